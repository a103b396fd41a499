"""Specify the drafting rule of ArcticInference's suffix decoding. Implemented by csrc/drafting/arctic_suffix_rule.

Every length of context that occurred before gives a draft: its most frequent successors, as many as
`max_spec_factor * length + max_spec_offset` allows, as long as the draft's probability is at least `min_token_prob` and
context and draft have at most `max_depth` tokens together. The draft with the largest sum of probabilities wins; of
equal ones the request's, then the one with the longest context.

The rule drafts from two texts: the request's own, and its tenant's responses, the running one included. As in
ArcticInference's trees, the end of the context counts as an occurrence that nothing has followed yet, so text that
occurred once before is one of two. Where there are more occurrences than a match lists, the listed ones stand for all,
and of the lengths of context only SAMPLED and the longest are tried.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from agentspec.cache.policy import ArcticSettings, DraftPolicy
from tests.oracle.drafting import (
    CAUTION,
    Draft,
    DraftRequest,
    DraftValue,
    ExternalDraft,
    shared_with,
    with_probabilities,
)
from tests.oracle.index import SuffixIndex
from tests.oracle.scoring import Candidate, external_token

SAMPLED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)


class ArcticSuffixRule:
    """Draft by the rule, from the request's own text and its tenant's responses only. It learns nothing."""

    def __init__(self, policy: DraftPolicy) -> None:
        assert policy.arctic is not None
        self._rule = policy.arctic
        self.kept_context = 0  # stored responses have no context in front

    def start(self, own: SuffixIndex, prompt: list[int], _: int, __: int) -> None:
        """Index the whole prompt at once, whatever the session holds."""
        own.append(prompt)
        own.advance(len(prompt))

    def draft(self, request: DraftRequest, limit: int, _: float) -> Draft:
        own, shared = request.sources[0], request.sources[3]
        copied = draft_arctic(self._rule, own, shared, request.text, request.state.begin, limit)
        draft = Draft(match_length=copied.length if copied.tokens else 0)
        draft.taken = [
            Candidate(token, 3 if copied.source else 0, 0, copied.length + depth, 0, probability, probability, 0)
            for depth, (token, probability) in enumerate(zip(copied.tokens, copied.probabilities, strict=True))
        ]
        return draft

    def merge_draft(self, request: DraftRequest, external: ExternalDraft, limit: int, cost: float) -> Draft:
        """Return the better of the draft, uncut, and another drafter's tokens, with nothing added behind them."""
        draft, external = request.draft, external[:limit]
        present = DraftValue(CAUTION * cost)
        for candidate in draft.taken:
            present.add(candidate.probability)
        offered = DraftValue(CAUTION * cost, max(present.value, 1.0))
        alike = with_probabilities(draft.taken, external)[: shared_with(external, draft.taken)]
        taken = alike + [external_token(token, probability) for token, probability in external[len(alike) :]]
        for candidate in taken:
            if not offered.can_grow:
                break
            offered.add(candidate.probability)
        if offered.best_length == 0:
            return draft
        return Draft(taken=taken[: offered.best_length], match_length=draft.match_length if alike else 0)

    def learn(self, request: DraftRequest, verified: Sequence[int]) -> None:
        if verified:
            request.draft.open = False


@dataclass(slots=True)
class CopiedDraft:
    """Hold a draft: each token, its probability given those before it, and how many listed places agree so far.

    source: 0 the request, 1 the tenant's responses. length, count: tokens of the matched context, and its occurrences.
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
    """Hold a context's occurrences. `places` lists them oldest first, all of them if `whole` is true."""

    count: int
    places: list[Place]
    whole: bool


def draft_arctic(
    settings: ArcticSettings,
    request: SuffixIndex | None,
    shared: SuffixIndex | None,
    context: Sequence[int],
    begin: int,
    max_draft: int,
) -> CopiedDraft:
    """Return the rule's draft of at most `max_draft` tokens after `context`, the request's whole text.

    The response begins at `begin`; `shared` holds the tenant's finished responses.
    """
    tail = list(context[-settings.max_depth :])
    limit = min(max_draft, 128)
    best = CopiedDraft(source=2)
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
    return best if best.tokens else CopiedDraft()


def _longest(index: SuffixIndex | None, tail: list[int]) -> int:
    return index.look_up(tail[1:]).length if index is not None and len(tail) > 1 else 0


def _find(index: SuffixIndex, tail: list[int], length: int) -> _Found:
    match = index.look_up(tail, length)
    return _Found(match.count, [(index.text, p) for p in sorted(match.positions)], match.complete)


def _with_running(found: _Found, request: SuffixIndex, tail: list[int], length: int, begin: int) -> _Found:
    """Add the occurrences in the running response, if all are known."""
    if not found.whole:
        return found
    match = request.look_up(tail, length)
    if not match.complete:
        return _Found(found.count, found.places, False)
    own = [(request.text, p) for p in sorted(match.positions) if p >= begin + length]
    return _Found(found.count + len(own), found.places + own, True)


def _better(
    settings: ArcticSettings,
    found: _Found,
    length: int,
    longest: bool,
    open_end: bool,
    limit: int,
    source: int,
    best: CopiedDraft,
) -> CopiedDraft:
    """Return the better of `best` and the draft from a context of `length` tokens."""
    allowed = length * settings.max_spec_factor + settings.max_spec_offset + 1e-6
    max_draft = 0 if allowed < 1 else int(min(allowed, limit, settings.max_depth - length))
    if found.count == 0 or max_draft == 0 or not (found.whole or longest or length in SAMPLED):
        return best
    draft = CopiedDraft(source=source, length=length, count=found.count)
    _grow(draft, found, found.count + open_end, max_draft, settings.min_token_prob)
    level = draft.score == best.score and (length > best.length if source == best.source else source < best.source)
    return draft if draft.score > best.score or level else best


def _grow(draft: CopiedDraft, found: _Found, occurrences: float, max_draft: int, min_token_prob: float) -> None:
    places, weight, so_far = found.places, found.count / len(found.places), 1.0
    while len(draft.tokens) < max_draft:
        following = list(_following(places))
        if not following:
            return
        token = most_frequent([text[position] for text, position in following])
        places = [(text, position + 1) for text, position in following if text[position] == token]
        count = weight * len(places)
        so_far *= count / occurrences
        if so_far < min_token_prob:
            return
        draft.tokens.append(token)
        draft.probabilities.append(count / occurrences)
        draft.places.append(len(places))
        draft.score += so_far
        occurrences = count


def _following(places: list[Place]) -> Iterator[Place]:
    """Yield the places that go on with a token that can be proposed."""
    for text, position in places:
        if position < len(text) and text[position] >= 0:
            yield text, position


def most_frequent(tokens: Sequence[int]) -> int:
    """Return the most frequent of the tokens, given oldest first; of equal ones, the one that ArcticInference takes.

    Its trees keep successors sorted by count. A new one goes to the end. One whose count rises passes the equals ahead
    of it or, if there are none, those whose count it reaches.
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
