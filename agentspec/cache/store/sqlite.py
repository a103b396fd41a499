"""Store records in SQLite: in a file that several processes may share, or in this process's memory.

A file has a write-ahead log with ``synchronous=NORMAL``. Once an append returns, its records survive the death of the
process (kill -9). A power cut or kernel crash can lose the latest records but leaves the file consistent. Erased
sessions are overwritten, in the log as well. The file must not lie on a network file system.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentspec.cache.store.base import Entry, bad_cursor, check_namespace, check_newest
from agentspec.errors import StoreError, StoreUnavailableError, StoreVersionError

APPLICATION_ID = 0x41675370
"""Mark of agentspec's files (PRAGMA application_id)."""
SCHEMA_VERSION = 1
"""Version of the schema (PRAGMA user_version)."""

_BUSY_SECONDS = 5.0
_PAGE = 64  # entries that a read takes at once
_MAGIC = b"SQLite format 3\x00"

# AUTOINCREMENT never reuses the number of an erased entry, so cursors stay valid
_SCHEMA = (
    "CREATE TABLE entries (sequence INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL,"
    " session TEXT NOT NULL, payload BLOB NOT NULL)",
    "CREATE INDEX entries_by_session ON entries (namespace, session)",
    "CREATE INDEX entries_by_namespace ON entries (namespace)",
)


class _Database:
    """Implement Store on two connections to a database: one writes, one reads, and neither waits for the other.

    name: the database as errors name it.
    """

    def __init__(self, name: str, writer: sqlite3.Connection, reader: sqlite3.Connection) -> None:
        self._name = name
        self._writer: sqlite3.Connection | None = writer
        self._reader: sqlite3.Connection | None = reader
        self._write_lock = threading.Lock()
        self._read_lock = self._write_lock if reader is writer else threading.Lock()

    def append(self, namespace: str, entries: Sequence[tuple[str, bytes]]) -> None:
        check_namespace(namespace)
        rows = [(namespace, session, payload) for session, payload in entries]
        with self._write() as connection, _transaction(connection):
            connection.executemany("INSERT INTO entries (namespace, session, payload) VALUES (?, ?, ?)", rows)
            self._make_room(connection)

    def read(
        self, namespace: str, *, session: str | None = None, after: str | None = None, newest: int | None = None
    ) -> Iterator[Entry]:
        where, values = "namespace = ?", [check_namespace(namespace)]
        if session is not None:
            where, values = "namespace = ? AND session = ?", [namespace, session]
        return self._pages(where, values, _parse_cursor(after), check_newest(newest))

    def sessions(self, namespace: str) -> list[str]:
        check_namespace(namespace)
        with self._read() as connection:
            query = "SELECT DISTINCT session FROM entries WHERE namespace = ? ORDER BY session"
            return [session for (session,) in connection.execute(query, (namespace,))]

    def remove_session(self, namespace: str, session: str) -> int:
        check_namespace(namespace)
        with self._write() as connection:
            with _transaction(connection):
                removed = connection.execute(
                    "DELETE FROM entries WHERE namespace = ? AND session = ?", (namespace, session)
                ).rowcount
            if removed:  # removes what secure_delete has blanked from the write-ahead log too
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return removed

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
            f"SELECT sequence, session, payload FROM entries WHERE {where} AND sequence BETWEEN ? AND ?"
            f" ORDER BY sequence LIMIT {_PAGE}"
        )
        while low <= high:
            with self._read() as connection:
                rows = connection.execute(page, (*values, low, high)).fetchall()
            for sequence, session, payload in rows:
                yield Entry(f"{sequence:020d}", session, payload)  # padded, so that string order is numeric order
            if len(rows) < _PAGE:
                return
            low = rows[-1][0] + 1

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._write_lock, _store_errors(self._name):
            yield self._opened(self._writer)

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._read_lock, _store_errors(self._name):
            yield self._opened(self._reader)

    def _opened(self, connection: sqlite3.Connection | None) -> sqlite3.Connection:
        if connection is None:
            raise StoreError(f"{self._name}: the store is closed")
        return connection


class SQLiteStore(_Database):
    """Implement Store in one file.

    Raises StoreVersionError for a file of another schema version and StoreError for a file of another program. It does
    not change such a file.
    """

    def __init__(self, path: Path) -> None:
        with _store_errors(str(path)):
            _prepare_file(path)
            writer = _connect(str(path))
            try:
                _create_schema(writer, path)
                _enter_wal(writer)
                super().__init__(str(path), writer, _connect(str(path)))
            except BaseException:
                writer.close()
                raise


class MemoryStore(_Database):
    """Implement Store in this process's memory, for tests and for servers that must not write.

    It deletes the oldest entries beyond ``max_bytes``.
    """

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self._max_bytes = max_bytes
        connection = _connect(":memory:")
        _create_schema(connection, Path(":memory:"))
        super().__init__("memory://", connection, connection)

    def _make_room(self, connection: sqlite3.Connection) -> None:
        (page_size,) = connection.execute("PRAGMA page_size").fetchone()
        while True:
            (pages,) = connection.execute("PRAGMA page_count").fetchone()
            (free,) = connection.execute("PRAGMA freelist_count").fetchone()
            if (pages - free) * page_size <= self._max_bytes:
                return
            oldest = "DELETE FROM entries WHERE sequence = (SELECT min(sequence) FROM entries)"
            if connection.execute(oldest).rowcount == 0:
                return


@contextmanager
def _store_errors(name: str) -> Iterator[None]:
    """Raise errors of sqlite3 and of the system as store errors that name the database."""
    try:
        yield
    except (sqlite3.OperationalError, OSError) as error:
        raise StoreUnavailableError(f"{name}: {error}") from error
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{name}: {error}; the file may be damaged: move it away to start an empty store") from error
    except sqlite3.Error as error:
        raise StoreError(f"{name}: {error}") from error


@contextmanager
def _transaction(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _parse_cursor(cursor: str | None) -> int:
    """Return the row number of ``cursor``, or 0 for None, which is before every row."""
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdigit()):
        raise bad_cursor(cursor)
    return int(cursor)


def _prepare_file(path: Path) -> None:
    """Create the file and its folder, readable by the owner only, or check the header of an existing file.

    The check does not open the file as a database, because SQLite would then write to its journals at least.
    """
    if path.is_dir():
        raise StoreError(f"{path}: a folder, not a file; name a file in it, such as sqlite:///{path}/agentspec.db")
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    with path.open("rb") as file:
        header = file.read(100)
    if not header:
        return
    if len(header) < 100 or not header.startswith(_MAGIC):
        raise _not_ours(path, "not an SQLite database")
    # SQLite's file format has both numbers at these offsets. They are written before the write-ahead log exists.
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


def _connect(database: str) -> sqlite3.Connection:
    connection = sqlite3.connect(database, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA secure_delete = ON")
    return connection


def _create_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Write the schema into an empty file, under a lock because another process may have opened the same file."""
    with _transaction(connection, "EXCLUSIVE" if _is_empty(connection) else ""):
        if _is_empty(connection):
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            for statement in _SCHEMA:
                connection.execute(statement)
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        _check_marks(path, application, version)


def _is_empty(connection: sqlite3.Connection) -> bool:
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return bool(tables == 0)


def _enter_wal(connection: sqlite3.Connection) -> None:
    """Switch to the write-ahead log. Retries, because here SQLite answers "locked" without waiting."""
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
