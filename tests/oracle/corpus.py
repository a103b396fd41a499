"""Specify how finished responses are kept together, dropped and swept. Implemented by csrc/cache/corpus."""

from collections import deque
from dataclasses import dataclass, field

from tests.oracle.index import SuffixIndex
from tests.oracle.names import Key

SWEEP_COST = 16  # positions whose indexing costs as much as removing one
SWEEP_SOME = 4  # positions removed at once
OUTDATED_PER_CALL = 256  # documents older than the window dropped in one call


@dataclass(frozen=True, slots=True)
class Document:
    session: Key | None
    record: int  # the turn's name in the store; 0: none
    begin: int
    end: int
    written: int  # when, by the clock of the history window


@dataclass(slots=True)
class Corpus:
    """Hold finished responses, oldest first, as documents of one growing text.

    A dropped document no longer counts. Its positions leave the index with the next sweeps, a few at a time.
    """

    index: SuffixIndex = field(default_factory=SuffixIndex)
    documents: deque[Document] = field(default_factory=deque)
    dropped: deque[Document] = field(default_factory=deque)
    tokens: int = 0

    def add(self, session: Key | None, record: int, context: list[int], response: list[int], written: int) -> None:
        begin = len(self.index)
        self.index.append_boundary()
        self.index.append(context, findable=False)
        self.index.append(response)
        self.documents.append(Document(session, record, begin, len(self.index), written))
        self.tokens += len(self.index) - begin

    def holds(self, record: int) -> bool:
        return record != 0 and any(document.record == record for document in self.documents)

    def drop_oldest(self) -> None:
        document = self.documents.popleft()
        self.tokens -= document.end - document.begin
        self.dropped.append(document)

    def drop_before(self, time: int) -> None:
        """Drop the oldest documents that were written before a time, at most OUTDATED_PER_CALL."""
        for _ in range(OUTDATED_PER_CALL):
            if self.documents and self.documents[0].written < time:
                self.drop_oldest()

    def drop_older_half(self) -> None:
        for _ in range((len(self.documents) + 1) // 2):
            self.drop_oldest()

    def drop_session(self, session: Key) -> None:
        """Drop a session's documents and remove them from the index, also those that were dropped before."""
        held = [document for document in self.documents if document.session == session]
        dropped = [document for document in self.dropped if document.session == session]
        for document in held:
            self.documents.remove(document)
            self.tokens -= document.end - document.begin
        for document in dropped:
            self.dropped.remove(document)
        for document in (*dropped, *held):
            self.index.remove(document.begin, document.end, document.end - document.begin)

    def advance(self, budget: int) -> int:
        return self.index.advance(budget)

    def sweep(self, budget: int) -> int:
        """Remove positions of dropped documents, for at most about `budget`. Return how much of it was used."""
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
                continue  # if nothing is left of it, the next round finds out
            self.dropped.popleft()
            done += 1
        return min(budget, done * SWEEP_COST)

    @property
    def has_work(self) -> bool:
        return self.index.pending > 0 or bool(self.dropped)
