"""DraftLoop: n greedy steps of a speculator for a whole batch, without a synchronisation."""

from typing import NamedTuple

import torch
from torch import Tensor

from agentspec.errors import SpeculatorError
from agentspec.server_ext.speculator.base import Speculator

FREE = -1
"""In a proposal: the speculator takes its own token here."""


class DraftedTokens(NamedTuple):
    """What a loop answers, all on the device of the speculator; token ids are the target's."""

    tokens: Tensor
    """int64 [B, n]: the proposal's token where there is one, else the speculator's."""
    probabilities: Tensor
    """float32 [B, n]: the speculator's probability of that token (0 for one outside a reduced head)."""
    top: Tensor
    """int64 [B, n]: the speculator's likeliest token, given the tokens taken before it."""
    top_probabilities: Tensor
    """float32 [B, n]."""


class DraftLoop:
    """Drafts with a speculator, and scores tokens that others propose, in one go.

    positions: how many tokens to draft, at most the speculator's ``n_predict``, which is the default.
    Raises SpeculatorError for more.
    """

    def __init__(self, speculator: Speculator, *, positions: int | None = None) -> None:
        most = speculator.config.n_predict
        self.speculator = speculator
        self.positions = most if positions is None else positions
        if not 1 <= self.positions <= most:
            raise SpeculatorError(
                f"num_speculative_tokens: 1 to {most} with this speculator (its n_predict), got {positions}"
            )
        self._row_of = _rows(speculator.draft_vocabulary, speculator.config.vocab_size)

    @torch.inference_mode()  # type: ignore[untyped-decorator]  # torch is not followed
    def __call__(self, hidden: Tensor, tokens: Tensor, proposal: Tensor | None = None) -> DraftedTokens:
        """Draft for B rows.

        hidden [B, H]: the target's hidden state after its final norm, at the position that produced the newest token,
        in the speculator's dtype. tokens int64 [B]: the newest token. proposal int64 [B, n]: tokens to take and score
        where they are not FREE; None: all of them are.
        """
        state = self.speculator.begin(hidden)
        steps = []
        for k in range(self.positions):
            state = self.speculator.advance(state, tokens, k)
            logits = self.speculator.logits(state, k).float()
            step = self._choose(logits, None if proposal is None else proposal[:, k])
            tokens = step.tokens
            steps.append(step)
        return DraftedTokens(*(torch.stack(parts, dim=1) for parts in zip(*steps, strict=True)))

    def _choose(self, logits: Tensor, forced: Tensor | None) -> DraftedTokens:
        """The token of one position; all fields [B]."""
        total = logits.logsumexp(dim=-1)
        best, row = logits.max(dim=-1)
        vocabulary = self.speculator.draft_vocabulary
        top = row if vocabulary is None else vocabulary[row]
        chance = (best - total).exp()
        if forced is None:
            return DraftedTokens(top, chance, top, chance)
        free = forced < 0
        row = forced.clamp(min=0)
        known = None
        if self._row_of is not None:
            row = self._row_of[row]
            known = row >= 0
            row = row.clamp(min=0)
        score = (logits.gather(-1, row.unsqueeze(-1)).squeeze(-1) - total).exp()
        if known is not None:
            score = score * known
        return DraftedTokens(torch.where(free, top, forced), torch.where(free, chance, score), top, chance)


def _rows(vocabulary: Tensor | None, size: int) -> Tensor | None:
    """int64 [V]: which row of a reduced head stands for a token, -1 for none; None where the head is whole."""
    if vocabulary is None:
        return None
    rows = torch.full((size,), -1, dtype=torch.int64, device=vocabulary.device)
    rows[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)
    return rows
