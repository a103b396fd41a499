"""Measure the CPU time that steps spend on work beside drafting, and divide what they may spend.

That work is starting and finishing requests, applying stored turns, indexing and evicting. A step spends at most
_WORK_SHARE of its duration on it, and never more than DEFAULT_WORK_SECONDS, before and after its forward pass together.
Other work waits for later steps. A step's duration is measured in wall-clock time, the work in CPU time of the engine's
thread.
"""

import time

from agentspec.cache.suffix_cache import DEFAULT_WORK_SECONDS

_WORK_SHARE = 0.02
"""Most CPU time that the work takes, as a share of a step's duration."""
_MOST_WAITS = 2
"""Most steps in a row in which stored turns wait because starts and ends took all the time."""


class WorkTime:
    """Divide a step's CPU time for work: to starts and ends first, then to stored turns, then to indexing.

    ``with work_time:`` counts the CPU time of its block; blocks must not nest. Starts, ends and stored turns lie in
    such blocks. Indexing is part of the call that drafts, and the cache counts its time. A step's calls, in order:

    - before its forward pass, if requests begin, in a block: ``note_stored_turns`` and ``for_stored_turns_first`` (if
      turns are ready), and ``for_begun``
    - after that pass: ``tick``; ``for_turnover``, ``for_stored_turns`` and ``note_stored_turns``, in a block;
      ``for_indexing``; and after the call that drafts ``take``

    ``allowed`` is a step's time for work, in seconds, as ``in_step`` or ``in_latest_step`` returns it.
    """

    def __init__(self) -> None:
        self._called = 0.0  # when `tick` was called last
        self._elapsed = 0.0  # seconds between its last two calls
        self._usual = 0.0  # usual seconds between calls, in which pauses and prompts weigh little; 0.0: not known yet
        self._spent_ns = 0  # spent since the latest step, except by the cache
        self._began_ns = 0  # the thread's CPU time when the latest block began
        self._cache_ns = 0  # spent by the cache up to the latest step
        self._waits = 0  # latest steps in a row that had no time to apply stored turns

    def __enter__(self) -> None:
        self._began_ns = time.thread_time_ns()

    def __exit__(self, *_: object) -> None:
        self._spent_ns += time.thread_time_ns() - self._began_ns

    def tick(self) -> None:
        """Note the time at which a step ends."""
        now = time.perf_counter()
        if self._called:
            self._elapsed = now - self._called
            usual = self._usual or self._elapsed
            self._usual = usual + 0.1 * (min(self._elapsed, 2.0 * usual) - usual)
        self._called = now

    def in_step(self, seconds: float | None) -> float:
        """Return the time for work in a step of ``seconds``; None: the usual duration of steps."""
        seconds = self._usual if seconds is None else seconds
        return min(_WORK_SHARE * seconds, DEFAULT_WORK_SECONDS) if seconds else DEFAULT_WORK_SECONDS

    def in_latest_step(self) -> float:
        """Return the time for work in a step as long as the one that ended last."""
        return min(_WORK_SHARE * self._elapsed, DEFAULT_WORK_SECONDS)

    def for_stored_turns_first(self) -> float:
        """Return the seconds for applying stored turns before a forward pass."""
        return DEFAULT_WORK_SECONDS / 2

    def for_begun(self) -> float:
        """Return the seconds for starting requests before a forward pass, which is long as it has their prompts."""
        return DEFAULT_WORK_SECONDS - self._spent()

    def for_turnover(self, allowed: float) -> float:
        """Return the seconds for starting and finishing requests: 0 if stored turns had to wait in the step before."""
        return 0.0 if self._waits else max(allowed - 1e-9 * self._spent_ns, 0.0)

    def for_stored_turns(self, allowed: float, *, any_wait: bool) -> float | None:
        """Return the seconds for applying stored turns; None: they wait for the next step.

        They get half of the step's time, and indexing them gets the other half. They wait at most _MOST_WAITS steps in
        a row, because otherwise no turn would be applied while every step begins requests. any_wait: whether turns
        are ready to be applied.
        """
        left = allowed / 2 - self._spent()
        return None if any_wait and left <= 0 and not self.must_apply() else max(left, 0.0)

    def note_stored_turns(self, *, waited: bool) -> None:
        """Note whether stored turns had to wait in this step."""
        self._waits = self._waits + 1 if waited else 0

    def must_apply(self) -> bool:
        """Return whether stored turns have waited so long that the next step applies some in any case."""
        return self._waits >= _MOST_WAITS

    def for_indexing(self, allowed: float, *, halved: bool) -> float:
        """Return the seconds for indexing: what other work has left, but at least a quarter of the time for indexing.

        A step that took longer than others, for example because it computed prompts, has more time. halved: whether
        half of the step's time was for stored turns.
        """
        allowed = max(allowed, self.in_latest_step())
        half = allowed / 2 if halved else allowed
        return max(half / 4, half - 1e-9 * self._spent_ns)

    def note_cache(self, worked_ns: int) -> None:
        """Charge no step for the cache's work up to now. worked_ns: that work, from ``SuffixCache.worked_ns``."""
        self._cache_ns = worked_ns

    def take(self, worked_ns: int) -> tuple[int, int]:
        """Return the nanoseconds of the cache's work and of all work since the latest step, and reset both.

        worked_ns: the cache's work up to now, from ``SuffixCache.worked_ns``.
        """
        by_cache = worked_ns - self._cache_ns
        spent, self._cache_ns, self._spent_ns = self._spent_ns + by_cache, worked_ns, 0
        return by_cache, spent

    def _spent(self) -> float:
        """Return the seconds spent since the latest step, including the block that is running."""
        return 1e-9 * (self._spent_ns + time.thread_time_ns() - self._began_ns)
