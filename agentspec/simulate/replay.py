"""Conversations through the serving cache with greedy verification: the recorded response is what the model says."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter_ns
from typing import TYPE_CHECKING

import numpy as np

from agentspec.cache import SOURCES, Scope
from agentspec.cache.types import Draft, Int32Array
from agentspec.simulate.figures import Figures
from agentspec.simulate.records import Call

if TYPE_CHECKING:
    from agentspec.cache import SuffixCache


def simulate(
    calls: Iterable[Call], cache: SuffixCache, *, max_draft: int | None = None, scope: Scope = "tenant"
) -> Figures:
    """Replay the calls one after the other; `max_draft` (default: the policy's) is the room of each draft.

    A step drafts, verifies against the record and takes in the accepted tokens and the one after them. Drafts may
    run past the end of the response, which the engine does not know; those tokens count as drafted. scope: what each
    call drafts from beside its own text.
    """
    figures = Figures()
    room = cache.policy.max_draft if max_draft is None else max_draft
    for call in calls:
        _replay(call, cache, room, scope, figures)
    stats = cache.stats()
    figures.bytes_per_token = stats.bytes / stats.tokens if stats.tokens else 0.0
    return figures


def _replay(call: Call, cache: SuffixCache, room: int, scope: Scope, figures: Figures) -> None:
    name = f"line {call.line}"
    cache.start(name, call.prompt, session=call.session, group=call.group, tenant=call.tenant, scope=scope)
    response = call.response
    done, end = 0, len(response)
    while done < end:
        begin = perf_counter_ns()
        draft = cache.propose([name], room)[0]
        figures.propose.add(perf_counter_ns() - begin)
        accepted = _accepted(draft, response[done:])
        given = min(accepted + 1, end - done)
        begin = perf_counter_ns()
        cache.extend(name, response[done : done + given])
        figures.extend.add(perf_counter_ns() - begin)
        done += given
        figures.steps += 1
        figures.drafted += len(draft.token_ids)
        figures.accepted += accepted
        for source in draft.sources[:accepted].tolist():
            figures.accepted_by_source[SOURCES[source]] += 1
    figures.tokens += end
    cache.finish(name)


def _accepted(draft: Draft, truth: Int32Array) -> int:
    """How many of the draft's first tokens the model would have written itself."""
    count = min(len(draft.token_ids), len(truth))
    wrong = np.flatnonzero(draft.token_ids[:count] != truth[:count])
    return int(wrong[0]) if len(wrong) else count
