"""The drafting rule in plain Python: the specification of csrc/drafter.cpp (policy.py explains it).

Drafting and learning; reference_scoring.py judges the candidates at one position of a draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentspec.cache.policy import MAX_DRAFT, DraftPolicy
from agentspec.cache.reference import Match, ReferenceIndex
from agentspec.cache.reference_judge import Learned
from agentspec.cache.reference_scoring import Candidate, Scored, Situation, Sources, Trail, score

TENANT_BITS, SESSION_BITS, REQUEST_BITS = 18, 14, 12  # slots of the judge, as a power of two, by whose it is

_TAIL = 256  # tokens of context that look-ups within a draft see
_LONG_ENOUGH = 32  # one match of so many tokens: the other sources need not be searched
_LISTED_ENOUGH = 4  # so many listed occurrences may stand for all of them
_TRAIL_LENGTH = 4  # a match of so many tokens that goes wrong leaves a trail
# The token taken is the one that looks best of several, so its chances are somewhat overrated: made up for here.
_CAUTION = 1.3


@dataclass(slots=True)
class DraftPath:
    """Scored positions, the first `len(taken)` of which are the draft.

    Positions that were scored but did not pay stay in the path: verified tokens may reveal them all the same.
    """

    path: list[Scored] = field(default_factory=list)
    taken: list[Candidate] = field(default_factory=list)
    match_length: int = 0


@dataclass(slots=True)
class MatchState:
    """What a request keeps from step to step, so that a step follows its matches rather than searching again.

    begin: length of the context when the response began. outcome: of the last draft: 0 there was none, 1 wholly right,
    2 not.
    """

    matches: list[Match] = field(default_factory=lambda: [Match() for _ in range(4)])
    versions: list[int] = field(default_factory=lambda: [0] * 4)
    trail: Trail | None = None
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
    """Drafts at most `room` tokens after `context`, the request's whole text."""
    result = DraftPath()
    limit = min(room, policy.max_draft, MAX_DRAFT)
    if limit <= 0:
        return result
    if state.started:
        _distrust(sources, state)
    _refresh(sources, context, state)
    tail = context[-_TAIL:]
    matches, trail = list(state.matches), state.trail
    price = _CAUTION * cost
    chance = expected = best_ratio = 1.0
    drafted = 0
    for depth in range(limit):
        situation = Situation(tail, depth, state.begin, len(context) - state.begin + depth, state.outcome)
        scored = score(policy, learned, sources, matches, trail, situation)
        if not scored.candidates:
            break
        result.path.append(scored)
        token = scored.taken.token
        chance *= scored.taken.probability
        expected += chance
        ratio = expected / (1.0 + price * (depth + 1))
        if ratio > best_ratio:
            best_ratio, drafted = ratio, depth + 1
        if chance < price * best_ratio or depth + 1 == limit:
            break
        tail = [*tail, token]
        matches = _move_on(sources, token, tail, matches)
        trail = _advance_trail(sources, token, trail)
    result.taken = [scored.taken for scored in result.path[:drafted]]
    result.match_length = result.taken[0].match_length if result.taken else 0
    return result


def learn(
    policy: DraftPolicy,
    sources: Sources,
    verified: Sequence[int],
    state: MatchState,
    drafted: DraftPath,
    learned: Learned,
) -> None:
    """Learns from the verified tokens, every position whose predecessors were all right; follows the matches with them.

    To be called before they are appended to the request's text. Afterwards `drafted.path` is empty: nothing is learned
    twice.
    """
    if not verified:
        return
    _distrust(sources, state)
    right = _learn_path(policy, verified, drafted.path, learned)
    state.outcome = 0 if not drafted.taken else 1 if right >= len(drafted.taken) else 2
    for number, token in enumerate(verified):
        if number == right < len(drafted.path):
            wrong = drafted.path[number].taken
            if wrong.rank < 2 and (wrong.match_length >= _TRAIL_LENGTH or state.trail is None):
                state.trail = Trail(wrong.source, wrong.place)
        state.trail = _advance_trail(sources, token, state.trail)
        for at, (source, match) in enumerate(zip(sources, state.matches, strict=True)):
            if source is not None and match.positions:
                state.matches[at] = source.follow(token, match) or Match()
    drafted.path = []


def _learn_path(policy: DraftPolicy, verified: Sequence[int], path: list[Scored], learned: Learned) -> int:
    """Returns how many of the path's tokens were right."""
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
    """Brings the matches up to date with the sources: followed ones are kept, the others searched for."""
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
    """The matches after one more drafted token; searches where following gives none, unless another is long enough."""
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


def _follow(source: ReferenceIndex | None, token: int, match: Match) -> Match | None:
    if source is None or not match.positions:
        return None
    least = 1 if match.complete else _LISTED_ENOUGH
    listed = Match(match.length, len(match.positions), match.positions)
    followed = source.follow(token, listed)
    return followed if followed is not None and len(followed.positions) >= least else None


def _advance_trail(sources: Sources, token: int, trail: Trail | None) -> Trail | None:
    """Moves the trail one on: past `token`, which may or may not be the one it proposed."""
    source = sources[trail.source] if trail is not None else None
    return trail.advanced(source.text, token) if trail is not None and source is not None else None


def _distrust(sources: Sources, state: MatchState) -> None:
    """Drops what was found in a source that has changed since. The request's own text only grows."""
    for at, source in enumerate(sources):
        same = source is not None and source.version == state.versions[at]
        if not same:
            state.matches[at] = Match()
        if state.trail is not None and state.trail.source == at and not same and (at > 0 or source is None):
            state.trail = None
