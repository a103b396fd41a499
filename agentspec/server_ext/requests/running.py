"""Hold an engine's requests from their beginning to their end, and how long their responses were."""

import logging
import time
from collections.abc import Iterable, Mapping, Set
from functools import partial

import numpy as np

from agentspec.server_ext.figures.metrics import Metrics
from agentspec.server_ext.figures.response_count import ResponseCount
from agentspec.server_ext.figures.traces import Traces
from agentspec.server_ext.pricing.acceptance_length import AcceptanceLengths
from agentspec.server_ext.requests.cached import CachedRequests
from agentspec.server_ext.requests.turnover import Text, Turnover
from agentspec.server_ext.step import NewRequest, RequestState

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 1.0
"""Longest time that an ended request waits for the length of its response, in seconds.

The API server reports it at once, unless the caller has gone.
"""


class RunningRequests:
    """Hold the states of requests that run, and those that wait for their start or end in the cache (``turnover``).

    by_id: the requests that have begun and not ended, as far as the engine knows.
    """

    def __init__(self, cached: CachedRequests, metrics: Metrics, traces: Traces, lengths: AcceptanceLengths) -> None:
        self.by_id: dict[str, RequestState] = {}
        self.turnover = Turnover(cached.start, cached.keep)
        self._cached, self._metrics, self._traces, self._lengths = cached, metrics, traces, lengths
        self._warned = False  # whether the log has said that a tenant is outdated

    def of(self, request_ids: Iterable[str]) -> list[RequestState]:
        """Return the states of these requests, without those that have not begun or have ended."""
        return [self.by_id[request_id] for request_id in request_ids if request_id in self.by_id]

    def unfailed(self) -> list[RequestState]:
        """Return the states of the requests that have begun and neither ended nor failed."""
        return [state for state in self.by_id.values() if not state.failed]

    def fail(self, states: Iterable[RequestState]) -> None:
        """Stop drafting for these requests, and keep nothing of them."""
        for state in states:
            if not state.failed:
                state.failed = True
                self._cached.drop(state.request_id)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended, and keep nothing of it but its figures."""
        self.fail(self.of([request_id]))
        self._leave(request_id)

    def make_way(self, outdated: Set[str | None]) -> None:
        """Stop drafting for the running requests of these tenants, and keep nothing of them.

        outdated: tenants to be forgotten, which can only be done once none of their requests is in the cache.
        """
        running = [state for state in self.unfailed() if state.identity.tenant in outdated]
        self.fail(running)
        if running and not self._warned:
            self._warned = True
            logger.warning(
                "agentspec: erasures may have been missed, so what was said is forgotten and read from the store again;"
                " %d running requests go on without drafts",
                len(running),
            )

    def begin(self, new: NewRequest, step: int) -> None:
        """Queue a request for its start. step: number of the latest step.

        If the request is running already, streamed input has extended its prompt. Then its response so far ends first,
        and all tokens of that response must be counted by now.
        """
        known = self.by_id.get(new.request_id)
        if known is not None:
            # vLLM drops the last token of a response that streamed input follows; the prompt begins with the rest.
            said = max(known.response.length - known.response.behind_end - 1, 0)
            length = known.response.prompt_length + said
            before = np.asarray(new.prompt[:length]).tolist() if known.awaits_start else ()
            self.end(new.request_id, said, partial(tuple, before))
        identity, length = new.identity, len(new.prompt)
        figures = self._metrics.begin(new.api_id or new.request_id, identity.caller, new.call)
        accepted = self._lengths.begin(length + 1, step)  # prefill gives a token, too
        ends = frozenset(new.end_tokens)
        response = ResponseCount(figures, length, ends, new.repetition)
        state = RequestState(new.request_id, identity, response, accepted, ends.union(new.never_drafted))
        if new.detailed and figures.trace is None:  # of several samples, the first is traced
            shared = identity.named_tenant is not None
            state.trace = self._traces.begin(figures, identity.session, shared, identity.tenant)
        self.by_id[new.request_id] = state
        self.turnover.begin(state, new)

    def end(
        self, request_id: str, output_limit: int | None, text: Text | None = None, *, may_be_shorter: bool = False
    ) -> None:
        """Queue a request for its end. The arguments are those of ``DraftingEngine.finish``."""
        state = self.by_id.get(request_id)
        if state is not None:
            until = time.monotonic() + _REPORT_SECONDS if may_be_shorter else 0.0
            self.turnover.end(state, output_limit, text, until)
            self._leave(request_id)  # not before: an erasure in another thread looks for it here, then in `turnover`

    def _leave(self, request_id: str) -> None:
        """Take a request out of those that run, and end its figures, if it runs."""
        state = self.by_id.pop(request_id, None)
        if state is not None:
            self._metrics.end(state.response.figures)
            if state.trace is not None:
                self._traces.end()

    def finish_if_idle(self) -> None:
        """Finish all waiting requests if no request runs any more, because no step may follow."""
        if not self.by_id:
            self.turnover.finish_all()

    def note_lengths(self, lengths: Mapping[str, int]) -> None:
        """Note how many tokens of their responses callers got. lengths: by request id; unknown ones are ignored.

        vLLM looks for stop texts in the API server. When it finds one, the engine has verified tokens behind it and
        often goes on.
        """
        for request_id, length in lengths.items():
            state = self.by_id.get(request_id) or self.turnover.ending(request_id)
            if state is not None and state.response.reported_length is None:
                behind = state.response.end_at(length)
                if state.trace is not None:
                    self._traces.cut(state.trace, behind)

    def states(self) -> list[RequestState]:
        """Return the states of all requests that run, or wait for their start or end. Any thread may call it."""
        return [*list(self.by_id.values()), *self.turnover.states()]
