"""Specify what a tenant, a session and a group hold of finished requests."""

from dataclasses import dataclass, field

from tests.oracle.corpus import Corpus
from tests.oracle.index import SuffixIndex
from tests.oracle.names import Key
from tests.oracle.scoring import Learned
from tests.oracle.session import Turns

PIECE = 64  # units of work between two looks at the clock


@dataclass(slots=True)
class Tenant:
    """Hold what all sessions of one tenant share: finished responses, and what was learned about drafts."""

    name: str
    owner: str = ""  # who it counts for when memory is scarce
    learned: Learned | None = None
    used: int = 0
    running: int = 0
    corpus: Corpus = field(default_factory=Corpus)
    loaded: bool = False  # what the store holds of its corpus was restored
    written: int = 0  # tokens of all responses finished so far


@dataclass(slots=True, eq=False)
class Session:
    """Hold the turns of one conversation."""

    key: Key
    tenant: Tenant
    learned: Learned | None = None  # learned from its requests that share nothing
    turns: Turns = field(default_factory=Turns)
    owner: str = ""  # who it counts for when memory is scarce
    running: int = 0
    gone: bool = False
    loaded: bool = False  # what the store holds of it was restored
    family: str | None = None  # the session whose agent started this one, or an ancestor of that
    final: bool = False  # its client has ended it: evicted once none of its requests runs

    @property
    def index(self) -> SuffixIndex:
        return self.turns.index

    @property
    def tokens(self) -> int:
        return len(self.index)

    def held_of(self, prompt: list[int]) -> tuple[int, int]:
        """Return begin and end of the part of a prompt that the session holds."""
        known = self.turns.find(prompt)
        return (min(self.turns.missing_at(known.position), known.length), known.length) if known else (0, 0)

    def advance(self, budget: int) -> int:
        return self.index.advance(budget)

    def sweep(self, _: int) -> int:
        return 0

    @property
    def has_work(self) -> bool:
        return self.index.pending > 0


@dataclass(slots=True, eq=False)
class Group:
    """Hold responses of a tenant's sessions that name the group, or of a family: a session and all that it started."""

    key: Key
    tenant: Tenant
    corpus: Corpus = field(default_factory=Corpus)
    owner: str = ""
    running: int = 0
    gone: bool = False
    loaded: bool = False  # what the store holds of it was restored
    of_several: bool = False  # it may hold responses of several sessions: all but families without children

    @property
    def index(self) -> SuffixIndex:
        return self.corpus.index

    @property
    def tokens(self) -> int:
        return self.corpus.tokens

    def advance(self, budget: int) -> int:
        return self.corpus.advance(budget)

    def sweep(self, budget: int) -> int:
        return self.corpus.sweep(budget)

    @property
    def has_work(self) -> bool:
        return self.corpus.has_work


CacheEntry = Session | Group
"""Evicted as a whole. running: requests that draft from it; while there are any, it is not evicted."""


def work_on(part: CacheEntry | Corpus, budget: int) -> int:
    """Index and sweep in pieces, as far as the budget allows. Return what is left of it."""
    while budget > 0 and part.has_work:
        piece = min(budget, PIECE)
        budget -= min(budget, part.advance(piece) or part.sweep(piece))
    return budget
