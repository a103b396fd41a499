"""What the plain-Python core keeps: requests, sessions and tenants. See reference_core.py for the calls on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentspec.cache.reference import ReferenceIndex
from agentspec.cache.reference_drafter import DraftPath, Odds

OVERLAP = 32  # context kept in front of a document, so that matches can span its start


@dataclass(slots=True)
class Session:
    """What one conversation leaves behind: its turns as one growing text."""

    key: str
    odds: Odds | None  # its own where there is no tenant to share them with
    index: ReferenceIndex = field(default_factory=ReferenceIndex)
    last: list[int] = field(default_factory=list)  # full text of the last finished request
    running: int = 0
    erased: bool = False

    @property
    def tokens(self) -> int:
        return len(self.index) + len(self.last)

    def append_turn(self, kept: int, prompt_tail: list[int], response: list[int]) -> None:
        """Appends in place where the prompt repeats all that came before, else as a new document."""
        if kept < len(self.last):
            del self.last[kept:]
            self.index.append_boundary()
            self.index.append(self.last[-OVERLAP:], findable=False)
        self.index.append(prompt_tail)
        self.index.append(response)
        self.last += prompt_tail + response


@dataclass(frozen=True, slots=True)
class Document:
    session: str | None
    begin: int
    context: list[int]
    response: list[int]


@dataclass(slots=True)
class Tenant:
    """What all sessions of one tenant share: finished responses and learned odds."""

    odds: Odds
    used: int = 0
    index: ReferenceIndex = field(default_factory=ReferenceIndex)
    documents: list[Document] = field(default_factory=list)

    def add(self, session: str | None, context: list[int], response: list[int]) -> None:
        document = Document(session, len(self.index), context[-OVERLAP:], response)
        self.documents.append(document)
        self.index.append_boundary()
        self.index.append(document.context, findable=False)
        self.index.append(response)

    def rebuild(self, keep: Callable[[Document], bool]) -> None:
        """Keeps some documents; they become findable again as the index advances."""
        old, self.documents, self.index = self.documents, [], ReferenceIndex()
        for document in filter(keep, old):
            self.add(document.session, document.context, document.response)


@dataclass(slots=True)
class Request:
    session: Session | None
    tenant: Tenant | None
    odds: Odds
    prompt_length: int
    index: ReferenceIndex = field(default_factory=ReferenceIndex)  # whole text; findable: what the session lacks
    draft: DraftPath = field(default_factory=DraftPath)

    def sources(self) -> list[ReferenceIndex | None]:
        session = self.session.index if self.session and not self.session.erased else None
        return [self.index, session, self.tenant.index if self.tenant else None]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return min(len(a), len(b))
