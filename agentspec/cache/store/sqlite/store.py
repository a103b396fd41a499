"""Store records in SQLite: in a file that several processes may share, or in this process's memory.

A file has a write-ahead log with ``synchronous=NORMAL``. Once an append returns, its records survive the death of the
process (kill -9). A power cut or kernel crash can lose the latest records but leaves the file consistent. The file must
not lie on a network file system.

Erased payloads leave no byte behind (file.py). Several engines may follow one file: `PRAGMA data_version`
changes when another connection has written.
"""

import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentspec.cache.store import forks
from agentspec.cache.store.background.courtesy import Courtesy
from agentspec.cache.store.base import (
    SLICE_BYTES,
    Entry,
    Erasure,
    History,
    Losses,
    NewEntry,
    Retention,
    SessionUsage,
    Trimmed,
    Usage,
    check_namespace,
    check_read,
    conflict,
    expected_session,
)
from agentspec.cache.store.codec import encode
from agentspec.cache.store.records import EraseRecord
from agentspec.cache.store.sqlite.entries import (
    cursor_of,
    delete,
    insert,
    last_trimmed,
    newest_of,
    records_held,
    sequence_of,
    trim_slice,
)
from agentspec.cache.store.sqlite.file import (
    BUSY_SECONDS,
    FRONT,
    OPENING,
    PAGE_SIZE,
    close_held,
    connect,
    create_schema,
    empty_log,
    enter_wal,
    pragma,
    prepare_file,
    store_errors,
    transaction,
)
from agentspec.cache.store.sqlite.watch import FileWatch
from agentspec.errors import StoreError, StoreUnavailableError

_ROWS = 64  # entries that a read fetches at once
_FREE_PAGES = 256  # left in the file for the next records
_POLL_SECONDS = 0.01  # between two looks for new entries
_unusable: list[sqlite3.Connection] = []  # of a process that this one was forked off


class _Database:
    """Implement Store on two connections to a database: one writes, one reads, and neither waits for the other.

    A database in memory has one connection for both. name: the database's name in errors.
    """

    def __init__(self, name: str, writer: sqlite3.Connection, reader: sqlite3.Connection) -> None:
        self._name = name
        self._writer: sqlite3.Connection | None = writer
        self._reader: sqlite3.Connection | None = reader
        self._write_lock = threading.Lock()
        self._read_lock = self._write_lock if reader is writer else threading.Lock()
        self._trimmed = False

    def part(self, namespace: str) -> str:
        return ""

    def append(self, namespace: str, entries: Sequence[NewEntry], *, expect: str | None = None) -> list[str]:
        check_namespace(namespace)
        if expect is not None:
            expected, newest = expected_session(entries), sequence_of("expect", expect)
        now = time.time()
        with self._write() as connection, transaction(connection):
            if expect is not None and newest_of(connection, namespace, expected) != newest:
                raise conflict(expected)
            found, courtesy = [], Courtesy()
            for entry in entries:
                found.append(insert(connection, namespace, entry, now))
                courtesy.pause()
            self._make_room(connection)
        return [cursor_of(sequence) for sequence in found]

    def read(
        self,
        namespace: str,
        *,
        session: str | None = None,
        group: str | None = None,
        after: str | None = None,
        newest: int | None = None,
    ) -> Iterator[Entry]:
        check_read(session, group, newest)
        where, values = "namespace = ?", [check_namespace(namespace)]
        if session is not None:
            where, values = "namespace = ? AND session = ? AND erased = 0", [namespace, session]
        elif group is not None:
            where, values = "namespace = ? AND grouped = ?", [namespace, group]
        return self._pages(where, values, sequence_of("after", after), newest)

    def sessions(self, namespace: str) -> list[SessionUsage]:
        check_namespace(namespace)
        query = (
            "SELECT session, count(*), sum(size), max(created) FROM entries WHERE namespace = ? AND erased = 0"
            " GROUP BY session ORDER BY session"
        )
        with self._read() as connection:
            return [SessionUsage(*row) for row in connection.execute(query, (namespace,))]

    def newest(self, namespace: str) -> str:
        check_namespace(namespace)
        with self._read() as connection:
            trimmed = last_trimmed(connection, namespace)  # `history` calls any cursor before this "trimmed"
            query = "SELECT max(sequence) FROM entries WHERE namespace = ?"
            (newest,) = connection.execute(query, (namespace,)).fetchone()
        newest = max(newest or 0, trimmed)
        return cursor_of(newest) if newest else ""

    def wait(self, cursors: Mapping[str, str], timeout: float) -> list[str]:
        places = json.dumps({check_namespace(name): sequence_of("cursors", at) for name, at in cursors.items()})
        query = (
            "SELECT key FROM json_each(?) WHERE EXISTS"
            " (SELECT 1 FROM entries WHERE namespace = key AND sequence > json_each.value)"
        )
        deadline, version = time.monotonic() + timeout, None
        while True:
            with self._read() as connection:
                before, version = version, self._version(connection)
                found = connection.execute(query, (places,)).fetchall() if version != before else []
            if found or (left := deadline - time.monotonic()) <= 0:
                return [name for (name,) in found]
            time.sleep(min(left, _POLL_SECONDS))

    def tombstones(self, namespace: str, *, after: str | None = None) -> dict[str, str]:
        query = (
            "SELECT session, sequence FROM entries WHERE namespace = ? AND sequence > ? AND erased = 1"
            " ORDER BY sequence"
        )
        with self._read() as connection:
            rows = connection.execute(query, (check_namespace(namespace), sequence_of("after", after)))
            return {session: cursor_of(sequence) for session, sequence in rows}

    def history(self, namespace: str, after: str) -> History:
        check_namespace(namespace)
        with self._read() as connection:
            (last,) = connection.execute("SELECT total(seq) FROM sqlite_sequence WHERE name = 'entries'").fetchone()
            trimmed = last_trimmed(connection, namespace)
        cursor = sequence_of("after", after)
        if cursor > last:  # the cursor is of an earlier file
            return "lost"
        return "whole" if cursor >= trimmed else "trimmed"

    def undone_erasures(self, namespace: str, erased: Mapping[str, str]) -> list[str]:
        marks = json.dumps({session: sequence_of("erased", name) for session, name in erased.items()})
        query = (
            "SELECT key FROM json_each(?) WHERE EXISTS (SELECT 1 FROM entries WHERE namespace = ? AND session = key"
            " AND erased = 0 AND sequence < json_each.value)"
        )
        with self._read() as connection:
            return [session for (session,) in connection.execute(query, (marks, check_namespace(namespace)))]

    def namespaces(self, prefix: str = "", *, session: str | None = None) -> list[str]:
        # Each step of the recursion is a search in the index of namespaces, so that a long log costs no more.
        query = (
            "WITH RECURSIVE found(name) AS (SELECT min(namespace) FROM entries WHERE namespace >= ? UNION ALL"
            " SELECT (SELECT min(namespace) FROM entries WHERE namespace > name) FROM found"
            " WHERE substr(name, 1, ?) = ?) SELECT name FROM found WHERE substr(name, 1, ?) = ?"
            " AND (? IS NULL OR EXISTS"
            " (SELECT 1 FROM entries WHERE namespace = name AND session = ? AND erased = 0))"
        )
        with self._read() as connection:
            rows = connection.execute(query, (prefix, len(prefix), prefix, len(prefix), prefix, session, session))
            return [name for (name,) in rows]

    def erase_session(self, namespace: str, session: str, *, mark: bool = True) -> Erasure:
        check_namespace(namespace)
        theirs = "SELECT sequence FROM entries WHERE namespace = ? AND session = ? AND erased = ?"
        with self._write() as connection:
            with transaction(connection):
                removed = delete(connection, (theirs, (namespace, session, 0)))
                marked = connection.execute(theirs, (namespace, session, 1)).fetchone()
                tombstone = marked[0] if marked else None
                if mark:
                    entry = NewEntry(session, encode(EraseRecord(session)))
                    tombstone = insert(connection, namespace, entry, time.time(), erased=True)
                    delete(connection, (f"{theirs} AND sequence < ?", (namespace, session, 1, tombstone)))
            complete = empty_log(connection, to_erase=True)
            return Erasure(removed, complete, None if tombstone is None else cursor_of(tombstone))

    def secret(self) -> bytes:
        query = "SELECT value FROM facts WHERE name = 'secret'"
        with self._read() as connection:
            row = connection.execute(query).fetchone()
        if row is None:  # only now, because a write may wait for other processes' writes
            with self._write() as connection, transaction(connection):
                new = secrets.token_bytes(32)
                connection.execute("INSERT OR IGNORE INTO facts VALUES ('secret', ?)", (new,))
                row = connection.execute(query).fetchone()
        return bytes(row[0])

    def keep_secret(self, secret: bytes) -> None:
        """Do nothing: a file that lost its secret is another file, which is not written to."""

    def swap_secret_id(self, secret_id: str) -> str | None:
        query = "SELECT value FROM facts WHERE name = 'secret id'"
        with self._read() as connection:
            row = connection.execute(query).fetchone()
        if row is None or row[0] != secret_id:  # else nothing is written, and no other writer waited for
            with self._write() as connection, transaction(connection):
                connection.execute("INSERT OR REPLACE INTO facts VALUES ('secret id', ?)", (secret_id,))
        return None if row is None else str(row[0])

    def usage(self) -> Usage:
        with self._read() as connection:
            return Usage(records_held(connection), pragma(connection, "page_count") * PAGE_SIZE)

    def trim(self, retention: Retention) -> Trimmed:
        with self._write() as connection:
            with transaction(connection):
                removed = trim_slice(connection, retention)
            if removed:
                self._trimmed = True
                return Trimmed(removed, True)
            if pragma(connection, "freelist_count") > _FREE_PAGES:
                self._trimmed = True
                # `execute` would stop after the first page, because the statement has rows without columns
                connection.executescript(f"PRAGMA incremental_vacuum({SLICE_BYTES // PAGE_SIZE})")
                return Trimmed(0, True)
            if self._trimmed:
                self._trimmed = not empty_log(connection)  # the file shrinks only when its log is moved into it
            return Trimmed(0, False)

    def losses(self) -> Losses:
        return Losses()  # a damaged file is an error of each call; SQLite loses no record silently

    def ping(self) -> None:
        with self._read() as connection:
            connection.execute("SELECT 1 FROM entries LIMIT 1").fetchall()

    def close(self) -> None:
        with self._write_lock:
            writer, self._writer = self._writer, None
        with self._read_lock:
            reader, self._reader = self._reader, None
        for connection in (reader, writer):
            if connection is not None:
                connection.close()

    def _make_room(self, connection: sqlite3.Connection) -> None:
        """Delete entries beyond the limit, if there is one. Runs in the transaction of an append."""

    def _version(self, connection: sqlite3.Connection) -> int:
        """Return a number that changes when another connection has written. connection: the reader."""
        return pragma(connection, "data_version")

    def _pages(self, where: str, values: list[str], after: int, newest: int | None) -> Iterator[Entry]:
        bounds = (
            f"SELECT min(sequence), max(sequence) FROM (SELECT sequence FROM entries WHERE {where}"
            " AND sequence > ? ORDER BY sequence DESC LIMIT ?)"
        )
        with self._read() as connection:
            arguments = (*values, after, -1 if newest is None else newest)  # -1 means no limit
            low, high = connection.execute(bounds, arguments).fetchone()
        if low is None:
            return
        page = (
            f"SELECT sequence, session, substr(padded, {FRONT + 1}, size), grouped FROM entries JOIN payloads USING"
            f" (sequence) WHERE {where} AND sequence BETWEEN ? AND ? ORDER BY sequence LIMIT {_ROWS}"
        )
        while low <= high:
            with self._read() as connection:
                rows = connection.execute(page, (*values, low, high)).fetchall()
            for sequence, session, payload, group in rows:
                yield Entry(cursor_of(sequence), session, payload, group)
            if len(rows) < _ROWS:
                return
            low = rows[-1][0] + 1

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        if not self._write_lock.acquire(timeout=BUSY_SECONDS):  # others may wait in front of this, each as long
            raise StoreUnavailableError(f"{self._name}: other writes of this process wait or take long")
        try:
            with store_errors(self._name):
                yield self._opened(self._writer)
        finally:
            self._write_lock.release()

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._read_lock, store_errors(self._name):
            yield self._opened(self._reader)

    def _opened(self, connection: sqlite3.Connection | None) -> sqlite3.Connection:
        if connection is None:
            raise StoreError(f"{self._name}: the store is closed")
        return connection


class SQLiteStore(_Database):
    """Implement Store in one file.

    Raises StoreVersionError for a file of another schema version and StoreError for a file of another program, and then
    does not change the file. Raises StoreUnavailableError if the file cannot be made or opened.
    """

    shared = True
    held_bytes = 0

    def __init__(self, path: Path) -> None:
        self._path = path
        writer, reader, self._files = self._open()
        super().__init__(str(path), writer, reader)
        self._inherited = False  # from the process that this one was forked off, so that the file is to be opened anew
        self._locked: list[threading.Lock] = []  # during a fork
        forks.notify(self)

    def _open(self) -> tuple[sqlite3.Connection, sqlite3.Connection, FileWatch]:
        """Return connections that write and read, and the watch of the file. Raises as the constructor does."""
        path = self._path
        with OPENING, store_errors(str(path)):
            prepare_file(path)
            writer = connect(str(path))
            try:
                create_schema(writer, path)
                enter_wal(writer)
                empty_log(writer)  # a process that was killed while it erased may have left text in it
                reader = connect(str(path))
                try:
                    return writer, reader, FileWatch(path.absolute())
                except BaseException:
                    reader.close()
                    raise
            except BaseException:
                writer.close()
                raise

    def before_fork(self) -> None:
        for lock in (self._write_lock, self._read_lock):
            if lock.acquire(timeout=BUSY_SECONDS):
                self._locked.append(lock)

    def after_fork(self, *, in_child: bool) -> None:
        whole = len(self._locked) == 2
        for lock in reversed(self._locked):
            lock.release()
        self._locked = []
        if not in_child or self._writer is None or self._reader is None:
            return
        if whole:  # SQLite must forget that this process had locks
            self._reader.close()
            self._writer.close()
            close_held()
        else:  # another thread of the former process used them for long, so closing them could wait for it
            _unusable.extend((self._reader, self._writer))
            self._write_lock, self._read_lock = threading.Lock(), threading.Lock()
        self._writer = self._reader = None
        self._inherited = whole

    def _reopen(self) -> None:
        """Open the file anew in a forked process. Raises as the constructor does."""
        if self._inherited:
            with self._write_lock, self._read_lock:
                if self._inherited:
                    self._writer, self._reader, self._files = self._open()
                    self._inherited = False

    def close(self) -> None:
        with self._write_lock, self._read_lock:
            self._inherited = False
        if self._writer is None:
            return
        try:
            self._keep_shared_memory()
        except StoreUnavailableError:  # the disk is full; the end of the process closes what would now end it
            return
        super().close()
        with self._write_lock, self._read_lock:
            self._files.close()

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        self._keep_shared_memory()
        with super()._write() as connection:
            self._files.check(connection)
            yield connection
            self._files.note_size()

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        self._keep_shared_memory()
        with super()._read() as connection:
            yield connection

    def _keep_shared_memory(self) -> None:
        """Restore the memory that the log's users share if it was cut short, before a connection looks at it."""
        self._reopen()
        with store_errors(self._name):
            if self._writer is not None and self._files.is_shared_memory_cut():
                with self._write_lock, self._read_lock:
                    if self._writer is not None:
                        self._files.restore_shared_memory()


class MemoryStore(_Database):
    """Implement Store in this process's memory, for tests and for servers that must not write to disk.

    The store deletes its oldest entries beyond ``max_bytes``. held_bytes: memory that it took at the latest append.
    """

    shared = False

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self.held_bytes = 0
        self._max_bytes = max_bytes
        connection = connect(":memory:")
        create_schema(connection, Path(":memory:"))
        super().__init__("memory://", connection, connection)

    def _version(self, connection: sqlite3.Connection) -> int:
        return connection.total_changes  # there is no other connection

    def _make_room(self, connection: sqlite3.Connection) -> None:
        retention = Retention(bytes=self._max_bytes)
        while trim_slice(connection, retention):
            pass
        self.held_bytes = pragma(connection, "page_count") * PAGE_SIZE
