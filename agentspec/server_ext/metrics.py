"""Counters of one engine, and the figures of each request: plain numbers, no locks, updated once a step."""

import re
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentspec.cache import SOURCES

_KEPT_REQUESTS = 4_096
_CHILD_PREFIX = re.compile(r"^\d+_")
_ENGINE_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_PROMPT_NUMBER = re.compile(r"^(cmpl-.+)-\d+$")


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

    def begin(self, engine_request_id: str, session: str | None) -> RequestFigures:
        """The figures that a new engine request adds to; samples of one API request share theirs."""
        key = api_request_id(engine_request_id)
        figures = self._requests.setdefault(key, RequestFigures(session))
        self._requests.move_to_end(key)
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


def api_request_id(engine_request_id: str) -> str:
    """The id that the API returned: without the engine's random suffix, a sample's number in front (n > 1), and
    the prompt's number behind (a completions request may hold several prompts)."""
    plain = _ENGINE_SUFFIX.sub("", _CHILD_PREFIX.sub("", engine_request_id))
    return _PROMPT_NUMBER.sub(r"\1", plain)
