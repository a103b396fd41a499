"""List, read, extend and find the sessions of a store, for `session_admin`."""

import math
from collections.abc import Container, Generator, Iterable, Iterator, Sequence, Set
from typing import Any

from agentspec.cache.store import NewEntry, RecordReader, SessionUsage, Store, TurnRecord, decode, encode
from agentspec.cache.store.background.courtesy import Courtesy
from agentspec.errors import SessionConflictError
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.session_questions import ImportRecords, ListSessions

_LOAD_SECONDS = 0.25
"""Longest wait until an imported session is read back from the store, before the import is answered."""
_WRITE_RECORDS, _WRITE_BYTES = 256, 256 * 1024
"""Most records, and about the most bytes, that an import appends at once: Redis answers nobody else meanwhile."""


class StoredSessions:
    """Answer questions about stored sessions, each as an iterator of lists, some of which may be empty.

    It may be left behind any list, to go on later, so that none holds up other questions. All raise StoreError.
    """

    def __init__(self, persistence: Persistence) -> None:
        self._cache, self._persistence = persistence.cache, persistence

    def _logs(self, store: Store, tenant: str | None, anybody: bool = False, session: str | None = None) -> list[str]:
        """Return the names of a tenant's logs, or of all logs for ``anybody``. session: only those that hold it."""
        logs = self._persistence.logs
        return store.namespaces(logs.prefix if anybody else logs.family(tenant), session=session)

    def used_last(self, wanted: ListSessions, store: Store) -> Iterator[list[dict[str, Any]]]:
        """Yield the sessions used last. Takes long if many are other principals', or if they are long."""
        held: dict[str, list[tuple[str, SessionUsage]]] = {}  # by session, which may be in several logs
        for log in self._logs(store, wanted.tenant, wanted.anybody):
            for usage in store.sessions(log):
                if usage.session:
                    held.setdefault(usage.session, []).append((log, usage))
        for parts in held.values():
            parts.sort(key=lambda part: part[1].used)
        count = wanted.count
        last = math.inf  # when the latest one that was yielded was used
        for session, parts in sorted(held.items(), key=lambda item: -item[1][-1][1].used):
            used = parts[-1][1].used
            if count <= 0 and used < last:
                return
            if wanted.before is not None and used >= wanted.before:
                continue
            yield []
            if not (wanted.anybody and wanted.prefix is None):  # who wants all sessions need not wait for this read
                newest = _turns(store, parts[-1][0], session, newest=1)
                if not any(_is_wanted(wanted, turn) for turn in newest):
                    continue
            if summary := (yield from _summary_of(store, session, parts)):
                yield [summary]
                count, last = count - 1, used

    def read(self, session: str, store: Store) -> Iterator[list[bytes]]:
        """Yield a session's records that can be used, also those that wait for the store."""
        reader, courtesy = RecordReader(), Courtesy()
        unwritten = {_name_of(turn): turn for turn in self._persistence.unwritten(session)}
        for log in self._logs(store, None, anybody=True, session=session):
            for entry, record in reader.read(store.read(log, session=session)):
                if isinstance(record, TurnRecord):
                    unwritten.pop(_name_of(record), None)
                yield [] if record is None else [entry.payload]
                courtesy.pause()
        for turn in unwritten.values():
            yield [encode(turn)]

    def import_records(self, wanted: ImportRecords, store: Store) -> Iterator[list[int]]:
        """Append the records that a session lacks to the store. Yields their number last.

        If that fails between two slices, the next try appends the others. Raises SessionConflictError if the session is
        erased meanwhile, and leaves nothing behind the erasure.
        """
        session, tenant = wanted.session, wanted.tenant
        log = self._persistence.logs.of(tenant)
        looked = last = store.newest(log) if wanted.begun is None else wanted.begun
        held: set[tuple[str, int]] = set()
        for part in self._logs(store, tenant, session=session):
            for turn in _turns(store, part, session):
                held.add(_name_of(turn))
                yield []
        if wanted.only_new and (held or self._cache.has_session(tenant, session)):
            yield [0]
            return
        given = dict[tuple[str, int], bytes]()  # by name, because a text may be given twice
        courtesy = Courtesy()
        for payload in wanted.records:
            given[_name_of(decode(payload))] = payload
            courtesy.pause()
        missing = [payload for name, payload in given.items() if name not in held]
        new = [NewEntry(session, payload, owner=wanted.owner) for payload in missing]
        for entries in _slices_of(new):
            self._stop_if_erased(wanted, given, store, looked)
            # The look came before the last append, so the next one begins where that began.
            looked, last = last, store.append(log, entries)[-1]
            yield []
        self._stop_if_erased(wanted, given, store, looked)
        self._persistence.load_again(tenant, session, _LOAD_SECONDS)
        yield [len(new)]

    def end(self, tenant: str | None, store: Store) -> Iterator[list[str]]:
        """Yield the cursor at which a tenant's log ends."""
        yield [store.newest(self._persistence.logs.of(tenant))]

    def _stop_if_erased(
        self, wanted: ImportRecords, given: Container[tuple[str, int]], store: Store, after: str
    ) -> None:
        """Raise SessionConflictError if the session of an import was erased behind a cursor.

        given: the names of the turns. Those that came to the store behind another process's erasure are erased again.
        """
        log = self._persistence.logs.of(wanted.tenant)
        tombstone = store.tombstones(log, after=after).get(wanted.session)
        if tombstone is None:
            return
        if any(_name_of(turn) in given for turn in _turns(store, log, wanted.session, after=tombstone)):
            self._persistence.erase_again(wanted.tenant, wanted.session)
        raise SessionConflictError("the session was erased while it was imported, so the import has ended")

    def tenants(self, session: str, held: Set[str | None], store: Store) -> Iterator[list[str | None]]:
        """Yield the tenants under which a session has turns, in one list. held: tenants that are known to have some."""
        logs = self._logs(store, None, anybody=True, session=session)
        yield [*held | {turn.tenant for log in logs for turn in _turns(store, log, session, newest=1)}]


def _is_wanted(wanted: ListSessions, turn: TurnRecord) -> bool:
    """Return whether the session of this turn belongs into the list."""
    begins = wanted.prefix is None or (turn.session_name or "").startswith(wanted.prefix)
    return begins and (wanted.anybody or turn.principal == wanted.principal)


def _summary_of(
    store: Store, session: str, parts: Sequence[tuple[str, SessionUsage]]
) -> Generator[list[Any], None, dict[str, Any] | None]:
    """Return a session as the list shows it; None if no turn is left. Yields an empty list where a slice may end.

    parts: its logs and their usage, newest last.
    """
    tokens, newest = 0, None
    for log, _ in parts:
        for newest in _turns(store, log, session):
            tokens += len(newest.prompt_tail) + len(newest.response)
            yield []
    if newest is None:
        return None
    return {
        "id": newest.session_name,
        "key": session,
        "tokens": tokens,
        "turns": sum(usage.records for _, usage in parts),
        "bytes": sum(usage.bytes for _, usage in parts),
        "used": parts[-1][1].used,
        "group": newest.group_name,
    }


def _slices_of(entries: Sequence[NewEntry]) -> Iterator[list[NewEntry]]:
    """Yield the entries in slices of _WRITE_RECORDS and about _WRITE_BYTES at most."""
    part: list[NewEntry] = []
    size = 0
    for entry in entries:
        part.append(entry)
        size += len(entry.payload)
        if len(part) == _WRITE_RECORDS or size >= _WRITE_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _turns(
    store: Store, namespace: str, session: str, newest: int | None = None, after: str | None = None
) -> Iterable[TurnRecord]:
    """Yield the turns of a session in a log. Skips records that cannot be decoded or name another session."""
    courtesy = Courtesy()
    for _, record in RecordReader().read(store.read(namespace, session=session, newest=newest, after=after)):
        if isinstance(record, TurnRecord):
            yield record
        courtesy.pause()


def _name_of(record: Any) -> tuple[str, int]:
    return record.writer, record.number
