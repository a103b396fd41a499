"""Count drafted and accepted tokens, and durations, for an engine and for each of its requests.

Plain numbers without locks, updated once a step.
"""

import logging
import sys
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentspec.cache import SOURCES
from agentspec.server_ext.figures.traces import Trace

logger = logging.getLogger(__name__)

_KEPT_REQUESTS = 4_096
_REQUEST_BYTES = 1_024
_ID_BYTES = 128
"""Approximate memory of one request's figures, of which so much is for its id. A caller may choose a longer id."""

FiguresKey = tuple[str | None, str, str]
"""Caller of a request, the id that the API returned, and the call, which tells it from others with that id.

`Identity` has three names for who sent a request. The principal has its sessions and groups. The caller is the
principal without ``cache_salt``; it gets the figures. The owner is whose memory its texts count as in evictions.
"""


@dataclass(slots=True)
class RequestFigures:
    """Count what drafting did for one request (for all its samples together).

    `as_dict` makes the field ``agentspec`` of responses of these. The SDK reads it in agentspec/client/answers/reply.py
    (`read_speculation`) and shows it as ``Reply.speculation``, so a new figure needs a place in both.

    began: Unix time in seconds. running: its samples that have not ended. steps: verification steps. drafts: of these,
    the steps with a draft. drafted, accepted: tokens by source, in the order of SOURCES. trace: its steps, if it asked
    for them.
    """

    key: FiguresKey = (None, "", "")
    began: float = field(default_factory=time.time)
    running: int = 0
    tokens: int = 0
    steps: int = 0
    drafts: int = 0
    drafted: list[int] = field(default_factory=lambda: [0] * len(SOURCES))
    accepted: list[int] = field(default_factory=lambda: [0] * len(SOURCES))
    trace: Trace | None = None

    @property
    def bytes(self) -> int:
        """Return about how many bytes this takes without its trace."""
        return _REQUEST_BYTES + max(sys.getsizeof(self.key[1]) - _ID_BYTES, 0)

    def take_back(self, tokens: int) -> None:
        """Leave out tokens that the caller did not get, and those accepted tokens that must have been among them."""
        self.tokens -= tokens
        _cut(self.accepted, self.tokens - 1)  # the first token is never a draft's

    def cut_accepted(self, accepted: list[int], most: int) -> None:
        """Count only ``most`` of a step's accepted tokens. accepted: these by source; reduced to those that count."""
        for source, lost in _cut(accepted, most):
            self.accepted[source] -= lost

    def as_dict(self, request_id: str) -> dict[str, Any]:
        """Return the figures as JSON: tokens, verification steps, steps with a draft, drafted and accepted tokens.

        "detail": the steps of its trace, if it has one, for `traces.steps_of`. "caller", "call" and "began" tell the
        API server which engines' figures belong together (`of_one_call`).
        """
        trace = self.trace  # another thread may drop it meanwhile
        return {
            "request_id": request_id,
            "tokens": self.tokens,
            "steps": self.steps,
            "drafts": self.drafts,
            "drafted": sum(self.drafted),
            "accepted": sum(self.accepted),
            "drafted_by_source": dict(zip(SOURCES, self.drafted, strict=True)),
            "accepted_by_source": dict(zip(SOURCES, self.accepted, strict=True)),
            **({} if trace is None else {"detail": trace.packed()}),
            "caller": self.key[0],
            "call": self.key[2],
            "began": self.began,
        }


def of_one_call(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the API call that began last, added up over the engines on which its samples ran.

    answers: one or more engines' figures of calls with one id (`RequestFigures.as_dict`). "detail" is that of the first
    engine that has it.
    """
    latest = max(answers, key=lambda answer: float(answer["began"]))
    caller, call = latest["caller"], latest["call"]
    sums: dict[str, Any] = {}
    for answer in answers:
        if (answer["caller"], answer["call"]) != (caller, call):
            continue
        for name, value in answer.items():
            if isinstance(value, int):
                sums[name] = sums.get(name, 0) + value
            elif isinstance(value, dict):
                sums[name] = {source: count + sums.get(name, {}).get(source, 0) for source, count in value.items()}
            else:
                sums.setdefault(name, value)
    return {name: value for name, value in sums.items() if name not in ("caller", "call", "began")}


def _cut(tokens: list[int], most: int) -> list[tuple[int, int]]:
    """Reduce counts by source until they sum to ``most`` or 0, the largest first. Return what sources have lost."""
    lost = []
    while (over := sum(tokens) - max(most, 0)) > 0:
        largest = tokens.index(max(tokens))
        lost.append((largest, min(over, tokens[largest])))
        tokens[largest] -= lost[-1][1]
    return lost


class Histogram:
    """Count durations in buckets. bounds: upper bounds of the buckets but the last, in seconds."""

    __slots__ = ("_counts", "_sum")

    bounds = (
        *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 7.5e-4),
        *(1e-3, 1.25e-3, 1.5e-3, 2e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 1e-1),
    )

    def __init__(self) -> None:
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self.bounds, seconds)] += 1
        self._sum += seconds

    def as_dict(self) -> dict[str, Any]:
        """Return bounds, counts (one more than bounds, not cumulative) and the sum of all durations, as JSON."""
        return {"bounds": list(self.bounds), "counts": list(self._counts), "sum": self._sum}


class Metrics:
    """Hold counters and durations since start, and figures of running and of the latest finished requests.

    Figures are kept by caller, id and call. So a caller may choose the ids of its requests, even one again, but never
    gets another caller's figures. max_bytes: limit of the figures of finished requests.
    """

    def __init__(self, max_bytes: int = _KEPT_REQUESTS * _REQUEST_BYTES) -> None:
        self._max_bytes = max_bytes
        self.counters: Counter[str] = Counter(started=0, finished=0, drafts=0, sessions_ended=0)
        self.drafted = [0] * len(SOURCES)
        self.accepted = [0] * len(SOURCES)
        self.draft_seconds = Histogram()
        self.beside_seconds = Histogram()
        self._running: dict[FiguresKey, RequestFigures] = {}
        self._finished: OrderedDict[FiguresKey, RequestFigures] = OrderedDict()
        self._finished_bytes = 0

    def begin(self, api_id: str, caller: str | None, call: str = "") -> RequestFigures:
        """Return the figures for a new engine request. The samples of one API request, or call, share them."""
        key = (caller, api_id, call)
        figures = self._running.get(key)
        if figures is None:
            figures = self._finished.pop(key, None)
            if figures is None:
                figures = RequestFigures(key)
            else:
                self._finished_bytes -= figures.bytes
            self._running[key] = figures
        figures.running += 1
        return figures

    def end(self, figures: RequestFigures) -> None:
        """Count an engine request of these figures as finished. Beyond the limits, forget those that finished first."""
        figures.running -= 1
        if figures.running == 0 and self._running.pop(figures.key, None) is not None:
            self._finished[figures.key] = figures
            self._finished_bytes += figures.bytes
            while len(self._finished) > _KEPT_REQUESTS or self._finished_bytes > self._max_bytes:
                self._finished_bytes -= self._finished.popitem(last=False)[1].bytes

    def add_draft(self, figures: RequestFigures, drafted: Sequence[int], accepted: Sequence[int]) -> tuple[int, int]:
        """Add the verified draft of a step, if it had one. drafted, accepted: tokens by source. Returns their sums."""
        total = right = 0
        for source, n in enumerate(drafted):
            if n:
                ok = accepted[source]
                figures.drafted[source] += n
                figures.accepted[source] += ok
                self.drafted[source] += n
                self.accepted[source] += ok
                total, right = total + n, right + ok
        if total:
            figures.drafts += 1
            self.counters["drafts"] += 1
        return total, right

    def count_error(self, where: str, error: Exception) -> None:
        """Count an error that costs drafts, and log the first of its kind. where: what failed."""
        self.counters[f"errors_{where}"] += 1
        if self.counters[f"errors_{where}"] == 1:
            logger.error("agentspec: %s failed, the engine goes on without its drafts", where, exc_info=error)

    @property
    def bytes(self) -> int:
        """Return about how many bytes the figures of requests take."""
        return sum(figures.bytes for figures in self._running.values()) + self._finished_bytes

    def stats(self) -> dict[str, Any]:
        """Return counters since start, drafted and accepted tokens by source, and durations, as JSON."""
        return {
            "counters": {**self.counters, "drafted": sum(self.drafted), "accepted": sum(self.accepted)},
            "drafted_by_source": dict(zip(SOURCES, self.drafted, strict=True)),
            "accepted_by_source": dict(zip(SOURCES, self.accepted, strict=True)),
            "seconds": {"draft": self.draft_seconds.as_dict(), "beside": self.beside_seconds.as_dict()},
        }

    def request(
        self, request_id: str, caller: str | None = None, *, call: str | None = None, any_caller: bool = False
    ) -> dict[str, Any] | None:
        """Return the figures of one API request of this caller, or None if it is unknown or forgotten.

        call: tells API calls with this id apart; None: the one that began last. any_caller: return those of any caller.
        """
        if call is not None and not any_caller:
            key = (caller, request_id, call)
            found = [figures for each in (self._running, self._finished) if (figures := each.get(key)) is not None]
        else:
            known = (*list(self._running.values()), *list(self._finished.values()))
            owned = (figures for figures in known if figures.key[1] == request_id)
            found = [figures for figures in owned if any_caller or figures.key[0] == caller]
        return max(found, key=lambda figures: figures.began).as_dict(request_id) if found else None
