"""Let vLLM's drafter leave out forward passes, and make up for them in the next pass that it runs.

A drafter with a KV cache takes in the tokens of every step. Where it drafts nothing that is all its first pass is for,
and the same work takes a fraction of the time for many tokens at once. So what a pass would have taken in is kept
(token, position and the target's hidden state of each accepted token) and put before the tokens of the next pass, whose
queries are longer for it.

A row's kept tokens never fill a block of the KV cache: the pass that would fill one runs. vLLM's prefix cache holds
full blocks alone, so no request, of this caller or another, finds a block that the drafter has not written.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.server_ext.vllm_adapter.step_reader import ForwardPass

MOST_KEPT = 512
"""Tokens kept at most, of all rows together. Each takes the memory of its hidden states."""
_PARAMETERS = (
    "self",
    "num_speculative_tokens",
    "target_token_ids",
    "target_positions",
    "target_hidden_states",
    "next_token_ids",
    "token_indices_to_sample",
    "common_attn_metadata",
    "sampling_metadata",
    "mm_embed_inputs",
    "num_rejected_tokens_gpu",
    "slot_mappings",
)
"""The parameters of vLLM's ``propose`` that this module knows."""
_METADATA = ("query_start_loc_cpu", "seq_lens_cpu_upper_bound", "block_table_tensor", "slot_mapping")
"""Fields of vLLM's attention metadata that it builds."""

Indices = NDArray[np.int64]


@dataclass(slots=True)
class _KeptRow:
    """Hold what a row's drafter has not taken in: ``count`` tokens up to the text's position ``end``."""

    end: int
    count: int = 0
    pieces: list[Indices] = field(default_factory=list)
    """where these tokens lie among all that are kept"""


@dataclass(frozen=True, slots=True)
class _Step:
    """Hold what is known on the host of the pass that ``propose`` is called for, row by row."""

    ids: Sequence[str]
    begins: NDArray[np.int64]
    """position of the first token that the target computed"""
    sampled: NDArray[np.int64]
    """number of tokens that the row was given"""
    drafted: NDArray[np.int64]
    """number of draft tokens that were verified"""

    @classmethod
    def of(cls, forward: ForwardPass) -> "_Step":
        batch, count = forward.input_batch, len(forward.sampled)
        spec = forward.spec_decode_metadata
        return cls(
            ids=batch.req_ids[:count],
            begins=batch.num_computed_tokens_cpu[:count].astype(np.int64),
            sampled=np.fromiter(map(len, forward.sampled), np.int64, count),
            drafted=np.zeros(count, np.int64) if spec is None else np.array(spec.num_draft_tokens, np.int64),
        )


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Hold what a pass takes in, [T] tokens. The positions' last dimension is T, the hidden states' first."""

    tokens: Any
    positions: Any
    states: Any

    def at(self, indices: Any) -> "_Inputs":
        return _Inputs(self.tokens[indices], self.positions[..., indices], self.states[indices])

    @classmethod
    def joined(cls, parts: Sequence["_Inputs"]) -> "_Inputs":
        import torch

        return cls(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.positions for part in parts], dim=-1),
            torch.cat([part.states for part in parts]),
        )


class SkippedPasses:
    """Take the place of ``propose`` on vLLM's drafter ``native``, of the model runner ``runner``."""

    def __init__(self, runner: Any, native: Any) -> None:
        self._runner = runner
        self._native = native
        self._step: _Step | None = None
        self._skips = False
        self._rows: dict[str, _KeptRow] = {}
        self._parts: list[_Inputs] = []
        self._kept = 0
        """tokens in ``_parts``"""
        self.able = _is_known(native) and _can_wait(runner, native)
        """whether this drafter's passes can wait at all"""
        self._caches_prefixes = self.able and bool(runner.vllm_config.cache_config.enable_prefix_caching)
        if self.able:
            self._signature = inspect.signature(type(native).propose)
            native.propose = self._propose

    def may_skip(self, forward: ForwardPass) -> bool:
        """Return whether the drafter may leave out its pass for this step.

        It may if every row has decoded, none has filled a block of the KV cache, and not too much is kept.
        """
        block = self._native.block_size if self.able else 0
        if block <= 0 or not all(forward.sampled):
            return False
        step = _Step.of(forward)
        count = len(step.ids)
        if forward.scheduler_output.total_num_scheduled_tokens != count + int(step.drafted.sum()):
            return False
        if self._kept + int(step.sampled.sum()) > min(MOST_KEPT, self._room(count)):
            return False
        if not self._caches_prefixes:
            return True
        waiting = np.array([self._waiting(name, begin) for name, begin in zip(step.ids, step.begins, strict=True)])
        begins, ends = step.begins - waiting, step.begins + step.sampled
        return bool((begins // block == ends // block).all())

    def prepare(self, forward: ForwardPass, *, skip: bool) -> None:
        """Say which pass vLLM's next call of ``propose`` is for, and whether to leave it out."""
        if self.able:
            self._step, self._skips = _Step.of(forward), skip

    def forget(self) -> None:
        """Drop what is kept, after an error."""
        self._rows, self._parts, self._kept = {}, [], 0

    def _room(self, rows: int) -> int:
        """Return how many tokens a pass over so many rows can take in."""
        return int(self._native.max_num_tokens - rows * self._native.net_num_new_slots_per_request)

    def _waiting(self, request_id: str, begin: int) -> int:
        """Return how many tokens are kept for a row whose step began at this position."""
        row = self._rows.get(request_id)
        return row.count if row is not None and row.end == begin else 0

    def _propose(self, *args: Any, **kwargs: Any) -> Any:
        """Keep what the pass would take in, or run it behind what is kept. Takes and returns what ``propose`` does."""
        run = type(self._native).propose
        call = self._signature.bind(self._native, *args, **kwargs).arguments
        step, self._step = self._step, None
        if step is None:
            return run(**call)
        inputs = _Inputs(call["target_token_ids"], call["target_positions"], call["target_hidden_states"])
        metadata, rejected = call["common_attn_metadata"], call.get("num_rejected_tokens_gpu")
        if self._skips:
            return self._keep(step, inputs, self._taken_in(step, metadata, rejected))
        waiting = [self._pieces(*row) for row in zip(step.ids, step.begins.tolist(), strict=True)]
        if any(map(len, waiting)):
            own = [piece + self._kept for piece in self._taken_in(step, metadata, rejected)]
            everything = _Inputs.joined([*self._parts, inputs])
            drafted = self._catch_up(step, everything, waiting, own, call)
        else:
            drafted = run(**call)
        if self._rows:
            self._drop_unless_absent(step.ids)
        return drafted

    def _catch_up(
        self, step: _Step, inputs: _Inputs, waiting: Sequence[Indices], own: Sequence[Indices], call: dict[str, Any]
    ) -> Any:
        """Run the pass with what is kept in front, or, where the drafter's buffers don't hold both, right behind it.

        waiting, own: which of the inputs are each row's kept ones, and those of this step.
        """
        run = _Pass(self._native, inputs, call["common_attn_metadata"], call["sampling_metadata"])
        ends = step.begins + np.array([len(piece) for piece in own], np.int64)
        if sum(map(len, (*waiting, *own))) <= self._room(len(own)):
            own = [np.concatenate(pieces) for pieces in zip(waiting, own, strict=True)]
        else:
            late = [i for i, kept in enumerate(waiting) if len(kept)]
            following = inputs.tokens[_on(inputs.tokens, [int(own[i][0]) for i in late])]
            run(0, late, [waiting[i] for i in late], step.begins[late], following)
        return run(call["num_speculative_tokens"], range(len(own)), own, ends, call["next_token_ids"])

    def _taken_in(self, step: _Step, metadata: Any, rejected: Any) -> list[Indices]:
        """Return where the tokens lie that each row has computed for good: without rejected drafts."""
        starts = metadata.query_start_loc_cpu.numpy().astype(np.int64)
        if len(starts) != len(step.ids) + 1:
            raise ValueError(f"the pass has {len(starts) - 1} rows, the batch {len(step.ids)}")
        ends = starts[1:]
        if rejected is not None:
            ends = ends - np.where(step.drafted > 0, step.drafted + 1 - step.sampled, 0)
        return [np.arange(start, end) for start, end in zip(starts[:-1].tolist(), ends.tolist(), strict=True)]

    def _keep(self, step: _Step, inputs: _Inputs, rows: Sequence[Indices]) -> Any:
        import torch

        part = inputs.at(_on(inputs.tokens, np.concatenate(rows)))
        at = self._kept
        for name, begin, piece in zip(step.ids, step.begins.tolist(), rows, strict=True):
            row = self._rows.get(name)
            if row is None or row.end != begin:
                row = self._rows[name] = _KeptRow(begin)
            row.end += len(piece)
            row.count += len(piece)
            row.pieces.append(np.arange(at, at + len(piece)))
            at += len(piece)
        self._parts.append(part)
        self._kept = at
        return torch.empty(len(rows), 0, dtype=torch.int64, device=inputs.tokens.device)

    def _pieces(self, request_id: str, begin: int) -> Indices:
        """Return where a row's kept tokens lie, in their order."""
        row = self._rows.get(request_id)
        return np.concatenate(row.pieces) if row is not None and row.end == begin else np.zeros(0, np.int64)

    def _drop_unless_absent(self, present: Sequence[str]) -> None:
        """Drop what these rows have taken in, and what belongs to requests that are gone."""
        known, here = self._runner.requests, set(present)
        absent = {name: row for name, row in self._rows.items() if name not in here and name in known}
        kept = _Inputs.joined(self._parts) if absent and self._parts else None
        self.forget()
        if kept is None:
            return
        pieces = [np.concatenate(row.pieces) for row in absent.values()]
        self._parts = [kept.at(_on(kept.tokens, np.concatenate(pieces)))]
        for (name, row), piece in zip(absent.items(), pieces, strict=True):
            at = np.arange(self._kept, self._kept + len(piece))
            self._rows[name] = _KeptRow(row.end, row.count, [at])
            self._kept += len(piece)


@dataclass(frozen=True, slots=True)
class _Pass:
    """Run the drafter on some rows, with queries of any length and without rejected tokens."""

    native: Any
    inputs: _Inputs
    metadata: Any
    """vLLM's metadata of the step, for the rows' blocks"""
    sampling: Any

    def __call__(
        self, tokens: int, rows: Sequence[int], queries: Sequence[Indices], ends: NDArray[np.int64], following: Any
    ) -> Any:
        """Return the drafts of ``tokens`` tokens, [rows, tokens].

        queries: which of the inputs each row takes in. ends: position behind each query. following: [rows] the token
        there.
        """
        import torch

        lengths = np.array([len(query) for query in queries], np.int64)
        inputs = self.inputs.at(_on(self.inputs.tokens, np.concatenate(queries)))
        starts = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
        seen = torch.from_numpy(ends.astype(np.int32))
        device = inputs.tokens.device
        blocks = self.metadata.block_table_tensor[_on(inputs.tokens, rows)]
        row_of = _on(inputs.tokens, np.repeat(np.arange(len(rows)), lengths))
        size = self.native.block_size
        places = (blocks[row_of, inputs.positions // size] * size + inputs.positions % size).to(
            self.metadata.slot_mapping.dtype
        )
        metadata = type(self.metadata)(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=seen.to(device),
            seq_lens_cpu_upper_bound=seen.clone(),
            num_reqs=len(rows),
            num_actual_tokens=int(lengths.sum()),
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=blocks,
            slot_mapping=places,
            causal=True,
        )
        return type(self.native).propose(
            self.native,
            num_speculative_tokens=tokens,
            target_token_ids=inputs.tokens,
            target_positions=inputs.positions,
            target_hidden_states=inputs.states,
            next_token_ids=following,
            token_indices_to_sample=None,
            common_attn_metadata=metadata,
            sampling_metadata=self.sampling,
        )


def _is_known(native: Any) -> bool:
    """Return whether the drafter drafts as vLLM's base class does, in a version whose calls this module knows."""
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    if getattr(type(native), "propose", None) is not SpecDecodeBaseProposer.propose:
        return False
    known = tuple(inspect.signature(type(native).propose).parameters) == _PARAMETERS
    return known and {*_METADATA} <= {part.name for part in fields(CommonAttentionMetadata)}


def _can_wait(runner: Any, native: Any) -> bool:
    """Return whether nothing but this drafter depends on when its passes run."""
    config = runner.vllm_config
    parallel = config.parallel_config
    sizes = (
        parallel.data_parallel_size,
        parallel.decode_context_parallel_size,
        getattr(parallel, "prefill_context_parallel_size", 1),
    )
    fixed = getattr(native, "constant_draft_positions", False)
    if native.parallel_drafting or native.supports_mm_inputs or native.uses_mrope or fixed:
        return False
    return max(sizes) == 1 and config.kv_transfer_config is None


def _on(tensor: Any, indices: Any) -> Any:
    """Return indices as a tensor on the device of another one."""
    import torch

    return torch.as_tensor(np.asarray(indices, np.int64)).to(tensor.device, non_blocking=True)
