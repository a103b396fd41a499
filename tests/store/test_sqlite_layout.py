"""Test where the bytes of a payload lie in an SQLite file, and what its write-ahead log leaves."""

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import pytest

from agentspec.cache.store import NewEntry, Retention, SQLiteStore
from agentspec.cache.store.sqlite.file import FRONT, OVERFLOW, PAGE_SIZE, connect, empty_log, enter_wal, padded, pragma
from agentspec.errors import StoreError
from tests.store.helpers import NS


def varint_bytes(value: int) -> int:
    """Return how many bytes SQLite writes for a number."""
    return max(1, -(-value.bit_length() // 7))


def test_every_byte_of_a_payload_lies_on_an_overflow_page() -> None:
    """Bytes in a leaf are copied when rows move, and the copies outlive an erasure.

    The numbers are from https://sqlite.org/fileformat2.html#b_tree_pages.
    """
    usable, least = PAGE_SIZE, (PAGE_SIZE - 12) * 32 // 255 - 23
    choose = random.Random(1)
    for size in chain(range(1100), range(8000, 8200), (choose.randrange(1 << 22) for _ in range(10))):
        payload = b"x" * size
        blob = padded(payload)
        header = 2 + varint_bytes(12 + 2 * len(blob))  # its size, the key's type, the blob's
        row = header + len(blob)
        assert row > usable - 35
        in_leaf = least + (row - least) % (usable - 4)
        in_leaf = in_leaf if in_leaf <= usable - 35 else least
        assert blob[FRONT : FRONT + size] == payload and header + FRONT >= in_leaf
        assert blob.count(0) == len(blob) - size
        assert in_leaf == least and row - in_leaf < size + 4 + OVERFLOW  # whole pages, no more than needed


def test_others_are_waited_for_as_before_once_the_log_was_emptied(tmp_path: Path) -> None:
    """Emptying the log itself must wait only for a moment."""
    with closing(connect(str(tmp_path / "store.db"))) as connection:
        enter_wal(connection)
        patience = pragma(connection, "busy_timeout")
        assert empty_log(connection) and pragma(connection, "busy_timeout") == patience == 5000


@pytest.mark.parametrize(
    ("code", "to_erase", "raises"),
    [
        (sqlite3.SQLITE_BUSY, True, False),
        (sqlite3.SQLITE_LOCKED, True, False),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, True, False),
        (sqlite3.SQLITE_FULL, True, True),
        (sqlite3.SQLITE_FULL, False, False),
    ],
)
def test_only_an_erasure_fails_where_the_disk_keeps_the_log(code: int, to_erase: bool, raises: bool) -> None:
    """If a reader is the reason, it is tried again; without an erasure, the log may stay."""
    error = sqlite3.OperationalError("no")
    error.sqlite_errorcode = code
    connection = Mock()
    connection.execute.side_effect = lambda sql: Mock(fetchone=Mock(side_effect=error))
    try:
        assert not empty_log(connection, to_erase=to_erase)
    except sqlite3.OperationalError:
        assert raises
    else:
        assert not raises


@pytest.mark.parametrize("mark", ["CREATE TABLE theirs (value)", "PRAGMA application_id = 77"])
def test_a_database_of_another_program_keeps_what_its_log_holds_where_it_was(tmp_path: Path, mark: str) -> None:
    """That program was killed, and will recover its log itself."""
    killed = tmp_path / "killed"
    killed.mkdir()
    with closing(connect(str(tmp_path / "theirs.db"))) as connection:
        enter_wal(connection)
        connection.execute(mark)
        assert empty_log(connection)
        connection.execute("PRAGMA user_version = 5")
        for name in ("theirs.db", "theirs.db-wal"):
            shutil.copy(tmp_path / name, killed)
    before = {path.name: path.read_bytes() for path in killed.iterdir()}
    assert before["theirs.db-wal"]
    with pytest.raises(StoreError, match="a database of another program"):
        SQLiteStore(killed / "theirs.db")
    assert {path.name: path.read_bytes() for path in killed.iterdir()} == before


def plans(store: SQLiteStore, call: Callable[[], object]) -> str:
    """Return SQLite's plans of the queries that a call makes."""
    connections = store._connections
    assert connections is not None
    queries: list[str] = []
    for connection in connections:
        connection.set_trace_callback(queries.append)
    call()
    for connection in connections:
        connection.set_trace_callback(None)
    rows = [row for query in queries for row in connections[0].execute(f"EXPLAIN QUERY PLAN {query}")]
    return "\n".join(row[3] for row in rows)


def make_older(path: Path) -> None:
    """Give a file the index of sessions that earlier releases made."""
    with closing(sqlite3.connect(path)) as old:
        old.execute("DROP INDEX IF EXISTS entries_of_sessions")
        old.execute("CREATE INDEX IF NOT EXISTS entries_by_session ON entries (namespace, session, erased)")


@pytest.mark.parametrize("older", [False, True])
def test_a_list_of_sessions_reads_an_index_and_a_session_is_read_by_it(tmp_path: Path, older: bool) -> None:
    """A list of 37,000 sessions took 3 s, because it looked each of their 300,000 entries up."""
    path = tmp_path / "store.db"
    with closing(SQLiteStore(path)) as store:
        store.append(NS, [NewEntry(f"s{number % 3}", b"x" * number) for number in range(9)])
    if older:
        make_older(path)
    with closing(SQLiteStore(path)) as store:
        assert [(usage.session, usage.records, usage.bytes) for usage in store.sessions(NS)] == [
            ("s0", 3, 9),
            ("s1", 3, 12),
            ("s2", 3, 15),
        ]
        listed = plans(store, lambda: store.sessions(NS))
        assert "USING COVERING INDEX entries_of_sessions" in listed and "TEMP B-TREE" not in listed
        read = plans(store, lambda: list(store.read(NS, session="s1", newest=2)))
        assert read.count("entries_of_sessions (namespace=? AND session=? AND erased=? AND sequence>?") == 4
        assert "TEMP B-TREE" not in read


def test_a_file_of_an_earlier_release_gets_the_owners_of_its_logs(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with closing(SQLiteStore(path)) as store:
        store.append("model.a", [NewEntry("s", b"x", owner="me")] * 3)
    with closing(sqlite3.connect(path)) as old:
        assert old.execute("SELECT * FROM owners").fetchall() == [("model.a", "me")]
        old.executescript("DROP TRIGGER log_removed; DROP TABLE owners; DROP INDEX entries_of_erased")
    with closing(SQLiteStore(path)) as store:
        for owner in ("me", "", "you"):
            store.append("model.a", [NewEntry("s", b"x", owner=owner)])
        assert "entries_of_erased" in plans(store, lambda: store.trim(Retention(records=1)))
        while store.trim(Retention(records=0)).more:
            pass
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT * FROM owners").fetchall() == [], "a log that is gone leaves nothing"


def test_a_large_file_of_an_earlier_release_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could write to it while it is indexed: for some 10 s, if it is as large as the default limit."""
    path = tmp_path / "store.db"
    with closing(SQLiteStore(path)) as store:
        store.append(NS, [NewEntry("s", b"x")] * 3)
    make_older(path)
    monkeypatch.setattr("agentspec.cache.store.sqlite.file._MOST_INDEXED", 2)
    with closing(SQLiteStore(path)) as store:
        assert "entries_by_session" in plans(store, lambda: store.sessions(NS))
        assert [usage.records for usage in store.sessions(NS)] == [3]


def test_an_older_file_with_a_damaged_page_is_used_as_it_is(tmp_path: Path) -> None:
    """The index for lists, which is made at the opening, reads all pages. Most sessions can be read all the same."""
    path = tmp_path / "store.db"
    with closing(SQLiteStore(path)) as store:
        store.append(NS, [NewEntry(f"session-{number:<90}", b"x") for number in range(2000)])
    make_older(path)
    with closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page_size,) = file.execute("PRAGMA page_size").fetchone()
    pages = path.read_bytes()
    at = next(n for n in range(2, len(pages) // page_size) if b"session-1000" in pages[n * page_size :][:page_size])
    with path.open("r+b") as broken:
        broken.seek(at * page_size)
        broken.write(bytes(page_size))
    with closing(SQLiteStore(path)) as store:
        assert list(store.read(NS, session=f"session-{7:<90}"))


def test_an_older_file_that_others_write_to_or_that_cannot_grow_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.cache.store.sqlite.file.BUSY_SECONDS", 0.05)
    path = tmp_path / "store.db"
    with closing(SQLiteStore(path)) as store:
        store.append(NS, [NewEntry("s", b"x")] * 3)
        make_older(path)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with closing(SQLiteStore(path)) as second:
                assert [usage.records for usage in second.sessions(NS)] == [3]
