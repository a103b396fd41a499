"""Specify the drafting rule of ArcticInference's suffix decoding. Implemented by csrc/fixed_rule and fixed_draft.

Every length of context that occurred before gives a draft: its most
frequent successors, as many as `max_spec_factor * length + max_spec_offset` allows, as long as the draft's probability
is at least `min_token_prob` and context and draft have at most `max_depth` tokens together. The draft with the
largest sum of probabilities wins; of equal ones the request's, then the one with the longest context.

Two texts are drafted from: the request's own, and the responses of all, of which the running one counts as part. As in
ArcticInference's trees, the context's own end is an occurrence too, which nothing has followed yet: text that occurred
once before is one of two. Where there are more occurrences than a match lists, those that are listed stand for all, and
of the lengths of context only SAMPLED and the longest are tried.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from agentspec.cache.policy import FixedRule
from tests.oracle.index import TextIndex

SAMPLED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)


@dataclass(slots=True)
class FixedDraft:
    """tokens, and of each: its probability given those before it, and how many listed places have the draft up to it.

    source: 0 the request, 1 the responses of all. length, count: of the matched context, and its occurrences.
    """

    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    score: float = 0.0
    source: int = 0
    length: int = 0
    count: int = 0


Place = tuple[list[int], int]  # a text and a position in it


@dataclass(frozen=True, slots=True)
class _Found:
    """Occurrences of a context: `places`, oldest first, which are all of them where `whole` is true."""

    count: int
    places: list[Place]
    whole: bool


def draft_fixed(
    settings: FixedRule,
    request: TextIndex | None,
    shared: TextIndex | None,
    context: Sequence[int],
    begin: int,
    room: int,
) -> FixedDraft:
    """Return the rule's draft of at most `room` tokens after `context`, the request's whole text.

    The response begins at `begin`; `shared` holds the responses of all, without the running one.
    """
    tail = list(context[-settings.max_depth :])
    limit = min(room, 128)
    best = FixedDraft(source=2)
    matched = _longest(request, tail)
    if limit > 0 and request is not None:
        for length in range(1, matched + 1):
            found = _find(request, tail, length)
            best = _better(settings, found, length, length == matched, True, limit, 0, best)
    if limit > 0 and shared is not None:
        response = len(context) - begin
        known = min(matched, response)
        longest = max(_longest(shared, tail), known)
        for length in range(1, longest + 1):
            found = _find(shared, tail, length)
            if request is not None and length <= known:
                found = _with_running(found, request, tail, length, begin)
            best = _better(settings, found, length, length == longest, length <= response, limit, 1, best)
    return best if best.tokens else FixedDraft()


def _longest(index: TextIndex | None, tail: list[int]) -> int:
    return index.look_up(tail[1:]).length if index is not None and len(tail) > 1 else 0


def _find(index: TextIndex, tail: list[int], length: int) -> _Found:
    match = index.look_up(tail, length)
    return _Found(match.count, [(index.text, p) for p in sorted(match.positions)], match.complete)


def _with_running(found: _Found, request: TextIndex, tail: list[int], length: int, begin: int) -> _Found:
    """Add the occurrences in the running response, if all are known."""
    if not found.whole:
        return found
    match = request.look_up(tail, length)
    if not match.complete:
        return _Found(found.count, found.places, False)
    own = [(request.text, p) for p in sorted(match.positions) if p >= begin + length]
    return _Found(found.count + len(own), found.places + own, True)


def _better(
    settings: FixedRule,
    found: _Found,
    length: int,
    longest: bool,
    open_end: bool,
    limit: int,
    source: int,
    best: FixedDraft,
) -> FixedDraft:
    """Return the better of `best` and the draft from a context of `length` tokens."""
    allowed = length * settings.max_spec_factor + settings.max_spec_offset + 1e-6
    room = 0 if allowed < 1 else int(min(allowed, limit, settings.max_depth - length))
    if found.count == 0 or room == 0 or not (found.whole or longest or length in SAMPLED):
        return best
    draft = FixedDraft(source=source, length=length, count=found.count)
    _grow(draft, found, found.count + open_end, room, settings.min_token_prob)
    level = draft.score == best.score and (length > best.length if source == best.source else source < best.source)
    return draft if draft.score > best.score or level else best


def _grow(draft: FixedDraft, found: _Found, occurrences: float, room: int, min_token_prob: float) -> None:
    places, weight, chance = found.places, found.count / len(found.places), 1.0
    while len(draft.tokens) < room:
        following = list(_following(places))
        if not following:
            return
        token = most_frequent([text[position] for text, position in following])
        places = [(text, position + 1) for text, position in following if text[position] == token]
        count = weight * len(places)
        chance *= count / occurrences
        if chance < min_token_prob:
            return
        draft.tokens.append(token)
        draft.probabilities.append(count / occurrences)
        draft.places.append(len(places))
        draft.score += chance
        occurrences = count


def _following(places: list[Place]) -> Iterator[Place]:
    """Yield the places that go on with a token that can be proposed."""
    for text, position in places:
        if position < len(text) and text[position] >= 0:
            yield text, position


def most_frequent(tokens: Sequence[int]) -> int:
    """Return the most frequent of tokens that came one after the other; of equal ones, the one ArcticInference takes.

    Its trees keep successors sorted by count. A new one goes to the end; one that draws level with others goes in
    front of them, unless it leaves equals behind: then it goes in front of those.
    """
    order: list[list[int]] = []  # token and count
    for token in tokens:
        at = next((i for i, (other, _) in enumerate(order) if other == token), len(order))
        if at == len(order):
            order.append([token, 1])
            continue
        entry = order.pop(at)
        entry[1] += 1
        to = at
        if at > 0 and order[at - 1][1] <= entry[1]:
            level = order[at - 1][1]
            while to > 0 and order[to - 1][1] == level:
                to -= 1
        order.insert(to, entry)
    return order[0][0]
