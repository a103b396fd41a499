"""Test the SQLite file: what it accepts, what erasing and trimming leave in it, and several processes on it."""

import multiprocessing
import os
import random
import sqlite3
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from agentspec.cache.store import Erasure, MemoryStore, NewEntry, Retention, SQLiteStore
from agentspec.cache.store.sqlite.file import APPLICATION_ID, SCHEMA_VERSION
from agentspec.errors import StoreError, StoreUnavailableError, StoreVersionError
from tests.store.helpers import NS


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
        store.append(NS, [NewEntry("s", b"%d" % number)])
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


def test_a_pipe_and_a_device_are_refused_at_once(tmp_path: Path) -> None:
    """Otherwise a server would wait for ever for a writer to the pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path(os.devnull)):
        with ThreadPoolExecutor() as threads:
            opening = threads.submit(SQLiteStore, path)
            try:
                with pytest.raises(StoreError, match=f"{path}: a device, pipe or socket, not a file; name"):
                    opening.result(5)
            finally:
                if not opening.done():
                    pipe.write_bytes(b"so that the reader ends")


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
    store.append(NS, [NewEntry("s", b"x")])
    assert len(list(store.read(NS))) == 1


def test_a_folder_and_an_impossible_place(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="a folder"):
        SQLiteStore(tmp_path)
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StoreUnavailableError, match=r"file/store\.db"):
        SQLiteStore(tmp_path / "file" / "store.db")


def everything(folder: Path) -> bytes:
    """Return all bytes of the database, its write-ahead log and its index."""
    return b"".join(file.read_bytes() for file in folder.iterdir())


def test_an_erased_session_is_gone_from_the_files_bytes(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SQLiteStore(path)
    secret = b"correct horse battery staple"
    store.append(NS, [NewEntry("key-1", secret * 300), NewEntry("other", b"kept")] * 20)
    assert secret in everything(tmp_path)
    assert store.erase_session(NS, "key-1") == Erasure(20, complete=True)
    assert secret not in everything(tmp_path)
    assert b"kept" in everything(tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_no_byte_of_an_erased_session_stays_whatever_moved_in_the_file(tmp_path: Path, seed: int) -> None:
    """Rows that move to another page leave copies, which SQLite's secure_delete does not blank."""
    store, chance = SQLiteStore(tmp_path / "store.db"), random.Random(seed)
    alive: list[int] = []
    for number in range(250):
        alive.append(number)
        entries = []
        for _ in range(chance.choice((1, 3, 30))):
            for session in {number, *chance.sample(alive, min(3, len(alive)))}:
                size = chance.choice((1, 3, 20, 100, 127, 128, 400, 700))
                entries.append(NewEntry(f"k{session}", b"<%06d>" % session * size, chance.choice((None, "g"))))
        store.append(NS, entries)
        if len(alive) > 5 and chance.random() < 0.8:
            session = alive.pop(chance.randrange(len(alive)))
            assert store.erase_session(NS, f"k{session}").complete
            assert b"<%06d>" % session not in everything(tmp_path)
        if chance.random() < 0.3:
            store.trim(Retention(bytes=1 << 20))


def test_an_erasure_is_incomplete_while_another_process_reads_the_old_state(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SQLiteStore(path)
    store.append(NS, [NewEntry("key-1", b"correct horse" * 100)])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN")
    other.execute("SELECT count(*) FROM entries").fetchall()
    assert store.erase_session(NS, "key-1") == Erasure(1, complete=False)
    assert list(store.read(NS, session="key-1")) == []  # it is gone for every new reader
    assert store.erase_session(NS, "key-1") == Erasure(0, complete=False)
    other.execute("COMMIT")
    assert store.erase_session(NS, "key-1") == Erasure(0, complete=True)
    assert b"correct horse" not in everything(tmp_path)
    other.close()


def test_the_file_shrinks_when_it_is_trimmed(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SQLiteStore(path)
    for number in range(1400):
        store.append(NS, [NewEntry(f"s{number % 50}", bytes([number % 256]) * 9_000)])
    limit = 1 << 20
    assert path.stat().st_size > 10 * limit
    while store.trim(Retention(bytes=limit)).more:
        pass
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1.4 * limit
    assert len(list(store.read(NS))) > 80


def test_a_file_of_an_earlier_release_gets_what_it_lacks(tmp_path: Path) -> None:
    """Earlier releases kept no counts of each log, and trimmed the oldest entries of all logs."""
    path = tmp_path / "store.db"
    with closing(SQLiteStore(path)) as store:
        cursors = store.append("log", [NewEntry("s", b"x")] * 9) + store.append("other", [NewEntry("s", b"x")] * 3)
    with closing(sqlite3.connect(path)) as old:
        for what in ("TRIGGER entry_added", "TRIGGER entry_removed", "TABLE logs"):
            old.execute(f"DROP {what}")
        old.execute("DELETE FROM entries WHERE sequence <= 4")
        old.commit()
    with closing(SQLiteStore(path)) as store, closing(SQLiteStore(path)) as second:
        assert store.usage().records == second.usage().records == 8
        assert [store.history(log, cursors[at]) for log in ("log", "other") for at in (2, 3)] == [
            "trimmed",
            "whole",
        ] * 2
        assert store.trim(Retention(records=6)).records == 2
        assert [second.history("log", cursors[at]) for at in (4, 5)] == ["trimmed", "whole"]
        assert second.history("other", cursors[3]) == "whole"


def test_a_tombstone_that_an_earlier_release_trims_is_missed(tmp_path: Path) -> None:
    """A server of that release may run beside this one. It trims the oldest entries without a note of that."""
    path = tmp_path / "store.db"
    with closing(SQLiteStore(path)) as store:
        cursors = store.append(NS, [NewEntry("s", b"x")] * 2)
        for _ in range(2):
            store.erase_session(NS, "s")
        assert store.history(NS, cursors[1]) == "whole", "a newer tombstone took the place of the first"
        end = store.append(NS, [NewEntry("t", b"y")])[0]
        with closing(sqlite3.connect(path)) as old:
            old.execute("DELETE FROM entries WHERE sequence < (SELECT max(sequence) FROM entries)")
            old.commit()
        assert [store.history(NS, cursor) for cursor in (cursors[1], end)] == ["trimmed", "whole"]


def test_logs_that_are_empty_take_no_room(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with closing(SQLiteStore(path)) as store:
        newest = [store.append(f"log-{number}", [NewEntry("s", b"x")] * 2)[-1] for number in range(200)]
        store.erase_session("log-7", "s", mark=False)
        while store.trim(Retention(records=1)).more:
            pass
        assert [store.history("log-5", cursor) for cursor in ("", newest[4], newest[198])] == ["trimmed"] * 2 + [
            "whole"
        ]
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT namespace, records FROM logs").fetchall() == [("", 0), ("log-199", 1)]


def test_a_file_of_the_first_schema_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    old = sqlite3.connect(path)
    old.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    old.execute("PRAGMA user_version = 1")
    old.execute("CREATE TABLE entries (sequence INTEGER PRIMARY KEY AUTOINCREMENT, namespace, session, payload)")
    old.close()
    before = path.read_bytes()
    with pytest.raises(StoreVersionError, match=rf"agentspec sessions convert sqlite:///{path}"):
        SQLiteStore(path)
    assert path.read_bytes() == before


def _append_many(path: Path, name: str, count: int) -> None:
    store = SQLiteStore(path)
    for number in range(count):
        store.append(NS, [NewEntry(name, b"%s %d" % (name.encode(), number))] * 2)
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


def test_an_append_gets_its_turn_beside_a_process_that_writes_nearly_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's own waits grow to 100 ms and miss the gaps of 4 ms."""
    monkeypatch.setattr("agentspec.cache.store.sqlite.file.BUSY_SECONDS", 1.5)
    path, ended = tmp_path / "store.db", threading.Event()
    store = SQLiteStore(path)

    def hog() -> None:
        connection = sqlite3.connect(path, isolation_level=None)
        while not ended.is_set():
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(0.3)
            connection.execute("COMMIT")
            time.sleep(0.004)
        connection.close()

    thread = threading.Thread(target=hog)
    thread.start()
    try:
        for number in range(8):
            for _ in range(2):  # a busy machine may be slower than the gap
                with suppress(StoreUnavailableError):
                    store.append(NS, [NewEntry("s", b"%d" % number)])
                    break
            else:
                store.append(NS, [NewEntry("s", b"%d" % number)])
    finally:
        ended.set()
        thread.join()
        store.close()


def test_what_age_took_is_known_though_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries written later are older then, and are removed first."""
    store, cursors = MemoryStore(), list[str]()
    for seconds in (200.0, 100.0):
        monkeypatch.setattr("agentspec.cache.store.sqlite.database.time", Mock(time=lambda at=seconds: at))
        cursors += store.append(NS, [NewEntry("s", b"x")])
    assert store.trim(Retention(days=1)).records == 2
    assert [store.history(NS, cursor) for cursor in cursors] == ["trimmed", "whole"]


def test_a_full_memory_store_drops_its_oldest_entries() -> None:
    store = MemoryStore(max_bytes=1 << 20)
    for number in range(40):
        store.append(NS, [NewEntry("s", bytes([number]) * 100_000)])
    kept = [entry.payload[0] for entry in store.read(NS)]
    assert 8 <= len(kept) <= 10
    assert kept == list(range(40 - len(kept), 40))
    store.append(NS, [NewEntry("s", bytes(2 << 20))])  # larger than all of it
    store.append(NS, [NewEntry("s", b"small")])
    assert [entry.payload for entry in store.read(NS)] == [b"small"]


def test_a_folder_that_cannot_be_made_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for below in ("file/a.db", "file/folder/a.db"):
        path = tmp_path / below
        with pytest.raises(StoreUnavailableError) as error:
            SQLiteStore(path)
        why = f"{path}: the folder {path.parent} cannot be made: "
        assert str(error.value).startswith(why) and str(error.value).endswith("; name another file")


def test_a_cursor_of_a_file_that_was_here_before_tells_nothing_of_erasures(tmp_path: Path) -> None:
    before, now = (SQLiteStore(tmp_path / name) for name in ("before.db", "now.db"))
    with closing(before), closing(now):
        cursors = [before.append(NS, [NewEntry("s", b"1")])[0] for _ in range(3)]
        now.append(NS, [NewEntry("s", b"1")])
        assert [now.history(NS, cursor) for cursor in cursors] == ["whole", "lost", "lost"]
        assert before.history(NS, cursors[2]) == "whole"


def test_a_list_of_sessions_holds_up_nobody(tmp_path: Path) -> None:
    """The follower waits on the store all the time, and nothing is drafted while it is held up."""
    listing, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        if threading.current_thread() is lister and not listing.is_set():
            listing.set()
            go_on.wait(5)

    with closing(SQLiteStore(tmp_path / "store.db")) as store, ThreadPoolExecutor() as threads:
        store.append(NS, [NewEntry("s", b"x")])
        assert store._connections is not None
        for connection in store._connections:
            connection.set_progress_handler(pause, 1)
        lister = threads.submit(threading.current_thread).result()
        listed = threads.submit(store.sessions, NS)
        assert listing.wait(5)
        assert store.wait({NS: ""}, 0.0) == [NS] and store.newest(NS) and store.history(NS, "") == "whole"
        store.append(NS, [NewEntry("s", b"y")])
        assert len(list(store.read(NS))) == 2 and not listed.done()
        go_on.set()
        assert [usage.session for usage in listed.result(5)] == ["s"]


def test_a_store_is_closed_though_a_call_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine has 10 s to end."""
    monkeypatch.setattr("agentspec.cache.store.sqlite.database.BUSY_SECONDS", 0.05)
    for store in (SQLiteStore(tmp_path / "store.db"), MemoryStore()):
        store.append(NS, [NewEntry("s", b"x")])
        with store._read() as connection, ThreadPoolExecutor() as threads:
            threads.submit(store.close).result(5)
            entries = connection.execute("SELECT sequence FROM entries").fetchall()  # the call's connection stays open
        assert len(entries) == 1
        with pytest.raises(StoreError, match="closed"):
            store.newest(NS)
        store.close()


def test_a_read_sees_one_state_of_the_file_while_another_program_writes(tmp_path: Path) -> None:
    """A session in use was taken for empty, or the read ended in a TypeError."""
    path = tmp_path / "store.db"
    with closing(SQLiteStore(path)) as reader, closing(SQLiteStore(path)) as writer:
        writer.append("log", [NewEntry("used", b"x"), NewEntry("erased", b"x")])
        stop = threading.Event()

        def write() -> None:
            while not stop.is_set():
                writer.append("log", [NewEntry("used", b"x"), NewEntry("erased", b"x")])
                writer.erase_session("log", "erased")

        writing = threading.Thread(target=write)
        writing.start()
        try:
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                assert len(list(reader.read("log", session="used", newest=1))) == 1
                list(reader.read("log", session="erased"))
        finally:
            stop.set()
            writing.join()
