"""The embedded default: one SQLite file, which several processes may share.

Write-ahead log with ``synchronous=NORMAL``: what an append has returned for survives the death of the process at any
moment (kill -9); a power cut or kernel crash can take the last moments with it, never the file's consistency.
Erased sessions are overwritten, in the log as well. The file must not lie on a network file system.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentspec.cache.store.base import Entry, check_namespace, check_newest, format_cursor, parse_cursor
from agentspec.errors import StoreError, StoreUnavailableError, StoreVersionError

APPLICATION_ID = 0x41675370
"""Marks the file as ours (PRAGMA application_id)."""
SCHEMA_VERSION = 1
"""PRAGMA user_version."""

_BUSY_SECONDS = 5.0
_PAGE = 64  # entries a read takes at once
_MAGIC = b"SQLite format 3\x00"

# AUTOINCREMENT: numbers of erased entries are never used again, so cursors stay valid
_SCHEMA = (
    "CREATE TABLE entries (sequence INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL,"
    " session TEXT NOT NULL, payload BLOB NOT NULL)",
    "CREATE INDEX entries_by_session ON entries (namespace, session)",
    "CREATE INDEX entries_by_namespace ON entries (namespace)",
)


class SQLiteStore:
    """A Store in one file. One connection reads and one writes, so neither waits for the other.

    Raises StoreVersionError for a file of another schema version and StoreError for a file that is something else;
    such a file is left as it is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        with self._explained():
            _prepare_file(path)
            self._writer: sqlite3.Connection | None = _connect(path)
            try:
                _create_schema(self._writer, path)
                _enter_wal(self._writer)
                self._reader: sqlite3.Connection | None = _connect(path)
            except BaseException:
                self._writer.close()
                raise

    def append(self, namespace: str, entries: Sequence[tuple[str, bytes]]) -> None:
        check_namespace(namespace)
        rows = [(namespace, session, payload) for session, payload in entries]
        with self._write() as connection:
            connection.executemany("INSERT INTO entries (namespace, session, payload) VALUES (?, ?, ?)", rows)

    def read(
        self,
        namespace: str,
        *,
        session: str | None = None,
        after: str | None = None,
        newest: int | None = None,
    ) -> Iterator[Entry]:
        where, values = "namespace = ?", [check_namespace(namespace)]
        if session is not None:
            where, values = "namespace = ? AND session = ?", [namespace, session]
        return self._pages(where, values, parse_cursor(after), check_newest(newest))

    def sessions(self, namespace: str) -> list[str]:
        check_namespace(namespace)
        with self._read() as connection:
            rows = connection.execute(
                "SELECT DISTINCT session FROM entries WHERE namespace = ? ORDER BY session", (namespace,)
            )
            return [session for (session,) in rows]

    def remove_session(self, namespace: str, session: str) -> int:
        check_namespace(namespace)
        with self._write() as connection:
            removed = connection.execute(
                "DELETE FROM entries WHERE namespace = ? AND session = ?", (namespace, session)
            ).rowcount
        if removed:
            with self._write_lock, self._explained():
                # secure_delete has blanked the pages; this takes the old ones out of the write-ahead log
                self._opened(self._writer).execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return removed

    def ping(self) -> None:
        with self._read() as connection:
            connection.execute("SELECT 1 FROM entries LIMIT 1").fetchall()

    def close(self) -> None:
        with self._write_lock, self._read_lock:
            for connection in (self._reader, self._writer):
                if connection is not None:
                    connection.close()
            self._reader = self._writer = None

    def _pages(self, where: str, values: list[str], after: int, newest: int | None) -> Iterator[Entry]:
        bounds = f"SELECT min(sequence), max(sequence) FROM entries WHERE {where} AND sequence > ?"
        arguments: list[str | int] = [*values, after]
        if newest is not None:
            bounds = (
                f"SELECT min(sequence), max(sequence) FROM (SELECT sequence FROM entries WHERE {where}"
                " AND sequence > ? ORDER BY sequence DESC LIMIT ?)"
            )
            arguments.append(newest)
        with self._read() as connection:
            low, high = connection.execute(bounds, arguments).fetchone()
        if low is None:
            return
        page = (
            f"SELECT sequence, session, payload FROM entries WHERE {where} AND sequence BETWEEN ? AND ?"
            f" ORDER BY sequence LIMIT {_PAGE}"
        )
        while low <= high:
            with self._read() as connection:
                rows = connection.execute(page, (*values, low, high)).fetchall()
            for sequence, session, payload in rows:
                yield Entry(format_cursor(sequence), session, payload)
            if len(rows) < _PAGE:
                return
            low = rows[-1][0] + 1

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._write_lock, self._explained():
            connection = self._opened(self._writer)
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._read_lock, self._explained():
            yield self._opened(self._reader)

    def _opened(self, connection: sqlite3.Connection | None) -> sqlite3.Connection:
        if connection is None:
            raise StoreError(f"{self._path}: the store is closed")
        return connection

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """sqlite3's and the system's errors as ours, with the file's name."""
        try:
            yield
        except (sqlite3.OperationalError, OSError) as error:
            raise StoreUnavailableError(f"{self._path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise StoreError(
                f"{self._path}: {error}; the file may be damaged: move it away to start an empty store"
            ) from error
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: {error}") from error


def _prepare_file(path: Path) -> None:
    """Create the file, readable by its owner alone, or look at the one that is there without opening it as a database.

    The look comes first because SQLite writes to a file, if only to its journals, once it has opened it.
    """
    if path.is_dir():
        raise StoreError(f"{path}: a folder, not a file; name a file in it, such as sqlite:///{path}/agentspec.db")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    with path.open("rb") as file:
        header = file.read(100)
    if not header:
        return
    if len(header) < 100 or not header.startswith(_MAGIC):
        raise _not_ours(path, "not an SQLite database")
    # offsets 60 and 68 of the SQLite file format; ours are there before the file ever has a write-ahead log
    _check_marks(path, int.from_bytes(header[68:72], "big"), int.from_bytes(header[60:64], "big"))


def _check_marks(path: Path, application: int, version: int) -> None:
    if application != APPLICATION_ID:
        raise _not_ours(path, "a database of another program")
    if version != SCHEMA_VERSION:
        raise StoreVersionError(
            f"{path}: store file of schema version {version}, this release reads version {SCHEMA_VERSION};"
            " use the release that wrote it, or name another file"
        )


def _not_ours(path: Path, what: str) -> StoreError:
    return StoreError(f"{path}: {what}, so not a store of agentspec; it was left as it is: name another file")


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA secure_delete = ON")
    return connection


def _create_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Write the schema into an empty file. Under a lock, for another process may have opened the same new file."""
    connection.execute("BEGIN EXCLUSIVE" if _is_empty(connection) else "BEGIN")
    try:
        if _is_empty(connection):
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            for statement in _SCHEMA:
                connection.execute(statement)
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        _check_marks(path, application, version)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _is_empty(connection: sqlite3.Connection) -> bool:
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return bool(tables == 0)


def _enter_wal(connection: sqlite3.Connection) -> None:
    """Switch to the write-ahead log. SQLite answers "locked" at once here, whatever the timeout, so try again."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            break
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    if mode != "wal":
        raise StoreError(f"the file system does not support SQLite's write-ahead log (mode {mode!r}); use another")
