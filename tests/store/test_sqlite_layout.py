"""Test where the bytes of a payload lie in an SQLite file, and what its write-ahead log leaves."""

import random
import shutil
import sqlite3
from contextlib import closing
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import pytest

from agentspec.cache.store import SQLiteStore
from agentspec.cache.store.sqlite.file import FRONT, OVERFLOW, PAGE_SIZE, connect, empty_log, enter_wal, padded, pragma
from agentspec.errors import StoreError


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
