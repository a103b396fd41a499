"""Read and write the logs of an SQLite database, whichever it is: `store.SQLiteStore`, `store.MemoryStore`."""

import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

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
    set_owner,
    trim_slice,
)
from agentspec.cache.store.sqlite.file import (
    BUSY_SECONDS,
    FRONT,
    PAGE_SIZE,
    empty_log,
    pragma,
    store_errors,
    transaction,
)
from agentspec.errors import StoreError, StoreUnavailableError

_ROWS = 64  # entries that a read fetches at once
_FREE_PAGES = 256  # left in the file for the next records
_POLL_SECONDS = 0.01  # between two looks for new entries
_abandoned: list[sqlite3.Connection] = []  # left open, because another thread was in the middle of a call


class Connections(NamedTuple):
    """Hold the connections to a database. None waits for another, but they may be one and the same.

    long_reader: makes the reads that take long, so that `wait` and short reads go on meanwhile.
    """

    writer: sqlite3.Connection
    reader: sqlite3.Connection
    long_reader: sqlite3.Connection


class Database:
    """Implement Store on the connections to a database.

    name: the database's name in errors.
    """

    def __init__(self, name: str, connections: Connections) -> None:
        self._name = name
        self._trimmed = False
        self._locked: list[threading.Lock] = []  # during a fork
        self._connections: Connections | None = connections  # None: the store is closed, or forked and not reopened
        self._make_locks(single=connections.reader is connections.writer)

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
            if owner := next((entry.owner for entry in entries if entry.owner), ""):
                set_owner(connection, namespace, owner)
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
        with self._read(long=True) as connection:
            rows = connection.execute(query, (namespace,)).fetchall()
        return [SessionUsage(*row) for row in rows]

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
        with self._read(long=after is None) as connection:
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
        self._close_connections()

    def before_fork(self) -> None:
        self._locked = self._lock_all()

    def after_fork(self, *, in_child: bool) -> None:
        whole = len(self._locked) == len(self._locks)
        for lock in self._locked:
            lock.release()
        self._locked = []
        if in_child and self._connections is not None:
            self._begin_anew(whole)

    def _begin_anew(self, whole: bool) -> None:
        """Begin anew in a forked process. whole: no thread of the former process was in the middle of a call."""
        if not whole:
            _abandoned.extend(self._forget_connections())
            self._make_locks(single=len(self._locks) == 1)

    def _close_connections(self) -> bool:
        """Close the connections. Return False if another thread's call takes too long, so that they stay open."""
        try:
            with self._alone():
                connections = self._forget_connections()
        except StoreUnavailableError:
            _abandoned.extend(self._forget_connections())
            return False
        for connection in connections:
            connection.close()
        return True

    def _forget_connections(self) -> list[sqlite3.Connection]:
        """Let later calls find the store closed, and return its connections, the writer last."""
        held, self._connections = self._connections, None
        return list(dict.fromkeys(reversed(held or ())))

    def _make_locks(self, *, single: bool) -> None:
        """Make the locks of the connections. single: the three are one."""
        self._write_lock = threading.Lock()
        self._read_lock, self._long_lock = (self._write_lock if single else threading.Lock() for _ in range(2))
        self._locks = list(dict.fromkeys((self._write_lock, self._read_lock, self._long_lock)))

    def _lock_all(self) -> list[threading.Lock]:
        """Acquire the locks that can be had within BUSY_SECONDS, and return them."""
        until = time.monotonic() + BUSY_SECONDS
        return [lock for lock in self._locks if lock.acquire(timeout=max(0.0, until - time.monotonic()))]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let no other thread use a connection. Raises StoreUnavailableError if one does so for BUSY_SECONDS."""
        held = self._lock_all()
        try:
            if len(held) < len(self._locks):
                raise StoreUnavailableError(f"{self._name}: other calls of this process wait or take long")
            yield
        finally:
            for lock in held:
                lock.release()

    def _make_room(self, connection: sqlite3.Connection) -> None:
        """Delete entries beyond the limit, if there is one. Runs in the transaction of an append."""

    def _version(self, connection: sqlite3.Connection) -> int:
        """Return a number that changes when another connection has written. connection: the reader."""
        return pragma(connection, "data_version")

    def _pages(self, where: str, values: list[str], after: int, newest: int | None) -> Iterator[Entry]:
        if newest == 0:
            return
        rows, given = f"FROM entries WHERE {where} AND sequence > ?", (*values, after)
        first = (
            "NULL"
            if newest is None
            else f"SELECT sequence {rows} AND erased = 0 ORDER BY sequence DESC LIMIT 1 OFFSET ?"
        )
        bounds = f"SELECT coalesce(({first}), (SELECT min(sequence) {rows})), (SELECT max(sequence) {rows})"
        arguments = (*(() if newest is None else (*given, newest - 1)), *given, *given)
        with self._read() as connection:  # one query, because others write meanwhile
            low, high = connection.execute(bounds, arguments).fetchone()
        if low is None:
            return
        page = (
            f"SELECT sequence, session, substr(padded, {FRONT + 1}, size), grouped FROM entries JOIN payloads USING"
            f" (sequence) WHERE {where} AND sequence BETWEEN ? AND ? ORDER BY sequence LIMIT {_ROWS}"
        )
        while low <= high:
            with self._read() as connection:
                found = connection.execute(page, (*values, low, high)).fetchall()
            for sequence, session, payload, group in found:
                yield Entry(cursor_of(sequence), session, payload, group)
            if len(found) < _ROWS:
                return
            low = found[-1][0] + 1

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        if not self._write_lock.acquire(timeout=BUSY_SECONDS):  # others may wait in front of this, each as long
            raise StoreUnavailableError(f"{self._name}: other writes of this process wait or take long")
        try:
            with store_errors(self._name):
                yield self._opened().writer
        finally:
            self._write_lock.release()

    @contextmanager
    def _read(self, *, long: bool = False) -> Iterator[sqlite3.Connection]:
        """Yield a connection that reads. long: others must not wait for what it does."""
        with self._long_lock if long else self._read_lock, store_errors(self._name):
            yield self._opened().long_reader if long else self._opened().reader

    def _opened(self) -> Connections:
        if self._connections is None:
            raise StoreError(f"{self._name}: the store is closed")
        return self._connections
