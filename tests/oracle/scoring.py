"""Specify the probabilities of a draft's next token: acceptance table, reranker and candidates.

Implemented by csrc/drafting/acceptance_table, reranker and scoring. The table counts how often proposals of a kind were
accepted. The reranker, a logistic regression that sees which tokens are proposed, corrects it. At each position of a
draft `score` gathers what the sources propose, takes the likeliest tokens by the table as candidates, and has the
reranker correct their probabilities. Doubles and the order of operations match the core bit for bit; the reranker's
weights are 32-bit floats in both.
"""

import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from agentspec.cache.policy import DraftPolicy
from agentspec.cache.types import SOURCES
from tests.oracle.index import Match, SuffixIndex

CANDIDATES = 4  # scored at each position of a draft
_CLIP = 9.0  # log-odds are clipped to at most this far from 0
_MOST_MISSES = 4  # misses in a row that a resume point survives
_WORTH_RESUMING = 4  # match length from which on a place is worth resuming


RESUME = 4  # kind of a resume point's proposals; others have their source's number, from 4 on plus 1
KINDS = 8
LENGTH_BOUNDS = (1, 2, 3, 4, 6, 9, 15, 31)

# Prior log-odds: longer matches and more agreement are likelier to go on.
_PRIOR_LENGTH = (-2.2, -1.4, -0.9, -0.4, 0.1, 0.6, 1.0, 1.5, 2.2)
_PRIOR_SHAPE = (0.0, -0.8, 0.6, -1.8, -1.0, 0.0, 1.0, -2.2, -1.4, -0.6, 0.6, 1.6)
_SECOND_MINUS, _RESUME_MINUS = 1.0, 0.5
_LENGTHS, _SHAPES, _RANKS, _DEPTHS = len(_PRIOR_LENGTH), len(_PRIOR_SHAPE), 2, 3
_LEAST = 1e-6  # observations assumed at least; keeps the log-odds finite

_CALM = 2.0  # keeps the first steps of a weight short
_ONES = 2**64 - 1
_K1, _K2 = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93


def cell(kind: int, length: int, count: int, winner: int, second: bool, depth: int) -> int:
    """Return a proposal's cell in the acceptance table.

    The token follows `winner` of `count` occurrences. second: another token follows more often.
    """
    row = (kind * _LENGTHS + bisect_left(LENGTH_BOUNDS, length)) * _SHAPES + _shape(count, winner)
    return (row * _RANKS + second) * _DEPTHS + min(depth, _DEPTHS - 1)


def _shape(count: int, winner: int) -> int:
    if count == 1:
        return 0
    if count == 2:
        return winner
    if count <= 5:
        return 6 if winner == count else 3 if 2 * winner < count else 4 if 4 * winner < 3 * count else 5
    if winner == count:
        return 11
    return 7 if 4 * winner < count else 8 if 2 * winner < count else 9 if 4 * winner < 3 * count else 10


def _priors() -> list[float]:
    return [
        1.0 / (1.0 + math.exp(rank * _SECOND_MINUS + (kind == RESUME) * _RESUME_MINUS - (length + shape)))
        for kind in range(KINDS)
        for length in _PRIOR_LENGTH
        for shape in _PRIOR_SHAPE
        for rank in range(_RANKS)
        for _ in range(_DEPTHS)
    ]


_PRIORS = _priors()


class AcceptanceTable:
    """Count online how often proposals were accepted, with one tally for each cell."""

    def __init__(self, prior_weight: float, memory: float) -> None:
        self._hits = [prior * prior_weight for prior in _PRIORS]
        self._total = [prior_weight] * len(_PRIORS)
        self._memory = memory

    def probability(self, at: int) -> float:
        return self._hits[at] / self._total[at]

    def log_odds(self, at: int) -> float:
        return math.log(max(self._hits[at], _LEAST) / max(self._total[at] - self._hits[at], _LEAST))

    def learn(self, at: int, hit: bool) -> None:
        if self._total[at] >= self._memory:
            self._hits[at] *= 0.5
            self._total[at] *= 0.5
        self._total[at] += 1.0
        if hit:
            self._hits[at] += 1.0


class Reranker:
    """Learn a logistic regression over hashed features online, by AdaGrad: 2**bits weights with squared errors."""

    def __init__(self, bits: int) -> None:
        self._shift = 64 - bits
        self._weights = array("f", bytes(8 << bits))

    def slot(self, key: int) -> int:
        return (key * _K2 & _ONES) >> self._shift

    def correction(self, slots: Iterable[int]) -> float:
        total = 0.0
        for slot in slots:
            total += self._weights[2 * slot]
        return total

    def learn(self, slots: Sequence[int], error: float, rate: float) -> None:
        weights = self._weights
        for slot in slots:
            weights[2 * slot + 1] += error * error
            weights[2 * slot] += rate * error / math.sqrt(weights[2 * slot + 1] + _CALM)


def mixed(a: int, b: int) -> int:
    """Hash two numbers."""
    z = (a ^ (b * _K1 & _ONES)) * _K2 & _ONES
    return z ^ z >> 32


def token_key(token: int) -> int:
    return (token + 1) * _K1 & _ONES


class Learned:
    """Hold what verification taught a tenant, a session that shares nothing, or a request that has neither."""

    def __init__(self, policy: DraftPolicy, bits: int) -> None:
        self.table = AcceptanceTable(policy.prior_weight, policy.memory)
        self.reranker = Reranker(bits)


Sources = Sequence[SuffixIndex | None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Hold a possible next token.

    rank: 0 the source's most frequent successor, 1 its second, 2 the resume point's. match_length: tokens of context
    that agree. share: fraction of the `count` listed occurrences that the token follows. place: its position in
    its source. slots: of the reranker's features.
    """

    token: int
    source: int
    rank: int
    match_length: int
    count: int
    share: float
    probability: float
    place: int
    slots: tuple[int, ...] = ()


@dataclass(slots=True)
class ScoredPosition:
    """Hold the scored candidates, likeliest by the table first, the token taken, and (token, cell) of every proposal.

    best: the candidate with the highest final probability. taken: the same, or another drafter's token.
    """

    candidates: list[Candidate] = field(default_factory=list)
    best: Candidate | None = None
    taken: Candidate = field(init=False)
    proposals: list[tuple[int, int]] = field(default_factory=list)

    def take(self, token: int, probability: float) -> None:
        """Take another drafter's token, which is accepted with this probability."""
        own = self.best is not None and self.best.token == token
        self.taken = (
            replace(self.best, probability=probability) if self.best and own else external_token(token, probability)
        )


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Remember a place whose copy went wrong once: text often goes on there after a replaced token.

    place: position of the token that it proposes. hits: tokens that agreed since the last miss. misses: in a row.
    """

    source: int
    place: int
    hits: int = 0
    misses: int = 0

    def advanced(self, text: list[int], token: int) -> "ResumePoint | None":
        if self.place >= len(text):
            return None
        hit = text[self.place] == token
        moved = ResumePoint(self.source, self.place + 1, self.hits + 1 if hit else 0, 0 if hit else self.misses + 1)
        ended = moved.misses > _MOST_MISSES or moved.place >= len(text) or text[moved.place] < 0
        return None if ended else moved


def external_token(token: int, probability: float) -> Candidate:
    """Return another drafter's token as a candidate."""
    return Candidate(token, SOURCES.index("model"), 0, 0, 0, 0.0, probability, 0)


def mark_resume_point(scored: ScoredPosition, token: int, resume: ResumePoint | None) -> ResumePoint | None:
    """Return the resume point, a new one if the likeliest candidate was not `token` but is worth resuming."""
    wrong = scored.best
    if wrong is None or wrong.token == token or wrong.rank > 1:
        return resume
    return ResumePoint(wrong.source, wrong.place) if wrong.match_length >= _WORTH_RESUMING or resume is None else resume


@dataclass(frozen=True, slots=True)
class ScoringContext:
    """Hold what the reranker sees besides a candidate.

    tokens: the end of the text, with the draft so far. depth: tokens drafted before this one. prompt: length of the
    context in front of the response. written: tokens of the response before this one. outcome: the last draft's.
    """

    tokens: list[int]
    depth: int
    prompt: int
    written: int
    outcome: int


@dataclass(frozen=True, slots=True)
class _Proposal:
    """Hold a proposed token and its origin. kind: its source, or RESUME. winner: occurrences that it follows."""

    token: int
    winner: int
    place: int
    length: int
    count: int
    kind: int
    source: int
    rank: int
    cell: int
    probability: float


def score(
    policy: DraftPolicy,
    learned: Learned,
    sources: Sources,
    matches: list[Match],
    resume: ResumePoint | None,
    context: ScoringContext,
) -> ScoredPosition:
    """Return the scored candidates for the next token, the likeliest of them taken; none where nothing is proposed."""
    proposals = list(_gather(policy, learned, sources, matches, resume, context.depth))
    scored = ScoredPosition(proposals=[(proposal.token, proposal.cell) for proposal in proposals])
    features = _Features(learned.reranker, context)
    for proposal in _choose(proposals):
        candidate = Candidate(
            proposal.token,
            proposal.source,
            proposal.rank,
            proposal.length,
            proposal.count,
            proposal.winner / proposal.count,
            proposal.probability,
            proposal.place,
        )
        if policy.rerank:
            own = proposal.source == 0 and proposal.place >= context.prompt
            slots = features.slots(proposal, _agreement(proposals, proposal.token), own)
            total = _clipped(_clipped(learned.table.log_odds(proposal.cell)) + learned.reranker.correction(slots))
            candidate = replace(candidate, probability=1.0 / (1.0 + math.exp(-total)), slots=slots)
        scored.candidates.append(candidate)
    if scored.candidates:
        scored.best = scored.taken = max(scored.candidates, key=lambda candidate: candidate.probability)
    return scored


def _clipped(value: float) -> float:
    return max(-_CLIP, min(_CLIP, value))


def _gather(
    policy: DraftPolicy,
    learned: Learned,
    sources: Sources,
    matches: list[Match],
    resume: ResumePoint | None,
    depth: int,
) -> Iterator[_Proposal]:
    def proposal(
        token: int, winner: int, place: int, length: int, count: int, kind: int, source: int, rank: int
    ) -> _Proposal:
        at = cell(kind, length, count, winner, rank == 1, depth)
        return _Proposal(token, winner, place, length, count, kind, source, rank, at, learned.table.probability(at))

    for number, (source, match) in enumerate(zip(sources, matches, strict=True)):
        if source is not None and match.positions and match.length >= policy.min_match:
            for rank, (token, winner, place) in enumerate(_successors(source, match)):
                yield proposal(
                    token, winner, place, match.length, len(match.positions), number + (number >= RESUME), number, rank
                )
    if resume is not None and (source := sources[resume.source]) is not None:
        # Count each miss as one more occurrence with another successor.
        token = source.text[resume.place]
        yield proposal(token, 1, resume.place, resume.hits + 1, resume.misses + 1, RESUME, resume.source, 2)


def _successors(index: SuffixIndex, match: Match) -> list[tuple[int, int, int]]:
    """Return the two most frequent successors of the listed occurrences; of equal ones, the one listed first."""
    places: dict[int, int] = {}
    counts: Counter[int] = Counter()
    for place in match.positions:
        token = index.text[place]
        if token >= 0:
            places.setdefault(token, place)
            counts[token] += 1
    return [(token, count, places[token]) for token, count in counts.most_common(2)]


def _choose(proposals: list[_Proposal]) -> list[_Proposal]:
    """Return the likeliest proposal of each proposed token by the table, likeliest first."""
    chosen: list[_Proposal] = []
    for proposal in proposals:
        at = next((i for i, other in enumerate(chosen) if other.token == proposal.token), len(chosen))
        if at < len(chosen) and not proposal.probability > chosen[at].probability:
            continue
        del chosen[at : at + 1]
        while at > 0 and chosen[at - 1].probability < proposal.probability:
            at -= 1
        chosen.insert(at, proposal)
    return chosen[:CANDIDATES]


def _agreement(proposals: list[_Proposal], token: int) -> int:
    """Return two bits for each kind: 0 it proposes nothing, 1 the token first, 2 the token second, 3 only others."""
    code = 0
    for proposal in proposals:
        says = 3 if proposal.token != token else 2 if proposal.rank == 1 else 1
        shift = 2 * proposal.kind
        if says != 3 or code >> shift & 3 == 0:
            code = code & ~(3 << shift) | says << shift
    return code


def _share_bucket(count: int, winner: int) -> int:
    if count == 1:
        return 0
    if winner == count:
        return 1
    bounds = (5 * winner >= 4 * count, 2 * winner >= count, 4 * winner >= count, 10 * winner >= count)
    return next((bucket for bucket, reached in enumerate(bounds, 2) if reached), 6)


class _Features:
    """Compute the reranker's features of candidates at one position."""

    def __init__(self, reranker: Reranker, context: ScoringContext) -> None:
        last, second = [token % 2**32 for token in [*context.tokens[:-3:-1], -3, -3][:2]]
        self._slot = reranker.slot
        self._last = mixed(1, last)
        self._pair = mixed(self._last, second)
        self._depth = context.depth
        self._outcome = context.outcome if context.depth == 0 else 3
        self._age = context.written if context.written < 6 else 3 + context.written.bit_length()

    def slots(self, proposal: _Proposal, agreement: int, own: bool) -> tuple[int, ...]:
        slot, kind, depth, age = self._slot, proposal.kind, self._depth, self._age
        length = bisect_left(LENGTH_BOUNDS, proposal.length)
        share = _share_bucket(proposal.count, proposal.winner)
        token = token_key(proposal.token)
        return (
            slot(self._pair ^ token),
            slot(1000 + kind * 4 + min(depth, 3) ^ token),
            slot(self._last + 1100 + kind),
            slot(1200 + length ^ token),
            slot(self._last + (2000 + agreement) * 0xA24BAED4963EE407 ^ token),
            slot(1300 + kind * 8 + share ^ token),
            slot(4000 + ((kind * 16 + length) * 4 + min(depth, 2)) * 4 + self._outcome),
            slot(8000 + agreement),
            slot(1400 + own ^ token),
            slot(1500 + age ^ token),
            slot(10000 + ((kind * 16 + length) * 2 + own) * 64 + age),
        )
