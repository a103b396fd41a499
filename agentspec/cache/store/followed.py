"""Define how far a log was followed, and the counts of the follower."""

from collections import OrderedDict
from dataclasses import dataclass, field

from agentspec.cache.store.breaker import CircuitBreaker, State

_PAUSE_SECONDS = 1.0
"""First pause before a log that the store refuses to read is tried again."""


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
    erased: str
    """tombstones up to this cursor were applied; it may be ahead of ``cursor``, because erasures do not wait"""
    applied: OrderedDict[str, str] = field(default_factory=OrderedDict)
    """tombstones applied lately, with their sessions; they are skipped when the log is read up to them"""
    numbers: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """for each session erased lately, the number of this process's newest turn when the tombstone was applied"""
    late: set[str] = field(default_factory=set)
    """sessions to erase again: a turn of this process lies behind their tombstone, or the store has lost the erasure"""
    owner: str | None = None
    """owner of the log, if known; if there are too many logs, the owner with the most loses some"""
    breaker: CircuitBreaker = field(default_factory=lambda: CircuitBreaker(threshold=1, first_pause=_PAUSE_SECONDS))
    """open while the store refuses to read this log"""
