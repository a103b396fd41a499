"""Test what a damaged, removed, locked or full SQLite file costs."""

import os
import resource
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest

from agentspec.cache.store import (
    BackgroundWriter,
    CircuitBreaker,
    NewEntry,
    RecordReader,
    Retention,
    SQLiteStore,
    decode,
    encode,
)
from agentspec.cache.store.sqlite.file import PAGE_SIZE, store_errors
from agentspec.errors import StoreError, StoreUnavailableError
from tests.store.helpers import NS, damage_payload, entry_of, number_of, turn, wait_until


def test_a_damaged_record_costs_only_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "store.db"
    store = SQLiteStore(path)
    store.append(NS, [entry_of(turn("s", number)) for number in range(5)])
    store.close()
    for sequence in (2, 4):
        damage_payload(path, sequence)
    reader = RecordReader()
    records = [record for _, record in reader.read(SQLiteStore(path).read(NS))]
    assert [None if record is None else number_of(record) for record in records] == [0, None, 2, None, 4]
    assert (reader.damaged, reader.unknown) == (2, 0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "checksum" in caplog.text


def test_a_record_under_another_session_is_not_used(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "store.db")
    store.append(NS, [NewEntry("mallory", encode(turn("alice", 1)))])
    reader = RecordReader()
    assert [record for _, record in reader.read(store.read(NS))] == [None]
    assert reader.damaged == 1


def test_a_file_damaged_in_its_structure_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SQLiteStore(path)
    store.append(NS, [NewEntry("s", bytes(3000))] * 100)
    store.close()
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"store\.db"):
        list(SQLiteStore(path).read(NS))


def test_nothing_is_written_to_a_file_that_was_removed_or_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("store.db")
    store = SQLiteStore(path)
    monkeypatch.chdir("/")
    store.append(NS, [NewEntry("s", b"1")])
    path = tmp_path / path
    moved = path.rename(tmp_path / "moved.db")
    with pytest.raises(StoreUnavailableError, match=r"store\.db: No such file or directory: .*put it back, or restart"):
        store.append(NS, [NewEntry("s", b"2")])
    moved.rename(path)
    store.append(NS, [NewEntry("s", b"3")])
    assert [entry.payload for entry in store.read(NS)] == [b"1", b"3"]
    path.unlink()
    SQLiteStore(path).close()
    with pytest.raises(StoreUnavailableError, match="another file has taken its place; restart"):
        store.append(NS, [NewEntry("s", b"4")])


@pytest.mark.parametrize("names", [("-wal",), ("-shm",), ("-wal", "-shm")])
def test_what_was_acknowledged_survives_the_removal_of_the_log_beside_the_file(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    """SQLite would go on writing to the deleted log, and a kill would lose all that is in it."""
    path = tmp_path / "store.db"
    with closing(SQLiteStore(path)) as store:
        store.append(NS, [NewEntry("s", b"1")])
        for name in names:
            Path(f"{path}{name}").unlink()
        for _ in range(2):
            with pytest.raises(
                StoreUnavailableError, match=rf"store\.db{names[0]} .*removed or replaced.*; restart all"
            ):
                store.append(NS, [NewEntry("s", b"2")])
        assert [entry.payload for entry in store.read(NS)] == [b"1"]
        left = tmp_path / "left.db"  # the files that a kill leaves
        left.write_bytes(path.read_bytes())
        if names == ("-shm",):
            Path(f"{left}-wal").write_bytes(Path(f"{path}-wal").read_bytes())
        with closing(SQLiteStore(left)) as after:
            assert [entry.payload for entry in after.read(NS)] == [b"1"]
    with closing(SQLiteStore(path)) as again:
        again.append(NS, [NewEntry("s", b"3")])
        assert [entry.payload for entry in again.read(NS)] == [b"1", b"3"]


def test_a_log_that_another_process_made_anew_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with closing(SQLiteStore(path)) as store:
        store.append(NS, [NewEntry("s", b"1")])
        before = path.read_bytes()
        Path(f"{path}-wal").rename(tmp_path / "moved")
        Path(f"{path}-wal").touch()
        with pytest.raises(StoreUnavailableError, match=r"store\.db-wal beside it was removed or replaced"):
            store.append(NS, [NewEntry("s", b"2")])
        assert path.read_bytes() == before


@pytest.mark.parametrize("fault", ["locked", "full"])
def test_turns_wait_while_another_program_locks_the_file_or_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("agentspec.cache.store.sqlite.file.BUSY_SECONDS", 0.05)
    path = tmp_path / "store.db"
    with closing(SQLiteStore(path)) as store, closing(sqlite3.connect(path, isolation_level=None)) as other:
        store.append(NS, [entry_of(turn("s", 0))])
        assert store._connections is not None
        if fault == "locked":
            other.execute("BEGIN EXCLUSIVE")
        else:
            store._connections.writer.execute("PRAGMA max_page_count = 1")  # SQLite gives the error of a full disk
        writer = BackgroundWriter(store, breaker=CircuitBreaker(first_pause=0.05, max_pause=0.1))
        for number in range(1, 40):
            writer.put(NS, turn("s", number))
        wait_until(lambda: writer.stats().state == "open")
        assert len(list(store.read(NS))) == 1
        if fault == "locked":
            with pytest.raises(StoreUnavailableError, match="locked"):
                store.erase_session(NS, "s")
            other.execute("COMMIT")
        else:
            store._connections.writer.execute("PRAGMA max_page_count = 1000000")
        assert writer.flush(60)
        assert [number_of(decode(entry.payload)) for entry in store.read(NS)] == list(range(40))
        assert (writer.stats().refused, writer.stats().dropped) == (0, 0)
        writer.close()


def test_a_caller_waits_for_no_more_than_one_other_writer_of_a_locked_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them waits for the lock, one after the other. An erasure once waited for all that had come before."""
    for name in ("file", "database"):
        monkeypatch.setattr(f"agentspec.cache.store.sqlite.{name}.BUSY_SECONDS", 0.3)
    path = tmp_path / "store.db"
    with closing(SQLiteStore(path)) as store, closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        took = []

        def erase() -> None:
            begin = time.monotonic()
            with pytest.raises(StoreUnavailableError):
                store.erase_session(NS, "s")
            took.append(time.monotonic() - begin)

        threads = [threading.Thread(target=erase) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(took) == 8 and max(took) < 1.2  # one after the other they would take 2.4 s


def test_an_erasure_that_a_full_disk_keeps_in_the_log_is_an_error(tmp_path: Path) -> None:
    """The erasure must not wait two minutes for a reader of old pages: there is none, and the text stays in the log."""
    path = tmp_path / "store.db"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(SQLiteStore(path)) as store:
        store.append(NS, [NewEntry("other", bytes(200_000))])
        assert store.erase_session(NS, "none").complete  # the log is in the file
        store.append(NS, [NewEntry("s", b"what was said" * 10), NewEntry("other", bytes(50_000))])
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))  # the log has room, and the file none
        try:
            with pytest.raises(StoreUnavailableError, match=r"store\.db: disk I/O error"):
                store.erase_session(NS, "s")
            assert b"what was said" in Path(f"{path}-wal").read_bytes()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert store.erase_session(NS, "s").complete
    assert b"what was said" not in path.read_bytes()


def test_a_full_disk_is_named_where_not_even_the_memory_of_the_log_fits(tmp_path: Path) -> None:
    """SQLite reports an I/O error then, as if the disk were broken."""
    path = tmp_path / "store.db"
    SQLiteStore(path).close()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 1, hard))  # less than the 32 kB of that memory
    try:
        with pytest.raises(StoreUnavailableError, match=r"store\.db: database or disk is full"):
            SQLiteStore(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    SQLiteStore(path).close()


def test_a_limit_of_the_size_of_files_is_named(tmp_path: Path) -> None:
    """SQLite says "disk I/O error" alone, as if the disk were broken."""
    path = tmp_path / "store.db"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(SQLiteStore(path)) as store:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
            with pytest.raises(StoreUnavailableError, match=r"more than 60,000 bytes \(ulimit -f\): raise that limit"):
                for _ in range(100):
                    store.append(NS, [NewEntry("s", bytes(2_000))])
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, hard))
            held = store.append(NS, [NewEntry("s", b"again")])[-1]
            with pytest.raises(StoreUnavailableError) as error, store_errors(str(path)):
                raise_io_error()
            assert "ulimit" not in str(error.value)  # the limit is not what stops it
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [entry.sequence for entry in store.read(NS)][-1] == held


def test_too_many_open_files_are_named(tmp_path: Path) -> None:
    """SQLite says "unable to open database file" alone, as if its place were wrong."""
    path = tmp_path / "store.db"
    SQLiteStore(path).close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.dup(2)
    os.close(spare)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 1, hard))  # the writer's file opens, and no other
        with pytest.raises(StoreUnavailableError, match=r"store\.db: Too many open files.*raise that limit"):
            SQLiteStore(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    SQLiteStore(path).close()


def raise_io_error() -> NoReturn:
    """Raise what SQLite raises where a disk is broken."""
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
    raise error


def test_the_secret_is_read_while_another_program_writes(tmp_path: Path) -> None:
    """Otherwise a server that starts then would take another secret, and find none of the stored sessions."""
    path = tmp_path / "store.db"
    with closing(SQLiteStore(path)) as store:
        secret = store.secret()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with closing(SQLiteStore(path)) as store:
            assert store.secret() == secret


def test_nothing_is_written_to_a_file_that_was_emptied(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SQLiteStore(path)
    store.append(NS, [NewEntry("s", b"1")])
    path.write_bytes(b"")
    with pytest.raises(StoreUnavailableError, match="was emptied"):
        store.append(NS, [NewEntry("s", b"2")])


@pytest.mark.parametrize("left", [10, PAGE_SIZE, 40 * PAGE_SIZE])
def test_nothing_is_written_to_a_file_that_was_cut_short(tmp_path: Path, left: int) -> None:
    """With the needed pages in memory, SQLite would accept turns, and fill the lost part with holes."""
    path = tmp_path / "store.db"
    with closing(SQLiteStore(path)) as store:
        store.append(NS, [NewEntry(f"s{number}", bytes(5000)) for number in range(20)])
    whole = path.read_bytes()
    assert len(whole) > 80 * PAGE_SIZE
    with closing(SQLiteStore(path)) as store:
        os.truncate(path, left)
        with pytest.raises(StoreUnavailableError, match=r"store\.db: it was cut short while in use"):
            store.append(NS, [NewEntry("s", b"1")])
        with path.open("r+b") as file:  # put back as it was
            file.write(whole)
        store.append(NS, [NewEntry("s", b"2")])
        assert [entry.payload for entry in store.read(NS, session="s")] == [b"2"]


def test_a_file_that_another_process_has_trimmed_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with closing(SQLiteStore(path)) as store, closing(SQLiteStore(path)) as other:
        for number in range(600):
            store.append(NS, [NewEntry(f"s{number}", bytes(8000))])
        size = path.stat().st_size
        while other.trim(Retention(bytes=1 << 16)).more:
            pass
        assert path.stat().st_size < size / 4
        store.append(NS, [NewEntry("s", b"1")])
        assert [entry.payload for entry in store.read(NS, session="s")] == [b"1"]
