"""Specify how a draft grows, is cut, meets another drafter's tokens, and is learned from. Implemented by csrc/drafter.

agentspec/cache/policy.py explains the rule. scoring.py scores the candidates at one position of a draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agentspec.cache.policy import MAX_DRAFT, DraftPolicy
from tests.oracle.index import Match, TextIndex
from tests.oracle.scoring import (
    Candidate,
    Learned,
    Scored,
    Situation,
    Sources,
    Trail,
    given_token,
    leave_trail,
    score,
)

_TAIL = 256  # tokens of context that look-ups within a draft see
_LONG_ENOUGH = 32  # one match of so many tokens: the other sources need not be searched
_LISTED_ENOUGH = 4  # so many listed occurrences may stand for all of them
# The token taken is the one that looks best of several, so its chances are somewhat overrated: made up for here.
_CAUTION = 1.3


@dataclass(slots=True)
class DraftPath:
    """The positions that were scored; the first `len(taken)` of them are the draft.

    Positions that did not pay stay in the path, because verified tokens may reveal them all the same. open: the draft
    continues the text as it is now, so other tokens may be offered instead.
    """

    path: list[Scored] = field(default_factory=list)
    taken: list[Candidate] = field(default_factory=list)
    match_length: int = 0
    open: bool = False


Given = Sequence[tuple[int, float]]
"""Another drafter's tokens, each with the chance that it is accepted if those before it are."""


@dataclass(slots=True)
class _Prospect:
    """What a growing draft is worth: expected tokens (with the one that every step brings) for the price of the step.

    price: of a drafted token, as a share of a step. ratio: the best so far, at `best` tokens; without a draft it is 1.
    """

    price: float
    ratio: float = 1.0
    chance: float = 1.0
    expected: float = 1.0
    size: int = 0
    best: int = 0

    def add(self, probability: float) -> None:
        self.chance *= probability
        self.expected += self.chance
        self.size += 1
        if self.whole > self.ratio:
            self.ratio, self.best = self.whole, self.size

    @property
    def whole(self) -> float:
        return self.expected / (1.0 + self.price * self.size)

    @property
    def can_grow(self) -> bool:
        return self.chance >= self.price * self.ratio


@dataclass(slots=True)
class MatchState:
    """What a request keeps from step to step, so that a step follows its matches rather than searching again.

    ends: tokens that end the response. begin: length of the context when the response began. outcome: of the last
    draft: 0 there was none, 1 wholly right, 2 not.
    """

    matches: list[Match] = field(default_factory=lambda: [Match() for _ in range(4)])
    versions: list[int] = field(default_factory=lambda: [0] * 4)
    trail: Trail | None = None
    ends: frozenset[int] = frozenset()
    begin: int = 0
    outcome: int = 0
    started: bool = False


def draft(
    policy: DraftPolicy,
    learned: Learned,
    sources: Sources,
    context: list[int],
    room: int,
    cost: float,
    state: MatchState,
) -> DraftPath:
    """Draft at most `room` tokens after `context`, the request's whole text."""
    limit = _limit(policy, room)
    prospect = _Prospect(_CAUTION * cost)
    path = _grow(policy, learned, sources, context, (), limit, state, prospect)
    return _drafted(path, prospect.best)


def take_offer(
    policy: DraftPolicy,
    learned: Learned,
    sources: Sources,
    context: list[int],
    given: Given,
    room: int,
    cost: float,
    state: MatchState,
    drafted: DraftPath,
) -> DraftPath:
    """Return the better of an open draft and the given tokens with what the indexes add behind them.

    Both are cut where they pay. Where they begin alike, the given chances hold for the draft too.
    """
    limit, price = _limit(policy, room), _CAUTION * cost
    if policy.rule is not None:
        return _take_offer_fixed(given[:limit], price, drafted)
    present = _Prospect(price)
    taken = _with_chances(drafted.taken, given)
    for candidate in taken:
        present.add(candidate.probability)
    offered = _Prospect(price, present.ratio)
    path = _grow(policy, learned, sources, context, given, limit, state, offered) if given else []
    if offered.best > 0:
        return _drafted(path, offered.best)
    drafted.taken = taken[: present.best]
    drafted.match_length = drafted.match_length if drafted.taken else 0
    return drafted


def _take_offer_fixed(given: Given, price: float, drafted: DraftPath) -> DraftPath:
    """Do the same under the fixed rule: its draft is compared uncut, and nothing is added behind given tokens."""
    present = _Prospect(price)
    for candidate in drafted.taken:
        present.add(candidate.probability)
    offered = _Prospect(price, max(present.whole, 1.0))
    alike = _with_chances(drafted.taken, given)[: _shared(given, drafted.taken)]
    taken = alike + [given_token(token, chance) for token, chance in given[len(alike) :]]
    for candidate in taken:
        if not offered.can_grow:
            break
        offered.add(candidate.probability)
    if offered.best == 0:
        return drafted
    return DraftPath(taken=taken[: offered.best], match_length=drafted.match_length if alike else 0)


def _shared(given: Given, taken: list[Candidate]) -> int:
    """Count the tokens with which both the draft and the given tokens begin."""
    pairs = zip(given, taken, strict=False)
    return next((at for at, ((token, _), own) in enumerate(pairs) if token != own.token), min(len(given), len(taken)))


def _with_chances(taken: list[Candidate], given: Given) -> list[Candidate]:
    alike = _shared(given, taken)
    return [replace(own, probability=given[at][1]) if at < alike else own for at, own in enumerate(taken)]


def _grow(
    policy: DraftPolicy,
    learned: Learned,
    sources: Sources,
    context: list[int],
    given: Given,
    limit: int,
    state: MatchState,
    prospect: _Prospect,
) -> list[Scored]:
    """Draft token by token: first what is given, then the likeliest candidates, while that can still pay."""
    path: list[Scored] = []
    if limit == 0:
        return path
    if state.started:
        _distrust(sources, state)
    _refresh(sources, context, state)
    tail = context[-_TAIL:]
    matches, trail = list(state.matches), state.trail
    for depth in range(limit):
        situation = Situation(tail, depth, state.begin, len(context) - state.begin + depth, state.outcome)
        scored = score(policy, learned, sources, matches, trail, situation)
        if depth < len(given):
            scored.take(*given[depth])
        elif not scored.candidates:
            break
        path.append(scored)
        token = scored.taken.token
        prospect.add(scored.taken.probability)
        if not prospect.can_grow or depth + 1 == limit or token in state.ends:
            break
        tail = [*tail, token]
        trail = leave_trail(scored, token, trail)
        matches = _move_on(sources, token, tail, matches)
        trail = _advance_trail(sources, token, trail)
    return path


def _drafted(path: list[Scored], length: int) -> DraftPath:
    """Return the path with its first `length` tokens as the draft."""
    taken = [scored.taken for scored in path[:length]]
    return DraftPath(path, taken, taken[0].match_length if taken else 0)


def _limit(policy: DraftPolicy, room: int) -> int:
    return max(min(room, policy.max_draft, MAX_DRAFT), 0)


def learn(
    policy: DraftPolicy,
    sources: Sources,
    verified: Sequence[int],
    state: MatchState,
    drafted: DraftPath,
    learned: Learned,
) -> None:
    """Learn from every position that the verified tokens reveal, and follow the matches with these tokens.

    A position is revealed if all drafted tokens before it were right. Call this before the tokens are appended to the
    request's text. Afterwards `drafted.path` is empty, so nothing is learned twice.
    """
    if not verified:
        return
    _distrust(sources, state)
    right = _learn_path(policy, verified, drafted.path, learned)
    state.outcome = 0 if not drafted.taken else 1 if right >= len(drafted.taken) else 2
    for number, token in enumerate(verified):
        if number <= right and number < len(drafted.path):
            state.trail = leave_trail(drafted.path[number], token, state.trail)
        state.trail = _advance_trail(sources, token, state.trail)
        for at, (source, match) in enumerate(zip(sources, state.matches, strict=True)):
            if source is not None and match.positions:
                state.matches[at] = source.follow(token, match) or Match()
    drafted.path = []
    drafted.open = False


def _learn_path(policy: DraftPolicy, verified: Sequence[int], path: list[Scored], learned: Learned) -> int:
    """Learn from a path. Return how many of its tokens were right."""
    right = 0
    for scored, token in zip(path, verified, strict=False):
        for proposal, cell in scored.proposals:
            learned.table.learn(cell, proposal == token)
        if policy.judge:
            for candidate in scored.candidates:
                error = (1.0 if candidate.token == token else 0.0) - candidate.probability
                learned.judge.learn(candidate.slots, error, policy.learning_rate)
        if scored.taken.token != token:
            break
        right += 1
    return right


def _refresh(sources: Sources, context: list[int], state: MatchState) -> None:
    """Search again for the matches that could not be followed or whose source has changed."""
    for at, source in enumerate(sources):
        match = state.matches[at]
        if source is None:
            state.matches[at] = Match()
            continue
        if state.started and source.version == state.versions[at] and match.positions and match.complete:
            continue
        match = source.look_up(context)
        state.matches[at], state.versions[at] = match, source.version
    state.started = True


def _move_on(sources: Sources, token: int, context: list[int], matches: list[Match]) -> list[Match]:
    """Return the matches after one more drafted token; search where following fails and none is long enough."""
    followed = [_follow(source, token, match) for source, match in zip(sources, matches, strict=True)]
    longest = max((match.length for match in followed if match is not None), default=0)
    return [
        match
        if match is not None
        else source.look_up(context)
        if source is not None and longest < _LONG_ENOUGH
        else Match()
        for source, match in zip(sources, followed, strict=True)
    ]


def _follow(source: TextIndex | None, token: int, match: Match) -> Match | None:
    if source is None or not match.positions:
        return None
    least = 1 if match.complete else _LISTED_ENOUGH
    listed = Match(match.length, len(match.positions), match.positions)
    followed = source.follow(token, listed)
    return followed if followed is not None and len(followed.positions) >= least else None


def _advance_trail(sources: Sources, token: int, trail: Trail | None) -> Trail | None:
    """Move the trail past `token`, whether or not the trail proposed it."""
    source = sources[trail.source] if trail is not None else None
    return trail.advanced(source.text, token) if trail is not None and source is not None else None


def _distrust(sources: Sources, state: MatchState) -> None:
    """Drop what was found in a source that has changed. A trail in the request's own text stays: that only grows."""
    for at, source in enumerate(sources):
        same = source is not None and source.version == state.versions[at]
        if not same:
            state.matches[at] = Match()
        if state.trail is not None and state.trail.source == at and not same and (at > 0 or source is None):
            state.trail = None
