"""Which positions are trained on in which step, and as what."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec.train.hidden_states import HiddenStates, Response

PIECE = 256
"""Positions of a piece at most: the length of ArcticTraining's sequences."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions ``first`` to ``last`` of a response, each with at least one token behind it."""

    response: Response
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of several pieces, and the positions in them that drafts start from.

    ``hidden``: [M, H]. ``tokens``: int64 [M]. ``starts``: int64 [N], rows. ``left``: int64 [N], how many rows of the
    same response follow each of them.
    """

    hidden: Tensor
    tokens: Tensor
    starts: Tensor
    left: Tensor

    def row(self, k: int) -> Tensor:
        """int64 [N]: the row k further, or the response's last one where it ends before."""
        return self.starts + self.left.clamp(max=k)

    def inputs(self, n: int) -> Tensor:
        """int64 [N, n]: the input tokens of a draft of n, teacher-forced; those behind the response are fillers."""
        return torch.stack([self.tokens[self.row(k)] for k in range(n)], dim=1)

    def to(self, device: torch.device) -> "Batch":
        """The same on another device."""
        return Batch(*(part.to(device) for part in (self.hidden, self.tokens, self.starts, self.left)))


def pieces(responses: Sequence[Response]) -> list[Piece]:
    """All responses cut into pieces; the last token of a response starts no draft, for nothing follows it."""
    return [
        Piece(response, first, min(first + PIECE, response.length - 1))
        for response in responses
        for first in range(0, response.length - 1, PIECE)
    ]


def collate(data: HiddenStates, chosen: Sequence[Piece], n: int) -> Batch:
    """The batch of these pieces for drafts of n tokens."""
    hidden, tokens, starts, left = [], [], [], []
    at = 0
    for piece in chosen:
        end = min(piece.last + n, piece.response.length)
        states, ids = data.rows(piece.response, piece.first, end)
        hidden.append(states)
        tokens.append(ids)
        first = torch.arange(piece.last - piece.first)
        starts.append(at + first)
        left.append(end - piece.first - 1 - first)
        at += end - piece.first
    return Batch(torch.cat(hidden), torch.cat(tokens), torch.cat(starts), torch.cat(left))


def draws(count: int, seed: int, begin: int) -> Iterator[int]:
    """Indices below ``count`` without end: epoch after epoch, each in its own random order, from draw ``begin`` on.

    What is drawn depends on its number alone, so a resumed run sees what an unbroken one would have seen.
    """
    epoch, at = divmod(begin, count)
    while True:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
        yield from order[at:]
        epoch, at = epoch + 1, 0
