"""Test that the files beside an SQLite file may be cut short, and that watching them costs no lock."""

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from agentspec.cache.store import NewEntry, SQLiteStore
from agentspec.errors import StoreUnavailableError
from tests.store.helpers import NS

USE_CUT_MEMORY = """
import os, sys
from pathlib import Path
from agentspec.cache.store import NewEntry, SQLiteStore
path, left, first, cut_last = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "True"
store = SQLiteStore(path)
for number in range(50):
    store.append("log", [NewEntry("s", b"%d" % number)])
calls = {
    "read": lambda: list(store.read("log")),
    "wait": lambda: store.wait({"log": ""}, 0.0),
    "append": lambda: store.append("log", [NewEntry("t", b"early")]),
    "erase": lambda: store.erase_session("log", "t"),
    "close": lambda: None,
}
os.truncate(f"{path}-shm", left)
calls[first]()
store.append("log", [NewEntry("s", b"last")])
assert [entry.payload for entry in store.read("log", session="s")] == [*(b"%d" % n for n in range(50)), b"last"]
if cut_last:
    os.truncate(f"{path}-shm", left)
store.close()
"""
TRIM = """
import sys
from pathlib import Path
from agentspec.cache.store import Retention, SQLiteStore
store = SQLiteStore(Path(sys.argv[1]))
while store.trim(Retention(records=1)).more:
    pass
print("trimmed", flush=True)
sys.stdin.readline()
store.close()
"""


USE = """
import sys
from pathlib import Path
from agentspec.cache.store import SQLiteStore
SQLiteStore(Path(sys.argv[1])).close()
"""


@pytest.mark.parametrize("first", ["read", "wait", "append", "erase", "close"])
@pytest.mark.parametrize("left", [0, 20_000])
def test_shared_memory_that_is_cut_short_ends_no_process(tmp_path: Path, left: int, first: str) -> None:
    """SQLite maps it, so the next look at a page that is gone would kill the process, and with it an engine."""
    path = tmp_path / "store.db"
    arguments = [str(path), str(left), first, str(first == "close")]
    ran = subprocess.run([sys.executable, "-c", USE_CUT_MEMORY, *arguments], capture_output=True, text=True)
    assert ran.returncode == 0, ran
    assert ran.stderr.count("store.db-shm was cut short while in use") == (2 if first == "close" else 1)
    with closing(SQLiteStore(path)) as store:
        assert len(list(store.read(NS, session="s"))) == 0
        assert len(list(store.read("log", session="s"))) == 51
        assert store._connections is not None
        assert store._connections.writer.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_shared_memory_without_room_on_the_disk_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with closing(SQLiteStore(tmp_path / "store.db")) as store:
        size = store._files._shared_size
        monkeypatch.setattr(os, "posix_fallocate", full)
        os.truncate(store._files._shared_fd, 0)
        for call in (lambda: store.append(NS, [NewEntry("s", b"1")]), lambda: list(store.read(NS))):
            with pytest.raises(StoreUnavailableError, match="No space left"):
                call()
        store.close()  # closing the connections would look at it, too
        assert os.fstat(store._files._shared_fd).st_size == 0
        monkeypatch.undo()
        assert size > 0
        store.append(NS, [NewEntry("s", b"2")])
        assert [entry.payload for entry in store.read(NS)] == [b"2"]


@pytest.mark.parametrize("left", [0, 5_000])
def test_nothing_is_written_behind_a_log_that_was_cut_short(tmp_path: Path, left: int) -> None:
    """SQLite would write behind the gap, and move the gap into the file, which would be malformed from then on."""
    path = tmp_path / "store.db"
    with closing(SQLiteStore(path)) as store:
        store.append(NS, [NewEntry("s", b"in the file")])
        assert store.erase_session(NS, "none").complete  # the log is in the file
        for _ in range(20):
            store.append(NS, [NewEntry("s", bytes(2_000))])
        os.truncate(f"{path}-wal", left)
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match=r"store\.db-wal beside it was cut short.* restart all"):
                store.append(NS, [NewEntry("s", b"lost")])
    with closing(SQLiteStore(path)) as store:
        assert next(store.read(NS, session="s")).payload == b"in the file"
        assert store._connections is not None
        assert store._connections.writer.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        store.append(NS, [NewEntry("s", b"after")])
        assert [entry.payload for entry in store.read(NS, session="s")][-1] == b"after"


def test_a_file_that_another_process_trimmed_keeps_the_lock_of_its_users(tmp_path: Path) -> None:
    """Without the lock, the other process would take itself for the last user at its end, and remove the log."""
    path = tmp_path / "store.db"
    with closing(SQLiteStore(path)) as store:
        store.append(NS, [NewEntry(f"s{number}", bytes(50_000)) for number in range(30)])
        assert store.erase_session(NS, "none").complete  # the log is in the file, which is large now
        store.append(NS, [NewEntry("s", b"1")])
        size = path.stat().st_size
        command = [sys.executable, "-c", TRIM, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "trimmed\n"
            assert path.stat().st_size < size / 2
            store.append(NS, [NewEntry("s", b"2")])  # it looks at the file's header
            other.communicate("\n")
        assert other.returncode == 0
        store.append(NS, [NewEntry("s", b"3")])
        assert [entry.payload for entry in store.read(NS, session="s")][-2:] == [b"2", b"3"]


@pytest.mark.parametrize("other", ["opened", "closed"])
def test_a_second_store_of_a_process_costs_the_first_no_locks(tmp_path: Path, other: str) -> None:
    """Several clients of one program share the default store, and other programs use it, too."""
    path = tmp_path / "store.db"
    if other == "opened":
        first, second = SQLiteStore(path), SQLiteStore(path)
    else:
        second, first = SQLiteStore(path), SQLiteStore(path)
        second.close()
    with closing(first):
        first.append(NS, [NewEntry("s", b"1")])
        subprocess.run([sys.executable, "-c", USE, str(path)], check=True)
        assert path.with_name("store.db-wal").exists()
        first.append(NS, [NewEntry("s", b"2")])
        assert [entry.payload for entry in first.read(NS)] == [b"1", b"2"]
        second.close()


def test_the_files_beside_the_one_that_a_link_leads_to_are_watched(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    path, link = tmp_path / "data" / "store.db", tmp_path / "link.db"
    link.symlink_to(path)
    with closing(SQLiteStore(link)) as store:
        store.append(NS, [NewEntry("s", b"1")])
        path.with_name("store.db-wal").unlink()
        with pytest.raises(StoreUnavailableError, match=r"link\.db: store\.db-wal beside it was removed"):
            store.append(NS, [NewEntry("s", b"2")])
    with closing(SQLiteStore(link)) as store:
        assert [entry.payload for entry in store.read(NS)] == [b"1"]


def test_stores_leave_no_descriptors_behind(tmp_path: Path) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    for number in range(3):
        stores = [SQLiteStore(tmp_path / f"{number}.db") for _ in range(2)]
        for store in (*stores, *stores):
            store.close()
    assert count() == before
