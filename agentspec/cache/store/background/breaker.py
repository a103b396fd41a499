"""Decide when background threads may call the store again after it failed."""

import time
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "half-open"]


class CircuitBreaker:
    """Decide from the latest calls to a store whether it may be called now.

    closed: calls go through; after a failure the next one waits ``retry_delay`` seconds, doubled with each failure.
    open, after ``threshold`` failures in a row or a slow one: no call goes through, for a pause that doubles from
    ``first_pause`` to ``max_pause`` seconds. half-open, after the pause: one call goes through; its outcome closes or
    opens the breaker.

    One thread makes the calls; others may read ``state`` and call ``hurry``. clock: returns the time in seconds.
    """

    def __init__(
        self,
        *,
        threshold: int = 5,
        first_pause: float = 0.5,
        max_pause: float = 60.0,
        retry_delay: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threshold = threshold
        self._first_pause, self._max_pause, self._retry_delay = first_pause, max_pause, retry_delay
        self._clock = clock
        self._state: State = "closed"
        self._failures, self._pause, self._until = 0, first_pause, 0.0

    @property
    def state(self) -> State:
        """Return ``closed``, ``open`` or ``half-open``."""
        return self._state

    @property
    def failing(self) -> bool:
        """Return whether the latest call failed."""
        return self._failures > 0

    def wait(self) -> float:
        """Return how many seconds to wait before the next call."""
        return max(0.0, self._until - self._clock())

    def allow(self) -> bool:
        """Return whether a call may be made now. Once its pause is over, an open breaker lets one through."""
        if self._state == "open" and self.wait() == 0.0:
            self._state = "half-open"
            return True
        return self._state == "closed"

    def hurry(self) -> None:
        """End the pause, because there is reason to believe that the next call works."""
        self._until = 0.0

    def success(self) -> bool:
        """Note a call that worked. Returns True if it ended an outage (the breaker was not closed)."""
        recovered = self._state != "closed"
        self._state = "closed"
        self._failures, self._pause, self._until = 0, self._first_pause, 0.0
        return recovered

    def failure(self, *, slow: bool = False) -> bool:
        """Note a call that failed. Returns True if it begins an outage (the breaker was closed, and opens).

        slow: whether the call took long, as one does that waits for a lock; then the breaker opens at once.
        """
        was_closed = self._state == "closed"
        self._failures += 1
        if was_closed and self._failures < self._threshold and not slow:
            self._until = self._clock() + self._retry_delay * 2 ** (self._failures - 1)
            return False
        self._state = "open"
        self._until = self._clock() + self._pause
        self._pause = min(self._max_pause, self._pause * 2)
        return was_closed
