"""The SQLite file: what it is, what it refuses, what happens to a damaged one, and several processes at it."""

import multiprocessing
import sqlite3
import stat
from pathlib import Path

import pytest

from agentspec.cache.store import MemoryStore, RecordReader, SQLiteStore, encode
from agentspec.cache.store.sqlite import APPLICATION_ID, SCHEMA_VERSION
from agentspec.errors import StoreError, StoreUnavailableError, StoreVersionError
from tests.store.helpers import NS, entry_of, number_of, turn


def pragma(path: Path, name: str) -> object:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(f"PRAGMA {name}").fetchone()[0]
    finally:
        connection.close()


def test_the_file_is_marked_private_and_logs_ahead(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    SQLiteStore(path).close()
    assert pragma(path, "application_id") == APPLICATION_ID
    assert pragma(path, "user_version") == SCHEMA_VERSION
    assert pragma(path, "journal_mode") == "wal"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_was_appended_is_there_when_the_file_is_opened_again(tmp_path: Path) -> None:
    for number in range(3):
        store = SQLiteStore(tmp_path / "store.db")
        store.append(NS, [("s", b"%d" % number)])
        store.close()
    assert [entry.payload for entry in SQLiteStore(tmp_path / "store.db").read(NS)] == [b"0", b"1", b"2"]


def test_a_file_of_another_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    SQLiteStore(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreVersionError, match=f"version {SCHEMA_VERSION + 1}.*name another file") as error:
        SQLiteStore(path)
    assert str(path) in str(error.value)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["store.db"]


@pytest.mark.parametrize("content", [b"hello", b"\n", b"SQLite format 3\x00", b"x" * 5000])
def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"not an SQLite database.*name another file") as error:
        SQLiteStore(path)
    assert str(path) in str(error.value)
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_database_of_another_program_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE entries (x)")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"another program.*name another file"):
        SQLiteStore(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["other.db"]


def test_an_empty_file_becomes_a_store(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.touch()
    store = SQLiteStore(path)
    store.append(NS, [("s", b"x")])
    assert len(list(store.read(NS))) == 1


def test_a_folder_and_an_impossible_place(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="a folder"):
        SQLiteStore(tmp_path)
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StoreUnavailableError, match=r"file/store\.db"):
        SQLiteStore(tmp_path / "file" / "store.db")


def test_a_damaged_record_costs_only_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "store.db"
    store = SQLiteStore(path)
    store.append(NS, [entry_of(turn("s", number)) for number in range(5)])
    store.close()
    connection = sqlite3.connect(path)
    for sequence in (2, 4):
        (payload,) = connection.execute("SELECT payload FROM entries WHERE sequence = ?", (sequence,)).fetchone()
        damaged = payload[:-3] + bytes([payload[-3] ^ 0x40]) + payload[-2:]
        connection.execute("UPDATE entries SET payload = ? WHERE sequence = ?", (damaged, sequence))
    connection.commit()
    connection.close()
    reader = RecordReader()
    records = [record for _, record in reader.read(SQLiteStore(path), NS)]
    assert [None if record is None else number_of(record) for record in records] == [0, None, 2, None, 4]
    assert (reader.damaged, reader.unknown) == (2, 0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "checksum" in caplog.text


def test_a_record_under_another_session_is_not_used(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "store.db")
    store.append(NS, [("mallory", encode(turn("alice", 1)))])
    reader = RecordReader()
    assert [record for _, record in reader.read(store, NS)] == [None]
    assert reader.damaged == 1


def test_a_file_damaged_in_its_structure_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SQLiteStore(path)
    store.append(NS, [("s", bytes(3000))] * 100)
    store.close()
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"store\.db"):
        list(SQLiteStore(path).read(NS))


def test_an_erased_session_is_gone_from_the_files_bytes(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SQLiteStore(path)
    secret = b"correct horse battery staple"
    store.append(NS, [("private", secret * 300), ("other", b"kept")] * 20)
    assert secret in b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert store.remove_session(NS, "private") == 20
    files = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert secret not in files
    assert b"private" not in files
    assert b"kept" in files


def _append_many(path: Path, name: str, count: int) -> None:
    store = SQLiteStore(path)
    for number in range(count):
        store.append(NS, [(name, b"%s %d" % (name.encode(), number))] * 2)
    store.close()


def test_processes_share_a_file_even_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "shared.db"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_append_many, args=(path, f"p{number}", 60)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    store = SQLiteStore(path)
    for number in range(2):
        expected = [b"p%d %d" % (number, index // 2) for index in range(120)]
        assert [entry.payload for entry in store.read(NS, session=f"p{number}")] == expected
    assert len(list(store.read(NS))) == 240


def test_a_full_memory_store_drops_its_oldest_entries() -> None:
    store = MemoryStore(max_bytes=1 << 20)
    for number in range(40):
        store.append(NS, [("s", bytes([number]) * 100_000)])
    kept = [entry.payload[0] for entry in store.read(NS)]
    assert 8 <= len(kept) <= 10
    assert kept == list(range(40 - len(kept), 40))
    store.append(NS, [("s", bytes(2 << 20))])  # larger than all of it
    store.append(NS, [("s", b"small")])
    assert [entry.payload for entry in store.read(NS)] == [b"small"]
