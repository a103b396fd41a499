"""What a simulation counts and times."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from agentspec.cache.types import SOURCES


class Durations:
    """Durations of many calls in constant memory: each is kept to three digits."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, nanoseconds: int) -> None:
        unit = 10 ** max(len(str(nanoseconds)) - 3, 0)
        self._counts[nanoseconds // unit * unit] += 1

    def quantile(self, share: float) -> float:
        """The duration, in microseconds, that `share` of all calls do not exceed; 0 without calls."""
        left = share * self._counts.total()
        for value in sorted(self._counts):
            left -= self._counts[value]
            if left <= 0:
                return value / 1000
        return 0.0

    def as_dict(self) -> dict[str, float]:
        return {"p50": self.quantile(0.5), "p99": self.quantile(0.99)}


@dataclass(slots=True)
class Figures:
    """tokens: of all responses. steps: verifications, each of which gives its accepted tokens and one more.
    drafted, accepted: draft tokens verified, and right. bytes_per_token: what the cache holds at the end, its
    indexes' bytes over the tokens kept for sessions, groups and tenants.
    """

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    propose: Durations = field(default_factory=Durations)
    extend: Durations = field(default_factory=Durations)
    bytes_per_token: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The object that `agentspec simulate --json` prints; times in microseconds a call."""
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens_per_step": round(self.tokens_per_step, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "accepted_by_source": dict(self.accepted_by_source),
            "propose_us": self.propose.as_dict(),
            "extend_us": self.extend.as_dict(),
            "bytes_per_token": round(self.bytes_per_token, 2),
        }
