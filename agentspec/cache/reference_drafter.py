"""The drafting rule in plain Python: the specification of csrc/drafter.cpp (policy.py explains it)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentspec.cache.policy import DraftPolicy, cell
from agentspec.cache.reference import CAP, Match, ReferenceIndex


class Odds:
    """Online odds of acceptance, one tally a cell. Doubles and their order match the native core bit for bit."""

    def __init__(self, policy: DraftPolicy) -> None:
        self._hits = [prior * policy.prior_weight for prior in policy.priors()]
        self._total = [policy.prior_weight] * len(self._hits)
        self._memory = policy.memory

    def probability(self, at: int) -> float:
        return self._hits[at] / self._total[at]

    def learn(self, at: int, hit: bool) -> None:
        if self._total[at] >= self._memory:
            self._hits[at] *= 0.5
            self._total[at] *= 0.5
        self._total[at] += 1.0
        if hit:
            self._hits[at] += 1.0


@dataclass(frozen=True, slots=True)
class Candidate:
    token: int
    cell: int
    probability: float
    source: int


@dataclass(slots=True)
class DraftPath:
    """Scored positions, each with every source's candidate and the one taken; the first `drafted` are the draft.

    Positions that were scored but did not pay stay in the path: verified tokens may reveal them all the same.
    """

    candidates: list[list[Candidate]] = field(default_factory=list)
    taken: list[Candidate] = field(default_factory=list)
    drafted: int = 0
    match_length: int = 0


Sources = Sequence[ReferenceIndex | None]


def draft(policy: DraftPolicy, odds: Odds, sources: Sources, context: Sequence[int], room: int) -> DraftPath:
    path = DraftPath()
    limit = min(room, policy.max_draft)
    if limit <= 0:
        return path
    tail = list(context[-CAP:])
    matches = _look_up_missing(sources, tail, [Match() for _ in sources])
    chance = expected = best_ratio = 1.0
    first_length = 0
    while len(path.taken) < limit:
        candidates = _score(policy, odds, sources, matches)
        if not candidates:
            break
        taken = max(candidates, key=lambda candidate: candidate.probability)
        path.candidates.append(candidates)
        path.taken.append(taken)
        length = len(path.taken)
        if length == 1:
            first_length = matches[taken.source].length
        chance *= taken.probability
        expected += chance
        ratio = expected / (1.0 + policy.cost * length)
        if ratio > best_ratio:
            best_ratio, path.drafted = ratio, length
        if chance < policy.cost * best_ratio:
            break
        tail.append(taken.token)
        matches = _move_on(sources, taken.token, tail, matches)
    path.match_length = first_length if path.drafted else 0
    return path


def learn(path: DraftPath, verified: Sequence[int], odds: Odds) -> None:
    """Learns from every position whose predecessors were all right, from all its candidates."""
    for candidates, taken, token in zip(path.candidates, path.taken, verified, strict=False):
        for candidate in candidates:
            odds.learn(candidate.cell, candidate.token == token)
        if taken.token != token:
            break


def _score(policy: DraftPolicy, odds: Odds, sources: Sources, matches: list[Match]) -> list[Candidate]:
    proposals = [
        (number, match, *source.best_successor(match))
        for number, (source, match) in enumerate(zip(sources, matches, strict=True))
        if source is not None and match.positions and match.length >= policy.min_match
    ]
    tokens = Counter(token for _, _, token, _ in proposals)
    candidates = []
    for number, match, token, winner in proposals:
        others = 0 if len(proposals) == 1 else 1 if tokens[token] > 1 else 2
        at = cell(number, match.length, len(match.positions), winner, others)
        candidates.append(Candidate(token, at, odds.probability(at), number))
    return candidates


def _look_up_missing(sources: Sources, context: Sequence[int], matches: list[Match]) -> list[Match]:
    return [
        source.look_up(context) if source is not None and not match.positions else match
        for source, match in zip(sources, matches, strict=True)
    ]


def _move_on(sources: Sources, token: int, context: Sequence[int], matches: list[Match]) -> list[Match]:
    moved = [
        source.follow(token, match) if source is not None and match.positions else Match()
        for source, match in zip(sources, matches, strict=True)
    ]
    # One match that goes on is enough: looking up the others again costs more than it brings.
    return moved if any(match.positions for match in moved) else _look_up_missing(sources, context, moved)
