"""Choose tokens by a head's logits, computed in parts of the vocabulary: blocks of a kernel, or ranks of a server.

A part is float32 [4] for each row of a batch: its best logit, the index of that logit, the log-sum-exp of its logits,
and the logit of a given token (-inf where the token is not in this part). This is enough to choose greedily and to
know the probability of any one token. float32 holds indexes exactly below MAX_HEAD_ROWS.

Under tensor parallelism each rank holds and reads a slice of the head's rows and sends one part: 16 bytes for each
row, position and rank instead of the logits. Everything before the head is small, and every rank computes it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from agentspec.errors import SpeculatorError
from agentspec.server_ext.speculator.models import Speculator

MAX_HEAD_ROWS = 1 << 24
_ALIGNMENT = 16
"""Number that divides the rows of a rank's slice, as FP8 products need."""


class DraftedTokens(NamedTuple):
    """Hold a draft loop's result, on the speculator's device; token ids are the target's."""

    tokens: Tensor
    """int64 [B, n]: the proposal's token if there is one, else the speculator's."""
    probabilities: Tensor
    """float32 [B, n]: the speculator's probability of that token (0 for one outside a reduced head)."""
    top: Tensor
    """int64 [B, n]: the speculator's most probable token, given the tokens taken before it."""
    top_probabilities: Tensor
    """float32 [B, n]: the speculator's probability of its most probable token."""


class Operations(NamedTuple):
    """Hold the operations of a draft step that exist twice: in plain torch (`PLAIN`), and as fused kernels."""

    prepare: Callable[[Speculator], Speculator]
    """Return a speculator with the same weights whose layers are of this kind; the given one is not changed."""
    score: Callable[[nn.Module, Tensor, Tensor], Tensor]
    """head, x [B, I], wanted int64 [B] -> parts float32 [P, B, 4]."""
    merge: Callable[[Tensor, int], Tensor]
    """parts [P, B, 4], first -> one part float32 [B, 4]."""
    choose: Callable[[Tensor, Tensor, Tensor | None], DraftedTokens]
    """parts [P, B, 4], given int64 [B], vocabulary int64 [V'] or None -> fields of shape [B]."""


def part_of(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return logits [B, R] as one part, float32 [1, B, 4]. wanted int64 [B]: a row of the head, or out of range."""
    logits = logits.float()
    rows = logits.shape[-1]
    best, index = logits.max(dim=-1)
    found = logits.gather(-1, wanted.clamp(0, rows - 1).unsqueeze(-1)).squeeze(-1)
    found = found.masked_fill((wanted < 0) | (wanted >= rows), -torch.inf)
    return torch.stack((best, index.float(), logits.logsumexp(dim=-1), found), dim=-1).unsqueeze(0)


def score(head: nn.Module, x: Tensor, wanted: Tensor) -> Tensor:
    """Return the logits of a head, a linear layer, for x [B, I] as a single part."""
    return part_of(head(x), wanted)


def merge(parts: Tensor, first: int) -> Tensor:
    """Return parts [P, B, 4] as one [B, 4], its indexes counted from ``first``. Equal logits: the lowest index."""
    if len(parts) == 1 and not first:
        return parts[0]
    best, place = parts[..., 0].max(dim=0)
    index = parts[..., 1].gather(0, place.unsqueeze(0)).squeeze(0) + first
    return torch.stack((best, index, parts[..., 2].logsumexp(dim=0), parts[..., 3].amax(dim=0)), dim=-1)


def choose(parts: Tensor, given: Tensor, vocabulary: Tensor | None) -> DraftedTokens:
    """Return the token of one position, with fields of shape [B].

    parts [P, B, 4]; given int64 [B]: token to take, or UNFORCED; vocabulary int64 [V']: the target's token of a row.
    """
    best, index, total, found = merge(parts, 0).unbind(dim=-1)
    top = index.long() if vocabulary is None else vocabulary[index.long()]
    probability = (best - total).exp()
    unforced = given < 0
    return DraftedTokens(
        torch.where(unforced, top, given), torch.where(unforced, probability, (found - total).exp()), top, probability
    )


PLAIN = Operations(lambda speculator: speculator, score, merge, choose)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Hold the ranks that share a head. gather: float32 [B, 4] of this rank -> [size, B, 4] of all, in rank order."""

    rank: int
    size: int
    gather: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, group: "distributed.ProcessGroup | None" = None) -> "Ranks":
        """Return the ranks of a torch process group (None: the default one)."""
        size = distributed.get_world_size(group)

        def gather(part: Tensor) -> Tensor:
            parts = part.new_empty(size * len(part), part.shape[1])
            distributed.all_gather_into_tensor(parts, part, group=group)
            return parts.view(size, *part.shape)

        return cls(distributed.get_rank(group), size, gather)

    def rows(self, total: int) -> range:
        """Return the rows that this rank holds of a head of ``total``."""
        each = -(-total // (self.size * _ALIGNMENT)) * _ALIGNMENT
        return range(min(self.rank * each, total), min((self.rank + 1) * each, total))

    def agree(self, verdict: bool, device: torch.device) -> bool:
        """Return whether all ranks pass true. Every rank must call it at the same point."""
        said = torch.full((1, 4), float(verdict), device=device)
        return bool(self.gather(said).min() > 0.0)


def shard_heads(speculator: Speculator, ranks: Ranks) -> None:
    """Keep only this rank's rows of each head.

    Raises SpeculatorError, on every rank, if the vocabulary is too small for so many ranks.
    """
    total = speculator.config.head_rows
    if not Ranks(ranks.size - 1, ranks.size, ranks.gather).rows(total):
        raise SpeculatorError(
            f"parallel: a head of {total} rows cannot be shared by {ranks.size} ranks "
            f"in multiples of {_ALIGNMENT}; use fewer ranks, or a larger draft vocabulary"
        )
    rows = ranks.rows(total)
    for name, head in list(speculator.heads.named_children()):
        with torch.device("meta"):
            part = nn.Linear(head.in_features, len(rows), bias=False)
        part.weight = nn.Parameter(head.weight.detach()[rows.start : rows.stop].clone(), requires_grad=False)
        setattr(speculator.heads, name, part)
