"""Hold the logs that are followed, how far each was, and the counts of the follower."""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from agentspec.cache.store.background.breaker import CircuitBreaker, State
from agentspec.cache.store.base import entry_name

_PAUSE_SECONDS = 1.0
"""First pause before a log that the store refuses to read is tried again."""
_MAX_OWNERS = 4096
"""Most logs, used but not followed yet, whose owners are remembered."""


@dataclass(slots=True)
class FollowerStats:
    """Count what the follower has done since the start."""

    delivered: int = 0
    """records of other processes"""
    learned: int = 0
    """delivered records that were learned from"""
    skipped: int = 0
    """records of this process"""
    erased: int = 0
    """tombstones applied"""
    damaged: int = 0
    """records that RecordReader skipped because they were damaged"""
    unknown: int = 0
    """records that RecordReader skipped because of their version or kind"""
    undone: int = 0
    """erasures that the store had lost, because it went back to an older state, and that were repeated"""
    failed: int = 0
    """calls to the store that failed"""
    logs: int = 0
    """logs that are followed"""
    behind: int = 0
    """followed logs that had unread entries left at the last look"""
    refused: int = 0
    """followed logs that the store refuses to read"""
    delay_ms: float = 0.0
    """age of the newest record when it was delivered"""
    state: State = "closed"
    """the breaker's state"""


@dataclass(slots=True)
class FollowedLog:
    """Hold how far a log was followed, and the erasures in it that the follower remembers."""

    tenant: str | None
    cursor: str
    """cursor of the last entry dealt with"""
    tombstones_applied_to: str
    """tombstones up to this cursor were applied; it may be ahead of ``cursor``, because erasures do not wait"""
    recent_tombstones: OrderedDict[str, str] = field(default_factory=OrderedDict)
    """tombstones applied lately, with their sessions; they are skipped when the log is read up to them"""
    own_turn_at_erasure: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """for each session erased lately, the number of this process's newest turn when the tombstone was applied"""
    late_turns: set[str] = field(default_factory=set)
    """sessions with a turn of this process behind their tombstone"""
    lost_erasures: set[str] = field(default_factory=set)
    """sessions whose erasure the store has lost"""
    owner: str | None = None
    """owner of the log, if known; if there are too many logs, the owner with the most loses some"""
    breaker: CircuitBreaker = field(default_factory=lambda: CircuitBreaker(threshold=1, first_pause=_PAUSE_SECONDS))
    """open while the store refuses to read this log"""
    read_at: float = 0.0
    """when the latest read of the log began (``time.monotonic``); with little time, those read longest ago go first"""
    checked_at: float = field(default_factory=time.monotonic)
    """when it was last known that no entry had been removed from the log before it was read here"""

    def to_erase_again(self) -> set[str]:
        """Return the sessions to erase again."""
        return self.late_turns | self.lost_erasures

    def is_settled(self, end: str) -> bool:
        """Return whether the log was read up to this entry and no session is to be erased again."""
        return not self.to_erase_again() and entry_name(self.cursor) >= end

    def note_erased(self, sessions: Iterable[str], number: int) -> None:
        """Note that the tombstones of these sessions were applied. number: of this process's newest turn."""
        for session in sessions:
            self.own_turn_at_erasure[session] = number
            self.own_turn_at_erasure.move_to_end(session)

    def forget_oldest_erasures(self, most: int) -> None:
        """Forget the tombstones and sessions beyond the ``most`` erased last."""
        for remembered in (self.recent_tombstones, self.own_turn_at_erasure):
            while len(remembered) > most:
                remembered.popitem(last=False)


class FollowedLogs:
    """Hold the logs that are followed, at most ``most`` if the others can be left. Any thread may make any call."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._logs: OrderedDict[str, FollowedLog] = OrderedDict()  # the one used last at the end
        self._owners: OrderedDict[str, str] = OrderedDict()  # of logs that are used but not followed yet
        self._lock = threading.Lock()

    def use(self, name: str, owner: str | None) -> bool:
        """Note that a log is used, and its owner. Returns whether it is followed."""
        with self._lock:
            if name in self._logs:
                self._logs.move_to_end(name)
                return True
            self._note_owner(name, owner)
            return False

    def add(self, name: str, log: FollowedLog) -> None:
        """Add a log, unless another thread did so meanwhile."""
        with self._lock:
            log.owner = self._owners.pop(name, None)
            self._logs.setdefault(name, log)

    def remove(self, name: str) -> None:
        """Remove a log. Its owner is remembered, because turns that wait for the store may bring the log back."""
        with self._lock:
            log = self._logs.pop(name, None)
            if log is not None:
                self._note_owner(name, log.owner)

    def _note_owner(self, name: str, owner: str | None) -> None:
        if owner is not None:
            self._owners[name] = owner
            if len(self._owners) > _MAX_OWNERS:
                self._owners.popitem(last=False)

    def all(self) -> dict[str, FollowedLog]:
        """Return the logs by their names."""
        with self._lock:
            return dict(self._logs)

    def beyond_most(self) -> list[tuple[str, FollowedLog]]:
        """Return the logs to leave, because there are too many.

        Each time the owner with the most logs loses the one used longest ago, so a caller with ever new salts displaces
        itself.
        """
        logs = list(self.all().items())
        owned = Counter(log.owner or name for name, log in logs)
        idle = []
        for _ in range(len(logs) - self._most):
            most = max(owned.values())
            place = next(i for i, (name, log) in enumerate(logs) if owned[log.owner or name] == most)
            name, log = logs.pop(place)
            owned[log.owner or name] -= 1
            idle.append((name, log))
        return idle

    def __contains__(self, name: object) -> bool:
        return name in self._logs

    def __len__(self) -> int:
        return len(self._logs)
