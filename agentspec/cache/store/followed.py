"""Say how far a log was followed, and count what the follower has done."""

from collections import OrderedDict
from dataclasses import asdict, dataclass, field

from agentspec.cache.store.breaker import CircuitBreaker, State

_PAUSE_SECONDS = 1.0
"""Time until a log that the store refuses to read is tried again, at first."""


@dataclass(slots=True)
class FollowerStats:
    """Count what the follower has done since the start.

    delivered: records of others. learned: those of them that were learned from. skipped: records of this process.
    erased: tombstones applied. damaged, unknown: records that RecordReader skipped. failed: calls to the store that
    failed. logs: logs that are followed. behind: those of them that had entries left unread at the last look.
    refused: those that the store refuses to read. delay_ms: age of the newest record when it was delivered. state: the
    breaker's.
    """

    delivered: int = 0
    learned: int = 0
    skipped: int = 0
    erased: int = 0
    damaged: int = 0
    unknown: int = 0
    failed: int = 0
    logs: int = 0
    behind: int = 0
    refused: int = 0
    delay_ms: float = 0.0
    state: State = "closed"

    def as_dict(self) -> dict[str, int | float | str]:
        """Return the counts as a JSON-able dict."""
        return asdict(self)


@dataclass(slots=True)
class FollowedLog:
    """Hold how far a log was followed.

    cursor: of the last entry dealt with. erased: tombstones up to this cursor were applied. applied: tombstones applied
    lately. numbers: for each session erased lately, the number of this process's newest turn when the tombstone was
    applied. late: sessions to erase again, because a turn of this process was on its way then and lies behind their
    tombstone. owner: whose log it is: where there are too many, the owner of most loses some. None: not known. breaker:
    open while the store refuses to read this log.
    """

    tenant: str | None
    cursor: str
    erased: str
    applied: OrderedDict[str, None] = field(default_factory=OrderedDict)
    numbers: OrderedDict[str, int] = field(default_factory=OrderedDict)
    late: set[str] = field(default_factory=set)
    owner: str | None = None
    breaker: CircuitBreaker = field(default_factory=lambda: CircuitBreaker(threshold=1, first_pause=_PAUSE_SECONDS))
