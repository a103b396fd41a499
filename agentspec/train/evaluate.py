"""Measure a speculator on held-out sessions: replay the decoding of every response with its drafts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from agentspec.server_ext.speculator import Speculator
from agentspec.train.hidden_states import HiddenStates, fitting
from agentspec.train.trainer import Batch, Piece, collate, pieces

PIECES_AT_ONCE = 8
"""Most pieces in one forward pass, unless the caller wants fewer."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Count how many tokens of greedy n-token drafts the recorded responses accept.

    ``tokens``: tokens of all responses, without the first of each, which the prefill gives. ``steps``: decode steps.
    ``accepted``: for each of the n positions, the steps in which its token was accepted.
    """

    tokens: int
    steps: int
    accepted: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the counts and rates for JSON.

        ``per_position``: accepted / steps. ``given_the_one_before``: accepted / accepted one position before.
        """
        before = (self.steps, *self.accepted)
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "mean_acceptance_length": round(self.tokens / max(1, self.steps), 4),
            "per_position": [round(count / max(1, self.steps), 4) for count in self.accepted],
            "given_the_one_before": [
                round(count / max(1, reached), 4) for count, reached in zip(self.accepted, before, strict=False)
            ],
        }


def measure(speculator: Speculator, data: HiddenStates, pieces_at_once: int = PIECES_AT_ONCE) -> Acceptance:
    """Replay the decoding of every response, and count the accepted draft tokens.

    A draft is accepted up to the first token that differs from the response. Up to there its inputs are the response's
    own tokens, so one teacher-forced pass over all positions gives the drafts of every step. pieces_at_once: most
    pieces in one pass. Raises ConfigurationError if a pass does not fit into the device's memory.
    """
    n = speculator.config.n_predict
    tokens = steps = 0
    accepted = [0] * n
    for lengths in _matched(speculator, data, n, pieces_at_once):
        at = 0
        while at < len(lengths):
            steps += 1
            for k in range(lengths[at]):
                accepted[k] += 1
            at += lengths[at] + 1
        tokens += len(lengths)
    return Acceptance(tokens, steps, tuple(accepted))


def _matched(speculator: Speculator, data: HiddenStates, n: int, pieces_at_once: int) -> Iterator[list[int]]:
    """Yield, for each response, how many tokens of the n-token draft from each of its positions are accepted."""
    lengths = (
        pair
        for batch in _batches(pieces(data.responses), pieces_at_once)
        for pair in zip(batch, _lengths(speculator, data, batch, n), strict=True)
    )
    for _, of_response in groupby(lengths, key=lambda pair: pair[0].response):
        yield [length for _, part in of_response for length in part]


def _batches(chosen: Sequence[Piece], size: int) -> Iterator[Sequence[Piece]]:
    for at in range(0, len(chosen), size):
        yield chosen[at : at + size]


def _lengths(speculator: Speculator, data: HiddenStates, chosen: Sequence[Piece], n: int) -> list[list[int]]:
    weights = next(speculator.parameters())
    batch = collate(data, chosen, n)
    with fitting("micro_batch_size", "a smaller one"), torch.inference_mode():
        batch = batch.to(weights.device)
        logits = speculator(batch.hidden[batch.starts].to(weights.dtype), batch.inputs(n))
        right = torch.stack([_is_right(batch, scores, k) for k, scores in enumerate(logits)], dim=1)
    matched = right.long().cumprod(1).sum(1)
    return [part.tolist() for part in matched.split([piece.last - piece.first for piece in chosen])]


def _is_right(batch: Batch, scores: torch.Tensor, k: int) -> torch.Tensor:
    return (scores.argmax(-1) == batch.tokens[batch.row(k + 1)]) & (batch.left > k)
