"""Store records in SQLite: in a file that several processes may share, or in this process's memory.

A file has a write-ahead log with ``synchronous=NORMAL``. Once an append returns, its records survive the death of the
process (kill -9). A power cut or kernel crash can lose the latest records but leaves the file consistent. The file must
not lie on a network file system.

Erased payloads leave no byte behind. SQLite's ``secure_delete`` blanks a page that becomes free, but not the copies
that stay in the gaps of a page when its rows move to a neighbour. So every payload is padded such that SQLite keeps all
of it on overflow pages, which belong to one row and never move within a page. The rows that do move hold keys only.
"""

import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentspec.cache.store.base import (
    Entry,
    Erasure,
    NewEntry,
    Retention,
    SessionUsage,
    Trimmed,
    Usage,
    bad_cursor,
    check_namespace,
    check_read,
    conflict,
    expected_session,
)
from agentspec.cache.store.breaker import Courtesy
from agentspec.cache.store.records import EraseRecord, encode
from agentspec.errors import StoreError, StoreUnavailableError, StoreVersionError

APPLICATION_ID = 0x41675370
"""Mark of agentspec's files (PRAGMA application_id)."""
SCHEMA_VERSION = 2
"""Version of the schema (PRAGMA user_version)."""

_BUSY_SECONDS = 5.0
_CHECKPOINT_SECONDS = 0.2  # wait for readers before an erasure counts as incomplete
_ROWS = 64  # entries that a read takes at once
_MAGIC = b"SQLite format 3\x00"

_SLICE_ENTRIES = 256
_SLICE_BYTES = 1 << 20
_PAGE_SIZE = 1024
_FREE_PAGES = 256  # left in the file for the next records
_WAL_BYTES = 4 << 20

# A table row larger than _PAGE_SIZE - 35 keeps its first bytes in the leaf: _LOCAL if what remains fills whole overflow
# pages (https://sqlite.org/fileformat2.html#b_tree_pages). _FRONT of them are the padding in front of a payload.
_OVERFLOW = _PAGE_SIZE - 4
_LOCAL = (_PAGE_SIZE - 12) * 32 // 255 - 23
_FRONT = _LOCAL - 3  # a row's header takes 3 bytes or more

# AUTOINCREMENT never reuses the number of an erased entry, so cursors stay valid
_SCHEMA = (
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL)",
    "CREATE TABLE entries (sequence INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, session TEXT NOT NULL,"
    " grouped TEXT, created REAL NOT NULL, erased INTEGER NOT NULL, size INTEGER NOT NULL)",
    "CREATE TABLE payloads (sequence INTEGER PRIMARY KEY, padded BLOB NOT NULL)",
    "CREATE INDEX entries_by_session ON entries (namespace, session, erased)",
    "CREATE INDEX entries_by_group ON entries (namespace, grouped) WHERE grouped IS NOT NULL",
    "CREATE INDEX entries_by_namespace ON entries (namespace)",
    "CREATE INDEX entries_by_age ON entries (created)",
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
        self._trimmed = False

    def append(self, namespace: str, entries: Sequence[NewEntry], *, expect: str | None = None) -> list[str]:
        check_namespace(namespace)
        if expect is not None:
            expected, newest = expected_session(entries), _parse_cursor("expect", expect)
        now = time.time()
        with self._write() as connection, _transaction(connection):
            if expect is not None and _newest(connection, namespace, expected) != newest:
                raise conflict(expected)
            found, courtesy = [], Courtesy()
            for entry in entries:
                found.append(_insert(connection, namespace, entry, now))
                courtesy.pause()
            self._make_room(connection)
        return [_cursor(sequence) for sequence in found]

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
        return self._pages(where, values, _parse_cursor("after", after), newest)

    def sessions(self, namespace: str) -> list[SessionUsage]:
        check_namespace(namespace)
        query = (
            "SELECT session, count(*), sum(size), max(created) FROM entries WHERE namespace = ? AND erased = 0"
            " GROUP BY session ORDER BY session"
        )
        with self._read() as connection:
            return [SessionUsage(*row) for row in connection.execute(query, (namespace,))]

    def erase_session(self, namespace: str, session: str, *, mark: bool = True) -> Erasure:
        check_namespace(namespace)
        theirs = "SELECT sequence FROM entries WHERE namespace = ? AND session = ? AND erased = ?"
        with self._write() as connection:
            with _transaction(connection):
                removed = _delete(connection, theirs, (namespace, session, 0))
                marked = connection.execute(theirs, (namespace, session, 1)).fetchone() is not None
                if mark and (removed or not marked):
                    _delete(connection, theirs, (namespace, session, 1))
                    payload = encode(EraseRecord(session))
                    _insert(connection, namespace, NewEntry(session, payload), time.time(), erased=True)
            return Erasure(removed, _empty_log(connection))

    def secret(self) -> bytes:
        with self._write() as connection, _transaction(connection):
            new = secrets.token_bytes(32)
            connection.execute("INSERT OR IGNORE INTO facts VALUES ('secret', ?)", (new,))
            (secret,) = connection.execute("SELECT value FROM facts WHERE name = 'secret'").fetchone()
        return bytes(secret)

    def usage(self) -> Usage:
        with self._read() as connection:
            (records,) = connection.execute("SELECT count(*) FROM entries").fetchone()
            return Usage(records, _pragma(connection, "page_count") * _PAGE_SIZE)

    def trim(self, retention: Retention) -> Trimmed:
        with self._write() as connection:
            with _transaction(connection):
                query = _oldest(connection, retention)
                removed = _delete(connection, *query) if query else 0
            if removed:
                self._trimmed = True
                return Trimmed(removed, True)
            if _pragma(connection, "freelist_count") > _FREE_PAGES:
                self._trimmed = True
                # `execute` would stop after the first page, because the statement has rows without columns
                connection.executescript(f"PRAGMA incremental_vacuum({_SLICE_BYTES // _PAGE_SIZE})")
                return Trimmed(0, True)
            if self._trimmed:
                self._trimmed = not _empty_log(connection)  # only a checkpoint makes the file smaller
            return Trimmed(0, False)

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
            f"SELECT sequence, session, substr(padded, {_FRONT + 1}, size), grouped FROM entries JOIN payloads USING"
            f" (sequence) WHERE {where} AND sequence BETWEEN ? AND ? ORDER BY sequence LIMIT {_ROWS}"
        )
        while low <= high:
            with self._read() as connection:
                rows = connection.execute(page, (*values, low, high)).fetchall()
            for sequence, session, payload, group in rows:
                yield Entry(_cursor(sequence), session, payload, group)
            if len(rows) < _ROWS:
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
                _empty_log(writer)  # of what a process left in it that was killed while it erased or appended
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
        retention = Retention(bytes=self._max_bytes)
        while query := _oldest(connection, retention):
            if _delete(connection, *query) == 0:
                return


_Query = tuple[str, tuple[str | int | float, ...]]


def _insert(
    connection: sqlite3.Connection, namespace: str, entry: NewEntry, created: float, *, erased: bool = False
) -> int:
    sequence = connection.execute(
        "INSERT INTO entries (namespace, session, grouped, created, erased, size) VALUES (?, ?, ?, ?, ?, ?)",
        (namespace, entry.session, entry.group, created, erased, len(entry.payload)),
    ).lastrowid
    assert sequence is not None
    connection.execute("INSERT INTO payloads VALUES (?, ?)", (sequence, _padded(entry.payload)))
    return sequence


def _padded(payload: bytes) -> bytes:
    """Return the payload with zeros around it, so that all of it lies on overflow pages of its row."""
    spilled = -(-(len(payload) + 4) // _OVERFLOW) * _OVERFLOW
    # The row is a header and the blob. The header is its own size, the key's type and the blob's type 12 + 2 * length.
    for width in (1, 2, 3, 4, 5):
        length = _LOCAL + spilled - 2 - width
        if 12 + 2 * length < 1 << 7 * width:
            break
    return bytes(_FRONT) + payload + bytes(length - _FRONT - len(payload))


def _delete(connection: sqlite3.Connection, query: str, values: tuple[str | int | float, ...]) -> int:
    """Delete the entries whose sequences the query selects. Return their number."""
    connection.execute(f"DELETE FROM payloads WHERE sequence IN ({query})", values)
    return connection.execute(f"DELETE FROM entries WHERE sequence IN ({query})", values).rowcount


def _oldest(connection: sqlite3.Connection, retention: Retention) -> _Query | None:
    """Return the query of a slice of entries beyond the limits, or None if all are within."""
    if retention.days is not None:
        cutoff = time.time() - retention.days * 86_400
        if connection.execute("SELECT 1 FROM entries WHERE created < ? LIMIT 1", (cutoff,)).fetchone():
            return "SELECT sequence FROM entries WHERE created < ? ORDER BY created LIMIT ?", (cutoff, _SLICE_ENTRIES)
    count = 0
    if retention.records is not None:
        (held,) = connection.execute("SELECT count(*) FROM entries").fetchone()
        count = held - retention.records
    if retention.bytes is not None and count < _SLICE_ENTRIES:
        used = (_pragma(connection, "page_count") - _pragma(connection, "freelist_count")) * _PAGE_SIZE
        if used > retention.bytes:
            count = max(count, _entries_of(connection, min(used - retention.bytes, _SLICE_BYTES)))
    if count <= 0:
        return None
    return "SELECT sequence FROM entries ORDER BY sequence LIMIT ?", (min(count, _SLICE_ENTRIES),)


def _entries_of(connection: sqlite3.Connection, size: int) -> int:
    """Return how many of the oldest entries hold about this many bytes; at least 1."""
    count = 0
    for (held,) in connection.execute("SELECT size FROM entries ORDER BY sequence LIMIT ?", (_SLICE_ENTRIES,)):
        count += 1
        size -= held + _OVERFLOW // 2
        if size <= 0:
            break
    return max(count, 1)


def _newest(connection: sqlite3.Connection, namespace: str, session: str) -> int:
    """Return the sequence of a session's newest entry; 0 if it has none."""
    query = "SELECT max(sequence) FROM entries WHERE namespace = ? AND session = ? AND erased = 0"
    (newest,) = connection.execute(query, (namespace, session)).fetchone()
    return newest or 0


def _empty_log(connection: sqlite3.Connection) -> bool:
    """Move the write-ahead log into the file and cut it to nothing. Return False if a reader prevents that."""
    connection.execute(f"PRAGMA busy_timeout = {int(_CHECKPOINT_SECONDS * 1000)}")
    try:
        (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.OperationalError:  # another process writes
        return False
    finally:
        connection.execute(f"PRAGMA busy_timeout = {int(_BUSY_SECONDS * 1000)}")
    return bool(busy == 0)


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return int(value)


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


def _cursor(sequence: int) -> str:
    return f"{sequence:020d}"  # padded, so that string order is numeric order


def _parse_cursor(name: str, cursor: str | None) -> int:
    """Return the row number of a cursor, or 0 for none, which is before every row."""
    if not cursor:
        return 0
    if not (cursor.isascii() and cursor.isdigit()):
        raise bad_cursor(name, cursor)
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
    # SQLite's file format has these numbers at these offsets. They are written before the write-ahead log exists.
    version, application, schema = (int.from_bytes(header[at : at + 4], "big") for at in (60, 68, 40))
    if application or schema:  # otherwise no table was ever made, and another process may be about to make ours
        _check_marks(path, application, version)


def _check_marks(path: Path, application: int, version: int) -> None:
    if application != APPLICATION_ID:
        raise _not_ours(path, "a database of another program")
    if version < SCHEMA_VERSION:
        raise StoreVersionError(
            f"{path}: store file of schema version {version}, this release reads version {SCHEMA_VERSION};"
            f" convert it with: agentspec sessions convert sqlite:///{path}"
        )
    if version > SCHEMA_VERSION:
        raise StoreVersionError(
            f"{path}: store file of schema version {version}, this release reads version {SCHEMA_VERSION};"
            " use the release that wrote it, or name another file"
        )


def _not_ours(path: Path, what: str) -> StoreError:
    return StoreError(f"{path}: {what}, so not a store of agentspec; it was left as it is: name another file")


def _connect(database: str) -> sqlite3.Connection:
    connection = sqlite3.connect(database, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    for setting in (
        "synchronous = NORMAL",
        "secure_delete = ON",
        "temp_store = MEMORY",
        f"wal_autocheckpoint = {_WAL_BYTES // _PAGE_SIZE}",
        f"journal_size_limit = {_WAL_BYTES}",
    ):
        connection.execute(f"PRAGMA {setting}").fetchall()
    return connection


def _create_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Write the schema into an empty file, under a lock because another process may have opened the same file."""
    if _is_empty(connection):  # a file with tables keeps the two settings that it has
        connection.execute(f"PRAGMA page_size = {_PAGE_SIZE}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    with _transaction(connection, "EXCLUSIVE" if _is_empty(connection) else ""):
        if _is_empty(connection):
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            for statement in _SCHEMA:
                connection.execute(statement)
        application, version = _pragma(connection, "application_id"), _pragma(connection, "user_version")
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
