"""When to leave a failing store alone, and when to try it again."""

import time
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "half-open"]


class CircuitBreaker:
    """closed: calls go through. open, after ``threshold`` failures in a row: none does, for a pause that doubles from
    ``first_pause`` to ``max_pause`` seconds. half-open, after the pause: one call tries, and decides.

    One thread drives it; others may read ``state``. ``clock`` gives seconds.
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
        self._first_pause = first_pause
        self._max_pause = max_pause
        self._retry_delay = retry_delay
        self._clock = clock
        self._state: State = "closed"
        self._failures = 0
        self._pause = first_pause
        self._until = 0.0

    @property
    def state(self) -> State:
        """``closed``, ``open`` or ``half-open``."""
        return self._state

    def wait(self) -> float:
        """Seconds to wait before the next call; between failures of a closed breaker, a short growing delay."""
        return max(0.0, self._until - self._clock())

    def allow(self) -> bool:
        """Whether a call may be made now. An open breaker whose pause is over lets one through."""
        if self._state == "closed":
            return True
        if self._state == "open" and self.wait() == 0.0:
            self._state = "half-open"
            return True
        return False

    def success(self) -> bool:
        """Report a call that worked. Returns True if it ended an outage (the breaker had been open)."""
        recovered = self._state != "closed"
        self._state = "closed"
        self._failures = 0
        self._pause = self._first_pause
        self._until = 0.0
        return recovered

    def failure(self) -> bool:
        """Report a call that failed. Returns True if an outage begins with it (the breaker was closed, and opens)."""
        self._failures += 1
        if self._state == "closed" and self._failures < self._threshold:
            self._until = self._clock() + self._retry_delay * 2 ** (self._failures - 1)
            return False
        begins = self._state == "closed"
        self._state = "open"
        self._until = self._clock() + self._pause
        self._pause = min(self._max_pause, self._pause * 2)
        return begins
