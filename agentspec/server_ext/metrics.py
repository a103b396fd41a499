"""Counters of one engine, and the figures of each request: plain numbers, no locks, updated once a step."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentspec.cache import SOURCES

_KEPT_REQUESTS = 4_096


@dataclass(slots=True)
class RequestFigures:
    """What drafting did for one request (all its samples, if it asked for several)."""

    session: str | None = None
    tokens: int = 0
    steps: int = 0
    drafts: int = 0
    drafted: list[int] = field(default_factory=lambda: [0] * len(SOURCES))
    accepted: list[int] = field(default_factory=lambda: [0] * len(SOURCES))

    def as_dict(self, request_id: str) -> dict[str, Any]:
        """Figures as JSON: tokens, verification steps, steps that had a draft, drafted and accepted tokens."""
        return {
            "request_id": request_id,
            "tokens": self.tokens,
            "steps": self.steps,
            "drafts": self.drafts,
            "drafted": sum(self.drafted),
            "accepted": sum(self.accepted),
            "drafted_by_source": dict(zip(SOURCES, self.drafted, strict=True)),
            "accepted_by_source": dict(zip(SOURCES, self.accepted, strict=True)),
        }


class Metrics:
    """Counters since start, and figures of the latest requests by the id that the API returned."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self._requests: OrderedDict[str, RequestFigures] = OrderedDict()

    def begin(self, api_id: str, session: str | None) -> RequestFigures:
        """Return the figures that a new engine request adds to. The samples of one API request share theirs."""
        figures = self._requests.setdefault(api_id, RequestFigures(session))
        self._requests.move_to_end(api_id)
        if len(self._requests) > _KEPT_REQUESTS:
            self._requests.popitem(last=False)
        return figures

    def judged(
        self, figures: RequestFigures, tokens: int, drafted: Sequence[int], accepted: Sequence[int]
    ) -> tuple[int, int]:
        """Add one step of one request; drafted and accepted are counts by source. Returns their sums."""
        figures.tokens += tokens
        figures.steps += 1
        total = sum(drafted)
        if not total:
            return 0, 0
        figures.drafts += 1
        for source, (n, ok) in enumerate(zip(drafted, accepted, strict=True)):
            figures.drafted[source] += n
            figures.accepted[source] += ok
        self.counters["drafts"] += 1
        self.counters["drafted"] += total
        self.counters["accepted"] += sum(accepted)
        return total, sum(accepted)

    def request(self, request_id: str) -> dict[str, Any] | None:
        """Figures of one API request, or None when it is not known (any more)."""
        figures = self._requests.get(request_id)
        return None if figures is None else figures.as_dict(request_id)
