"""A session's stored turns, one after the other, as a context that can be rebuilt."""

import sys
from dataclasses import dataclass, replace

from agentspec.cache.store.records import TurnRecord

_ALL = sys.maxsize


@dataclass(slots=True)
class Chain:
    """Keeps ``kept`` of a session's records true when some of its turns are missing.

    A record repeats the first ``kept`` tokens of the turn before it. Where that turn was not read (damaged, lost, or
    older than what is read), the record still holds a piece of text without a hole, its own prompt tail and response:
    it is delivered with ``kept`` 0, and the records after it with ``kept`` less what their context lacks in front.
    """

    cursor: str | None = None
    """Sequence of the last entry seen."""
    missing: int = _ALL
    """Tokens that the context delivered so far lacks in front; all, while nothing has been delivered."""
    length: int = 0
    """Tokens of the context delivered last."""

    def lose(self) -> None:
        """A turn could not be read: nothing is known of the context any more."""
        self.missing, self.length = _ALL, 0

    def link(self, record: TurnRecord) -> TurnRecord:
        """The session's next record as it is to be delivered."""
        if record.gap:
            self.lose()
        kept = record.kept - self.missing
        if kept < 0 or kept > self.length:
            kept, self.missing = 0, record.kept
        self.length = kept + len(record.prompt_tail) + len(record.response)
        return record if kept == record.kept and not record.gap else replace(record, kept=kept, gap=False)
