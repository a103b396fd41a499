"""DraftLoop: n greedy steps of a speculator for a whole batch, without a synchronisation."""

import torch
from torch import Tensor

from agentspec.errors import SpeculatorError
from agentspec.server_ext.speculator import selection
from agentspec.server_ext.speculator.base import Speculator
from agentspec.server_ext.speculator.fp8 import use_fp8
from agentspec.server_ext.speculator.graphs import SIZES, PaddedLoop
from agentspec.server_ext.speculator.parallel import Ranks, shard_heads
from agentspec.server_ext.speculator.selection import FREE, MOST_ROWS, DraftedTokens

__all__ = ["FREE", "DraftLoop", "DraftedTokens"]


class DraftLoop:
    """Drafts with a speculator, and scores tokens that others propose, in one go.

    It takes the speculator over: what is switched on below replaces parts of it, and their former weights are freed.

    positions: how many tokens to draft, at most the speculator's ``n_predict``, which is the default.
    fp8_head, fp8_projections: weights in 8 bits (`fp8`). kernels: fused ones, in Triton (`fused`). parallel: the ranks
    that share the head (`parallel`). graphs: batch sizes that `warm_up` records (`graphs`).
    Raises SpeculatorError for more positions than there are, for a head that cannot be shared so, and for kernels
    where Triton cannot run.
    """

    def __init__(
        self,
        speculator: Speculator,
        *,
        positions: int | None = None,
        fp8_head: bool = False,
        fp8_projections: bool = False,
        kernels: bool = False,
        graphs: bool = False,
        parallel: Ranks | None = None,
    ) -> None:
        config = speculator.config
        self.speculator = speculator
        self.positions = config.n_predict if positions is None else positions
        if not 1 <= self.positions <= config.n_predict:
            raise SpeculatorError(
                f"num_speculative_tokens: 1 to {config.n_predict} with this speculator (its n_predict), got {positions}"
            )
        if config.head_rows >= MOST_ROWS:
            raise SpeculatorError(f"vocab_size: less than {MOST_ROWS} rows of a head expected, got {config.head_rows}")
        self._vocabulary = speculator.draft_vocabulary
        self._row_of = _rows(self._vocabulary, config.vocab_size)
        self._ranks = parallel
        self._first = shard_heads(speculator, parallel) if parallel is not None else 0
        use_fp8(speculator, heads=fp8_head, projections=fp8_projections)
        self._score, self._merge, self._choose = selection.score, selection.merge, selection.choose
        if kernels:
            self._use_kernels()
        self._recorded = PaddedLoop(self._run, self.inputs(SIZES[-1])) if graphs else None

    def _use_kernels(self) -> None:
        try:
            from agentspec.server_ext.speculator import fused
        except ImportError as error:
            raise SpeculatorError(f"kernels: {error}; install triton, or switch kernels off") from error
        fused.fuse(self.speculator)
        self._score, self._merge, self._choose = fused.score, fused.merge, fused.choose

    def inputs(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of so many rows, of the shapes and dtypes that the loop takes, on its device; nothing is proposed."""
        some = next(self.speculator.parameters())
        return (
            torch.zeros(batch, self.speculator.config.hidden_size, dtype=some.dtype, device=some.device),
            torch.zeros(batch, dtype=torch.int64, device=some.device),
            torch.full((batch, self.positions), FREE, dtype=torch.int64, device=some.device),
        )

    @torch.inference_mode()  # type: ignore[untyped-decorator]  # torch is not followed
    def warm_up(self) -> None:
        """Compile the kernels and record the graphs, where they are switched on.

        Before a server takes requests, on all ranks alike. Without it nothing is recorded, and kernels are compiled
        when they are first used.
        """
        for batch in (*SIZES, SIZES[-1] + 1):  # beyond the last size the steps are others
            self._run(*self.inputs(batch))
        if self._recorded is not None:
            self._recorded.warm_up()

    @torch.inference_mode()  # type: ignore[untyped-decorator]  # torch is not followed
    def __call__(self, hidden: Tensor, tokens: Tensor, proposal: Tensor | None = None) -> DraftedTokens:
        """Draft for B rows.

        hidden [B, H]: the target's hidden state after its final norm, at the position that produced the newest token.
        tokens int64 [B]: the newest token. proposal int64 [B, n]: tokens to take and score where they are not FREE;
        None: all of them are. Ids beyond the vocabulary count as its last, for a wrong draft is better than a fault
        on the device. What is answered holds until the next call.
        """
        batch = len(hidden)
        if not batch:
            return _nothing(self.positions, tokens.device)
        if proposal is None:
            proposal = tokens.new_full((batch, self.positions), FREE)
        if self._recorded is not None and self._recorded.size_for(batch):
            return self._recorded(hidden, tokens, proposal)
        return self._run(hidden, tokens, proposal)

    def _run(self, hidden: Tensor, tokens: Tensor, proposal: Tensor) -> DraftedTokens:
        """The loop itself: the same launches whatever the values are."""
        last = self.speculator.config.vocab_size - 1
        given = proposal.clamp(FREE, last)
        wanted = self._rows_of(given)
        token = tokens.clamp(0, last)
        state = self.speculator.begin(hidden)
        steps = []
        for k in range(self.positions):
            state = self.speculator.advance(state, token, k)
            parts = self._parts(state.hidden, k, wanted[:, k])
            step = self._choose(parts, given[:, k], self._vocabulary)
            token = step.tokens
            steps.append(step)
        return DraftedTokens(*(torch.stack(columns, dim=1) for columns in zip(*steps, strict=True)))

    def _parts(self, hidden: Tensor, k: int, wanted: Tensor) -> Tensor:
        """Position k's scores in parts of the vocabulary, float32 [P, B, 4] (`selection`)."""
        parts = self._score(self.speculator.heads[self.speculator.config.weights_at(k)], hidden, wanted)
        return parts if self._ranks is None else self._ranks.gather(self._merge(parts, self._first))

    def _rows_of(self, given: Tensor) -> Tensor:
        """int64 [B, n]: the rows that stand for the tokens, counted from the first of this rank's head; outside of it
        for a token that has none."""
        if self._row_of is not None:
            given = torch.where(given < 0, given, self._row_of[given.clamp(min=0)])
        return given - self._first if self._first else given


def _rows(vocabulary: Tensor | None, size: int) -> Tensor | None:
    """int64 [V]: which row of a reduced head stands for a token, -1 for none; None where the head is whole."""
    if vocabulary is None:
        return None
    rows = torch.full((size,), -1, dtype=torch.int64, device=vocabulary.device)
    rows[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)
    return rows


def _nothing(positions: int, device: torch.device) -> DraftedTokens:
    tokens = torch.empty(0, positions, dtype=torch.int64, device=device)
    return DraftedTokens(tokens, tokens.float(), tokens, tokens.float())
