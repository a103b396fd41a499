"""Test that a snapshot brings back nothing that was erased, and is used if it can bring back nothing."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from agentspec.cache.store import Retention, SQLiteStore, snapshot_path
from agentspec.errors import StoreError, StoreUnavailableError
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.persistence.snapshot_erasures import SnapshotErasures
from agentspec.server_ext.persistence.turn_records import turn_of
from agentspec.server_ext.persistence.warm_restart import SnapshotKeeper
from agentspec.server_ext.settings import Settings
from tests.store.helpers import LOGS, turn, wait_until

from .plain_engine import in_memory
from .replicas import NS, TENANT, Start, meet, patience, start, stored, text

__all__ = ["patience", "start"]


def test_a_restarted_engine_drafts_nothing_that_was_erased_meanwhile(start: Start, tmp_path: Path) -> None:
    first = start(snapshot=tmp_path / "snapshot")
    first.say([1, 2, 3], text(100))
    first.say([1, 2, 3], text(200), "kept")
    first.stop()
    assert (tmp_path / "snapshot").exists()
    other = start()
    other.erase("s")
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert again.drafts(text(200, 5)) == text(205, 4)
    assert again.drafts(text(100, 5)) == []
    assert not (tmp_path / "snapshot").exists()
    other.say([1, 2, 3], text(300), "more")
    again.wait(lambda: again.drafts(text(300, 5)) == text(305, 4))


def test_a_log_that_cannot_be_read_costs_its_own_tenants_snapshot_only(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the log's keys on Redis may hold something else, for example."""
    first = start(snapshot=tmp_path / "snapshot")
    first.say([1, 2, 3], text(100))
    first.say([1, 2, 3], text(200), tenant="other")
    first.stop()
    newest = SQLiteStore.newest

    def refuse(store: SQLiteStore, namespace: str) -> str:
        if namespace == LOGS.of("other"):
            raise StoreError("WRONGTYPE")
        return newest(store, namespace)

    monkeypatch.setattr(SQLiteStore, "newest", refuse)
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert again.cache.has_session(TENANT, "s") and not again.cache.has_session("other", "s")
    assert again.drafts(text(100, 5)) == text(105, 4)


# An erasure ends while the snapshot that still holds its session is renamed; then the process is killed.
_KILLED = """
import os, signal, sys
from pathlib import Path
from agentspec.cache import SuffixCache
from tests.server_ext.replicas import NS, Replica, text

folder = Path(sys.argv[1])
replica = Replica(f"sqlite:///{folder}/log.db", snapshot=folder / "snapshot")
replica.say([1, 2, 3], text(100))
replica.say([1, 2, 3], text(200), "kept")
replica.persistence._writer.flush(60)
while replica.place() != replica.store.newest(NS):
    pass
save = SuffixCache.save

def renamed_too_late(cache, path, **names):
    save(cache, path, **names)
    content = path.read_bytes()
    replica.erase("s")
    assert not path.exists()
    path.write_bytes(content)
    os.kill(os.getpid(), signal.SIGKILL)

SuffixCache.save = renamed_too_late
replica.engine._keeper.save()
"""


def test_a_kill_between_a_snapshots_renaming_and_its_check_brings_nothing_back(start: Start, tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False, cwd=Path(__file__).parents[2])
    assert killed.returncode == -signal.SIGKILL
    assert np.array(text(100), np.int32).tobytes() in (tmp_path / "snapshot").read_bytes()
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert again.drafts(text(100, 5)) == [] and again.drafts(text(100, 5), "s") == []
    assert again.drafts(text(200, 5)) == text(205, 4)
    assert not (tmp_path / "snapshot").exists()


@pytest.mark.parametrize("followed", [False, True])
def test_a_snapshot_older_than_an_erasure_brings_nothing_back_of_a_session_that_is_used_again(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, followed: bool
) -> None:
    """This holds whether or not its log was followed before the snapshot was checked."""
    here, elsewhere = start(snapshot=tmp_path / "snapshot"), start()
    here.say([1, 2, 3], text(100))
    here.say([1, 2, 3], text(300), "stays")
    here.stop()
    elsewhere.erase("s")
    elsewhere.say([1, 2, 3], text(200))
    assert elsewhere.persistence._writer.flush(60)
    catch_up = SnapshotErasures.catch_up

    def late(erasures: SnapshotErasures, places: Mapping[str, str]) -> bool:
        if followed:
            erasures._follower.begin(NS, TENANT)
        return catch_up(erasures, places)

    monkeypatch.setattr(SnapshotErasures, "catch_up", late)
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert again.cache.has_session(TENANT, "stays") and not again.cache.has_session(TENANT, "s")
    again.begin([4, 5], "s")
    again.wait(lambda: not again.cache.needs_load(TENANT, "s"))
    assert again.drafts(text(200, 5), "s") == text(205, 4)
    assert again.drafts(text(100, 5), "s") == []


def test_nothing_is_drafted_from_a_snapshot_before_it_is_known_what_was_erased(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start waits for the store only so long; then requests come."""
    from agentspec.cache.store import SQLiteStore

    first, elsewhere = start(snapshot=tmp_path / "snapshot"), start()
    first.say([1, 2, 3], text(100))
    first.say([1, 2, 3], text(300), "stays")
    first.stop()
    elsewhere.erase("s")
    asked, answers, tombstones = threading.Event(), threading.Event(), SQLiteStore.tombstones

    def slow(*args: Any, **more: Any) -> dict[str, str]:
        asked.set()
        assert answers.wait(60)
        return tombstones(*args, **more)

    monkeypatch.setattr(SQLiteStore, "tombstones", slow)
    monkeypatch.setattr(SnapshotKeeper, "wait_loaded", lambda *_: asked.wait(60) and b"")
    monkeypatch.setattr(Persistence, "warm_up", lambda *_: 0)
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert again.cache.has_session(TENANT, "s")
    assert again.drafts(text(100, 5)) == again.drafts(text(300, 5)) == []
    answers.set()
    again.wait(lambda: again.drafts(text(300, 5)))
    assert again.drafts(text(100, 5)) == [] and again.engine.stats()["steps_held_back"] > 0


def test_a_snapshot_older_than_what_the_store_keeps_is_deleted(start: Start, tmp_path: Path) -> None:
    """The store may have dropped tombstones of sessions that were erased since."""
    here, elsewhere = start(snapshot=tmp_path / "snapshot"), start()
    here.say([1, 2, 3], text(100))
    here.stop()
    elsewhere.erase("s")
    elsewhere.store.trim(Retention(days=1e-9))
    assert not elsewhere.store.tombstones(NS)
    month_ago = time.time() - 31 * 86_400
    os.utime(tmp_path / "snapshot", (month_ago, month_ago))
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert again.cache.tenants() == [] and not (tmp_path / "snapshot").exists()
    assert again.drafts(text(100, 5), "s") == []


def test_a_restart_without_the_snapshot_has_only_what_retention_left(start: Start, tmp_path: Path) -> None:
    """Retention reaches neither the indexes in memory nor the snapshot, as docs/security.md says."""
    server = start(snapshot=tmp_path / "snapshot")
    server.say([1, 2, 3], text(100), "old")
    assert server.persistence._writer.flush(60)
    between = time.time() + 0.1
    time.sleep(1.0)
    server.say([1, 2, 3], text(200), "new")
    assert server.persistence._writer.flush(60)
    while server.store.trim(Retention(days=(time.time() - between) / 86_400)).more:
        pass
    assert [record.session for record in stored(server)] == ["new"]
    assert server.drafts(text(100, 5)) == text(105, 4)
    server.stop()
    (tmp_path / "snapshot").unlink()
    again = start(snapshot=tmp_path / "snapshot")
    again.wait(lambda: again.drafts(text(200, 5)) == text(205, 4))
    assert again.drafts(text(100, 5)) == [] and again.drafts(text(100, 5), "old") == []


def test_a_snapshot_takes_no_more_than_the_store_may(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(store="memory://", retention_bytes=1_000_000)
    persistence = in_memory(settings)
    large = replace(turn("s", 1), response=np.arange(200_000, dtype=np.int32) % 1000)
    persistence.cache.restore(turn_of(large))
    keeper = SnapshotKeeper.of_engine(tmp_path / "snapshot", persistence, settings, note=bytes)
    keeper.wait_loaded(60)
    assert not keeper.save() and not (tmp_path / "snapshot").exists()
    assert "more than retention_bytes=1000000; raise retention_bytes, or lower max_bytes" in caplog.text
    keeper.close()
    persistence.close()


def test_snapshots_of_models_that_are_not_served_any_more_are_deleted_with_age(start: Start, tmp_path: Path) -> None:
    def snapshot(store: str, log: str) -> Path:
        path = snapshot_path(f"sqlite:///{tmp_path}/{store}", log, 0)
        assert path is not None
        path.write_bytes(b"text")
        return path

    old, young, of_another_store = snapshot("log.db", "0.1"), snapshot("log.db", "0.2"), snapshot("other.db", "0.1")
    month_ago = time.time() - 31 * 86_400
    for path in (old, of_another_store):
        os.utime(path, (month_ago, month_ago))
    start(snapshot=snapshot("log.db", NS))
    wait_until(lambda: not old.exists())
    assert young.exists() and of_another_store.exists()


def test_a_snapshot_is_not_used_where_retention_may_have_taken_a_tombstone(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Retention by size or number removes tombstones that are younger than the snapshot."""
    here, elsewhere = start(snapshot=tmp_path / "snapshot"), start()
    meet(here, elsewhere)
    here.say([1, 2, 3], text(100))
    here.stop()
    elsewhere.erase("s")
    elsewhere.store.trim(Retention(records=0))
    elsewhere.say([1, 2, 3], text(300), "stays")
    assert elsewhere.persistence._writer.flush(60)
    assert not elsewhere.store.tombstones(NS)
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert not again.cache.has_session(TENANT, "s")
    assert again.drafts(text(100, 5), "s") == again.drafts(text(100, 5)) == []
    (line,) = (line for line in caplog.messages if "saved suffix indexes" in line)
    assert "of 1 of 1 tenants are not used, because the store does not tell all that was erased since" in line


def test_a_snapshot_is_used_as_long_as_what_came_after_it_is_in_the_store(start: Start, tmp_path: Path) -> None:
    here, elsewhere = start(snapshot=tmp_path / "snapshot"), start()
    meet(here, elsewhere)
    here.say([1, 2, 3], text(100), "stays")
    here.stop()
    elsewhere.erase("s")
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert again.cache.has_session(TENANT, "stays") and not again.cache.has_session(TENANT, "s")
    assert again.drafts(text(100, 5), "stays") == text(105, 4)


@pytest.mark.parametrize("own", [True, False])
def test_a_snapshot_outlives_starts_after_erasures_that_it_knows(start: Start, tmp_path: Path, own: bool) -> None:
    """Each start deleted it as long as the store had a tombstone. A kill soon after cost what had been learned."""
    here, elsewhere = start(snapshot=tmp_path / "snapshot"), start()
    meet(here, elsewhere)
    here.say([1, 2, 3], text(100))
    assert here.persistence._writer.flush(60)  # a turn that arrives behind the erasure is erased later
    (here if own else elsewhere).erase("s")
    if not own:
        here.wait(lambda: here.follower("erased"))
    here.say([1, 2, 3], text(200))
    here.stop()
    for _ in range(2):
        again = start(snapshot=tmp_path / "snapshot", preload=0)
        assert (tmp_path / "snapshot").exists()
        assert again.cache.has_session(TENANT, "s") and again.drafts(text(200, 5)) == text(205, 4)
        assert again.drafts(text(100, 5)) == [] and again.drafts(text(100, 5), "s") == []
    elsewhere.erase("s")
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert not (tmp_path / "snapshot").exists() and not again.cache.has_session(TENANT, "s")


def test_a_snapshot_is_not_used_while_the_store_cannot_tell_what_was_erased(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentspec.cache.store import SQLiteStore

    first = start(snapshot=tmp_path / "snapshot")
    first.say([1, 2, 3], text(100))
    first.stop()

    def away(*_: object, **__: object) -> dict[str, str]:
        raise StoreUnavailableError("away")

    monkeypatch.setattr(SQLiteStore, "tombstones", away)
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert again.cache.tenants() == [] and again.drafts(text(100, 5)) == []


def test_a_snapshot_that_cannot_be_deleted_keeps_a_session_nowhere_else(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its file system may have become read-only. The caller who erases is told, and a start on it is not held back."""
    here, elsewhere = start(snapshot=tmp_path / "snapshot"), start()
    meet(here, elsewhere)
    here.say([1, 2, 3], text(100))
    here.say([1, 2, 3], text(300), "stays")
    assert here.persistence._writer.flush(60)
    wait_until(lambda: here.place() == here.store.newest(NS))
    assert here.engine._keeper is not None and here.engine._keeper.save()
    unlink = Path.unlink

    def read_only(path: Path, missing_ok: bool = False) -> None:
        if path == tmp_path / "snapshot":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(AssertionError, match=r"a snapshot .*refuses this"):
        here.erase("s")
    assert "snapshot: cannot be deleted, and holds what was erased: Read-only" in caplog.text
    assert [record.session for record in stored(here)] == ["stays"]
    wait_until(lambda: not elsewhere.cache.has_session(TENANT, "s"))
    elsewhere.erase("other")
    wait_until(lambda: here.follower("erased") == 1)
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert again.engine._keeper is not None and again.engine._keeper.is_loaded()
    assert again.cache.has_session(TENANT, "stays") and not again.cache.has_session(TENANT, "s")


def test_following_a_log_with_old_erasures_deletes_no_snapshot(start: Start, tmp_path: Path) -> None:
    """A snapshot of another engine, or of this one, holds nothing of them. Each tombstone deleted all of them."""
    elsewhere, here = start(), start(snapshot=tmp_path / f"log.db-{LOGS.of(None)}-0.snapshot")
    for session in ("gone", "gone too"):
        elsewhere.erase(session)
    others = tmp_path / f"log.db-{LOGS.of('somebody')}-1.snapshot"
    others.write_bytes(b"text")
    assert here.engine._keeper is not None and here.engine._keeper.save()
    here.say([1, 2, 3], text(100))
    wait_until(lambda: here.follower("logs") == 2)
    assert here.follower("erased") == 2
    assert here.engine._keeper.save()
    here.persistence._follower._logs.remove(NS)  # type: ignore[union-attr]  # as where too many are followed
    here.persistence._begin_following(NS, TENANT)
    assert here.follower("logs") == 2 and others.exists() and here.engine._keeper._path.exists()


@pytest.mark.parametrize("followed", [True, False])
def test_following_a_log_deletes_a_snapshot_that_may_hold_what_was_erased_while_it_was_not_followed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, followed: bool
) -> None:
    here, elsewhere = start(snapshot=tmp_path / "snapshot"), start()
    assert here.persistence._follower is not None and here.engine._keeper is not None
    with monkeypatch.context() as patch:
        if not followed:
            patch.setattr(here.persistence._follower, "begin", Mock(side_effect=StoreUnavailableError("away")))
        here.say([1, 2, 3], text(100), "gone")
        if followed:
            assert here.persistence._writer.flush(60)
            wait_until(lambda: here.follower("logs") == 2)
        assert here.engine._keeper.save()
        assert here.cache.forget_tenant(TENANT)  # so only the snapshot has it
        here.persistence._follower._logs.remove(NS)
        elsewhere.erase("gone")
    here.persistence._begin_following(NS, TENANT)
    assert not (tmp_path / "snapshot").exists()


def test_the_last_snapshot_does_not_wait_for_a_store_that_is_slow_to_close(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine gets 10 s to end, which another program's lock on the store can use up."""
    replica = start(snapshot=tmp_path / "snapshot")
    replica.say([1, 2, 3], text(100))
    wait_until(lambda: replica.place() is not None)  # its log is followed
    close = replica.store.close

    def close_later() -> None:
        wait_until((tmp_path / "snapshot").exists)
        close()

    monkeypatch.setattr(replica.store, "close", close_later)
    replica.engine.close()
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    assert again.drafts(text(100, 5)) == text(105, 4)
