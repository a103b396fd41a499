"""Test the preload of a tenant's newest turns: in which order, within which limits."""

from agentspec.cache.store import BackgroundLoader, Wanted
from agentspec.errors import StoreError
from tests.store.helpers import NS, FlakyStore, entry_of, gather, number_of, turn, wait_until
from tests.store.loader_fixtures import CORPUS, fill, loader, session, store

__all__ = ["loader", "store"]


def test_the_preload_gives_the_newest_in_log_order(store: FlakyStore, loader: BackgroundLoader) -> None:
    for number in range(500):
        store.append(NS, [entry_of(turn(f"s{number % 7}", number))])
    store.erase_session(NS, "s3")  # its tombstone does not count
    loader.request(CORPUS, 200)
    assert loader.is_pending(CORPUS)
    expected = [number for number in range(500) if number % 7 != 3][-200:]
    assert [number_of(record) for record in gather(loader, CORPUS)] == expected
    assert not loader.is_pending(CORPUS)


def test_the_preload_of_an_empty_log_is_soon_done(loader: BackgroundLoader) -> None:
    loader.request(CORPUS, 10)
    assert gather(loader, CORPUS) == []


def test_a_request_is_served_before_the_rest_of_a_preload(store: FlakyStore) -> None:
    # room for one batch only, so the preload cannot run ahead
    loader = BackgroundLoader(store, max_ready_bytes=1)
    for number in range(2000):
        store.append(NS, [entry_of(turn("bulk", number))])
    store.append(NS, [entry_of(turn("live", 2000))])
    loader.request(CORPUS, 2001)
    wait_until(lambda: loader.ready._waiting)
    loader.request(session("live"))
    records = gather(loader, session("live"))
    assert 2000 in map(number_of, records)
    assert len(records) < 1000
    rest = gather(loader, CORPUS)
    assert sorted(number_of(record) for record in records + rest) == [*range(2001), 2000]
    loader.close()


def corpus(tenant: str) -> Wanted:
    return Wanted(f"log-of-{tenant}", tenant)


def test_each_tenant_gets_the_newest_of_its_own_log(store: FlakyStore, loader: BackgroundLoader) -> None:
    for number in range(300):
        store.append(corpus("abc"[number % 3]).namespace, [entry_of(turn("s", number))])
    for tenant in "abcd":
        assert loader.request(corpus(tenant), 50)
    assert loader.stats().corpora == 4
    found: dict[Wanted | None, list[int]] = {}

    def ended() -> bool:
        while loaded := loader.take():
            found.setdefault(loaded.wanted, []).extend(map(number_of, loaded.records))
        return not any(loader.is_pending(corpus(tenant)) for tenant in "abcd")

    wait_until(ended)
    expected = {tenant: list(range(150 + place, 300, 3)) for place, tenant in enumerate("abc")}
    assert found == {corpus(tenant): numbers for tenant, numbers in {**expected, "d": []}.items()}
    assert loader.stats().corpora == 0


def test_a_corpus_is_not_read_again_before_all_of_it_was_taken(store: FlakyStore) -> None:
    loader = BackgroundLoader(store, max_ready_bytes=1)  # room for one batch
    for number in range(500):
        store.append(NS, [entry_of(turn("s", number))])
    store.calls = 0
    records = []
    for _ in range(4):
        assert loader.request(CORPUS, 500)
        wait_until(loader.ready.has_any)
        loaded = loader.take()
        assert loaded is not None
        records += loaded.records
    records += gather(loader, CORPUS)
    assert [number_of(record) for record in records] == list(range(500))
    assert store.calls == 1
    assert loader.request(CORPUS, 500)  # all was taken, so another request gets it again
    assert len(gather(loader, CORPUS)) == 500
    loader.close()


def test_corpora_are_bounded_apart_from_sessions(store: FlakyStore) -> None:
    store.gate.clear()
    loader = BackgroundLoader(store, max_pending=2)
    loader.request(session("first"))
    wait_until(lambda: loader._current is not None)
    assert [loader.request(corpus(tenant), 10) for tenant in "abc"] == [True, True, False]
    assert loader.request(session("a")) and loader.request(corpus("a"), 10)
    assert (loader.stats().corpora, loader.stats().refused) == (2, 1)
    store.gate.set()
    gather(loader, session("a"), corpus("a"), corpus("b"))
    assert loader.request(corpus("c"), 10)
    loader.close()


def test_one_corpus_is_read_to_its_end_before_the_next(store: FlakyStore) -> None:
    for number in range(400):
        store.append(corpus("ab"[number % 2]).namespace, [entry_of(turn("s", number))])
    store.gate.clear()
    loader = BackgroundLoader(store, max_ready_bytes=1)  # room for one batch only
    for tenant in "ab":
        loader.request(corpus(tenant), 200)
    wait_until(lambda: loader._current is not None)
    assert (loader.stats().pending, loader.stats().corpora) == (0, 2), "a corpus is no session"
    store.gate.set()
    found: list[str | None] = []

    def ended() -> bool:
        while loaded := loader.take():
            found.append(loaded.wanted.tenant)
        return not any(loader.is_pending(corpus(tenant)) for tenant in "ab")

    wait_until(ended)
    assert found == sorted(found, key=str) and len(found) > 6
    loader.close()


def test_a_corpus_that_cannot_be_read_is_given_up_and_asked_for_again(
    store: FlakyStore, loader: BackgroundLoader
) -> None:
    fill(store, 9)
    store.error = StoreError("damaged file")
    loader.request(CORPUS, 9)
    wait_until(lambda: not loader.is_pending(CORPUS))
    assert (loader.stats().given_up, loader.stats().corpora) == (1, 0)
    store.error = None
    assert loader.request(CORPUS, 9)
    assert len(gather(loader, CORPUS)) == 9
