"""Specify how drafts grow and are cut, how another drafter's tokens are merged, and what verification teaches.

Implemented by csrc/drafting/suffix_drafter and draft_value. agentspec/cache/policy.py explains the rule; scoring.py
scores the candidates at one position of a draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agentspec.cache import SOURCES
from agentspec.cache.policy import DraftPolicy
from tests.oracle.index import BOUNDARY, OVERLAP, Match, SuffixIndex
from tests.oracle.scoring import (
    Candidate,
    Learned,
    ResumePoint,
    ScoredPosition,
    ScoringContext,
    Sources,
    mark_resume_point,
    score,
)

_TAIL = 256  # tokens of context that look-ups within a draft see
INDEXES, SIBLING = SOURCES.index("model"), SOURCES.index("sibling")  # INDEXES: how many sources are indexes
_LONG_ENOUGH = 32  # match length from which on other sources need no search
_LISTED_ENOUGH = 4  # fewest listed occurrences that may stand for all of a match
CAUTION = 1.3  # multiplies the cost: a token that looks best of several has a somewhat overrated probability


@dataclass(slots=True)
class Draft:
    """Hold the scored positions; the first `len(taken)` of them are the draft.

    Positions that did not pay stay in the path, because verified tokens may reveal whether they were right. open: the
    draft continues the present text, so another drafter's tokens may be merged. outdated: the sources that were
    searched anew since, so that the path's places in them are wrong.
    """

    path: list[ScoredPosition] = field(default_factory=list)
    taken: list[Candidate] = field(default_factory=list)
    match_length: int = 0
    open: bool = False
    outdated: set[int] = field(default_factory=set)

    def forget_tokens(self) -> None:
        """Forget the tokens and what could be learned from them, but not how many there are and from where."""
        self.path, self.match_length, self.open = [], 0, False
        self.taken = [replace(candidate, token=BOUNDARY) for candidate in self.taken]


ExternalDraft = Sequence[tuple[int, float]]
"""Another drafter's tokens, each with the probability that it is accepted if those before it are."""


@dataclass(slots=True)
class DraftValue:
    """Compute a growing draft's value: the tokens that its step is expected to bring, divided by the step's price.

    cost: price of verifying a drafted token, as a share of a step. best: the largest value so far, at `best_length`
    tokens; without a draft it is 1. probability: that all tokens so far are accepted. expected: tokens of the step,
    with the one that every step brings.
    """

    cost: float
    best: float = 1.0
    best_length: int = 0
    length: int = 0
    probability: float = 1.0
    expected: float = 1.0

    def add(self, probability: float) -> None:
        self.probability *= probability
        self.expected += self.probability
        self.length += 1
        if self.value > self.best:
            self.best, self.best_length = self.value, self.length

    @property
    def value(self) -> float:
        return self.expected / (1.0 + self.cost * self.length)

    @property
    def can_grow(self) -> bool:
        return self.probability >= self.cost * self.best


@dataclass(slots=True)
class MatchState:
    """Keep a request's matches from step to step, so that a step can follow them rather than search again.

    ends: tokens that end the response. begin: length of the context when the response began. outcome: of the last
    draft; 0: there was none, 1: all its tokens were right, 2: some were wrong.
    """

    matches: list[Match] = field(default_factory=lambda: [Match() for _ in range(INDEXES)])
    versions: list[int] = field(default_factory=lambda: [0] * INDEXES)
    resume: ResumePoint | None = None
    ends: frozenset[int] = frozenset()
    begin: int = 0
    outcome: int = 0
    started: bool = False

    def forget(self, source: int) -> None:
        """Forget what was found in a source."""
        self.matches[source], self.versions[source] = Match(), 0
        if self.resume is not None and self.resume.source == source:
            self.resume = None


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Hold what a drafter sees of one running request. text: prompt and response."""

    sources: Sources
    text: list[int]
    state: MatchState
    draft: Draft
    learned: Learned


class SuffixDrafter:
    def __init__(self, policy: DraftPolicy) -> None:
        self._policy = policy
        self.kept_context = OVERLAP  # tokens of context in front of a stored response

    def start(self, own: SuffixIndex, prompt: list[int], begin: int, end: int) -> None:
        """Put a new request's prompt into its own index. The session holds its tokens from `begin` to `end` already."""
        own.append(prompt[:begin])
        own.append(prompt[begin:end], findable=False)
        own.append(prompt[end:])

    def draft(self, request: DraftRequest, limit: int, cost: float) -> Draft:
        """Return a draft of at most `limit` tokens behind the request's text."""
        value = DraftValue(CAUTION * cost)
        path = self._grow(request, (), limit, value)
        return _drafted(path, value.best_length)

    def merge_draft(self, request: DraftRequest, external: ExternalDraft, limit: int, cost: float) -> Draft:
        """Return the better of an open draft and another drafter's tokens with what the indexes add behind them.

        Each is cut at the length of its largest value. Where both begin alike, the draft takes the given probabilities.
        """
        draft, present = request.draft, DraftValue(CAUTION * cost)
        taken = with_probabilities(draft.taken, external)
        for candidate in taken:
            present.add(candidate.probability)
        offered = DraftValue(CAUTION * cost, present.best)
        before = list(request.state.versions)
        path = self._grow(request, external, limit, offered) if external else []
        for at, (old, new) in enumerate(zip(before, request.state.versions, strict=True)):
            if at > 0 and old != new:  # the request's own text only grows
                draft.outdated.add(at)
        if offered.best_length > 0:
            return _drafted(path, offered.best_length)
        draft.taken = taken[: present.best_length]
        draft.match_length = draft.match_length if draft.taken else 0
        return draft

    def learn(self, request: DraftRequest, verified: Sequence[int]) -> None:
        """Learn from every position that the verified tokens reveal, and follow the matches with these tokens.

        A position is revealed if all drafted tokens before it were right. Call this before the tokens are appended to
        the request's text. Afterwards the draft's path is empty, so nothing is learned twice.
        """
        if not verified:
            return
        sources, state, draft = request.sources, request.state, request.draft
        _drop_outdated(sources, state)
        right = self._learn_path(request, verified)
        state.outcome = 0 if not draft.taken else 1 if right >= len(draft.taken) else 2
        for number, token in enumerate(verified):
            if number <= right and number < len(draft.path) and not _is_outdated(draft, draft.path[number]):
                state.resume = mark_resume_point(draft.path[number], token, state.resume)
            state.resume = _advance(sources, token, state.resume)
            for at, (source, match) in enumerate(zip(sources, state.matches, strict=True)):
                if source is not None and match.positions:
                    state.matches[at] = source.follow(token, match) or Match()
        draft.path = []
        draft.open = False

    def _grow(
        self, request: DraftRequest, external: ExternalDraft, limit: int, value: DraftValue
    ) -> list[ScoredPosition]:
        """Draft token by token: first another drafter's, then the likeliest candidates, while that can still pay."""
        path: list[ScoredPosition] = []
        if limit == 0:
            return path
        sources, text, state = request.sources, request.text, request.state
        if state.started:
            _drop_outdated(sources, state)
        _refresh(sources, text, state)
        tail = text[-_TAIL:]
        matches, resume = list(state.matches), state.resume
        for depth in range(limit):
            context = ScoringContext(tail, depth, state.begin, len(text) - state.begin + depth, state.outcome)
            scored = score(self._policy, request.learned, sources, matches, resume, context)
            if depth < len(external):
                scored.take(*external[depth])
            elif not scored.candidates:
                break
            path.append(scored)
            token = scored.taken.token
            value.add(scored.taken.probability)
            if not value.can_grow or depth + 1 == limit or token in state.ends:
                break
            tail = [*tail, token]
            resume = mark_resume_point(scored, token, resume)
            matches = _move_on(sources, token, tail, matches)
            resume = _advance(sources, token, resume)
        return path

    def _learn_path(self, request: DraftRequest, verified: Sequence[int]) -> int:
        """Learn from the path of the draft. Return how many of its tokens were right."""
        right = 0
        for scored, token in zip(request.draft.path, verified, strict=False):
            for proposal, cell in scored.proposals:
                request.learned.table.learn(cell, proposal == token)
            if self._policy.rerank:
                for candidate in scored.candidates:
                    error = (1.0 if candidate.token == token else 0.0) - candidate.probability
                    request.learned.reranker.learn(candidate.slots, error, self._policy.learning_rate)
            if scored.taken.token != token:
                break
            right += 1
        return right


def shared_with(external: ExternalDraft, taken: list[Candidate]) -> int:
    """Count the tokens with which both another drafter's tokens and the draft begin."""
    pairs = zip(external, taken, strict=False)
    return next(
        (at for at, ((token, _), own) in enumerate(pairs) if token != own.token), min(len(external), len(taken))
    )


def with_probabilities(taken: list[Candidate], external: ExternalDraft) -> list[Candidate]:
    """Return a draft's tokens with another drafter's probabilities where both begin alike."""
    shared = shared_with(external, taken)
    return [replace(own, probability=external[at][1]) if at < shared else own for at, own in enumerate(taken)]


def _is_outdated(draft: Draft, scored: ScoredPosition) -> bool:
    """Return whether the place of a position's likeliest candidate is wrong by now."""
    return scored.best is not None and scored.best.source in draft.outdated


def _drafted(path: list[ScoredPosition], length: int) -> Draft:
    """Return the path with its first `length` tokens as the draft."""
    taken = [scored.taken for scored in path[:length]]
    return Draft(path, taken, taken[0].match_length if taken else 0)


def _refresh(sources: Sources, context: list[int], state: MatchState) -> None:
    """Search again for the matches that could not be followed or whose source has changed.

    The sibling's match was found when the sibling was chosen.
    """
    for at, source in enumerate(sources):
        match = state.matches[at]
        if source is None:
            state.matches[at] = Match()
            continue
        followed = state.started and match.positions and match.complete
        if source.version == state.versions[at] and (followed or at == SIBLING):
            continue
        match = source.look_up(context)
        state.matches[at], state.versions[at] = match, source.version
    state.started = True


def _move_on(sources: Sources, token: int, context: list[int], matches: list[Match]) -> list[Match]:
    """Return the matches after one more drafted token. Search where following fails, unless another is long enough."""
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


def _follow(source: SuffixIndex | None, token: int, match: Match) -> Match | None:
    if source is None or not match.positions:
        return None
    least = 1 if match.complete else _LISTED_ENOUGH
    listed = Match(match.length, len(match.positions), match.positions)
    followed = source.follow(token, listed)
    return followed if followed is not None and len(followed.positions) >= least else None


def _advance(sources: Sources, token: int, resume: ResumePoint | None) -> ResumePoint | None:
    """Move the resume point past `token`, also if it proposed another."""
    source = sources[resume.source] if resume is not None else None
    return resume.advanced(source.text, token) if resume is not None and source is not None else None


def _drop_outdated(sources: Sources, state: MatchState) -> None:
    """Drop what was found in a source that has changed. A resume point in the request's own text stays."""
    for at, source in enumerate(sources):
        same = source is not None and source.version == state.versions[at]
        if not same:
            state.matches[at] = Match()
        if state.resume is not None and state.resume.source == at and not same and (at > 0 or source is None):
            state.resume = None
