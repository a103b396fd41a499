"""Test that a restarted server goes on with its indexes and with what it had learned."""

import errno
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from agentspec.cache import FinishedTurn
from agentspec.server_ext.persistence.warm_restart import SnapshotKeeper, snapshot_identity
from tests.server_ext.snapshots import converse, drafts, keep, make, text
from tests.store.helpers import wait_until
from tests.timing import assert_fast, beside, cpu


def test_a_restart_goes_on_as_if_it_had_not_happened(tmp_path: Path) -> None:
    """It has what was learned, the note, and the turns that were stored after the snapshot."""
    path, never_stopped = tmp_path / "snapshot", make()
    keeper = keep(path, never_stopped, note=b"prices")
    for record in range(1, 21):
        converse([never_stopped], record)
    assert keeper.save() and keeper.save() and keeper.stats()["saved"] == 1  # the second time nothing had changed
    later = FinishedTurn("t", "s1", 0, text(40), text(100), writer="w", number=50)
    never_stopped.restore(later)
    never_stopped.catch_up()
    restarted = make()
    assert SnapshotKeeper(path, restarted, snapshot_identity("model", restarted)).wait_loaded() == b"prices"
    before = restarted.stats().tokens
    restarted.restore(later)
    assert restarted.stats().tokens > before
    held = restarted.stats().tokens
    restarted.restore(later)  # the log is read from a little before the snapshot: what is held changes nothing
    restarted.catch_up()
    assert restarted.stats().tokens == held == never_stopped.stats().tokens
    assert drafts(restarted) == drafts(never_stopped)
    assert len({str(draft) for draft in drafts(restarted)}) > 10
    converse([restarted, never_stopped], 60)
    assert drafts(restarted) == drafts(never_stopped)


def test_steps_run_while_it_is_saved(tmp_path: Path) -> None:
    cache = make()
    keeper = keep(tmp_path / "snapshot", cache)
    for record in range(1, 60):
        cache.restore(FinishedTurn("t", f"s{record % 5}", 0, text(500), text(4000), writer="w", number=record))
    stop = threading.Event()
    saved: list[bool] = []

    def save() -> None:
        while not stop.is_set():
            saved.append(keeper.save())

    thread = threading.Thread(target=save)
    thread.start()
    record = 100
    while len(saved) < 8:
        converse([cache], record := record + 1, tokens=60)
    stop.set()
    thread.join()
    assert all(saved)
    loaded = make()
    loaded.load_snapshot(tmp_path / "snapshot", identity=snapshot_identity("model", loaded))
    loaded.catch_up()
    assert loaded._core.recount()[1] == loaded.stats().bytes
    assert len({str(draft) for draft in drafts(loaded)}) > 10


@pytest.mark.alone
def test_no_step_waits_long_for_a_save(tmp_path: Path, clock_on: None) -> None:
    """The saving thread holds the lock for a fraction of a millisecond, so a step waits no longer."""
    cache = make()
    for record in range(1, 120):
        cache.restore(FinishedTurn("t", f"s{record % 5}", 0, text(20), text(8000), writer="w", number=record))
    cache.catch_up()
    cache.start("q", text(50), tenant="t")

    def measure() -> dict[str, float]:
        saving = partial(cache.save, tmp_path / "snapshot")
        steps, took = beside(saving, lambda: cache.propose(["q"], 8), pause=0.0005)
        enough = len(steps) > 20  # a busy machine may have let few steps run
        return {"share": float(np.percentile(steps, 90)) / took if enough else float("inf")}

    assert_fast(measure, share=0.05)


def test_it_saves_now_and_then_and_at_the_end_and_within_its_limit(tmp_path: Path) -> None:
    path, cache = tmp_path / "snapshot", make()
    keeper = SnapshotKeeper(path, cache, "model", interval=0.05)
    keeper.wait_loaded()
    converse([cache], 1)
    time.sleep(0.15)
    assert not path.exists()  # no save comes before the start
    keeper.start()
    deadline = time.monotonic() + 180
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    before = path.stat().st_size
    converse([cache], 2, tokens=3000)
    keeper.close()
    assert path.stat().st_size > before
    bounded = SnapshotKeeper(tmp_path / "none", cache, "model", max_bytes=1000)
    bounded.start()
    bounded.close()
    assert not (tmp_path / "none").exists() and bounded.stats()["errors"] == 1


@pytest.mark.alone
def test_a_large_cache_is_loaded_in_a_fraction_of_the_time_that_indexing_it_takes(tmp_path: Path) -> None:
    """Loading takes some .2 s of CPU time for a million tokens, while vLLM loads its weights."""
    cache = make()
    for record in range(1, 101):
        cache.restore(
            FinishedTurn("t", f"s{record % 50}", 0, text(200), text(9800), writer="w", number=record, scope="session")
        )
    indexing = cpu(cache.catch_up)
    cache.save(tmp_path / "snapshot")

    def measure() -> dict[str, float]:
        loaded = make()
        loading = cpu(lambda: loaded.load_snapshot(tmp_path / "snapshot"))
        assert loaded.stats().tokens >= 1_000_000 and loaded.stats().pending == 0
        return {"share": loading / indexing}

    assert_fast(measure, share=0.5)


def test_it_goes_on_once_its_folder_can_be_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network's file system may answer with an error for a while (ESTALE, EIO); the thread must survive that."""
    path, cache = tmp_path / "snapshot", make()
    keeper = SnapshotKeeper(path, cache, "model", interval=0.05)
    keeper.wait_loaded()
    keeper.start()
    converse([cache], 1)
    wait_until(lambda: keeper.stats()["saved"])

    def stale(*_: object, **__: object) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as away:
        for call in ("exists", "unlink"):
            away.setattr(Path, call, stale)
        wait_until(lambda: keeper.stats()["errors"] > 1)
    converse([cache], 2)
    wait_until(lambda: keeper.stats()["saved"] > 1)
    keeper.close()


def test_a_save_that_an_erasure_overtook_fails_where_it_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = tmp_path / "snapshot", make()
    keeper = keep(path, cache)
    converse([cache], 1)
    with monkeypatch.context() as away:
        original = cache.save

        def save(*arguments: Any, **options: Any) -> None:
            original(*arguments, **options)
            keeper.delete()
            original(*arguments, **options)
            away.setattr(Path, "unlink", Mock(side_effect=OSError(errno.EACCES, "Permission denied")))

        away.setattr(cache, "save", save)
        assert not keeper.save() and keeper.stats() == {"saved": 0, "errors": 1, "loaded_tokens": 0}
    assert keeper.save() and keeper.stats()["saved"] == 1
