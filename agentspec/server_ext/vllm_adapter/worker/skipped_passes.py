"""Let vLLM's drafter leave out forward passes, and make up for them in the next pass that it runs.

A drafter with a KV cache takes in the tokens of every step. In a step in which it drafts nothing, its pass does nothing
else, and taking in the tokens of many steps at once costs a fraction of the time. So SkippedPasses keeps the input of a
pass that is left out, the target's hidden state of each accepted token, and puts it before the tokens of the next pass.

With vLLM's prefix cache, a row's kept tokens never fill a block of the KV cache: the pass that would fill one runs. The
prefix cache holds full blocks alone, so no request, of this caller or another, finds a block that the drafter has not
written.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.server_ext.vllm_adapter.worker.step_reader import ForwardPass

MOST_KEPT = 512
"""Tokens kept at most, of all rows together. Each takes the memory of its hidden states."""
_PARAMETERS = (
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
"""Fields of vLLM's attention metadata that this module must know to build it."""

Indices = NDArray[np.int64]


@dataclass(slots=True)
class _KeptRow:
    """Hold the tokens of a row that the drafter has yet to take in: ``count`` of them, up to position ``end``."""

    end: int
    count: int = 0
    pieces: list[Indices] = field(default_factory=list)
    """places of their hidden states among all that are kept"""

    def places(self) -> Indices:
        return np.concatenate(self.pieces)


@dataclass(frozen=True, slots=True)
class _StepRows:
    """Hold what the host knows of a step's rows when the drafter's pass is due."""

    ids: Sequence[str]
    texts: NDArray[np.int32]
    """[rows, longest] vLLM's table of tokens"""
    begins: Indices
    """position of the first token that the target computed"""
    sampled: Indices
    """number of tokens that the row was given"""
    drafted: Indices
    """number of draft tokens that were verified"""

    @classmethod
    def of(cls, forward: ForwardPass) -> "_StepRows":
        batch, count = forward.input_batch, len(forward.sampled)
        spec = forward.spec_decode_metadata
        return cls(
            ids=batch.req_ids[:count],
            texts=batch.token_ids_cpu,
            begins=batch.num_computed_tokens_cpu[:count].astype(np.int64),
            sampled=np.fromiter(map(len, forward.sampled), np.int64, count),
            drafted=np.zeros(count, np.int64) if spec is None else np.array(spec.num_draft_tokens, np.int64),
        )


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Hold the input of a pass: tokens and positions, [T], and hidden states, [T, width]."""

    tokens: Any
    positions: Any
    states: Any

    def at(self, indices: Any) -> "_Inputs":
        return _Inputs(self.tokens[indices], self.positions[indices], self.states[indices])


class SkippedPasses:
    """Replace ``propose`` of vLLM's drafter ``native``, which belongs to the model runner ``runner``."""

    def __init__(self, runner: Any, native: Any) -> None:
        self._runner = runner
        self._native = native
        self._latest: tuple[ForwardPass, _StepRows] | None = None
        self._rows: dict[str, _KeptRow] = {}  # by request id
        self._kept = 0
        """tokens that are kept, of all rows together"""
        self._states: Any = None
        """[MOST_KEPT, width] the target's hidden states; None: nothing was kept yet, or the drafter takes none"""
        self.able = _is_known(native) and _can_wait(runner, native)
        """whether this drafter's passes can wait at all"""
        self._caches_prefixes = self.able and bool(runner.vllm_config.cache_config.enable_prefix_caching)
        if self.able:
            self._run = native.propose
            self._signature = inspect.signature(self._run)
            native.propose = self._propose

    def may_skip(self, forward: ForwardPass) -> bool:
        """Return whether the drafter may leave out its pass for this step.

        It may if every row has decoded and not too much is kept, and, with a prefix cache, no row has filled a block.
        """
        block = self._native.block_size if self.able else 0
        if block <= 0 or not all(forward.sampled):
            return False
        step = self._read(forward)
        count = len(step.ids)
        if forward.scheduler_output.total_num_scheduled_tokens != count + int(step.drafted.sum()):
            return False
        if self._kept + int(step.sampled.sum()) > min(MOST_KEPT, self._room(count)):
            return False
        if not self._caches_prefixes:
            return True
        begins, ends = step.begins - self._kept_counts(step), step.begins + step.sampled
        return bool((begins // block == ends // block).all())

    def skip(self, forward: ForwardPass) -> None:
        """Keep the input of this step's pass. Call it where ``may_skip`` allows it, on all ranks alike."""
        step = self._read(forward)
        self._keep_states(forward, step)
        for request_id, begin, taken in zip(step.ids, step.begins.tolist(), step.sampled.tolist(), strict=True):
            row = self._rows.get(request_id)
            if row is None or row.end != begin:
                row = self._rows[request_id] = _KeptRow(begin)
            row.end += taken
            row.count += taken
            row.pieces.append(np.arange(self._kept, self._kept + taken))
            self._kept += taken
        self._latest = None

    def prepare(self, forward: ForwardPass) -> None:
        """Note that vLLM's next call of ``propose`` is for this step. Does nothing where no tokens are kept."""
        if self._rows:
            self._read(forward)

    def forget(self) -> None:
        """Drop all kept tokens, because of an error."""
        self._rows, self._kept = {}, 0

    def _read(self, forward: ForwardPass) -> _StepRows:
        """Return the rows of a step. They stay for the call of ``propose`` that is told none of this."""
        if self._latest is None or self._latest[0] is not forward:
            self._latest = forward, _StepRows.of(forward)
        return self._latest[1]

    def _room(self, rows: int) -> int:
        """Return how many tokens a pass over ``rows`` rows can take in."""
        return int(self._native.max_num_tokens - rows * self._native.net_num_new_slots_per_request)

    def _kept_counts(self, step: _StepRows) -> Indices:
        """Return how many tokens are kept for each row, up to the first one of the step."""
        known = [self._rows.get(request_id) for request_id in step.ids]
        found = zip(known, step.begins.tolist(), strict=True)
        return np.array([0 if row is None or row.end != begin else row.count for row, begin in found], np.int64)

    def _keep_states(self, forward: ForwardPass, step: _StepRows) -> None:
        """Copy the states of accepted tokens, which vLLM will write over."""
        import torch

        if not self._native.pass_hidden_states_to_model:
            return
        own = getattr(self._runner.get_model(), "get_mtp_target_hidden_states", lambda: None)()
        layers = [forward.hidden_states if own is None else own]
        if self._runner.use_aux_hidden_state_outputs:
            layers = forward.aux_hidden_states
        starts = np.cumsum(step.drafted + 1) - step.drafted - 1
        wanted = _ranges(starts, step.sampled)
        if step.drafted.any():
            places = _on(layers[0], np.concatenate(wanted))
            layers = [layer[places] for layer in layers]
        else:
            layers = [layer[: len(wanted)] for layer in layers]
        if self._states is None:
            width = sum(layer.shape[-1] for layer in layers)
            self._states = torch.empty(MOST_KEPT, width, dtype=layers[0].dtype, device=layers[0].device)
        into = self._states[self._kept : self._kept + int(step.sampled.sum())]
        torch.cat(layers, dim=-1, out=into)

    def _propose(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pass, and let it take in the kept tokens first. Arguments and result are those of ``propose``."""
        call = self._signature.bind(*args, **kwargs).arguments
        latest, self._latest = self._latest, None
        if latest is None or not self._rows:
            return self._run(**call)
        step = latest[1]
        counts = self._kept_counts(step)
        drafted = self._run_with_kept(step, counts, call) if counts.any() else self._run(**call)
        self._drop_unless_absent(step.ids)
        return drafted

    def _run_with_kept(self, step: _StepRows, counts: Indices, call: dict[str, Any]) -> Any:
        """Run the pass with the kept tokens in front. If its buffers don't hold both, run these in a pass before.

        counts: the tokens kept for each row. call: vLLM's arguments of ``propose``, by name.
        """
        metadata = call["common_attn_metadata"]
        behind = np.flatnonzero(counts)  # rows that have kept tokens
        inputs = self._join_inputs(step, counts, behind, call)
        # Where each row's tokens are in these inputs: the kept ones, and behind all of these the new ones.
        kept, before = _ranges(np.cumsum(counts) - counts, counts), int(counts.sum())
        new = [before + places for places in self._new_places(step, metadata, call.get("num_rejected_tokens_gpu"))]
        run = _Pass(self._run, self._native.block_size, inputs, metadata, call["sampling_metadata"])
        if sum(map(len, (*kept, *new))) <= self._room(len(new)):
            queries = [np.concatenate(places) for places in zip(kept, new, strict=True)]
        else:
            first_new = inputs.tokens[_on(inputs.tokens, [new[row][0] for row in behind])]
            run(0, behind, [kept[row] for row in behind], step.begins[behind], first_new)
            queries = new
        ends = step.begins + np.array([len(places) for places in new], np.int64)
        return run(call["num_speculative_tokens"], range(len(new)), queries, ends, call["next_token_ids"])

    def _join_inputs(self, step: _StepRows, counts: Indices, behind: Indices, call: dict[str, Any]) -> _Inputs:
        """Return the kept input of the rows ``behind``, one after the other, then vLLM's input of the pass."""
        import torch

        new = _Inputs(call["target_token_ids"], call["target_positions"], call["target_hidden_states"])
        positions = _ranges(step.begins - counts, counts)
        tokens = np.concatenate([step.texts[row, positions[row]] for row in behind])
        if self._states is None:
            states = new.states[:1].expand(len(tokens), -1)  # the drafter reads no hidden states
        else:
            places = np.concatenate([self._rows[step.ids[row]].places() for row in behind])
            states = self._states[_on(new.states, places)]
        return _Inputs(
            torch.cat((_on(new.tokens, tokens).to(new.tokens.dtype), new.tokens)),
            torch.cat((_on(new.positions, np.concatenate(positions)).to(new.positions.dtype), new.positions)),
            torch.cat((states, new.states)),
        )

    def _new_places(self, step: _StepRows, metadata: Any, rejected: Any) -> list[Indices]:
        """Return, for each row, the places in vLLM's input of the tokens to take in: its query less rejected drafts."""
        starts = metadata.query_start_loc_cpu.numpy().astype(np.int64)
        if len(starts) != len(step.ids) + 1:
            raise ValueError(f"the pass has {len(starts) - 1} rows, the batch {len(step.ids)}")
        counts = np.diff(starts)
        if rejected is not None:
            counts -= np.where(step.drafted > 0, step.drafted + 1 - step.sampled, 0)
        return _ranges(starts[:-1], counts)

    def _drop_unless_absent(self, present: Sequence[str]) -> None:
        """Drop the kept tokens of these rows, which the drafter has taken in, and of requests that are gone."""
        known, here = self._runner.requests, set(present)
        absent = {
            request_id: row for request_id, row in self._rows.items() if request_id not in here and request_id in known
        }
        self.forget()
        if absent and self._states is not None:
            states = self._states[_on(self._states, np.concatenate([row.places() for row in absent.values()]))]
            self._states[: len(states)] = states
        for request_id, row in absent.items():
            self._rows[request_id] = _KeptRow(row.end, row.count, [np.arange(self._kept, self._kept + row.count)])
            self._kept += row.count


@dataclass(frozen=True, slots=True)
class _Pass:
    """Run the drafter on some rows, with queries of any length and without rejected tokens."""

    propose: Any
    """vLLM's method, bound to the drafter"""
    block: int
    """tokens in a block of the KV cache"""
    inputs: _Inputs
    metadata: Any
    """vLLM's metadata of the step, for the rows' blocks"""
    sampling: Any

    def __call__(
        self,
        tokens: int,
        rows: Sequence[int] | Indices,
        queries: Sequence[Indices],
        ends: NDArray[np.int64],
        following: Any,
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
        size = self.block
        slots = blocks[row_of, inputs.positions // size] * size + inputs.positions % size
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
            slot_mapping=slots.to(self.metadata.slot_mapping.dtype),
            causal=True,
        )
        return self.propose(
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
    known = tuple(inspect.signature(native.propose).parameters) == _PARAMETERS
    return known and {*_METADATA} <= {part.name for part in fields(CommonAttentionMetadata)}


def _can_wait(runner: Any, native: Any) -> bool:
    """Return whether passes can wait: nothing but this drafter, such as another rank, depends on when they run."""
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


def _ranges(begins: Indices, counts: Indices) -> list[Indices]:
    """Return, for each pair, the ``count`` numbers from ``begin`` on."""
    pairs = zip(begins.tolist(), counts.tolist(), strict=True)
    return [np.arange(begin, begin + count) for begin, count in pairs]


def _on(tensor: Any, indices: Any) -> Any:
    """Return indices as a tensor on the device of another one."""
    import torch

    return torch.as_tensor(np.asarray(indices, np.int64)).to(tensor.device, non_blocking=True)
