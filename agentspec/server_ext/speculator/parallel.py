"""Tensor parallel: each rank holds and reads a slice of the head's rows, and the ranks agree on a token.

What a rank sends is the four numbers of its part of the vocabulary (`selection`), so a position costs one all-gather
of 16 bytes a row and rank, instead of the logits. Everything before the head is small and done by every rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from agentspec.errors import SpeculatorError
from agentspec.server_ext.speculator.base import Speculator

_ALIGNMENT = 16
"""Slices come in multiples of so many rows, as FP8 products need them."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that share a head. gather: float32 [B, 4] of this rank -> [size, B, 4] of all, in rank order."""

    rank: int
    size: int
    gather: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, group: "distributed.ProcessGroup | None" = None) -> "Ranks":
        """The ranks of a torch process group (None: the default one)."""
        size = distributed.get_world_size(group)

        def gather(part: Tensor) -> Tensor:
            parts = part.new_empty(size * len(part), part.shape[1])
            distributed.all_gather_into_tensor(parts, part, group=group)
            return parts.view(size, *part.shape)

        return cls(distributed.get_rank(group), size, gather)

    def rows(self, total: int) -> range:
        """The head's rows that this rank holds, of ``total``."""
        each = -(-total // (self.size * _ALIGNMENT)) * _ALIGNMENT
        return range(min(self.rank * each, total), min((self.rank + 1) * each, total))


def shard_heads(speculator: Speculator, ranks: Ranks) -> int:
    """Keep this rank's rows of each head alone. Returns the first of them.

    Raises SpeculatorError where the vocabulary is too small for so many ranks.
    """
    total = speculator.config.head_rows
    rows = ranks.rows(total)
    if not Ranks(ranks.size - 1, ranks.size, ranks.gather).rows(total):  # the same answer on all ranks
        raise SpeculatorError(
            f"parallel: a head of {total} rows cannot be shared by {ranks.size} ranks "
            f"in multiples of {_ALIGNMENT}; use fewer ranks, or a larger draft vocabulary"
        )
    for name, head in list(speculator.heads.named_children()):
        with torch.device("meta"):
            part = nn.Linear(head.in_features, len(rows), bias=False)
        part.weight = nn.Parameter(head.weight.detach()[rows.start : rows.stop].clone(), requires_grad=False)
        setattr(speculator.heads, name, part)
    return rows.start
