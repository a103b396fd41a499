"""What the plain-Python core holds: requests, sessions, groups and tenants. See reference_core.py for the calls."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentspec.cache.reference import BOUNDARY, ReferenceIndex
from agentspec.cache.reference_drafter import DraftPath, MatchState
from agentspec.cache.reference_judge import Learned
from agentspec.cache.reference_scoring import Candidate

OVERLAP = 8  # context kept in front of a response, so that its first tokens can be matched
SWEEP_COST = 16  # taking a place out costs as much as putting so many in
SWEEP_SOME = 4  # places taken out at once
BYTES_PER_TOKEN = 12  # as budgets count, which is what the compiled core needs
BYTES_PER_LEARNER = 1 << 17


@dataclass(frozen=True, slots=True)
class Document:
    session: str | None
    begin: int
    end: int


@dataclass(slots=True)
class Corpus:
    """Finished responses, oldest first, as documents of one growing text.

    A dropped document counts as gone at once; its places leave the index with the next sweeps, a few at a time.
    """

    index: ReferenceIndex = field(default_factory=ReferenceIndex)
    documents: deque[Document] = field(default_factory=deque)
    dropped: deque[Document] = field(default_factory=deque)
    tokens: int = 0

    def add(self, session: str | None, context: list[int], response: list[int]) -> None:
        begin = len(self.index)
        self.index.append_boundary()
        self.index.append(context[-OVERLAP:], findable=False)
        self.index.append(response)
        self.documents.append(Document(session, begin, len(self.index)))
        self.tokens += len(self.index) - begin

    @property
    def bytes(self) -> int:
        return BYTES_PER_TOKEN * self.tokens

    def drop_oldest(self) -> None:
        document = self.documents.popleft()
        self.tokens -= document.end - document.begin
        self.dropped.append(document)

    def drop_session(self, session: str) -> None:
        """What is erased goes before what is merely old."""
        erased = [document for document in self.documents if document.session == session]
        for document in erased:
            self.documents.remove(document)
            self.tokens -= document.end - document.begin
        self.dropped.extendleft(reversed(erased))

    def advance(self, budget: int) -> int:
        return self.index.advance(budget)

    def sweep(self, budget: int) -> int:
        if not self.dropped or budget == 0:
            return 0
        most = -(-budget // SWEEP_COST)
        done = 0
        while self.dropped and done < most:
            oldest = self.dropped[0]
            some = min(most - done, SWEEP_SOME)
            removed = self.index.remove(oldest.begin, oldest.end, some)
            done += removed
            if removed == some:
                continue  # perhaps that was all: then the next time finds nothing left of it
            self.dropped.popleft()
            done += 1
        return min(budget, done * SWEEP_COST)


@dataclass(slots=True)
class Tenant:
    """What all sessions of one tenant share: finished responses and what was learned about drafts."""

    learned: Learned | None = None
    used: int = 0
    corpus: Corpus = field(default_factory=Corpus)


@dataclass(slots=True, eq=False)
class Session:
    """What one conversation leaves behind: its turns as one growing text."""

    key: str
    tenant: Tenant | None
    learned: Learned | None = None  # from requests that keep to their session
    index: ReferenceIndex = field(default_factory=ReferenceIndex)
    last: list[int] = field(default_factory=list)  # full text of the last finished request
    running: int = 0
    gone: bool = False

    @property
    def tokens(self) -> int:
        return len(self.index) + len(self.last)

    @property
    def bytes(self) -> int:
        return BYTES_PER_TOKEN * self.tokens + (BYTES_PER_LEARNER if self.learned else 0) if self.tokens else 0

    def append(self, kept: int, prompt_tail: list[int], response: list[int]) -> None:
        """Appends one finished turn, in place where the prompt repeats all that came before."""
        if kept < len(self.last):
            del self.last[kept:]
            self.index.append_boundary()
            self.index.append(self.last[-OVERLAP:], findable=False)
        self.index.append(prompt_tail)
        self.index.append(response)
        self.last += prompt_tail + response

    def trim(self, tokens: int) -> None:
        """Starts again from its newest tokens, at most `tokens` of them."""
        text = self.index.text[max(len(self.index) - tokens, 0) :]
        self.index.clear()
        for token in text:
            if token == BOUNDARY:
                self.index.append_boundary()
            else:
                self.index.append([token])
        if len(self.last) > tokens:
            self.last = []

    def advance(self, budget: int) -> int:
        return self.index.advance(budget)

    def sweep(self, _: int) -> int:
        return 0


@dataclass(slots=True, eq=False)
class Group:
    """Responses to one problem, from all sessions of a tenant that worked on it; or those of one session."""

    key: str
    tenant: Tenant
    corpus: Corpus = field(default_factory=Corpus)
    running: int = 0
    gone: bool = False

    @property
    def index(self) -> ReferenceIndex:
        return self.corpus.index

    @property
    def tokens(self) -> int:
        return self.corpus.tokens

    @property
    def bytes(self) -> int:
        return self.corpus.bytes

    def advance(self, budget: int) -> int:
        return self.corpus.advance(budget)

    def sweep(self, budget: int) -> int:
        return self.corpus.sweep(budget)


Holding = Session | Group
"""What can be evicted as a whole."""


@dataclass(slots=True)
class Request:
    session: Session | None
    group: Group | None
    tenant: Tenant | None
    learned: Learned
    prompt_length: int
    shared: bool = False  # draws on its tenant and gives to it
    own_group: bool = False  # the group is the session's own, not one that was named
    index: ReferenceIndex = field(default_factory=ReferenceIndex)  # whole text; findable: what the session lacks
    state: MatchState = field(default_factory=MatchState)
    draft: DraftPath = field(default_factory=DraftPath)

    def sources(self) -> list[ReferenceIndex | None]:
        holdings = [holding.index if holding and not holding.gone else None for holding in (self.session, self.group)]
        return [self.index, *holdings, self.tenant.corpus.index if self.tenant and self.shared else None]

    def source_of(self, candidate: Candidate) -> int:
        """Where a candidate comes from as users see it."""
        return 1 if self.own_group and candidate.source == 2 else candidate.source

    def holdings(self) -> list[Holding]:
        return [holding for holding in (self.session, self.group) if holding is not None]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return min(len(a), len(b))
