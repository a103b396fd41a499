"""Say how far a log was followed, and count what the follower has done."""

from collections import OrderedDict
from dataclasses import dataclass, field

from agentspec.cache.store.breaker import CircuitBreaker, State

_PAUSE_SECONDS = 1.0
"""Time until a log that the store refuses to read is tried again, at first."""


@dataclass(slots=True)
class FollowerStats:
    """Count what the follower has done since the start."""

    delivered: int = 0
    """records of other processes"""
    learned: int = 0
    """those of them that were learned from"""
    skipped: int = 0
    """records of this process"""
    erased: int = 0
    """tombstones applied"""
    damaged: int = 0
    """records that RecordReader skipped because they were damaged"""
    unknown: int = 0
    """those that it skipped because they are of a version or kind that it does not know"""
    failed: int = 0
    """calls to the store that failed"""
    logs: int = 0
    """logs that are followed"""
    behind: int = 0
    """those of them that had entries left unread at the last look"""
    refused: int = 0
    """those of them that the store refuses to read"""
    delay_ms: float = 0.0
    """age of the newest record when it was delivered"""
    state: State = "closed"
    """the breaker's"""


@dataclass(slots=True)
class FollowedLog:
    """Hold how far a log was followed, and what is remembered of the erasures in it."""

    tenant: str | None
    cursor: str
    """of the last entry dealt with"""
    erased: str
    """tombstones up to this cursor were applied; it may be ahead of ``cursor``, because erasures do not wait"""
    applied: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """tombstones applied lately, which are passed over where the log is read later"""
    numbers: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """for each session erased lately, the number of this process's newest turn when the tombstone was applied"""
    late: set[str] = field(default_factory=set)
    """sessions to erase again: a turn of this process was on its way then, and lies behind their tombstone"""
    owner: str | None = None
    """whose log it is: where there are too many, the owner of most loses some; None: not known"""
    breaker: CircuitBreaker = field(default_factory=lambda: CircuitBreaker(threshold=1, first_pause=_PAUSE_SECONDS))
    """open while the store refuses to read this log"""
