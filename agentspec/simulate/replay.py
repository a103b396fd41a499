"""Replay calls through the serving cache, and verify its drafts greedily against the recorded responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from agentspec.cache.types import SOURCES, Scope
from agentspec.draft_figures import DraftRates
from agentspec.simulate.records import Call

if TYPE_CHECKING:
    from agentspec.cache import SuffixCache

T = TypeVar("T")


class Durations:
    """Count the durations of many calls, each cut to three digits so that the memory stays bounded."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, nanoseconds: int) -> None:
        """Count the duration of one call, in nanoseconds."""
        unit = 10 ** max(len(str(nanoseconds)) - 3, 0)
        self._counts[nanoseconds // unit * unit] += 1

    def time(self, call: Callable[[], T]) -> T:
        """Make the call, count its duration, and return its result."""
        begin = perf_counter_ns()
        result = call()
        self.add(perf_counter_ns() - begin)
        return result

    def quantile(self, share: float) -> float:
        """Return the duration, in microseconds, that `share` of all calls do not exceed; 0 without calls."""
        left = share * self._counts.total()
        for value in sorted(self._counts):
            left -= self._counts[value]
            if left <= 0:
                return value / 1000
        return 0.0

    def as_dict(self) -> dict[str, float]:
        """Return median and 99th percentile, in microseconds."""
        return {"p50": self.quantile(0.5), "p99": self.quantile(0.99)}


@dataclass(slots=True)
class Figures(DraftRates):
    """Hold the counts and times of a simulation.

    tokens: tokens of all responses. steps: verifications, each of which gives its accepted tokens and one more.
    drafted, accepted: draft tokens verified and accepted. propose, extend: durations of these calls of the cache.
    bytes_per_token: bytes of the indexes at the end, divided by the tokens kept for sessions, groups and tenants.
    """

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    propose: Durations = field(default_factory=Durations)
    extend: Durations = field(default_factory=Durations)
    bytes_per_token: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `agentspec simulate --json` prints; times in microseconds a call."""
        return {
            **{name: getattr(self, name) for name in ("tokens", "steps", "drafted", "accepted")},
            "tokens_per_step": round(self.tokens_per_step, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "accepted_by_source": dict(self.accepted_by_source),
            "propose_us": self.propose.as_dict(),
            "extend_us": self.extend.as_dict(),
            "bytes_per_token": round(self.bytes_per_token, 2),
        }


def simulate(
    calls: Iterable[Call],
    cache: SuffixCache,
    *,
    max_draft: int | None = None,
    scope: Scope = "tenant",
    prefill_steps: bool = False,
) -> Figures:
    """Replay the calls one after the other and return their figures. The counts are the same on every machine.

    A step drafts at most `max_draft` tokens (None: the policy's limit), verifies them against the record, and adds the
    accepted tokens and the one after them. As in an engine, which does not know a response's end, drafts may run past
    it; those tokens count as drafted. scope: the sources of drafts beside a call's own text. prefill_steps: whether the
    first token of a response takes a step without a draft, as in an engine, where the step that reads the prompt gives
    it.
    """
    from agentspec.cache.core import without_clock  # imported here: the records can be read without the core

    figures = Figures()
    limit = cache.policy.max_draft if max_draft is None else max_draft
    with without_clock():
        for call in calls:
            _replay(call, cache, limit, scope, figures, prefill_steps)
    stats = cache.stats()
    figures.bytes_per_token = stats.bytes / stats.tokens if stats.tokens else 0.0
    return figures


def _replay(call: Call, cache: SuffixCache, max_draft: int, scope: Scope, figures: Figures, prefill_step: bool) -> None:
    name = f"line {call.line}"
    cache.start(name, call.prompt, session=call.session, group=call.group, tenant=call.tenant, scope=scope)
    left = call.response
    figures.tokens += len(left)
    if prefill_step and len(left):
        cache.extend(name, left[:1])
        left = left[1:]
        figures.steps += 1
    while len(left):
        draft = figures.propose.time(lambda: cache.propose([name], max_draft)[0])
        count = min(len(draft.token_ids), len(left))
        wrong = np.flatnonzero(draft.token_ids[:count] != left[:count])
        accepted = int(wrong[0]) if len(wrong) else count
        verified, left = left[: accepted + 1], left[accepted + 1 :]
        figures.extend.time(lambda tokens=verified: cache.extend(name, tokens))  # type: ignore[misc]
        figures.steps += 1
        figures.drafted += len(draft.token_ids)
        figures.accepted += accepted
        for source in draft.sources[:accepted].tolist():
            figures.accepted_by_source[SOURCES[source]] += 1
    cache.finish(name)
