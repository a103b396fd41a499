"""Read a ``Step`` out of vLLM's model runner after each decode step.

The reader keeps everything that depends only on which rows the batch has, until that changes. A step in between touches
no array, however many rows there are. When rows change, only new rows are read: a large batch changes in nearly every
step.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentspec.cache.arguments import MAX_VOCAB
from agentspec.cache.policy import MAX_DRAFT
from agentspec.server_ext.figures.response_count import Repetition
from agentspec.server_ext.identity import (
    BATCH_KEY,
    CALL_KEY,
    DETAIL_KEY,
    LENGTH_KEY,
    PREDICTION_KEY,
    QUOTABLE_KEY,
    identify,
)
from agentspec.server_ext.step import Batch, Int32, NewRequest, Step
from agentspec.server_ext.vllm_adapter.frontend.engine_calls import api_request_id

_MASK_ROWS = 1024
"""Most rows of the bitmask of allowed tokens in a step, for all requests with structured output together. From vLLM
0.33 on each of these requests takes as many rows as the one with the longest draft."""


@dataclass(slots=True)
class ForwardPass:
    """Hold the arguments of vLLM's ``propose_draft_token_ids``, in its order and under its names."""

    scheduler_output: Any
    sampled: Sequence[Sequence[int]]
    """tokens that each row was given; empty for a prompt that is still being prefilled"""
    sampling_metadata: Any = None
    hidden_states: Any = None
    """[T, H] states of all tokens in the pass, after the target's final norm"""
    sample_hidden_states: Any = None
    """[S, H] states of the positions that were sampled from: each row's drafts and one more, row by row"""
    aux_hidden_states: Any = None
    spec_decode_metadata: Any = None
    """vLLM's SpecDecodeMetadata; None: one sampled position a row"""
    common_attn_metadata: Any = None
    slot_mappings: Any = None
    input_batch: Any = None
    """vLLM's InputBatch, taken from the runner: vLLM does not pass it"""
    native: Callable[[], Any] | None = None
    """runs vLLM's own drafter on this pass"""

    def newest(self, rows: Sequence[int]) -> list[int]:
        """Return the last token that each of these rows was given."""
        return [self.sampled[row][-1] for row in rows]

    def positions(self, rows: Sequence[int]) -> list[int]:
        """Return the index in ``sample_hidden_states`` of the state that produced each row's newest token."""
        if self.spec_decode_metadata is None:
            return list(rows)
        drafted = self.spec_decode_metadata.num_draft_tokens
        begins, begin = [], 0
        for count in drafted:
            begins.append(begin)
            begin += count + 1
        return [begins[row] + len(self.sampled[row]) - 1 for row in rows]


@dataclass(frozen=True, slots=True)
class _RequestLimits:
    """Hold the limits of one request's drafts."""

    max_length: int
    """most tokens of its text with a draft: one less than it may have, as a step always samples one more"""
    masked: bool
    """whether a grammar says which tokens are allowed"""


@dataclass(slots=True)
class _ReadBatch:
    """Hold the data that stay the same while the engine's batch has the same requests in the same order."""

    engine_batch: Any
    """vLLM's InputBatch"""
    engine_ids: list[str]
    """ids of its requests when it was read, whether they were given tokens or not"""
    blank: list[int]
    """rows that were given no tokens: prompts that are still being prefilled"""
    whole: bool
    """whether all of its rows are in ``step``"""
    step: Step
    """the ``n`` rows that were given tokens; filled anew in every step"""
    max_lengths: Int32
    """[n] most tokens of each row's text with a draft"""
    zeros: Int32
    """[n] zeros, for a step in which no draft tokens were verified"""
    usual_limits: Int32
    """[n] most draft tokens of each row in most steps: max_draft, or less where the rows of a bitmask are shared"""
    step_limits: Int32
    """[n] the same in a step with a row near its end, or whose limit vLLM lowers; filled anew in each of these steps"""
    distance_to_end: int = 0
    """lower bound of ``max_lengths`` - lengths in all rows; found anew in a step where it or vLLM's limit is lower than
    max_draft"""


class StepReader:
    """Read steps out of one model runner.

    max_draft: longest draft, in tokens. max_model_len: most tokens of a row. knows: function of a request's id and its
    prompt's length in tokens; returns whether the engine has got that request before.
    """

    def __init__(self, max_draft: int, max_model_len: int, knows: Callable[[str, int], bool]) -> None:
        self._max_draft = max_draft
        self._max_model_len = max_model_len
        self._knows = knows
        self._kept: _ReadBatch | None = None
        self._limits: dict[str, _RequestLimits | None] = {}  # of each request that the last step gave tokens
        self._last = 0.0

    def read(self, runner: Any, scheduler_output: Any, sampled: Sequence[Sequence[int]]) -> Step:
        """Return the rows that were given tokens in this step: not those whose prompts are still being prefilled.

        The step is valid until the next call: its arrays are the engine's or will be filled anew.
        """
        now = time.perf_counter()
        kept = self._kept
        ids = runner.input_batch.req_ids
        blank = [] if all(sampled) else [row for row, tokens in enumerate(sampled) if not tokens]
        if (
            kept is None
            or scheduler_output.scheduled_new_reqs
            or kept.engine_ids != ids
            or kept.blank != blank
            or kept.engine_batch is not runner.input_batch
        ):
            kept = self._kept = self._read_rows(runner, scheduler_output.scheduled_new_reqs, sampled, blank)
        else:
            kept.step.started = ()
            if not kept.whole:
                kept.step.lengths = runner.input_batch.num_tokens_no_spec[kept.step.batch.rows]
        step = kept.step
        drafts = scheduler_output.scheduled_spec_decode_tokens
        step.num_draft_tokens = sum(map(len, drafts.values())) if drafts else 0
        step.num_verified_draft_tokens = _verified(step.batch.request_ids, drafts) if drafts else kept.zeros
        step.max_draft_tokens = self._max_draft_tokens(kept, scheduler_output.num_spec_tokens_to_schedule)
        # No request is new and nothing was prefilled, so the step before had the same requests. The engine was not
        # idle in between, and the time since then is the duration of this step.
        steady = (
            not scheduler_output.scheduled_new_reqs
            and scheduler_output.total_num_scheduled_tokens == len(ids) + step.num_draft_tokens
        )
        step.seconds = now - self._last if steady and self._last else None
        self._last = now
        return step

    def begun(self, runner: Any, requests: Sequence[Any]) -> list[NewRequest]:
        """Return those of these requests that the engine does not know yet. Call it as soon as they have rows.

        requests: vLLM's NewRequestData. The prompts are valid until the rows change.
        """
        batch = runner.input_batch
        rows = [(request.req_id, batch.req_id_to_index[request.req_id]) for request in requests]
        begun = [self._new(runner, batch.token_ids_cpu, request_id, row) for request_id, row in rows]
        return [request for request in begun if request is not None]

    def _read_rows(
        self, runner: Any, new: Sequence[Any], sampled: Sequence[Sequence[int]], blank: list[int]
    ) -> _ReadBatch:
        """Read a batch whose rows may have changed since the last step. new: vLLM's NewRequestData."""
        batch = runner.input_batch
        ids = batch.req_ids[: len(sampled)]
        picked, limits, fresh = self._pick_rows(runner, new, sampled, ids)
        whole = len(picked) == len(batch.req_ids)
        zeros = np.zeros(len(picked), dtype=np.int32)
        rows = np.array(picked, dtype=np.int32)
        request_ids = tuple(ids) if whole else tuple(ids[row] for row in picked)
        step = Step(
            started=(),
            batch=Batch(request_ids, rows),
            tokens=batch.token_ids_cpu,
            lengths=batch.num_tokens_no_spec[: len(rows)] if whole else batch.num_tokens_no_spec[rows],
            max_draft_tokens=zeros,
            num_verified_draft_tokens=zeros,
            num_draft_tokens=0,
        )
        begun = [self._new(runner, step.tokens, ids[row], row) for row in fresh]
        step.started = [request for request in begun if request is not None]
        return _ReadBatch(
            engine_batch=batch,
            engine_ids=list(batch.req_ids),
            blank=blank,
            whole=whole,
            step=step,
            max_lengths=np.array([of_row.max_length for of_row in limits], dtype=np.int32),
            zeros=zeros,
            usual_limits=self._usual_limits(limits),
            step_limits=np.empty(len(picked), dtype=np.int32),
        )

    def _pick_rows(
        self, runner: Any, new: Sequence[Any], sampled: Sequence[Sequence[int]], ids: Sequence[str]
    ) -> tuple[list[int], list[_RequestLimits], list[int]]:
        """Return the rows that may have drafts, the limits of each, and the rows new since the last step.

        new: vLLM's NewRequestData. ids: of the rows.
        """
        known, self._limits = self._limits, {}
        for request in new:  # also one whose prompt has grown by streamed input
            known.pop(request.req_id, None)
        picked, limits_of_picked, fresh = [], [], []
        for row, request_id in enumerate(ids):
            if not sampled[row]:
                continue
            if request_id in known:
                limits = known[request_id]
            else:
                limits = self._limits_of(runner.requests[request_id])
                fresh.append(row)
            self._limits[request_id] = limits
            if limits is not None:
                picked.append(row)
                limits_of_picked.append(limits)
        return picked, limits_of_picked, fresh

    def _new(self, runner: Any, tokens: Int32, request_id: str, row: int) -> NewRequest | None:
        """Return a request for the engine; None if the engine knows it, or its prompt has no tokens to match."""
        state = runner.requests[request_id]
        if state.prompt_token_ids is None or self._knows(request_id, len(state.prompt_token_ids)):
            return None
        params = state.sampling_params
        extra = (params.extra_args if params else None) or {}
        return NewRequest(
            request_id,
            # The engine's array holds the prompt, too; converting the list would take 10 ms for 100,000 tokens.
            tokens[row, : len(state.prompt_token_ids)],
            identify(extra),
            sorted(end_tokens(params)),
            never_drafted=sorted(never_drafted(params)),
            api_id=api_request_id(request_id, batch=bool(extra.get(BATCH_KEY))),
            call=str(extra.get(CALL_KEY, "")),
            detailed=bool(extra.get(DETAIL_KEY)),
            # These are text, and vLLM prints the parameters of all requests when an engine fails.
            prediction=extra.pop(PREDICTION_KEY, ()),
            quotable=np.frombuffer(extra.pop(QUOTABLE_KEY, b""), np.int32),
            repetition=repetition_of(params),
        )

    def _max_draft_tokens(self, kept: _ReadBatch, limit: int) -> Int32:
        """Return how many tokens each of the [n] rows may draft. Recount only where a row may be near its end.

        limit: vLLM's, for each row of this step.
        """
        kept.distance_to_end -= kept.step.num_draft_tokens + 1  # no row has grown by more than its draft and one token
        nobody_near_end = kept.distance_to_end >= self._max_draft
        if nobody_near_end and self._max_draft <= limit:
            return kept.usual_limits
        limits = kept.step_limits
        np.subtract(kept.max_lengths, kept.step.lengths, out=limits)
        kept.distance_to_end = min(limits.tolist(), default=0)
        if kept.distance_to_end < 0:
            np.maximum(limits, 0, out=limits)
        np.minimum(limits, kept.usual_limits, out=limits)
        return limits if self._max_draft <= limit else np.minimum(limits, limit, out=limits)

    def _usual_limits(self, requests: Sequence[_RequestLimits]) -> Int32:
        """Return how many tokens each of [n] rows may draft where none is near its end."""
        limits = np.full(len(requests), self._max_draft, dtype=np.int32)
        masked = [row for row, request in enumerate(requests) if request.masked]
        if masked:
            limits[masked] = min(self._max_draft, max(_MASK_ROWS // len(masked) - 1, 0))
        return limits

    def _limits_of(self, state: Any) -> _RequestLimits | None:
        """Return the limits of a request's drafts; None for a prompt of embeddings, which has no tokens to match."""
        if state.prompt_token_ids is None:
            return None
        params, longest = state.sampling_params, self._max_model_len
        if params is not None and params.max_tokens is not None:
            longest = min(longest, len(state.prompt_token_ids) + params.max_tokens)
        return _RequestLimits(longest - 1, params is not None and params.structured_outputs is not None)


def end_tokens(params: Any) -> set[int]:
    """Return the tokens that end a response under these sampling parameters (vLLM's, or None).

    vLLM takes any number from a caller; one that is no token ends nothing.
    """
    if params is None:
        return set()
    ends = {token for token in params.stop_token_ids or () if 0 <= token < MAX_VOCAB}
    if not params.ignore_eos and getattr(params, "eos_token_id", None) is not None:
        ends.add(params.eos_token_id)
    return ends


def never_drafted(params: Any) -> set[int]:
    """Return further tokens that no draft may hold: the ends of a grammar behind which the response goes on.

    With ``ignore_eos`` a grammar of the backend guidance takes such a token at the end of what it is given alone, and
    vLLM ends the request with an error if a draft has others behind it.
    """
    if getattr(params, "structured_outputs", None) is None or not params.ignore_eos:
        return set()
    return {token for token in getattr(params, "all_stop_token_ids", ()) if 0 <= token < MAX_VOCAB}


def returned_tokens(state: Any) -> int:
    """Return how many tokens of a response vLLM returned. Accepted drafts may run past the end of the response.

    An end token, ``max_tokens`` or ``repetition_detection`` ends it here. A stop text may end it earlier, which only
    the API server knows (`is_told_later`). state: vLLM's CachedRequestState.
    """
    output = state.output_token_ids
    params = state.sampling_params
    if params is None:
        return len(output)
    end = len(output) if params.max_tokens is None else min(len(output), params.max_tokens)
    stops = end_tokens(params)
    for i in range(min(params.min_tokens or 0, end), end):
        if output[i] in stops:
            end = i + 1
            break
    repetition = repetition_of(params)
    if repetition is None:
        return end
    latest = len(output) - MAX_DRAFT - 1  # tokens before the last step, none of which ended it
    return repetition.end_of(output[:end], max(latest, 0)) or end


def repetition_of(params: Any) -> Repetition | None:
    """Return the repetition that ends a response under these sampling parameters (vLLM's, or None); None for none."""
    wanted = getattr(params, "repetition_detection", None)
    if wanted is None or wanted.min_count < 2 or wanted.max_pattern_size < 1:
        return None
    shortest = max(wanted.min_pattern_size, 1)
    return Repetition(shortest, wanted.max_pattern_size, wanted.min_count, params.min_tokens or 0)


def is_told_later(state: Any) -> bool:
    """Return whether the API server will say how many tokens it returned (``response_lengths.process_outputs``).

    It will where stop texts may end a response, unless that has a single token: such a response is kept nowhere, so its
    length does not matter, and if its caller has left, vLLM may never send the token. state: vLLM's CachedRequestState.
    """
    params = state.sampling_params
    told = params is not None and (params.extra_args or {}).get(LENGTH_KEY)
    return bool(told and len(state.output_token_ids) > 1)


def text_of(state: Any) -> list[int]:
    """Return a request's prompt and response, in tokens. state: vLLM's CachedRequestState."""
    return [*(state.prompt_token_ids or ()), *state.output_token_ids]


def _verified(request_ids: Sequence[str], drafts: Mapping[str, list[int]]) -> Int32:
    """Return how many draft tokens of each of the [n] rows were verified: those that the scheduler kept.

    A grammar may have cut the draft, and a prefix-cache hit leaves placeholders (-1).
    """
    of = [drafts.get(request_id) for request_id in request_ids]
    return np.array([len(draft) - draft.count(-1) if draft else 0 for draft in of], dtype=np.int32)
