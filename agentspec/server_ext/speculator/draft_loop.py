"""Run n greedy steps of a speculator for a whole batch, without a synchronisation."""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from agentspec.errors import SpeculatorError, first_line
from agentspec.server_ext import UNFORCED
from agentspec.server_ext.speculator.gpu import Optimizations
from agentspec.server_ext.speculator.gpu.fp8 import use_fp8
from agentspec.server_ext.speculator.gpu.graphs import SIZES, PaddedLoop, Recorder
from agentspec.server_ext.speculator.gpu.self_check import check_graphs, check_kernels
from agentspec.server_ext.speculator.models import Speculator
from agentspec.server_ext.speculator.selection import (
    MAX_HEAD_ROWS,
    PLAIN,
    DraftedTokens,
    Operations,
    Ranks,
    shard_heads,
)

logger = logging.getLogger("vllm.agentspec")
T = TypeVar("T")


class GreedySteps:
    """Run the n steps of a draft, with one set of operations.

    The steps launch the same work for all values of their inputs and never synchronise, so they can be recorded.
    vocabulary: int64 [V'], the target's token of each row of the head; None: row i is token i. ranks: the processes
    that share the head; the speculator then has this rank's rows.
    """

    def __init__(
        self,
        speculator: Speculator,
        operations: Operations,
        positions: int,
        vocabulary: Tensor | None,
        ranks: Ranks | None,
    ) -> None:
        config = speculator.config
        self._speculator = operations.prepare(speculator)
        self._operations = operations
        self._positions = positions
        self._vocabulary = vocabulary
        self._row_of = None if vocabulary is None else _rows_of_tokens(vocabulary, config.vocab_size)
        self._ranks = ranks
        self._first = 0 if ranks is None else ranks.rows(config.head_rows).start

    def __call__(self, hidden: Tensor, tokens: Tensor, proposal: Tensor) -> DraftedTokens:
        """Draft for B rows: hidden [B, H], tokens int64 [B], proposal int64 [B, n]."""
        last = self._speculator.config.vocab_size - 1
        given = proposal.clamp(UNFORCED, last)
        wanted = self._rows(given)
        token = tokens.clamp(0, last)
        state = self._speculator.begin(hidden)
        steps = []
        for k in range(self._positions):
            state = self._speculator.advance(state, token, k)
            step = self._operations.choose(self._parts(state.hidden, k, wanted[:, k]), given[:, k], self._vocabulary)
            token = step.tokens
            steps.append(step)
        return DraftedTokens(*(torch.stack(columns, dim=1) for columns in zip(*steps, strict=True)))

    def _parts(self, hidden: Tensor, k: int, wanted: Tensor) -> Tensor:
        head = self._speculator.heads[self._speculator.config.weights_at(k)]
        parts = self._operations.score(head, hidden, wanted)
        return parts if self._ranks is None else self._ranks.gather(self._operations.merge(parts, self._first))

    def _rows(self, given: Tensor) -> Tensor:
        """Return the head's row of each token, counted from this rank's first; out of range if it has no such row."""
        if self._row_of is not None:
            given = torch.where(given < 0, given, self._row_of[given.clamp(min=0)])
        return given - self._first if self._first else given


class DraftLoop:
    """Draft with a speculator and score tokens that others propose, in one run.

    The loop owns the speculator: FP8 and ranks replace its layers and free the former weights.

    positions: number of tokens to draft, at most the speculator's ``n_predict``; None: all of these. fp8_head,
    fp8_projections: use FP8 weights (`gpu.fp8`). parallel: the ranks that share the head. optimizations: those that
    `warm_up` switches on if they pass their self-check; None: all that the device offers.
    Raises SpeculatorError for too many positions and for a head that these ranks cannot share.
    """

    def __init__(
        self,
        speculator: Speculator,
        *,
        positions: int | None = None,
        fp8_head: bool = False,
        fp8_projections: bool = False,
        parallel: Ranks | None = None,
        optimizations: Optimizations | None = None,
    ) -> None:
        config = speculator.config
        self.speculator = speculator
        self.positions = config.positions(positions)
        if config.head_rows >= MAX_HEAD_ROWS:
            raise SpeculatorError(
                f"vocab_size: less than {MAX_HEAD_ROWS} rows of a head expected, got {config.head_rows}"
            )
        self._ranks = parallel
        if parallel is not None:
            shard_heads(speculator, parallel)
        use_fp8(speculator, heads=fp8_head, projections=fp8_projections)
        self._device = next(speculator.parameters()).device
        self._optimizations = Optimizations.of(self._device) if optimizations is None else optimizations
        self._steps = self._with(PLAIN)
        self._recorded: PaddedLoop | None = None
        self.uses_kernels = False
        """True once `warm_up` has switched the fused kernels on."""

    @property
    def uses_graphs(self) -> bool:
        """Return whether `warm_up` has recorded graphs."""
        return self._recorded is not None

    def inputs(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return empty inputs for some number of rows, with the loop's shapes, dtypes and device, and no proposals."""
        some = next(self.speculator.parameters())
        return (
            torch.zeros(batch, self.speculator.config.hidden_size, dtype=some.dtype, device=some.device),
            torch.zeros(batch, dtype=torch.int64, device=some.device),
            torch.full((batch, self.positions), UNFORCED, dtype=torch.int64, device=some.device),
        )

    @torch.inference_mode()  # type: ignore[untyped-decorator]  # torch is not followed
    def warm_up(self) -> None:
        """Switch on each optimisation that drafts as plain torch does, and warn once about each that does not.

        Compiling kernels and recording graphs takes seconds, so call it before a server takes requests, on all ranks.
        Before that, the loop runs in plain torch, and after a failed check without that optimisation.
        """
        if self._optimizations.kernels is not None:
            load = self._optimizations.kernels
            fused = self._switch_on("fused kernels", "plain torch", lambda: self._fuse(load))
            self._steps, self.uses_kernels = fused or self._steps, fused is not None
        for batch in (*SIZES, SIZES[-1] + 1):  # larger batches run without kernels
            self._steps(*self.inputs(batch))
        if self._optimizations.recorder is not None:
            self._recorded = self._record(self._optimizations.recorder)

    @torch.inference_mode()  # type: ignore[untyped-decorator]  # torch is not followed
    def __call__(self, hidden: Tensor, tokens: Tensor, proposal: Tensor | None = None) -> DraftedTokens:
        """Draft for B rows.

        hidden [B, H]: the target's hidden state after its final norm, at the position that produced the newest token.
        tokens int64 [B]: the newest token. proposal int64 [B, n]: tokens to take and score, or UNFORCED; None: none.
        Ids beyond the vocabulary count as its last token, because a wrong draft is better than a fault on the device.
        The result is valid until the next call.
        """
        batch = len(hidden)
        if not batch:
            nothing = tokens.new_empty(0, self.positions)
            return DraftedTokens(nothing, nothing.float(), nothing, nothing.float())
        if proposal is None:
            proposal = tokens.new_full((batch, self.positions), UNFORCED)
        if self._recorded is not None and self._recorded.size_for(batch):
            return self._recorded(hidden, tokens, proposal)
        return self._steps(hidden, tokens, proposal)

    def _with(self, operations: Operations) -> GreedySteps:
        return GreedySteps(self.speculator, operations, self.positions, self.speculator.draft_vocabulary, self._ranks)

    def _fuse(self, load: Callable[[], Operations]) -> GreedySteps:
        """Return the steps with fused kernels after comparing them with plain torch. Raises any error."""
        operations, vocabulary, alone = load(), self.speculator.draft_vocabulary, None
        if self._ranks is not None:
            # Compare only this rank's rows, as if they were a reduced head. Then no rank waits for the part of a rank
            # that has failed.
            rows = self._ranks.rows(self.speculator.config.head_rows)
            whole = torch.arange(rows.stop, device=self._device) if vocabulary is None else vocabulary
            vocabulary, alone = whole[rows.start : rows.stop], Ranks(0, 1, lambda part: part.unsqueeze(0))
        fused, plain = (
            GreedySteps(self.speculator, each, self.positions, vocabulary, alone) for each in (operations, PLAIN)
        )
        check_kernels(fused, plain, self.speculator, self.positions)
        return self._with(operations)

    def _record(self, load: Callable[[], Recorder]) -> PaddedLoop | None:
        """Return the recorded loop after comparing it with the unrecorded one; None if that fails.

        The ranks agree after each stage, so that none waits for data from a rank whose recording failed. Recording
        itself sends nothing.
        """
        what, instead = "CUDA graphs", "single launches"
        loop = self._switch_on(what, instead, lambda: self._prepared(load()))
        if loop is None or self._switch_on(what, instead, loop.record) is None:
            return None
        return self._switch_on(what, instead, lambda: self._compared(loop))

    def _prepared(self, recorder: Recorder) -> PaddedLoop:
        loop = PaddedLoop(self._steps, self.inputs(SIZES[-1]), recorder)
        loop.prepare()
        return loop

    def _compared(self, loop: PaddedLoop) -> PaddedLoop:
        check_graphs(loop, self._steps, self.speculator, self.positions)
        return loop

    def _switch_on(self, what: str, instead: str, build: Callable[[], T]) -> T | None:
        """Return the built object. If building it raises, here or on another rank, warn once and return None."""
        built, problem = None, None
        try:
            built = build()
        except Exception as error:  # Triton, CUDA and their drivers may raise anything
            problem = first_line(error)
        agreed = problem is None if self._ranks is None else self._ranks.agree(problem is None, self._device)
        if not agreed:
            reason = problem or "the check failed on another rank"
            logger.warning("agentspec: %s are off, drafting with %s: %s", what, instead, reason)
        return built if agreed else None


def _rows_of_tokens(vocabulary: Tensor, size: int) -> Tensor:
    """Return int64 [V]: each token's row in a reduced head, or -1."""
    rows = torch.full((size,), -1, dtype=torch.int64, device=vocabulary.device)
    rows[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)
    return rows
