"""Open SQLite files of the store, and lay payloads out in them such that erased ones leave no byte behind.

SQLite's ``secure_delete`` blanks a page that becomes free, but not the copies that stay in the gaps of a page when its
rows move to a neighbour. So every payload is padded such that SQLite keeps all of it on overflow pages, which belong to
one row and never move within a page. The rows that do move hold keys only, of which copies may stay.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from agentspec.cache.store import forks
from agentspec.errors import StoreError, StoreUnavailableError, StoreVersionError
from agentspec.files import open_files_remedy, size_limit, size_remedy

APPLICATION_ID = 0x41675370
"""Mark of agentspec's files (PRAGMA application_id)."""
SCHEMA_VERSION = 2
"""Version of the schema (PRAGMA user_version)."""
PAGE_SIZE = 1024
"""Bytes of a page of the file."""

BESIDE = ("-wal", "-shm")
"""Suffixes of SQLite's files beside a database: the write-ahead log, and the memory that its users share."""
FileId = tuple[int, int]
"""Device and inode of a file. They tell it from a later file of the same name."""

BUSY_SECONDS = 5.0
_POLL_MS = 5  # short, because SQLite's own waits grow to 100 ms, in which busy writers always get the lock first
_CHECKPOINT_SECONDS = 0.2  # longest wait for readers before an erasure counts as incomplete
_WAL_BYTES = 4 << 20
_SHARED_BYTES = 32 << 10  # by which the memory that the log's users share grows
_MAGIC = b"SQLite format 3\x00"

# A table row larger than PAGE_SIZE - 35 keeps its first bytes in the leaf: _LOCAL if what remains fills whole overflow
# pages (https://sqlite.org/fileformat2.html#b_tree_pages). FRONT of them are the padding in front of a payload.
OVERFLOW = PAGE_SIZE - 4
"""Bytes of a payload that an overflow page holds."""
OVERHEAD = OVERFLOW // 2
"""About the bytes that an entry takes beside its payload."""
_LOCAL = (PAGE_SIZE - 12) * 32 // 255 - 23
FRONT = _LOCAL - 3
"""Bytes of padding in front of a payload. A row's header takes 3 bytes or more."""

_SESSIONS = "entries_of_sessions"
# A list of sessions reads this index alone. `sequence` comes before the sizes, so that a session is read in order.
_SESSIONS_INDEX = f"CREATE INDEX {_SESSIONS} ON entries (namespace, session, erased, sequence, size, created)"
_TOMBSTONES = "entries_of_erased"
_TOMBSTONES_INDEX = f"CREATE INDEX {_TOMBSTONES} ON entries (namespace) WHERE erased = 1"
_MOST_INDEXED = 100_000
"""Most entries of an earlier release's file that are indexed for lists of sessions when it is opened: in about .5 s. In
a larger file a list takes seven times as long, but holds up nobody."""

# AUTOINCREMENT never reuses the number of an erased entry, so cursors stay valid
_SCHEMA = (
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL)",
    "CREATE TABLE entries (sequence INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, session TEXT NOT NULL,"
    " grouped TEXT, created REAL NOT NULL, erased INTEGER NOT NULL, size INTEGER NOT NULL)",
    "CREATE TABLE payloads (sequence INTEGER PRIMARY KEY, padded BLOB NOT NULL)",
    _SESSIONS_INDEX,
    _TOMBSTONES_INDEX,
    "CREATE INDEX entries_by_group ON entries (namespace, grouped) WHERE grouped IS NOT NULL",
    "CREATE INDEX entries_by_namespace ON entries (namespace)",
    "CREATE INDEX entries_by_age ON entries (created)",
)

# Made after `entries`, because files of earlier releases lack it. Triggers keep it true, whichever release writes.
# trimmed: the last sequence that retention may have taken of a log. The row of '' holds it for logs without a row.
_LOGS = (
    "CREATE TABLE logs (namespace TEXT PRIMARY KEY, records INTEGER NOT NULL, bytes INTEGER NOT NULL,"
    " trimmed INTEGER NOT NULL) WITHOUT ROWID",
    # Earlier releases removed the oldest entries of all logs, so any log may be trimmed up to the oldest that is left.
    "INSERT INTO logs SELECT '', 0, 0, ifnull((SELECT min(sequence) - 1 FROM entries),"
    " (SELECT total(seq) FROM sqlite_sequence WHERE name = 'entries'))",
    f"INSERT INTO logs SELECT namespace, count(*), sum(size + {OVERHEAD}), (SELECT trimmed FROM logs) FROM entries"
    " GROUP BY namespace",
    "CREATE TRIGGER entry_added AFTER INSERT ON entries BEGIN"
    " INSERT OR IGNORE INTO logs SELECT new.namespace, 0, 0, trimmed FROM logs WHERE namespace = '';"
    f" UPDATE logs SET records = records + 1, bytes = bytes + new.size + {OVERHEAD} WHERE namespace = new.namespace;"
    " END",
    "CREATE TRIGGER entry_removed AFTER DELETE ON entries BEGIN"
    f" UPDATE logs SET records = records - 1, bytes = bytes - old.size - {OVERHEAD} WHERE namespace = old.namespace;"
    # Earlier releases trim without setting `trimmed`. The loss of a session's last tombstone must be noted in any case.
    " UPDATE logs SET trimmed = max(trimmed, old.sequence) WHERE namespace = old.namespace AND old.erased = 1 AND NOT"
    " EXISTS (SELECT 1 FROM entries WHERE namespace = old.namespace AND session = old.session AND erased = 1);"
    " END",
)

# For whom a log counts in retention where its name does not tell. Files of earlier releases lack this table, too.
_OWNERS = (
    "CREATE TABLE owners (namespace TEXT PRIMARY KEY, owner TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TRIGGER log_removed AFTER DELETE ON logs BEGIN DELETE FROM owners WHERE namespace = old.namespace; END",
)


def padded(payload: bytes) -> bytes:
    """Return the payload with zeros around it, so that SQLite puts all of it on overflow pages of its row."""
    spilled = -(-(len(payload) + 4) // OVERFLOW) * OVERFLOW
    # The row is a header and the blob. The header is its own size, the key's type and the blob's type 12 + 2 * length.
    for width in (1, 2, 3, 4, 5):
        length = _LOCAL + spilled - 2 - width
        if 12 + 2 * length < 1 << 7 * width:
            break
    return bytes(FRONT) + payload + bytes(length - FRONT - len(payload))


def empty_log(connection: sqlite3.Connection, *, to_erase: bool = False) -> bool:
    """Move the write-ahead log into the file and empty it. Return False if another process prevents that.

    to_erase: raise other errors, for example of a full disk, because waiting for other processes would not help.
    """
    _set_patience(connection, _CHECKPOINT_SECONDS)
    try:
        (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.OperationalError as error:
        if to_erase and error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise
        return False  # another process writes, or an error does not matter now
    finally:
        _set_patience(connection, BUSY_SECONDS)
    return bool(busy == 0)


def pragma(connection: sqlite3.Connection, name: str) -> int:
    """Return the integer value of a pragma."""
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return int(value)


@contextmanager
def store_errors(name: str) -> Iterator[None]:
    """Raise errors of sqlite3 and of the system as store errors that name the database."""
    try:
        yield
    except (sqlite3.OperationalError, OSError) as error:
        reason: object = error
        code = getattr(error, "sqlite_errorcode", None)
        if isinstance(error, OSError) and str(error.filename).endswith(name):
            reason = error.strerror
        elif code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE):  # the latter: for what processes share
            reason = "database or disk is full; make room on the disk"
        elif code == sqlite3.SQLITE_CANTOPEN and (why := open_files_remedy()):
            reason = why  # SQLite says "unable to open database file" alone
        raise StoreUnavailableError(f"{name}: {reason}{_limit_reached(name, error)}") from error
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{name}: {error}; the file may be damaged: move it away to start an empty store") from error
    except sqlite3.Error as error:
        raise StoreError(f"{name}: {error}") from error


def _limit_reached(name: str, error: Exception) -> str:
    """Return what to do if a database's files are as large as this process may make them; "" otherwise.

    SQLite says "disk I/O error" then, as if the disk were broken.
    """
    limit = size_limit()
    if limit is None or getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_IOERR:
        return ""
    largest = 0
    for suffix in ("", *BESIDE):
        with suppress(OSError):
            largest = max(largest, Path(f"{name}{suffix}").stat().st_size)
    return size_remedy() if largest + _SHARED_BYTES > limit else ""


@contextmanager
def transaction(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """Run the body in a transaction, undone if it raises."""
    try:
        _begin(connection, kind)
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _begin(connection: sqlite3.Connection, kind: str) -> None:
    deadline = time.monotonic() + BUSY_SECONDS
    _set_patience(connection, _POLL_MS / 1000)
    try:
        while True:
            try:
                connection.execute(f"BEGIN {kind}")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
    finally:
        _set_patience(connection, BUSY_SECONDS)


def _set_patience(connection: sqlite3.Connection, seconds: float) -> None:
    """Set how long SQLite waits for locks of other processes."""
    connection.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")


OPENING = threading.RLock()
"""Held while a store opens its connections, and while a descriptor of a database's file is closed.

A process that closes any descriptor of a file drops all locks that it has on the file, also those of SQLite
(https://sqlite.org/howtocorrupt.html). The next process to end would take itself for the last user, and remove the log.
"""
forks.hold(OPENING)
_held: dict[FileId, list[int]] = {}  # by file: its descriptor, and how many users that has


def file_id(status: os.stat_result) -> FileId:
    """Return the id of the file that was looked at."""
    return status.st_dev, status.st_ino


def hold(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return the descriptor by which this process reads a database's file, one for all stores. Raises OSError."""
    with OPENING:
        found = _held.get(file_id(path.stat()))
        if found is None:
            descriptor = os.open(path, flags)
            found = _held.setdefault(file_id(os.fstat(descriptor)), [descriptor, 0])
        found[1] += 1
        return found[0]


def let_go(descriptor: int) -> None:
    """Close the descriptor if no other store of this process uses it. Call this when the connections are closed."""
    with OPENING:
        file = file_id(os.fstat(descriptor))
        _held[file][1] -= 1
        if not _held[file][1]:
            del _held[file]
            os.close(descriptor)


def close_held() -> None:
    """Close all descriptors of databases' files. For a forked process, whose stores have closed their connections."""
    with OPENING:
        for descriptor, _ in _held.values():
            os.close(descriptor)
        _held.clear()


def prepare_file(path: Path) -> None:
    """Create the file and its folder, readable by the owner only, or check the header of an existing file.

    The check does not open the file as a database, because SQLite would then write to the files beside it at least.
    OPENING must be held. Raises StoreError, StoreVersionError, StoreUnavailableError or OSError.
    """
    if path.is_dir():
        raise StoreError(f"{path}: a folder, not a file; name a file in it, such as sqlite:///{path}/agentspec.db")
    if path.exists() and not path.is_file():  # opening a pipe would wait for ever
        raise StoreError(f"{path}: a device, pipe or socket, not a file; name another file")
    if not path.exists():
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            why = f"the folder {path.parent} cannot be made: {error.strerror}"
            raise StoreUnavailableError(f"{path}: {why}; name another file") from error
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    descriptor = hold(path)
    try:
        header = os.pread(descriptor, 100, 0)
    finally:
        let_go(descriptor)
    if not header:
        return
    if len(header) < 100 or not header.startswith(_MAGIC):
        raise _not_ours(path, "not an SQLite database")
    # SQLite's file format has these numbers at these offsets. They are written before the write-ahead log exists.
    version, application, schema = (int.from_bytes(header[at : at + 4], "big") for at in (60, 68, 40))
    if application or schema:  # otherwise no table was ever made, and another process may be about to make them
        _check_marks(path, application, version)


def _check_marks(path: Path, application: int, version: int) -> None:
    if application != APPLICATION_ID:
        raise _not_ours(path, "a database of another program")
    if version < SCHEMA_VERSION:
        raise StoreVersionError(
            f"{path}: store file of schema version {version}, this release reads version {SCHEMA_VERSION};"
            f" convert it with: agentspec sessions convert sqlite:///{path} --model MODEL"
        )
    if version > SCHEMA_VERSION:
        raise StoreVersionError(
            f"{path}: store file of schema version {version}, this release reads version {SCHEMA_VERSION};"
            " use the release that wrote it, or name another file"
        )


def _not_ours(path: Path, what: str) -> StoreError:
    return StoreError(f"{path}: {what}, so not a store of agentspec; it was left as it is: name another file")


def connect(database: str) -> sqlite3.Connection:
    """Open a connection that any thread may use, but only one thread at a time."""
    connection = sqlite3.connect(database, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    for setting in (
        "synchronous = NORMAL",
        "secure_delete = ON",
        "temp_store = MEMORY",
        f"wal_autocheckpoint = {_WAL_BYTES // PAGE_SIZE}",
        f"journal_size_limit = {_WAL_BYTES}",
    ):
        connection.execute(f"PRAGMA {setting}").fetchall()
    return connection


def create_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Write the schema into an empty file, under a lock because another process may have opened the same file."""
    if _is_empty(connection):  # a file with tables keeps the two settings that it has
        connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    with transaction(connection, "EXCLUSIVE" if _is_empty(connection) else ""):
        if _is_empty(connection):
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            for statement in _SCHEMA:
                connection.execute(statement)
        application, version = pragma(connection, "application_id"), pragma(connection, "user_version")
        _check_marks(path, application, version)
    _add(connection, "logs", _LOGS)
    _add(connection, "owners", _OWNERS)
    (records,) = connection.execute("SELECT total(records) FROM logs").fetchone()
    with suppress(sqlite3.DatabaseError):  # as on a full disk, or behind a damaged page; they only make calls faster
        _add(connection, _TOMBSTONES, (_TOMBSTONES_INDEX,))
        if records <= _MOST_INDEXED:
            _add(connection, _SESSIONS, (_SESSIONS_INDEX, "DROP INDEX IF EXISTS entries_by_session"))


def _add(connection: sqlite3.Connection, name: str, statements: Sequence[str]) -> None:
    """Run the statements that add a table or index to a file of an earlier release, if it lacks that."""
    if not _has(connection, name):
        with transaction(connection):
            for statement in () if _has(connection, name) else statements:
                connection.execute(statement)


def _has(connection: sqlite3.Connection, name: str) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)).fetchone() is not None


def _is_empty(connection: sqlite3.Connection) -> bool:
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return bool(tables == 0)


def enter_wal(connection: sqlite3.Connection) -> None:
    """Switch to the write-ahead log. Retries, because here SQLite answers "locked" without waiting."""
    deadline = time.monotonic() + BUSY_SECONDS
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
