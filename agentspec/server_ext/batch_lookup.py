"""Keep what is the same for all steps of a batch: which requests get drafts, and what the drafts may cost."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from agentspec.cache import SuffixCache
from agentspec.cache.running import BatchHandle
from agentspec.server_ext.pricing import Allowance
from agentspec.server_ext.step import AcceptanceLength, Batch, DraftRows, Int32, RequestState, Step, spread_drafts


@dataclass(slots=True, eq=False)
class BatchLookup:
    """Hold the k rows of a batch that get drafts, looked up once while the batch stays the same.

    rows: [k] their rows in the engine's token array. picked: [k] their rows in the batch; None: all rows, in order.
    failed: the requests of the batch that failed.
    steps: steps of the batch since the latest `Accounts.settle`. counted_steps: [k] how many of these the figures of
    each request count already. allowance: what a step may draft.
    """

    batch: Batch
    states: list[RequestState]
    handle: BatchHandle
    rows: Int32
    picked: NDArray[np.intp] | None
    failed: list[RequestState] = field(default_factory=list)
    steps: int = 0
    counted_steps: list[int] = field(init=False)
    allowance: Allowance = field(default_factory=Allowance)

    def __post_init__(self) -> None:
        self.counted_steps = [0] * len(self.states)

    @classmethod
    def of(cls, batch: Batch, requests: Mapping[str, RequestState], cache: SuffixCache) -> "BatchLookup":
        """Look up the requests of a batch. Requests that failed, have ended or wait for their start get no drafts."""
        known = [requests.get(request_id) for request_id in batch.request_ids]
        states = [state for state in known if state is not None and state.gets_drafts]
        if len(states) == len(batch):
            return cls(batch, states, cache.batch(batch.request_ids), batch.rows, None)
        picked = np.array([i for i, state in enumerate(known) if state is not None and state.gets_drafts], np.intp)
        failed = [state for state in known if state is not None and state.failed]
        handle = cache.batch([state.request_id for state in states])
        return cls(batch, states, handle, batch.rows[picked], picked, failed)

    def pick(self, values: Int32) -> Int32:
        """Return the values of the k rows. values: one for each row of the batch."""
        return values if self.picked is None else values[self.picked]

    def text_lengths(self, step: Step) -> list[tuple[AcceptanceLength, int]]:
        """Return, for each of the k rows, the measure of its acceptance and the tokens of its text at this step."""
        measures = (state.acceptance_length for state in self.states)
        return list(zip(measures, self.pick(step.lengths).tolist(), strict=True))

    def draft_rows(self, step: Step, work_seconds: float) -> DraftRows:
        """Return the k rows of a step. work_seconds: CPU seconds for the cache's work beside drafting."""
        lengths, verified = self.pick(step.lengths), self.pick(step.num_verified_draft_tokens)
        limits = self.pick(step.max_draft_tokens)
        return DraftRows(self.states, self.handle, step.tokens, self.rows, lengths, limits, verified, work_seconds)

    def spread(self, drafts: list[list[int]]) -> list[list[int]]:
        """Return the drafts of all rows of the batch: those of the k rows, and empty ones for the other rows.

        Each draft is cut before a token that ends the response. The step that accepts the tokens before it samples that
        token itself, so this costs no step. A draft must not contain it, because the request may go on with streamed
        input, and vLLM takes the last token of a response back only if it was sampled.
        """
        drafts = [
            draft if not draft or state.not_drafted.isdisjoint(draft) else list(takewhile(state.may_draft, draft))
            for state, draft in zip(self.states, drafts, strict=True)
        ]
        return drafts if self.picked is None else spread_drafts(drafts, self.picked.tolist(), len(self.batch))
