"""Test the background loader: what it gives, in which order, and what a failing store costs."""

import time
from typing import Any

import pytest

from agentspec.cache.store import BackgroundLoader, Loaded, MessageRecord, NewEntry, Wanted, encode
from agentspec.errors import StoreError, StoreUnavailableError
from tests.store.helpers import NS, FlakyStore, entry_of, gather, number_of, turn, wait_until
from tests.store.loader_fixtures import CORPUS, SlowSession, fill, loader, session, store

__all__ = ["loader", "store"]


def test_a_session_comes_whole_and_in_order_at_each_request(store: FlakyStore, loader: BackgroundLoader) -> None:
    fill(store, 600)
    for _ in range(2):  # the engine knows which turns are new
        store.gate.clear()  # the loader is busy with another session
        calls = store.calls
        assert loader.request(session("nobody"))
        wait_until(lambda calls=calls: store.calls > calls)  # type: ignore[misc]
        assert loader.request(session("s1"))
        assert loader.request(session("s1"))
        store.gate.set()
        assert [number_of(record) for record in gather(loader, session("s1"))] == list(range(1, 600, 3))
    assert loader.stats().delivered == 400


def test_what_was_read_is_not_read_again_before_all_of_it_was_taken(
    store: FlakyStore, loader: BackgroundLoader
) -> None:
    """A large group takes many steps to apply, and each of its requests that begins meanwhile asks for it."""
    fill(store, 600)
    for wanted, count in ((Wanted(NS, "tenant", group="g1"), 300), (session("s1"), 200)):
        for _ in range(5):
            assert loader.request(wanted)
            wait_until(lambda: not loader.stats().pending)
        found = 0
        while loaded := loader.take():
            found += len(loaded.records)
            if loaded.complete:
                break
        assert found == count
        assert len(gather(loader, wanted)) == count  # once more, with what was stored since
        assert loader.take() is None and not loader.is_pending(wanted)


def test_of_a_session_without_end_the_newest_records_come(store: FlakyStore, loader: BackgroundLoader) -> None:
    store.append(NS, [entry_of(turn("s", number)) for number in range(3000)])
    loader.request(session("s"))
    assert [number_of(record) for record in gather(loader, session("s"))] == list(range(3000 - 2048, 3000))


def test_a_group_comes_across_its_sessions(store: FlakyStore, loader: BackgroundLoader) -> None:
    fill(store, 90)
    loader.request(Wanted(NS, "tenant", group="g1"))
    assert [number_of(record) for record in gather(loader, Wanted(NS, "tenant", group="g1"))] == list(range(1, 90, 2))


def test_a_short_session_does_not_wait_for_all_of_a_long_group(store: FlakyStore, loader: BackgroundLoader) -> None:
    fill(store, 600)
    group, short = Wanted(NS, "tenant", group="g0"), session("short")
    store.append(NS, [entry_of(turn("short", 600))])
    assert loader.request(group) and loader.request(short)
    wait_until(lambda: not loader.stats().pending)
    taken = list(iter(loader.take, None))
    assert [loaded.wanted for loaded in taken[:4]] == [group, short, group, short]
    assert [loaded.complete for loaded in taken[:4]] == [False, False, False, True]
    of_group = [number_of(record) for loaded in taken if loaded.wanted == group for record in loaded.records]
    assert of_group == list(range(0, 600, 2))


def test_the_end_of_a_session_is_told(store: FlakyStore, loader: BackgroundLoader) -> None:
    fill(store, 300, sessions=1)
    loader.request(session("s0"))
    loader.request(session("nobody"))
    found: list[Loaded] = []

    def ended() -> bool:
        while loaded := loader.take():
            found.append(loaded)
        return sum(loaded.complete for loaded in found) == 2

    wait_until(ended)
    of_each = {name: [loaded for loaded in found if loaded.wanted == session(name)] for name in ("s0", "nobody")}
    assert [loaded.complete for loaded in of_each["s0"]] == [False] * (len(of_each["s0"]) - 1) + [True]
    assert len(of_each["s0"]) > 1 and len(of_each["nobody"]) == 1
    assert not loader.is_pending(session("s0"))


def test_taking_never_waits_and_an_unknown_session_is_soon_done(store: FlakyStore, loader: BackgroundLoader) -> None:
    assert loader.take() is None
    store.gate.clear()
    loader.request(session("nobody"))
    begin = time.perf_counter()
    for _ in range(1000):
        assert loader.take() is None
        assert loader.is_pending(session("nobody"))
    assert time.perf_counter() - begin < 10  # each call would take 10 ms if it waited
    store.gate.set()
    assert gather(loader, session("nobody")) == []


def test_what_was_read_is_pending_until_it_is_taken(
    store: FlakyStore, loader: BackgroundLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its read ends just while somebody asks."""
    wanted = session("s0")
    fill(store, 3)
    store.gate.clear()
    loader.request(wanted)
    holds = loader.ready.holds

    def slow(wanted: Wanted) -> bool:
        found = holds(wanted)
        store.gate.set()
        wait_until(lambda: not loader.is_reading(wanted))
        return found

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(loader.ready, "holds", slow)
        assert loader.is_pending(wanted)
    store.gate.set()
    wait_until(lambda: not loader.is_reading(wanted))
    assert loader.is_pending(wanted)
    assert len(gather(loader, wanted)) == 1 and not loader.is_pending(wanted)


def test_the_records_that_wait_are_bounded_and_counted(store: FlakyStore) -> None:
    limit = 1 << 20
    for number in range(10 * limit // 8_500):
        store.append(NS, [entry_of(turn("s", number, prompt=2000))])
    loader = BackgroundLoader(store, max_ready_bytes=limit)
    loader.request(session("s"))
    wait_until(lambda: loader.stats().ready_bytes >= limit)
    time.sleep(0.1)
    assert limit <= loader.stats().ready_bytes < 2.2 * limit
    assert len(gather(loader, session("s"))) == 10 * limit // 8_500
    assert loader.stats().ready_bytes == 0
    loader.close()


def test_records_of_an_erased_session_are_dropped_wherever_they_are(store: FlakyStore) -> None:
    loader = BackgroundLoader(store, max_ready_bytes=1)
    fill(store, 300, sessions=2)
    loader.request(CORPUS, 300)
    wait_until(lambda: loader.ready._waiting)
    loader.forget("s0")  # its records are ready, read, or yet to be read
    assert {record.session for record in gather(loader, CORPUS)} == {"s1"}
    loader.request(session("s0"))  # what the store still has is loaded again
    assert len(gather(loader, session("s0"))) == 150
    loader.close()


def test_a_store_that_is_away_costs_waiting_only(
    store: FlakyStore, loader: BackgroundLoader, caplog: pytest.LogCaptureFixture
) -> None:
    fill(store, 9)
    store.error = StoreUnavailableError("away")
    loader.request(session("s0"))
    loader.request(CORPUS, 100)
    wait_until(lambda: loader.stats().failed > 9)
    assert loader.is_pending(session("s0"))
    assert loader.take() is None
    store.error = None
    assert sorted(number_of(record) for record in gather(loader, session("s0"), CORPUS)) == sorted([*range(9), 0, 3, 6])
    assert loader.stats().given_up == 0
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "cannot be read: away" in lines[0]
    assert "again" in lines[1]


@pytest.mark.parametrize("whole_log", [False, True])
def test_a_read_that_breaks_off_goes_on_behind_what_it_gave(
    store: FlakyStore, loader: BackgroundLoader, whole_log: bool
) -> None:
    fill(store, 300, sessions=1)
    store.fail_read_after = 100
    if whole_log:
        loader.request(CORPUS, 300)
    else:
        loader.request(session("s0"))
    records = gather(loader, CORPUS if whole_log else session("s0"))
    assert [number_of(record) for record in records] == list(range(300))
    assert loader.stats().failed == 1


@pytest.mark.parametrize("wanted", [CORPUS, session("s0")])
def test_a_read_that_breaks_off_gives_all_of_the_newest_though_others_write_meanwhile(
    store: FlakyStore, loader: BackgroundLoader, wanted: Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 100, sessions=1)
    store.fail_read_after = 40
    put_off = loader._put_off

    def late(job: Any, error: Exception) -> None:
        store.append_ungated(NS, [entry_of(turn("s0", number)) for number in range(100, 150)])
        put_off(job, error)

    monkeypatch.setattr(loader, "_put_off", late)
    loader.request(wanted, 100)
    assert [number_of(record) for record in gather(loader, wanted)] == [*range(40), *range(50, 150)]
    assert loader.stats().failed == 1


def test_a_session_that_always_times_out_blocks_no_other_and_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    store = SlowSession()
    for name in ("slow", "a", "b", "c"):
        store.append(NS, [entry_of(turn(name, 1))])
    loader = BackgroundLoader(store)  # with the pauses that a server has
    for name in ("slow", "a", "b", "c"):
        loader.request(session(name))
    assert len(gather(loader, *map(session, ("slow", "a", "b", "c")))) == 3
    stats = loader.stats()
    assert (stats.failed, stats.given_up, stats.state) == (3, 1, "closed")
    assert len(caplog.records) == 1
    store.broken = ""
    loader.request(session("slow"))  # the session's next request asks again
    assert len(gather(loader, session("slow"))) == 1
    loader.close()


@pytest.mark.parametrize("error", [StoreError("damaged file"), RuntimeError("a bug")])
def test_a_read_that_can_never_work_is_given_up(
    store: FlakyStore, loader: BackgroundLoader, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    fill(store, 9)
    store.error = error
    loader.request(session("s0"))
    loader.request(CORPUS, 5)
    assert gather(loader, session("s0"), CORPUS) == []
    assert (loader.stats().failed, loader.stats().given_up, len(caplog.records)) == (2, 2, 1)
    store.error = None
    loader.request(session("s0"))
    assert len(gather(loader, session("s0"))) == 3


def test_unusable_records_are_skipped_counted_and_warned_of_once(
    store: FlakyStore, loader: BackgroundLoader, caplog: pytest.LogCaptureFixture
) -> None:
    good = entry_of(turn("s", 1))
    damaged = NewEntry("s", good.payload[:-1] + b"\x7f")
    for entry in (damaged, good, damaged, NewEntry("s", b""), NewEntry("s", encode(MessageRecord("s", {}, 1.0)))):
        store.append(NS, [entry])
    loader.request(session("s"))
    assert [number_of(record) for record in gather(loader, session("s"))] == [1]
    assert loader.stats().damaged == 3
    assert len(caplog.records) == 1


def test_too_many_requests_are_turned_away_counted_and_taken_later(store: FlakyStore) -> None:
    store.gate.clear()
    fill_store = [entry_of(turn(name, 1)) for name in "abcd"]
    loader = BackgroundLoader(store, max_pending=2)
    loader.request(session("first"))
    wait_until(lambda: loader._current is not None)  # the loader hangs in this read, and takes no waiting one
    assert [loader.request(session(name)) for name in "abcd"] == [True, True, False, False]
    assert [loader.is_pending(session(name)) for name in "abcd"] == [True, True, False, False]
    assert loader.stats().refused == 2
    store.gate.set()
    store.append(NS, fill_store)
    gather(loader, session("a"), session("b"))
    assert loader.request(session("c"))
    assert [record.session for record in gather(loader, session("c"))] == ["c"]
    loader.close()


def test_close_ends_the_thread_that_waits_for_requests(store: FlakyStore) -> None:
    loader = BackgroundLoader(store)
    loader.request(session("nobody"))
    gather(loader, session("nobody"))
    loader.close(5)
    assert not loader._thread.is_alive()


def test_close_ends_the_thread_even_if_nobody_takes(store: FlakyStore) -> None:
    fill(store, 600)
    loader = BackgroundLoader(store, max_ready_bytes=1)
    loader.request(CORPUS, 600)
    wait_until(lambda: loader.ready._waiting)
    loader.close(60)
    assert not loader._thread.is_alive()
    assert not loader.request(session("s0"))
    assert not loader.is_pending(session("s0"))
