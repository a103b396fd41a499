"""Test several engines on one store: none drafts from what another has erased."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentspec.cache import FinishedTurn
from agentspec.cache.store import Retention
from agentspec.errors import StoreUnavailableError
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.session_questions import EraseSession
from tests.store.helpers import wait_until
from tests.timing import assert_fast

from .replicas import FOLLOWER, LIFE_SECONDS, NS, TENANT, Start, meet, patience, start, stored, text

__all__ = ["patience", "start"]


def test_what_was_read_of_a_session_that_is_erased_here_is_dropped(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower is learning from a turn of another engine while the session is erased."""
    a, b = start(), start()
    meet(a, b)
    read, goes_on = threading.Event(), threading.Event()
    learn = a.cache.learn_from

    def slowly(turn: FinishedTurn) -> int:
        read.set()
        assert goes_on.wait(60)
        return learn(turn)

    monkeypatch.setattr(a.cache, "learn_from", slowly)
    monkeypatch.setattr(f"{FOLLOWER}._LEARN_SECONDS", 60.0)  # a busy machine may take all 20 ms
    b.say([1, 2, 3], text(100), "gone")
    assert b.persistence._writer.flush(60)
    assert read.wait(60)
    a.erase("gone")
    goes_on.set()
    b.say([1, 2, 3], text(200), "stays")
    a.wait(lambda: a.drafts(text(200, 5)))
    assert a.drafts(text(100, 5)) == []
    b.wait(lambda: not b.drafts(text(100, 5)))  # turns that b says before it knows of the erasure are erased, too
    b.say([1, 2, 3], text(300), "gone")  # used again
    a.wait(lambda: a.drafts(text(300, 5)))


def test_a_turn_that_cannot_be_learned_from_hides_no_erasure(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns and erasures are read in order, so such a turn must not stop the reading."""
    a, b = start(), start()
    meet(a, b)

    def fail(turn: FinishedTurn) -> int:
        raise RuntimeError("of the core")

    monkeypatch.setattr(b.cache, "learn_from", fail)
    a.say([1, 2, 3], text(100))
    b.wait(lambda: b.drafts(text(100, 5)) == text(105, 4))
    a.erase("s")
    b.wait(lambda: not b.drafts(text(100, 5)))
    assert b.persistence.stats()["follower"]["failed"] == 0


def test_an_erasure_reaches_the_others_at_once(start: Start, tmp_path: Path) -> None:
    a, b = start(), start(snapshot=tmp_path / "b.snapshot")
    meet(a, b)
    a.say([1, 2, 3], text(100))
    b.wait(lambda: b.drafts(text(100, 5), "s"))
    assert b.engine._keeper is not None and b.engine._keeper.save()
    running = b.begin([1, 2, 3], "s")
    a.erase("s")
    wait_until(lambda: b.follower("erased"))  # without a step or a request
    assert not b.cache.has_session(TENANT, "s")
    assert not (tmp_path / "b.snapshot").exists()
    assert b.drafts(text(100, 5)) == [] and a.drafts(text(100, 5)) == []
    b.end(running, text(300))  # it was running while its session was erased
    assert b.drafts(text(300, 5)) == []
    assert b.persistence._writer.flush(60)
    assert [record for record in stored(a) if record.session == "s"] == []
    a.say([1, 2, 3], text(500))  # the name may be used again, here at once
    b.wait(lambda: b.drafts(text(500, 5)) == text(505, 4))
    assert a.drafts(text(500, 5), "s") == text(505, 4)


def test_what_others_erased_is_hidden_in_detailed_figures(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected tokens of other requests may quote it."""
    a, b = start(), start()
    meet(a, b)
    hidden: list[tuple[str, set[str | None]]] = []
    traces = a.engine.sessions._traces
    monkeypatch.setattr(traces, "erase", lambda session, tenants: hidden.append((session, set(tenants))))
    b.erase("s")
    a.wait(lambda: ("s", {TENANT}) in hidden)


@pytest.mark.alone
def test_an_erasure_is_known_to_the_others_within_a_moment(start: Start) -> None:
    a, b = start(), start()
    meet(a, b)

    def measure() -> dict[str, float]:
        a.say([1, 2, 3], text(100))
        assert a.persistence._writer.flush(60)
        before, begin = b.follower("erased"), time.monotonic()
        a.erase("s")
        wait_until(lambda: b.follower("erased") > before)
        return {"seconds": time.monotonic() - begin}

    assert_fast(measure, seconds=2.0)  # some 20 ms


def test_a_turn_that_was_on_its_way_is_erased_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = start(), start()
    meet(a, b, session="other")
    append = b.store.append

    def late(*args: object, **options: object) -> list[str]:
        a.erase("s")
        wait_until(lambda: b.follower("erased"))
        return append(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(b.store, "append", late)
    b.say([1, 2, 3], text(100))
    wait_until(lambda: b.follower("erased"))
    monkeypatch.undo()
    a.wait(lambda: a.follower("erased") == 1)  # the second tombstone, by the other replica
    assert [record for record in stored(a) if record.session == "s"] == []
    assert a.drafts(text(100, 5)) == [] and b.drafts(text(100, 5)) == []


def test_an_erasure_is_known_as_this_processs_own_also_where_it_is_read_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it counted as another's, what the session said just then would be erased again."""
    a = start()
    a.say([1, 2, 3], text(100))
    assert a.persistence._writer.flush(60)
    wait_until(lambda: a.place() == a.store.newest(NS))
    erase_session = a.store.erase_session

    def slow(*args: Any, **options: Any) -> Any:
        erased = erase_session(*args, **options)
        time.sleep(0.3)
        return erased

    monkeypatch.setattr(a.store, "erase_session", slow)
    a.erase("s")
    wait_until(lambda: a.place() == a.store.newest(NS))
    assert a.follower("erased") == 0


def test_a_turn_that_ends_just_before_its_session_is_erased_is_not_stored_behind_that(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = start()
    meet(a)
    name, goes_on, finish = a.begin([1, 2, 3]), threading.Event(), a.cache.finish
    a.persistence.submit(lambda store: goes_on.wait(60))  # the erasure waits behind this job
    a.engine.sessions.begin("job", None, EraseSession("s", [TENANT]))

    def finished(request_id: str, **options: Any) -> FinishedTurn | None:
        turn = finish(request_id, **options)
        goes_on.set()
        wait_until(lambda: a.engine.sessions.poll("job"))
        return turn

    monkeypatch.setattr(a.cache, "finish", finished)
    a.end(name, text(100))
    assert a.persistence._writer.flush(60)
    assert stored(a) == [] and a.drafts(text(100, 5)) == []


def test_a_turn_that_was_on_its_way_is_erased_again_also_when_the_store_fails_then(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = start(), start()
    meet(a, b, session="other")
    append, erase, failures = b.store.append, b.store.erase_session, [0]

    def late(*args: Any, **options: Any) -> list[str]:
        a.erase("s")
        wait_until(lambda: b.follower("erased"))
        return append(*args, **options)

    def fails(*args: Any, **options: Any) -> Any:
        failures[0] += 1
        if failures[0] < 3:
            raise StoreUnavailableError("away")
        return erase(*args, **options)

    monkeypatch.setattr(b.store, "append", late)
    monkeypatch.setattr(b.store, "erase_session", fails)
    b.say([1, 2, 3], text(100))
    wait_until(lambda: b.follower("erased"))
    wait_until(lambda: failures[0])
    wait_until(lambda: not [record for record in stored(a) if record.session == "s"])


def test_a_turn_that_was_on_its_way_is_erased_again_also_where_it_was_loaded_meanwhile(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The session is used again at once, so it is loaded from the store, with the turn behind its tombstone."""
    a, b = start(), start(snapshot=tmp_path / "b.snapshot")
    meet(a, b, session="other")
    append, erase, goes_on = b.store.append, b.store.erase_session, threading.Event()

    def late(*args: Any, **options: Any) -> list[str]:
        a.erase("s")
        wait_until(lambda: b.follower("erased"))
        return append(*args, **options)

    def waits(*args: Any, **options: Any) -> Any:
        assert goes_on.wait(60)
        return erase(*args, **options)

    monkeypatch.setattr(b.store, "append", late)
    monkeypatch.setattr(b.store, "erase_session", waits)
    b.say([1, 2, 3], text(100))
    wait_until(lambda: b.follower("erased"))
    b.begin([1, 2, 3], "s")
    for _ in range(20):
        b.drafts(text(100, 5), "s")
        time.sleep(0.01)
    goes_on.set()
    wait_until(lambda: not [record for record in stored(a) if record.session == "s"])
    b.wait(lambda: not b.drafts(text(100, 5)) and not b.drafts(text(100, 5), "s"))
    assert not b.cache.has_session(TENANT, "s")
    b.stop()
    assert np.array(text(100), np.int32).tobytes() not in (tmp_path / "b.snapshot").read_bytes()


def test_a_turn_that_was_on_its_way_is_erased_again_also_where_its_process_stops_then(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = start(), start()
    meet(a, b, session="other")
    append, wait = b.store.append, b.store.wait

    def late(*args: Any, **options: Any) -> list[str]:
        a.erase("s")
        return append(*args, **options)

    def slow(*args: Any) -> list[str]:
        found = wait(*args)
        time.sleep(0.3 if found else 0.0)
        return found

    monkeypatch.setattr(b.store, "append", late)
    monkeypatch.setattr(b.store, "wait", slow)
    b.say([1, 2, 3], text(100))
    b.engine.close()
    assert [record for record in stored(a) if record.session == "s"] == []
    a.wait(lambda: not a.drafts(text(100, 5)))


def test_an_erasure_is_known_to_the_others_also_where_the_store_holds_nothing_of_the_session_but_its_tombstone(
    start: Start,
) -> None:
    a, b = start(), start()
    meet(a, b)
    a.erase("s")
    wait_until(lambda: b.follower("erased"))
    running = b.begin([1, 2, 3], "s")
    a.erase("s")
    wait_until(lambda: b.follower("erased") == 2)
    b.end(running, text(100))
    assert b.persistence._writer.flush(60)
    assert stored(a) == [] and b.drafts(text(100, 5)) == []


def test_what_was_loaded_but_not_applied_is_erased_too(start: Start) -> None:
    a, b = start(), start()
    for number in range(100, 3000, 100):
        a.say([1, 2, 3], text(number))
    assert a.persistence._writer.flush(60)
    b.begin([1], "other")
    wait_until(lambda: b.persistence.apply_loaded(0.0) == 1)  # the rest of the batch waits in the engine's hands
    a.erase("s")
    wait_until(lambda: b.follower("erased"))
    for number in range(100, 3000, 100):
        assert b.drafts(text(number, 5)) == []


@pytest.mark.parametrize("history", ["trimmed", ValueError("no reply that the client understands")])
def test_running_requests_make_way_where_their_tenant_has_to_be_forgotten(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    history: str | ValueError,
) -> None:
    """The start waits for the store only so long. Nothing is drafted until the snapshot's text is gone."""
    from agentspec.server_ext.persistence.warm_restart import SnapshotKeeper

    first = start(snapshot=tmp_path / "snapshot")
    first.say([1, 2, 3], text(100))
    first.stop()
    asked, answers = threading.Event(), threading.Event()

    def unknown(store: Any, namespace: str, after: str) -> str:
        asked.set()
        assert answers.wait(60)
        if isinstance(history, ValueError):
            raise history
        return history

    monkeypatch.setattr("agentspec.cache.store.SQLiteStore.history", unknown)
    monkeypatch.setattr(SnapshotKeeper, "wait_loaded", lambda *_: asked.wait(60) and b"")
    monkeypatch.setattr(Persistence, "warm_up", lambda *_: 0)
    again = start(snapshot=tmp_path / "snapshot", preload=0)
    running = again.begin(text(100, 5), "other")
    assert again.step()[running] == [] and not again.engine._keeper.is_loaded()  # type: ignore[union-attr]
    answers.set()
    again.wait(lambda: again.engine._keeper.is_loaded())  # type: ignore[union-attr]
    assert not again.cache.has_session(TENANT, "s") and again.drafts(text(100, 5)) == []
    assert "1 running requests go on without drafts" in caplog.text
    again.end(running, [7, 8])
    again.say([1, 2, 3], text(400), "next")
    assert again.drafts(text(400, 5)) == text(405, 4)


def test_an_engine_drafts_nothing_while_it_cannot_know_what_was_erased(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = start()
    meet(a)
    a.say([1, 2, 3], text(100))
    name = a.begin(text(100, 5))
    a.cache.catch_up()
    assert a.step()[name] == text(105, 4)
    follower = a.persistence._follower
    assert follower is not None
    with monkeypatch.context() as patch:  # the rest of the patience stays
        patch.setattr(follower, "is_current", lambda: False)
        assert a.step()[name] == []
        assert a.engine.stats()["steps_held_back"] == 1
    assert a.step()[name] == text(105, 4)


CHILD = """
import sys, time
from tests.server_ext.replicas import Replica, text
replica = Replica(sys.argv[1])
wait = replica.store.wait
def slow(*args):
    found = wait(*args)
    time.sleep(0.3 if found else 0)
    return found
replica.store.wait = slow
name = replica.begin(text(100, 5), "probe")
while True:
    draft = replica.step()[name]
    print(int(draft[:4] == text(105, 4)), flush=True)
    replica.cache.catch_up()
    time.sleep(0.002)
"""


def test_what_retention_took_while_a_process_could_not_read_it_may_have_been_an_erasure(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIFE_SECONDS, 1.0)
    here, elsewhere = start(), start()
    meet(here, elsewhere)
    here.say([1, 2, 3], text(100))
    assert here.persistence._writer.flush(60)
    wait_until(lambda: here.place() == here.store.newest(NS))
    away = threading.Event()

    def wait(*_: object) -> list[str]:
        if not away.is_set():
            raise StoreUnavailableError("away")
        return type(here.store).wait(here.store, *_)  # type: ignore[arg-type]

    monkeypatch.setattr(here.store, "wait", wait)
    wait_until(lambda: here.persistence.stats()["follower"]["state"] == "open")
    elsewhere.erase("s")
    while elsewhere.store.trim(Retention(records=0)).more:
        pass
    elsewhere.say([1, 2, 3], text(300), "stays")
    assert elsewhere.persistence._writer.flush(60)
    assert not elsewhere.store.tombstones(NS)
    here.begin([4, 5], "other")
    time.sleep(1.1)
    away.set()
    wait_until(here.persistence.outdated)

    def is_forgotten() -> bool:
        if not here.persistence.outdated() and here.persistence.is_current():
            return True
        assert here.drafts(text(100, 5)) == []
        here.begin([4, 5], "other")  # requests come all the time
        return False

    wait_until(is_forgotten)
    assert not here.cache.has_session(TENANT, "s") and here.drafts(text(100, 5), "s") == []
    here.wait(lambda: here.drafts(text(300, 5)) == text(305, 4))


def test_a_process_that_was_frozen_drafts_nothing_of_what_was_erased_meanwhile(start: Start, tmp_path: Path) -> None:
    a = start()
    a.say([1, 2, 3], text(100))
    assert a.persistence._writer.flush(60)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, f"sqlite:///{tmp_path}/log.db"], stdout=subprocess.PIPE, bufsize=0
    )
    deadline = threading.Timer(60.0, child.kill)  # reading its lines waits without one
    deadline.start()
    try:
        assert child.stdout is not None
        while child.stdout.readline() != b"1\n":  # until the child drafts what this process said
            assert child.poll() is None
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        os.set_blocking(child.stdout.fileno(), False)
        while child.stdout.read(65_536):
            pass
        os.set_blocking(child.stdout.fileno(), True)
        a.erase("s")
        time.sleep(1.1)
        os.kill(child.pid, signal.SIGCONT)
        child.stdout.readline()  # the line of an unfinished step
        lines = [child.stdout.readline() for _ in range(300)]
        assert child.poll() is None
        assert lines.count(b"0\n") == 300, lines
    finally:
        deadline.cancel()
        child.kill()
        child.wait()
