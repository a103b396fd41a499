"""Specify a running request: its text, its sources and its present draft. Implemented by csrc/cache/request."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from agentspec.cache import SOURCES
from agentspec.cache.policy import MAX_DRAFT
from tests.oracle.arctic_suffix_rule import ArcticSuffixRule
from tests.oracle.drafting import Draft, DraftRequest, MatchState, SuffixDrafter
from tests.oracle.index import BOUNDARY, OVERLAP, Match, SuffixIndex
from tests.oracle.kept import CacheEntry, Group, Session, Tenant
from tests.oracle.scoring import Candidate, Learned
from tests.oracle.session import BLOCK, Context, Turn

CHECKED = MAX_DRAFT + 1  # tokens at the end of a request's text that a step compares with the engine's
PUBLIC, SIBLING = SOURCES.index("public"), SOURCES.index("sibling")
PREDICTION, QUOTE = SOURCES.index("prediction"), SOURCES.index("quote")
ASKED_SIBLINGS = 8  # other requests of its group that a request searches in a step
ASKED_TOKENS = 1024  # tokens of its end that it searches for; in its present sibling it searches for all

Drafter = SuffixDrafter | ArcticSuffixRule


@dataclass(slots=True)
class Drafted:
    """Hold a request's draft and, by source, how many tokens of its previous draft were accepted and verified."""

    tokens: list[int]
    probabilities: list[float]
    sources: list[int]
    match_length: int
    accepted: list[int] = field(default_factory=lambda: [0] * len(SOURCES))
    verified: list[int] = field(default_factory=lambda: [0] * len(SOURCES))


@dataclass(slots=True)
class Request:
    """Hold a running request. shared: it drafts from and adds to its tenant. own_group: its group is its own family."""

    session: Session | None
    group: Group | None
    tenant: Tenant | None
    learned: Learned
    prompt_length: int
    shared: bool
    own_group: bool
    index: SuffixIndex = field(default_factory=SuffixIndex)  # the whole text; only what the session lacks is findable
    sibling: "Request | None" = None  # another running request of its group, whose text it drafts from
    next_asked: int = 0  # index of the request to search next, among the group's running requests
    prediction: SuffixIndex = field(default_factory=SuffixIndex)  # the expected response, behind the end of the prompt
    quotes: bool = False  # whether `prediction` holds texts that the response may quote instead
    state: MatchState = field(default_factory=MatchState)
    draft: Draft = field(default_factory=Draft)

    def begin(self, drafter: Drafter, prompt: list[int]) -> None:
        """Put the prompt into the empty index."""
        self.prompt_length = self.state.begin = len(prompt)
        session = self.session
        begin, end = session.held_of(prompt) if session and not session.gone else (0, 0)
        drafter.start(self.index, prompt, begin, end)

    def goes_on_in(self, row: list[int]) -> bool:
        """Return whether the engine's row begins with the text. Compare the last CHECKED tokens: no step adds more."""
        text = self.index.text
        return len(row) >= len(text) and row[: len(text)][-CHECKED:] == text[-CHECKED:]

    def rewind(self, drafter: Drafter, row: list[int]) -> None:
        """Cut the text to the prefix that the engine's row shares. The engine took back the rest."""
        text = self.index.text
        kept = text[: common_prefix(text, row)]
        prompt = kept[: self.prompt_length]
        self.index.clear()
        self.draft, self.state = Draft(), MatchState(ends=self.state.ends)
        self.begin(drafter, prompt)
        self.index.append(kept[len(prompt) :])

    def take(
        self, drafter: Drafter, public: SuffixIndex | None, tokens: list[int], num_verified: int
    ) -> tuple[list[int], list[int]]:
        """Add verified tokens. Return by source how many draft tokens were accepted and verified."""
        accepted, verified = [0] * len(SOURCES), [0] * len(SOURCES)
        if not tokens:
            return accepted, verified
        checked = self.draft.taken[: max(num_verified, 0)]
        drafted = [candidate.token for candidate in checked]
        right = common_prefix(drafted, tokens)
        if BOUNDARY in drafted:  # forgotten tokens; a step brings the accepted tokens and one more
            right = min(len(drafted), len(tokens) - 1)
        for depth, candidate in enumerate(checked):
            source = self.source_of(candidate)
            verified[source] += 1
            accepted[source] += depth < right
        drafter.learn(self.for_drafter(public), tokens)
        self.index.append(tokens)
        return accepted, verified

    def turn(self, output_limit: int | None) -> Turn:
        """Return the turn that the request adds to its session, group and tenant when it ends."""
        prompt = self.index.text[: self.prompt_length]
        response = self.index.text[self.prompt_length :][:output_limit]
        if not self.session:
            return Turn(0, 0, 0, prompt[-OVERLAP:], response)
        known = self.session.turns.find(prompt)
        kept = known.length if known else 0
        contexts = Context().walk(prompt[:kept])
        return Turn(kept, contexts[kept].hash, contexts[kept // BLOCK * BLOCK].hash, prompt[kept:], response)

    def for_drafter(self, public: SuffixIndex | None) -> DraftRequest:
        entries = [entry.index if entry and not entry.gone else None for entry in (self.session, self.group)]
        shared = [self.tenant.corpus.index, public] if self.tenant and self.shared else [None, None]
        sibling = self.sibling.index if self.sibling else None
        prediction = self.prediction if len(self.prediction) else None
        sources = [self.index, *entries, *shared, sibling, prediction]
        return DraftRequest(sources, self.index.text, self.state, self.draft, self.learned)

    def choose_sibling(self, running: Sequence["Request"]) -> None:
        """Choose the running request of its group whose text has the longest match of this one's end.

        It searches its present sibling and, in rotation, others. Requests of an erased session take no part.
        """
        before, self.sibling = self.sibling, None
        members = [each for each in running if self.group and each.group is self.group]
        asked = [before] if before is not None and before.takes_part else []
        passed = 0
        if len(members) < 2 or not self.takes_part:
            members = asked = []
        while passed < len(members) and len(asked) < ASKED_SIBLINGS:
            member = members[(self.next_asked + passed) % len(members)]
            if member is not self and member is not before and member.takes_part:
                asked.append(member)
            passed += 1
        if members:
            self.next_asked = (self.next_asked + passed) % len(members)
        best = Match()
        for other in asked:
            text = self.index.text
            match = other.index.look_up(text if other is before else text[-ASKED_TOKENS:])
            if match.length > best.length:
                best, self.sibling, self.state.versions[SIBLING] = match, other, other.index.version
        self.state.matches[SIBLING] = best
        if self.sibling is not before and self.state.resume and self.state.resume.source == SIBLING:
            self.state.resume = None

    @property
    def takes_part(self) -> bool:
        return self.session is None or not self.session.gone

    def forget_sibling(self) -> None:
        self.sibling = None
        self.state.forget(SIBLING)

    def source_of(self, candidate: Candidate) -> int:
        """Return a candidate's source as users see it: the family of a root counts as the session."""
        if self.quotes and candidate.source == PREDICTION:
            return QUOTE
        return 1 if self.own_group and candidate.source == 2 else candidate.source

    def in_order(self) -> list[SuffixIndex]:
        """Return its texts in the order in which they are to be indexed."""
        return [self.index, self.prediction] if self.quotes else [self.prediction, self.index]

    def entries(self) -> list[CacheEntry]:
        return [entry for entry in (self.session, self.group) if entry is not None]

    def drafted(self) -> Drafted:
        taken = self.draft.taken
        probabilities = [float(np.float32(candidate.probability)) for candidate in taken]
        sources = [self.source_of(candidate) for candidate in taken]
        return Drafted([candidate.token for candidate in taken], probabilities, sources, self.draft.match_length)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return min(len(a), len(b))
