"""What the trees and the draft model say of one request's next tokens, as chains of scored tokens.

A chain is a way that the text may go on: at each position the tokens that were scored there, and the one of them that
the chain goes on with. The trees' chain follows their draft; the model's chain leaves it where the model would take
another token. What may be drafted, and what a verified token teaches, are both read off these.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agentspec.server_ext.fusion.calibrator import AcceptanceCalibrator, Scored
from agentspec.server_ext.fusion.draft_model import ModelDraft

Offer = list[tuple[int, float]]
"""Tokens, each with the chance that it is accepted if those before it are."""


@dataclass(frozen=True, slots=True)
class LoopRow:
    """What the model said in one of its rows: lists [n] of ModelDraft's columns."""

    tokens: list[int]
    probabilities: list[float]
    top: list[int]
    top_probabilities: list[float]

    @classmethod
    def of(cls, draft: ModelDraft, row: int) -> "LoopRow":
        """One row of a draft."""
        return cls(
            draft.tokens[row].tolist(),
            draft.probabilities[row].tolist(),
            draft.top[row].tolist(),
            draft.top_probabilities[row].tolist(),
        )


@dataclass(slots=True)
class DraftAlternatives:
    """The opinions on one request. ``length``: tokens of its text then."""

    length: int
    shared: list[Scored] = field(default_factory=list)
    """tokens that both would take"""
    trees: list[tuple[Scored, Scored | None]] = field(default_factory=list)
    """behind those: the trees' token, and the model's where it would take another one there"""
    model: list[Scored] = field(default_factory=list)
    """behind the shared ones: the model's tokens"""

    def offers(self) -> list[Offer]:
        """Drafts that may pay better than the trees' own: theirs as it is judged now, the model's, and theirs up to
        a later position where the model's token is the likelier one."""
        begin = [(scored.token, scored.chance) for scored in self.shared]
        result = []
        if self.trees or not self.model:
            result.append(begin + [(own.token, own.chance) for own, _ in self.trees])
        if self.model:
            result.append(begin + [(scored.token, scored.chance) for scored in self.model])
        for at, (own, other) in enumerate(self.trees):
            if at > 0 and other is not None and other.chance > own.chance:
                kept = [(scored.token, scored.chance) for scored, _ in self.trees[:at]]
                result.append([*begin, *kept, (other.token, other.chance)])
                break
        return [offer for offer in result if offer]

    def learn(self, chances: AcceptanceCalibrator, verified: Sequence[int]) -> None:
        """``verified``: the text as it went on, as far as it is known."""
        for at, scored in enumerate(self.shared):
            if at == len(verified):
                return
            chances.learn(scored, scored.token == verified[at])
            if scored.token != verified[at]:
                return
        begin = len(self.shared)
        for at, (own, other) in enumerate(self.trees, begin):
            if at == len(verified):
                break
            chances.learn(own, own.token == verified[at])
            if other is not None and at > begin:  # the first of them heads the model's chain
                chances.learn(other, other.token == verified[at])
            if own.token != verified[at]:
                break
        for at, scored in enumerate(self.model, begin):
            if at == len(verified):
                break
            chances.learn(scored, scored.token == verified[at])
            if scored.token != verified[at]:
                break


def opinions(
    chances: AcceptanceCalibrator,
    length: int,
    trees: Sequence[int],
    tree_chances: Sequence[float],
    along: LoopRow | None,
    free: LoopRow | None,
    room: int,
) -> DraftAlternatives:
    """Both opinions on one request's text of ``length`` tokens, at most ``room`` tokens further.

    trees, tree_chances: their draft. along: the model's row that was made to follow it; free: the one that was not.
    """
    chains = DraftAlternatives(length)
    row = along or free
    if row is None:
        return chains
    limit = min(room, len(row.top))
    at = _agree(chains, chances, trees, tree_chances, row, limit)
    if at < limit and at < len(trees):
        _part(chains, chances, trees, tree_chances, row, at)
        if along is not None:
            _follow(chains, chances, trees, tree_chances, along, at + 1, limit)
    begin = at + len(chains.model)
    taken = [scored.token for scored in chains.shared + chains.model]
    if free is not None and begin < limit and free.tokens[:begin] == taken:
        chains.model += _own(chances, free, begin, limit)
    elif not chains.trees:
        chains.shared += _own(chances, row, at, limit)  # the model goes on behind a short draft of the trees
    return chains


def _agree(
    chains: DraftAlternatives,
    chances: AcceptanceCalibrator,
    trees: Sequence[int],
    given: Sequence[float],
    row: LoopRow,
    limit: int,
) -> int:
    """Fill in what both would take; returns the position where that ends."""
    for at in range(min(limit, len(trees))):
        if row.top[at] != trees[at]:
            return at
        chains.shared.append(chances.agreed(trees[at], at, given[at], row.top_probabilities[at]))
    return min(limit, len(trees))


def _part(
    chains: DraftAlternatives,
    chances: AcceptanceCalibrator,
    trees: Sequence[int],
    given: Sequence[float],
    row: LoopRow,
    at: int,
) -> None:
    """The position where the model would take another token than the trees."""
    top = row.top_probabilities[at]
    known = row.probabilities[at] if row.tokens[at] == trees[at] else None
    rival = chances.rival(row.top[at], at, top, given[at])
    chains.trees.append((chances.judged(trees[at], at, given[at], known, top), rival))
    chains.model.append(rival)


def _follow(
    chains: DraftAlternatives,
    chances: AcceptanceCalibrator,
    trees: Sequence[int],
    given: Sequence[float],
    along: LoopRow,
    begin: int,
    limit: int,
) -> None:
    """The rest of the trees' draft, and the model's tokens behind it, from a row that followed it."""
    for at in range(begin, min(limit, len(trees))):
        top = along.top_probabilities[at]
        if along.top[at] == trees[at]:
            chains.trees.append((chances.agreed(trees[at], at, given[at], top), None))
        else:
            judged = chances.judged(trees[at], at, given[at], along.probabilities[at], top)
            chains.trees.append((judged, chances.rival(along.top[at], at, top, given[at])))
    chains.trees += [(scored, None) for scored in _own(chances, along, max(begin, len(trees)), limit)]


def _own(chances: AcceptanceCalibrator, row: LoopRow, begin: int, limit: int) -> list[Scored]:
    """The model's tokens where the trees say nothing."""
    return [chances.own(row.tokens[at], at, row.probabilities[at]) for at in range(begin, limit)]


def pack(offers: Sequence[Offer], width: int) -> tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.int32]]:
    """Offers as SuffixCache takes them: tokens [n, width], chances [n, width], lengths [n]."""
    tokens = np.zeros((len(offers), width), dtype=np.int32)
    chances = np.zeros((len(offers), width), dtype=np.float64)
    for row, offer in enumerate(offers):
        tokens[row, : len(offer)] = [token for token, _ in offer]
        chances[row, : len(offer)] = [chance for _, chance in offer]
    return tokens, chances, np.array([len(offer) for offer in offers], dtype=np.int32)
