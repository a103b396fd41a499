"""What a head's scores become: a choice of tokens, from parts of the vocabulary that were scored apart.

A part is float32 [4] for each row: its best logit, the index of it, the log-sum-exp of its logits, and the logit of
the token that was asked for (-inf where that is not in this part). So much is enough to choose greedily and to know
the probability of any one token; it is what blocks of a fused head leave behind and what ranks send each other.
float32 holds indexes exactly below MOST_ROWS.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

FREE = -1
"""In a proposal: the speculator takes its own token here."""
MOST_ROWS = 1 << 24


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


def part_of(logits: Tensor, wanted: Tensor) -> Tensor:
    """float32 [1, B, 4]: logits [B, R] as a single part. wanted int64 [B]: a row of the head, or one outside of it."""
    logits = logits.float()
    rows = logits.shape[-1]
    best, index = logits.max(dim=-1)
    found = logits.gather(-1, wanted.clamp(0, rows - 1).unsqueeze(-1)).squeeze(-1)
    found = found.masked_fill((wanted < 0) | (wanted >= rows), -torch.inf)
    return torch.stack((best, index.float(), logits.logsumexp(dim=-1), found), dim=-1).unsqueeze(0)


def score(head: nn.Module, x: Tensor, wanted: Tensor) -> Tensor:
    """float32 [1, B, 4]: the logits of a head, a linear layer, for x [B, I]."""
    return part_of(head(x), wanted)


def merge(parts: Tensor, first: int = 0) -> Tensor:
    """float32 [B, 4]: parts [P, B, 4] as one, its indexes counted from ``first``. Of equal logits the lowest index."""
    if len(parts) == 1 and not first:
        return parts[0]
    best, place = parts[..., 0].max(dim=0)
    index = parts[..., 1].gather(0, place.unsqueeze(0)).squeeze(0) + first
    return torch.stack((best, index, parts[..., 2].logsumexp(dim=0), parts[..., 3].amax(dim=0)), dim=-1)


def choose(parts: Tensor, given: Tensor, vocabulary: Tensor | None) -> DraftedTokens:
    """The token of one position; the fields are [B].

    parts [P, B, 4]; given int64 [B]: the token to take, or FREE; vocabulary int64 [V']: the target's token of a row.
    """
    best, index, total, found = merge(parts).unbind(dim=-1)
    top = index.long() if vocabulary is None else vocabulary[index.long()]
    chance = (best - total).exp()
    free = given < 0
    return DraftedTokens(torch.where(free, top, given), torch.where(free, chance, (found - total).exp()), top, chance)
