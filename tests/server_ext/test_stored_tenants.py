"""Test tenants in the store: when each one's corpus is read, and how many are held."""

from typing import Any

import numpy as np

from agentspec.cache import FinishedTurn, Scope, SuffixCache
from agentspec.cache.store import Store
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.persistence.persistence import Persistence
from tests.store.helpers import LOGS, FlakyStore, wait_until

from .stored_engine import store, text

__all__ = ["store"]


def tell(store: Store, tenant: str, *responses: list[int]) -> None:
    """Store a turn of a tenant for each response."""
    persistence = Persistence(SuffixCache(), store, LOGS, preload=0)
    for response in responses:
        writer, number = persistence.next_name()
        said = np.array([1, 2, 3], np.int32), np.array(response, np.int32)
        turn = FinishedTurn(tenant, None, 0, *said, writer=writer, number=number)
        persistence.save(turn, Identity(tenant=tenant))
    assert persistence._writer.flush(60)
    persistence._writer.close()


class Tenants:
    """Hold a cache whose requests come from several tenants. Count restored turns by tenant."""

    def __init__(self, store: Store, preload: int, **cache: Any) -> None:
        self.cache = SuffixCache(**cache)
        self.persistence = Persistence(self.cache, store, LOGS, preload)

    def start(self, name: str, tenant: str, prompt: list[int], scope: Scope = "tenant") -> None:
        self.cache.start(name, prompt, tenant=tenant, scope=scope)
        self.persistence.request_load(Identity(tenant=tenant, scope=scope), group=None, family=None)

    def load(self) -> int:
        wait_until(lambda: self.persistence._loader.ready.has_any() or not self.pending())
        return self.persistence.apply_loaded(1.0)

    def pending(self) -> int:
        return self.persistence._loader.stats().corpora

    def load_all(self) -> int:
        count = self.load()
        while self.pending() or self.persistence.has_loaded():
            count += self.load()
        self.cache.catch_up()
        return count

    def draft(self, name: str) -> list[int]:
        found: list[int] = self.cache.propose([name], 3, cost=0.0)[0].token_ids.tolist()
        return found


def test_a_tenants_corpus_is_read_at_start_or_at_its_first_request(store: FlakyStore) -> None:
    tell(store, "known", text(100))
    tell(store, "other", *(text(1000 * number) for number in range(1, 6)))
    engine = Tenants(store, preload=3)
    assert engine.persistence.warm_up(10.0, "known") == 1
    reads = store.calls
    for name, tenant, scope in (("a", "known", "tenant"), ("b", "other", "session"), ("c", "other", "none")):
        engine.start(name, tenant, [7, 8, 100, 101, 102] if tenant == "known" else [5000, 5001, 5002], scope)  # type: ignore[arg-type]
    assert (engine.load_all(), store.calls) == (0, reads)  # one corpus is loaded, and the other requests don't use one
    assert engine.draft("a") == text(103, 3)
    engine.start("d", "other", [7, 5000, 5001, 5002])
    assert engine.load_all() == 3  # the newest
    assert engine.draft("d") == text(5003, 3)
    engine.start("e", "other", [7, 1000, 1001, 1002])
    assert (engine.load_all(), engine.draft("e")) == (0, [])


def test_a_tenant_that_was_evicted_is_read_again(store: FlakyStore) -> None:
    tell(store, "a", text(100))
    engine = Tenants(store, preload=10)
    engine.start("r", "a", [7, 8, 100, 101, 102])
    assert engine.load_all() == 1
    engine.cache.abort("r")
    engine.start("r", "a", [7, 8, 100, 101, 102])
    assert engine.load_all() == 0
    engine.cache.abort("r")
    assert engine.cache.forget_tenant("a")
    engine.start("r", "a", [7, 8, 100, 101, 102])
    assert engine.load_all() == 1
    assert engine.draft("r") == text(103, 3)


def test_ten_thousand_tenants_stay_bounded(store: FlakyStore) -> None:
    engine = Tenants(store, preload=10, max_bytes=4_000_000)
    tell(store, "tenant 9999", text(100))
    store.gate.clear()
    for number in range(10_000):  # all of them come while the store hangs
        engine.start("r", f"tenant {number}", [7, 8, 100, 101, 102])
        engine.cache.abort("r")
    assert engine.pending() <= 4097 and engine.persistence.stats()["loader"]["refused"] >= 5900
    store.gate.set()
    engine.load_all()
    for number in range(10_000):
        engine.start("r", f"tenant {number}", [7, 8, 100, 101, 102])
        engine.cache.abort("r")
        engine.persistence.apply_loaded()
    engine.load_all()
    loader = engine.persistence._loader
    assert not (loader._requested or loader._corpora or loader._requests or loader.ready.has_any())
    assert engine.cache.stats().bytes <= 4_000_000
    engine.start("r", "tenant 9999", [7, 8, 100, 101, 102])
    engine.load_all()
    assert engine.draft("r") == text(103, 3)


def test_each_tenants_turns_lie_in_a_log_of_their_own(store: FlakyStore) -> None:
    tell(store, "a", text(100), text(200))
    tell(store, "b", text(300))
    assert store.namespaces() == store.namespaces(LOGS.prefix) == sorted([LOGS.of("a"), LOGS.of("b")])
    assert [len(list(store.read(LOGS.of(tenant)))) for tenant in ("a", "b", "c")] == [2, 1, 0]
