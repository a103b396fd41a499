"""Test the file of a snapshot: who may read it, when it is refused or deleted, and what a kill leaves of it."""

import errno
import fcntl
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from agentspec.cache import DraftPolicy, FinishedTurn, SuffixCache
from agentspec.cache.store import snapshot_path
from agentspec.server_ext.persistence.warm_restart import SnapshotKeeper, snapshot_identity
from tests.cache.mutations import seal
from tests.server_ext.snapshots import converse, keep, make, text


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    keeper = keep(tmp_path / "new" / "snapshot", make())
    assert keeper.save()
    assert stat.S_IMODE((tmp_path / "new" / "snapshot").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_what_does_not_fit_is_ignored_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, cache = tmp_path / "snapshot", make()
    keeper = keep(path, cache)
    converse([cache], 1)
    assert keeper.save()
    others = {
        "model": ("other", make()),
        "policy": ("model", SuffixCache(vocab_size=1000, policy=DraftPolicy(memory=5.0))),
    }
    for namespace, other in others.values():
        with caplog.at_level(logging.WARNING):
            assert SnapshotKeeper(path, other, snapshot_identity(namespace, other)).wait_loaded() == b""
        assert "not used" in caplog.text and other.stats().tokens == 0
        caplog.clear()
    path.write_bytes(path.read_bytes()[:-8])
    damaged = make()
    with caplog.at_level(logging.WARNING):
        SnapshotKeeper(path, damaged, snapshot_identity("model", damaged)).wait_loaded()
    assert "truncated" in caplog.text and damaged.stats().tokens == 0


@pytest.mark.parametrize("place", ["a folder", "no room for its name"])
def test_a_snapshot_that_fails_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str) -> None:
    path, cache = tmp_path / ("x" * 250 if place == "no room for its name" else "x.snapshot"), make()
    if place == "a folder":
        path.mkdir()
    keeper = keep(path, cache)
    converse([cache], 1)
    assert not keeper.save()
    keeper.close()
    messages = [record.getMessage() for record in caplog.records]
    assert any("cannot save the snapshot: it cannot be" in message for message in messages)
    assert [message.count(str(path)) for message in messages] == [1] * len(messages)


def test_each_fault_of_the_snapshots_place_is_said_once_and_so_is_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk may be full for an hour, and again a week later."""
    path, cache = tmp_path / "x.snapshot", make()
    keeper = keep(path, cache)
    for number, fails in enumerate((True, True, False, True, True, False)):
        if fails and not path.is_dir():
            path.unlink(missing_ok=True)
            path.mkdir()
        elif not fails:
            path.rmdir()
        converse([cache], number)
        assert keeper.save() is not fails
    messages = [record.getMessage() for record in caplog.records]
    assert ["are not saved" in message for message in messages] == [True, False, True, False]
    assert ["are saved again" in message for message in messages] == [False, True, False, True]
    assert keeper.stats()["errors"] == 4
    keeper.close()


@pytest.mark.parametrize("place", ["home", "name"])
def test_a_file_that_cannot_even_be_looked_for_costs_no_drafts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """HOME may be root's folder, as in a container. Nothing is drafted until the snapshot is loaded or given up."""
    path = tmp_path / ("x" * 300 if place == "name" else "x.snapshot")
    if place == "home":  # root can read every folder

        def forbidden(*_: object, **__: object) -> bool:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr(Path, "exists", forbidden)
    cache = make()
    keeper = SnapshotKeeper(path, cache, snapshot_identity("model", cache))
    assert keeper.wait_loaded(60) == b"" and keeper.is_loaded()
    assert "Permission denied" in caplog.text or "File name too long" in caplog.text
    keeper.start()
    keeper.close()
    assert not keeper._thread.is_alive()


def test_a_folder_that_cannot_be_listed_holds_no_drafts_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drafted until the snapshot is read or given up."""

    def broken(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "glob", broken)
    cache = make()
    keeper = SnapshotKeeper(tmp_path / "x.snapshot", cache, snapshot_identity("model", cache))
    keeper.wait_loaded(5)
    assert keeper.is_loaded()
    keeper.close()


def test_where_it_is_unknown_what_was_erased_all_tenants_go_whatever_their_names(tmp_path: Path) -> None:
    """Nothing is drafted before. A forged file may name a tenant as no request can."""
    path, cache, none = tmp_path / "snapshot", SuffixCache(vocab_size=1000), np.zeros(0, np.int32)
    for number, tenant in enumerate(("acme", "other", None), 1):
        cache.restore(FinishedTurn(tenant, "s", 0, none, text(50), writer="w", number=number))
    cache.save(path, identity="i", note=b"{}\n")
    path.write_bytes(seal(bytearray(path.read_bytes().replace(b"acme", b"a\nme"))))
    cache, erasures, forgets = SuffixCache(vocab_size=1000), Mock(), threading.Event()

    def fail(_: object) -> bool:
        cache.start("r", [1, 2, 3], tenant="other")
        forgets.set()
        raise RuntimeError("the store is away")

    erasures.catch_up.side_effect = fail
    keeper = SnapshotKeeper(path, cache, "i", erasures=erasures)
    assert forgets.wait(60)
    assert keeper.wait_loaded(0.3) == b"" and not keeper.is_loaded()  # a request of a tenant runs
    assert cache.stats().tokens > 0
    cache.abort("r")
    assert keeper.wait_loaded(60) == b"" and keeper.is_loaded()
    assert cache.stats().tenants == 0 and not path.exists()
    keeper.close()


def test_an_erased_session_is_in_no_file(tmp_path: Path) -> None:
    path, cache = tmp_path / "snapshot", SuffixCache(vocab_size=2**31)
    keeper = keep(path, cache)
    secret = np.arange(0x5EC2E7, 0x5EC2E7 + 40, dtype=np.int32)
    cache.restore(FinishedTurn("t", "gone", 0, secret[:5], secret[5:], writer="w", number=1))
    cache.restore(FinishedTurn("t", "stays", 0, text(20), text(50), writer="w", number=2))
    assert keeper.save() and secret[6:7].tobytes() in path.read_bytes()
    cache.remove_session("t", "gone")
    keeper.delete()
    assert not path.exists()
    assert keeper.save() and secret[6:7].tobytes() not in path.read_bytes()
    assert SuffixCache(vocab_size=2**31).load_snapshot(path, identity=snapshot_identity("model", cache)) == b"{}\n"


def test_an_erased_session_is_in_no_file_of_another_tenant_engine_or_model(tmp_path: Path) -> None:
    """The others may no longer run. Another store keeps its file, also where its name begins with this one's."""

    def snapshot(log: str, number: int, store: str = "server.db") -> Path:
        path = snapshot_path(f"sqlite:///{tmp_path}/{store}", log, number)
        assert path is not None
        return path

    others = [snapshot("1.b", 0), snapshot("1.a", 1), snapshot("2.a", 0)]
    another_store = snapshot("1.a", 0, "server.db-1.a")
    cache = make()
    keeper = keep(snapshot("1.a", 0), cache)
    others += [path.with_name(f"{path.name}.tmp1mAN0x") for path in others]  # files of engines killed while they saved
    for file in (*others, another_store):
        file.write_bytes(b"text")
    converse([cache], 1)
    assert keeper.save()
    keeper.delete()
    assert not any(file.exists() for file in (snapshot("1.a", 0), *others)) and another_store.exists()
    assert keeper.save() and snapshot("1.a", 0).exists()
    snapshot("1.a", 0).unlink()  # by an erasure in another process
    assert keeper.save() and snapshot("1.a", 0).exists()
    keeper.close()


def test_an_erased_session_is_in_no_file_of_the_same_database_by_a_link(tmp_path: Path) -> None:
    folder, link = tmp_path / "data", tmp_path / "link.db"
    folder.mkdir()
    link.symlink_to(folder / "server.db")
    there, here = (
        snapshot_path(f"sqlite:///{path}", log, 0) for path, log in ((link, "1.b"), (folder / "server.db", "1.a"))
    )
    assert there is not None and here is not None
    there.write_bytes(b"text")
    keeper = keep(here, make())
    keeper.delete()
    assert not there.exists()
    keeper.close()


def test_an_erased_session_is_in_no_file_of_the_same_redis_by_another_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))

    def snapshot(host: str, log: str) -> Path:
        path = snapshot_path(f"redis://{host}/0", log, 0)
        assert path is not None
        return path

    here, there, another_model = (
        snapshot("127.0.0.1", "1.a"),
        snapshot("localhost", "1.b"),
        snapshot("localhost", "2.a"),
    )
    here.parent.mkdir(exist_ok=True)
    old = snapshot("long-gone", "3.a")
    beside = here.with_name("server.db-1.a-0.snapshot")
    for file in (there, another_model, old, beside):
        file.write_bytes(b"text")
    for file in (old, beside):
        os.utime(file, (0, 0))
    cache = make()
    keeper = SnapshotKeeper(here, cache, snapshot_identity("model", cache), max_age=3600.0)
    keeper.wait_loaded(30)
    assert not old.exists() and there.exists() and beside.exists()
    keeper.delete()
    assert not there.exists() and not another_model.exists() and beside.exists()
    keeper.close()


def test_a_session_erased_while_it_is_saved(tmp_path: Path) -> None:
    """Whenever the erasure comes, the file left at the end does not hold the session."""
    path, cache = tmp_path / "snapshot", SuffixCache(vocab_size=2**31)
    keeper = keep(path, cache)
    for record in range(1, 40):
        cache.restore(FinishedTurn("t", f"s{record}", 0, text(20), text(3000), writer="w", number=record))
    secret = np.arange(0x5EC2E7, 0x5EC2E7 + 40, dtype=np.int32)
    for number in range(12):
        cache.restore(FinishedTurn("t", "gone", 0, secret[:5], secret[5:], writer="w", number=100 + number))
        thread = threading.Thread(target=keeper.save)
        thread.start()
        time.sleep(0.001 * number)
        cache.remove_session("t", "gone")
        keeper.delete()
        thread.join()
        assert not path.exists() or secret[6:7].tobytes() not in path.read_bytes()
    assert keeper.save()


def test_a_kill_while_saving_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    code = f"""
import numpy as np
from agentspec.cache import FinishedTurn, SuffixCache
cache, n = SuffixCache(vocab_size=1000), 0
rng = np.random.default_rng(1)
while True:
    n += 1
    said = rng.integers(0, 900, 20_000, np.int32)
    cache.restore(FinishedTurn("t", f"s{{n % 3}}", 0, said[:20], said[20:], writer="w", number=n))
    cache.save({str(path)!r}, identity="model")
    print(n, flush=True)
"""
    for lines in (1, 2, 5):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(lines):
                process.stdout.readline()
            time.sleep(0.004 * lines)
            os.kill(process.pid, signal.SIGKILL)
        cache = make()
        assert cache.load_snapshot(path, identity="model") == b""
        assert cache.stats().tokens >= 19_000
    SnapshotKeeper(path, make(), "model").close()
    assert [file.name for file in tmp_path.iterdir()] == ["snapshot"]  # the files of killed processes are gone


def test_a_server_that_starts_leaves_what_another_one_is_saving(tmp_path: Path) -> None:
    """In another container, the other server's process may have any id, also this one's."""
    path, cache = tmp_path / "snapshot", make()
    converse([cache], 1, tokens=200_000)
    keeper, seen = SnapshotKeeper(path, make(), "model"), False
    with ThreadPoolExecutor(1) as pool:
        while not seen:  # a save may end before this thread looks
            path.unlink(missing_ok=True)
            saved = pool.submit(cache.save, path)
            while not (saved.done() or seen):
                seen = any(tmp_path.glob("snapshot.tmp*"))
            keeper._delete_unfinished()
            saved.result()  # raises an error if its file was deleted
    assert path.exists()
    keeper.close()


def test_a_file_that_is_deleted_before_it_is_locked_is_made_again(tmp_path: Path) -> None:
    path, cache = tmp_path / "snapshot", make()
    keeper = SnapshotKeeper(path, make(), "model")

    def save_often() -> None:
        for _ in range(6_000):
            cache.save(path)

    with ThreadPoolExecutor(1) as pool:
        saved = pool.submit(save_often)
        while not saved.done():
            keeper._delete_unfinished()
        saved.result()
    assert path.exists() and not any(tmp_path.glob("snapshot.tmp*"))
    keeper.close()


@pytest.mark.parametrize("locks", [True, False])
def test_a_file_without_a_lock_was_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    """If the file system has no locks, a recently written file may be in use."""
    if not locks:
        monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    path = tmp_path / "server[1].db-1.a-0.snapshot"
    new, old = (tmp_path / f"server[1].db-{name}" for name in ("1.a-0.snapshot.tmp1mAN0x", "1.b-3.snapshot.tmp123"))
    for file in (new, old):
        file.write_bytes(b"half of a snapshot")
    os.utime(old, (0, 0))
    SnapshotKeeper(path, make(), "model").close()
    assert new.exists() is not locks and not old.exists()
