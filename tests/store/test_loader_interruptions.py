"""Test interruptions of the background loader: erasures, reads that break off, sessions in several batches."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from agentspec.cache.store import BackgroundLoader, CircuitBreaker, Entry, TurnRecord, Wanted
from agentspec.errors import StoreUnavailableError
from tests.store.helpers import NS, FlakyStore, entry_of, gather, number_of, turn, wait_until
from tests.store.loader_fixtures import CORPUS, SlowSession, fill, loader, session, store

__all__ = ["loader", "store"]


def test_a_session_that_is_erased_between_two_batches_of_a_corpus_is_dropped(store: FlakyStore) -> None:
    between, goes_on = threading.Event(), threading.Event()

    def before_read(namespace: str, tenant: str | None) -> None:
        if not reader.is_pending(session("live")):  # the corpus is about to be read
            reader.request(session("live"))
        else:
            between.set()
            assert goes_on.wait(60)

    reader = BackgroundLoader(store, before_read=before_read)
    fill(store, 300, sessions=2)
    reader.request(CORPUS, 300)
    assert between.wait(60)
    reader.forget("s0")
    goes_on.set()
    assert {record.session for record in gather(reader, CORPUS)} == {"s1"}
    reader.close()


def test_what_is_read_anew_came_behind_an_erasure(
    store: FlakyStore, loader: BackgroundLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 300, sessions=2)
    store.fail_read_after = 100
    put_off = loader._put_off

    def erased_first(job: Any, error: Exception) -> None:
        loader.forget("s0")
        put_off(job, error)

    monkeypatch.setattr(loader, "_put_off", erased_first)
    loader.request(CORPUS, 300)
    numbers = [number_of(record) for record in gather(loader, CORPUS)]
    assert [number for number in numbers if number >= 100] == list(range(100, 300))


class BreakingStore(FlakyStore):
    """Break off each read after 60 entries."""

    def _failing(self, entries: Iterator[Entry]) -> Iterator[Entry]:
        for count, entry in enumerate(entries):
            if count == 60:
                raise StoreUnavailableError("timed out")
            yield entry


@pytest.mark.parametrize("wanted", [CORPUS, session("s0")])
def test_a_read_that_gets_on_is_not_given_up_however_often_it_breaks_off(wanted: Wanted) -> None:
    store = BreakingStore()
    fill(store, 400, sessions=1)
    loader = BackgroundLoader(store)
    loader.request(wanted, 400)
    assert [number_of(record) for record in gather(loader, wanted)] == list(range(400))
    assert (loader.stats().failed, loader.stats().given_up) == (6, 0)
    loader.close()


def test_a_request_during_a_read_that_breaks_off_is_a_read_of_its_own(
    store: FlakyStore, loader: BackgroundLoader
) -> None:
    """The first read may miss what was stored since it began."""
    fill(store, 3, sessions=1)
    store.fail_read_after = 1
    store.gate.clear()
    loader.request(session("s0"))
    wait_until(lambda: loader._current is not None)
    loader.request(session("s0"))
    store.gate.set()
    assert [number_of(record) for record in gather(loader, session("s0"))] == [0, 1, 2, 0, 1, 2]


def test_an_outage_ends_though_the_first_read_behind_it_times_out() -> None:
    store = SlowSession()
    store.append(NS, [entry_of(turn("a", 1))])
    store.error = StoreUnavailableError("away")
    loader = BackgroundLoader(store, breaker=CircuitBreaker(first_pause=0.02, max_pause=0.05, retry_delay=0.001))
    loader.request(session("slow"))
    wait_until(lambda: loader.stats().state == "open")
    store.error = None
    loader.request(session("a"))
    assert len(gather(loader, session("a"), session("slow"))) == 1
    assert (loader.stats().given_up, loader.stats().state) == (1, "closed")
    loader.close()


def test_only_a_session_that_comes_in_one_batch_is_indexed_before_it_is_delivered(
    store: FlakyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise indexes of a part would be taken for those of the whole session."""
    monkeypatch.setattr("agentspec.cache.store.background.loader._PREPARED_TOKENS", 1)
    prepared = list[int]()

    def prepare(records: list[TurnRecord]) -> Any:
        prepared.append(len(records))
        return SimpleNamespace(bytes=lambda: 12_345_678)

    reader = BackgroundLoader(store, max_ready_bytes=1 << 20, prepare=prepare)
    store.append(NS, [entry_of(turn("short", number, group="g")) for number in range(100)])
    store.append(NS, [entry_of(turn("long", number, prompt=2000, group="g")) for number in range(50)])  # 8 kB each
    group = Wanted(NS, "tenant", group="g")
    for wanted, count in ((session("long"), 50), (group, 150)):
        reader.request(wanted)
        assert len(gather(reader, wanted)) == count and prepared == []
    store.fail_read_after = 5
    reader.request(session("short"))
    assert len(gather(reader, session("short"))) == 100 and prepared == []
    reader.request(session("short"))
    wait_until(reader.ready.has_any)
    assert prepared == [100] and reader.stats().ready_bytes > 12_345_678
    reader.close()


def test_a_batch_is_about_a_megabyte(store: FlakyStore, loader: BackgroundLoader) -> None:
    """Otherwise a step would wait until 64 long turns are applied."""
    store.append(NS, [entry_of(turn(f"s{number}", number, prompt=50_000)) for number in range(20)])  # 200 kB each
    loader.request(CORPUS, 20)
    taken = list[int]()

    def all_taken() -> bool:
        while loaded := loader.take():
            taken.append(len(loaded.records))
        return sum(taken) == 20

    wait_until(all_taken)
    assert max(taken) == 6
