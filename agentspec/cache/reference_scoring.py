"""The candidates at one position of a draft, in plain Python: the specification of csrc/scoring.cpp."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from agentspec.cache.policy import DraftPolicy
from agentspec.cache.reference import Match, ReferenceIndex
from agentspec.cache.reference_judge import LENGTH_BOUNDS, TRAIL, Judge, Learned, cell, mixed, token_key
from agentspec.cache.types import MODEL

CANDIDATES = 4  # judged at each position of a draft

_CLIP = 9.0  # log-odds stay within
_MISSES_MOST = 4  # in a row, then a trail ends
_TRAIL_LENGTH = 4  # a match of so many tokens that goes wrong leaves a trail

Sources = Sequence[ReferenceIndex | None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One possible next token.

    rank: 0 the source's most frequent successor, 1 its second, 2 the trail's. match_length: tokens of context that
    agree. share: of the `count` occurrences that were looked at, those followed by the token. place: where it was
    found in its source. slots: of the judge's features.
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
class Scored:
    """The judged candidates, likeliest by the table first; what the draft takes; (token, cell) of every proposal.

    best: the likeliest candidate. taken: that one, unless another token was given.
    """

    candidates: list[Candidate] = field(default_factory=list)
    best: Candidate | None = None
    taken: Candidate = field(init=False)
    proposals: list[tuple[int, int]] = field(default_factory=list)

    def take(self, token: int, chance: float) -> None:
        """Takes a given token, with a given chance that it is right."""
        own = self.best is not None and self.best.token == token
        self.taken = replace(self.best, probability=chance) if self.best and own else given_token(token, chance)


@dataclass(frozen=True, slots=True)
class Trail:
    """A place that was being copied when the copy went wrong once: text often goes on there after a replaced token.

    place: of the token that it proposes. hits: tokens that agreed since the last that did not. misses: in a row.
    """

    source: int
    place: int
    hits: int = 0
    misses: int = 0

    def advanced(self, text: list[int], token: int) -> "Trail | None":
        if self.place >= len(text):
            return None
        hit = text[self.place] == token
        moved = Trail(self.source, self.place + 1, self.hits + 1 if hit else 0, 0 if hit else self.misses + 1)
        ended = moved.misses > _MISSES_MOST or moved.place >= len(text) or text[moved.place] < 0
        return None if ended else moved


def given_token(token: int, chance: float) -> Candidate:
    """Another drafter's token."""
    return Candidate(token, MODEL, 0, 0, 0, 0.0, chance, 0)


def leave_trail(scored: Scored, token: int, trail: Trail | None) -> Trail | None:
    """The trail, or a new one where `token` shows that the likeliest candidate, worth following, went wrong."""
    wrong = scored.best
    if wrong is None or wrong.token == token or wrong.rank > 1:
        return trail
    return Trail(wrong.source, wrong.place) if wrong.match_length >= _TRAIL_LENGTH or trail is None else trail


@dataclass(frozen=True, slots=True)
class Situation:
    """What the judge sees besides a candidate.

    context: its end, with the draft so far. depth: tokens drafted before this one. prompt: length of the context in
    front of the response. written: tokens of the response before this one. outcome: of the last draft.
    """

    context: list[int]
    depth: int
    prompt: int
    written: int
    outcome: int


@dataclass(frozen=True, slots=True)
class _Origin:
    """A proposed token and where it comes from. kind: its source, or TRAIL. winner: occurrences that it follows."""

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
    trail: Trail | None,
    situation: Situation,
) -> Scored:
    """The candidates for the next token, judged, and the likeliest taken; none where nothing proposes any."""
    origins = list(_gather(policy, learned, sources, matches, trail, situation.depth))
    scored = Scored(proposals=[(origin.token, origin.cell) for origin in origins])
    features = _Features(learned.judge, situation)
    for origin in _choose(origins):
        candidate = Candidate(
            origin.token,
            origin.source,
            origin.rank,
            origin.length,
            origin.count,
            origin.winner / origin.count,
            origin.probability,
            origin.place,
        )
        if policy.judge:
            own = origin.source == 0 and origin.place >= situation.prompt
            slots = features.slots(origin, _agreement(origins, origin.token), own)
            total = _clipped(_clipped(learned.table.log_odds(origin.cell)) + learned.judge.correction(slots))
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
    trail: Trail | None,
    depth: int,
) -> Iterator[_Origin]:
    def origin(
        token: int, winner: int, place: int, length: int, count: int, kind: int, source: int, rank: int
    ) -> _Origin:
        at = cell(kind, length, count, winner, rank == 1, depth)
        return _Origin(token, winner, place, length, count, kind, source, rank, at, learned.table.probability(at))

    for number, (source, match) in enumerate(zip(sources, matches, strict=True)):
        if source is not None and match.positions and match.length >= policy.min_match:
            for rank, (token, winner, place) in enumerate(_successors(source, match)):
                yield origin(token, winner, place, match.length, len(match.positions), number, number, rank)
    if trail is not None and (source := sources[trail.source]) is not None:
        # As if there had been one occurrence more for each miss, all with other successors.
        token = source.text[trail.place]
        yield origin(token, 1, trail.place, trail.hits + 1, trail.misses + 1, TRAIL, trail.source, 2)


def _successors(index: ReferenceIndex, match: Match) -> list[tuple[int, int, int]]:
    """The two most frequent successors of the listed occurrences, the earlier listed first where they are equal."""
    places: dict[int, int] = {}
    counts: Counter[int] = Counter()
    for place in match.positions:
        token = index.text[place]
        if token >= 0:
            places.setdefault(token, place)
            counts[token] += 1
    return [(token, count, places[token]) for token, count in counts.most_common(2)]


def _choose(origins: list[_Origin]) -> list[_Origin]:
    """The distinct tokens' likeliest origins by the table, likeliest first."""
    chosen: list[_Origin] = []
    for origin in origins:
        at = next((i for i, other in enumerate(chosen) if other.token == origin.token), len(chosen))
        if at < len(chosen) and not origin.probability > chosen[at].probability:
            continue
        del chosen[at : at + 1]
        while at > 0 and chosen[at - 1].probability < origin.probability:
            at -= 1
        chosen.insert(at, origin)
    return chosen[:CANDIDATES]


def _agreement(origins: list[_Origin], token: int) -> int:
    """For each kind two bits: 0 it has no proposal, 1 the token is its first, 2 its second, 3 it has others."""
    code = 0
    for origin in origins:
        says = 3 if origin.token != token else 2 if origin.rank == 1 else 1
        shift = 2 * origin.kind
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
    """The judge's features of candidates at one position."""

    def __init__(self, judge: Judge, situation: Situation) -> None:
        last, second = [token % 2**32 for token in [*situation.context[:-3:-1], -3, -3][:2]]
        self._slot = judge.slot
        self._last = mixed(1, last)
        self._pair = mixed(self._last, second)
        self._depth = situation.depth
        self._outcome = situation.outcome if situation.depth == 0 else 3
        self._age = situation.written if situation.written < 6 else 3 + situation.written.bit_length()

    def slots(self, origin: _Origin, agreement: int, own: bool) -> tuple[int, ...]:
        slot, kind, depth, age = self._slot, origin.kind, self._depth, self._age
        length = bisect_left(LENGTH_BOUNDS, origin.length)
        share = _share_bucket(origin.count, origin.winner)
        token = token_key(origin.token)
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
