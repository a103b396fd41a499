"""Queue records on their way from the store into the cache."""

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentspec.cache.store.records import TurnRecord

if TYPE_CHECKING:  # stores work without the compiled core
    from agentspec.cache.core import PreparedSession


@dataclass(frozen=True, slots=True)
class Wanted:
    """Name what to load from a tenant's log: a session, a group or a family by its key, or else the tenant's corpus.

    family: the key of its root session. The root's own turns are not loaded with its family.
    """

    namespace: str
    tenant: str | None = None
    session: str | None = None
    group: str | None = None
    family: str | None = None

    @property
    def is_corpus(self) -> bool:
        """Return whether this names the tenant's corpus."""
        return self.session is None and self.group is None and self.family is None


@dataclass(slots=True)
class Loaded:
    """Hold records to apply together."""

    wanted: Wanted
    """The session, group, family or corpus that was requested."""
    records: list[TurnRecord] = field(default_factory=list)
    size: int = 0
    """Bytes of the records."""
    complete: bool = False
    """Whether these are the last records of ``wanted``, and none was lost."""
    prepared: "PreparedSession | None" = None
    """The indexes of the session that the records make up; None: it was not indexed beforehand."""
    forgotten: set[str] = field(default_factory=set)
    """Sessions that were erased since ``take`` returned this."""

    def add(self, record: TurnRecord) -> None:
        """Add a record."""
        self.records.append(record)
        self.size += record.size

    def drop(self, sessions: set[str]) -> None:
        """Remove the records of these sessions."""
        if any(record.session in sessions for record in self.records):
            self.records = [record for record in self.records if record.session not in sessions]
            self.size = sum(record.size for record in self.records)
            self.prepared = None


class ReadyRecords:
    """Hold loaded records until the engine takes them. Thread-safe. max_bytes: limit of all records together.

    Sessions, groups and corpora take turns, so that a short session does not wait for a group of thousands of records.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._waiting: OrderedDict[Wanted, deque[Loaded]] = OrderedDict()  # the one to take from next comes first
        self.bytes = 0
        """memory of the records that wait, roughly"""
        self._taken: Loaded | None = None
        self._closed = False
        self._room = threading.Condition(threading.Lock())

    def put(self, loaded: Loaded, forgotten: set[str]) -> None:
        """Queue records, without those of sessions that were ``forgotten`` meanwhile. Waits while the queue is full."""
        with self._room:
            self._room.wait_for(lambda: self._closed or self.bytes < self._max_bytes)
            loaded.drop(forgotten)
            self._waiting.setdefault(loaded.wanted, deque()).append(loaded)
            self.bytes += loaded.size

    def has_any(self) -> bool:
        """Return whether ``take`` has something to return."""
        return bool(self._waiting)

    def take(self) -> Loaded | None:
        """Return the next records to apply, or None if none are ready."""
        if not self.has_any():
            return None
        with self._room:
            if not self._waiting:
                return None
            wanted, batches = self._waiting.popitem(last=False)
            self._taken = batches.popleft()
            if batches:
                self._waiting[wanted] = batches
            self.bytes -= self._taken.size
            self._room.notify_all()
            return self._taken

    def holds(self, wanted: Wanted) -> bool:
        """Return whether ``take`` will return records of ``wanted``."""
        with self._room:
            return wanted in self._waiting

    def forget(self, *sessions: str) -> None:
        """Drop the records of erased sessions, and note the sessions in the records that were taken last."""
        gone = set(sessions)  # made once, because the engine waits for the lock
        with self._room:
            if self._taken is not None:
                self._taken.forgotten |= gone
            waiting = [loaded for batches in self._waiting.values() for loaded in batches]
            for loaded in waiting:
                loaded.drop(gone)
            self.bytes = sum(loaded.size for loaded in waiting)

    def close(self) -> None:
        """End all waits in `put`."""
        with self._room:
            self._closed = True
            self._room.notify_all()
