"""Test that turns come back from the store: after a restart, after eviction, in another process."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentspec.cache import Scope, SuffixCache
from agentspec.cache.store import (
    Entry,
    MemoryStore,
    NewEntry,
    Retention,
    TurnRecord,
    Wanted,
    encode,
)
from agentspec.errors import StoreError, StoreUnavailableError
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.persistence.turn_records import turn_of
from tests.store.helpers import LOGS, FlakyStore, turn, unwritable, wait_until

from .stored_engine import NS, TENANT, Engine, Holder, prompts, records, store, text

__all__ = ["store"]


def test_a_family_comes_back_after_a_restart() -> None:
    """A new child loads the responses of the root and its other children, and no other session."""
    store = MemoryStore()
    before = Engine(store)
    before.say([1, 2, 3], [*range(100, 140)], "root")
    for child, said in (("a", range(200, 240)), ("b", range(300, 340))):
        before.finish(before.start([4, 5, 6], child, parent="root"), [*said], child)
    before.finish(before.start([4, 5, 6], "deep", parent="a"), [*range(400, 440)], "deep")
    before.say([1, 2, 3], [*range(500, 540)], "other")
    assert before.persistence._writer.flush(60)
    after = Engine(store)
    name = after.start([7, 8], "c", parent="root")
    assert after.load() == 4
    assert not after.cache.has_session(TENANT, "other")
    for begin in (100, 200, 300, 400):
        after.cache.extend(name, [begin + 10, begin + 11, begin + 12])
        (draft,) = after.cache.propose([name], 4)
        assert (draft.token_ids.tolist()[:2], draft.source) == ([begin + 13, begin + 14], "group")
    again = after.start([7, 8], "d", parent="root")  # the family is held now, so nothing is read again
    assert after.load() == 0 and after.cache.family_of(again) == "root"


@pytest.mark.parametrize(("named", "owner"), [(None, "ada"), ("acme", "")])
def test_the_store_learns_for_whom_the_log_of_a_turn_counts(store: FlakyStore, named: str | None, owner: str) -> None:
    persistence = Persistence(SuffixCache(), store, LOGS, preload=0)
    identity = Identity(principal="ada and a salt", caller="ada", named_tenant=named)
    persistence.save(turn_of(turn("s", 1)), identity)
    assert persistence._writer.flush(60)
    assert [entry.owner for batch in store.appended for entry in batch] == [owner]
    persistence.close()


@pytest.mark.parametrize("error", [StoreUnavailableError("away"), StoreError("WRONGTYPE")])
def test_nobody_waits_for_turns_that_cannot_be_written(store: FlakyStore, error: StoreError) -> None:
    """The store may refuse one log only. Otherwise each question about sessions would wait for its turns."""
    store.error = error
    engine = Engine(store)

    def cannot_write() -> bool:
        engine.say([1, 2, 3], text(5))
        stats = engine.persistence._writer.stats()
        return stats.state == "open" or stats.refused_logs > 0

    wait_until(cannot_write)
    engine.say([1, 2, 3], text(5))
    begin = time.monotonic()
    engine.persistence.flush(60)
    assert time.monotonic() - begin < 30
    engine.persistence.close()


def test_the_last_request_of_a_session_loads_nothing_of_it() -> None:
    store = MemoryStore()
    before = Engine(store)
    before.say([1, 2, 3], [*range(100, 140)])
    assert before.persistence._writer.flush(60)
    after = Engine(store)
    after.cache.start("r", [1], session="s", tenant=TENANT)
    ended = Identity(tenant=TENANT, session="s", scope="session", final=True)
    after.persistence.request_load(ended, group=None, family=None)
    assert after.load() == 0
    after.persistence.request_load(replace(ended, final=False), group=None, family=None)
    assert after.load() == 1


@pytest.mark.parametrize(("scope", "loaded"), [("none", 0), ("session", 1), ("tenant", 3)])
def test_a_request_loads_what_its_scope_lets_it_draft_from_and_no_more(scope: Scope, loaded: int) -> None:
    store = MemoryStore()
    before = Engine(store)
    before.say([1, 2, 3], text(100))
    before.say([1, 2, 3], text(200), session="of the group", group="g")
    before.say([1, 2, 3], text(300), session="of the tenant")
    before.flush()
    after = Engine(store)
    after.persistence = Persistence(after.cache, store, LOGS, preload=10)
    identity = Identity(tenant=TENANT, session="s", group="g", scope=scope)
    after.cache.start("r", [1], session="s", group="g", tenant=TENANT, scope=scope)
    after.persistence.request_load(identity, group="g", family=None)
    after.load()
    held = [after.cache.has_session(TENANT, name) for name in ("s", "of the group", "of the tenant")]
    assert held == [loaded >= 1, loaded >= 3, loaded >= 3]


def test_a_log_counts_for_the_owner_of_its_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many logs are followed: a caller's salts displace its own logs, and callers share a named tenant's."""
    engine, used = Engine(MemoryStore()), list[tuple[str, str]]()
    follower = SimpleNamespace(use=lambda log, owner: used.append((log, owner)))
    monkeypatch.setattr(engine.persistence, "_follower", follower)
    salted = Identity(tenant="salted", principal="salted", caller="ada")
    named = Identity(tenant="acme", principal="mac", caller="ada", named_tenant="acme")
    for identity in (salted, named):
        engine.persistence.request_load(identity, group=None, family=None)
    assert used == [(LOGS.of("salted"), "ada"), (LOGS.of("acme"), "acme")]


def test_an_erasure_waits_for_a_turn_that_is_on_its_way_into_the_cache() -> None:
    engine, forgotten, goes_on = Engine(MemoryStore()), threading.Event(), threading.Event()
    engine.persistence.follow(Holder(forgotten.set))
    # The store has nothing under this tenant, but other processes may run its requests.
    engine.cache.restore(replace(turn_of(turn("s", 1)), tenant="held"))
    engine.persistence.submit(lambda store: goes_on.wait(60))  # the erasure waits behind this job
    erasure = engine.persistence.erase("s", [TENANT])
    with engine.persistence._turns._applying:
        goes_on.set()
        assert not forgotten.wait(0.2)
    assert erasure.result(60).complete and forgotten.is_set()
    assert all("s" in engine.persistence._store.tombstones(LOGS.of(tenant)) for tenant in (TENANT, "held"))


def test_the_root_of_a_family_is_not_read_while_it_is_being_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = Engine(MemoryStore()), list[Wanted]()
    monkeypatch.setattr(engine.persistence._loader, "request", lambda wanted, *_: asked.append(wanted))
    for family in ("root", "gone"):
        engine.persistence._turns.begin_erasure("gone", lambda: Future())
        engine.start([1], "child of " + family, parent=family)
        assert Wanted(NS, TENANT, family=family) in asked
        assert (Wanted(NS, TENANT, session=family) in asked) == (family == "root")


def test_a_session_comes_back_in_another_process(store: FlakyStore) -> None:
    first = Engine(store)
    first.say([1, 2, 3], text(100))
    first.flush()
    second = Engine(store)
    name = second.start([7, 8, 100, 101, 102])
    assert second.draft(name) == []
    assert second.load() == 1
    assert second.draft(name) == text(103, 3)
    (record,) = records(store)
    assert (record.session, record.session_name, record.principal, record.tenant) == ("s", "s", "p", TENANT)


@pytest.mark.parametrize("loaded_before", [False, True])
def test_a_session_that_was_evicted_comes_back_from_the_store(store: FlakyStore, loaded_before: bool) -> None:
    engine = Engine(store, max_tokens=2_000)
    engine.say([1, 2, 3], text(100))
    if loaded_before:  # this process loaded the session and finished none of its turns
        engine.flush()
        engine = Engine(store, max_tokens=2_000)
        engine.finish(engine.start([9, 9, 9]), [9, 9])
        assert engine.load() == 1
    engine.flush()
    for number in range(10):
        engine.say([4, 5], text(10_000 + 500 * number, 500), session=f"other-{number}")
    engine.cache.catch_up()
    assert not engine.cache.has_session(TENANT, "s")
    name = engine.start([7, 8, 100, 101, 102])
    assert engine.draft(name) == []
    assert engine.load() >= 1
    assert engine.draft(name) == text(103, 3)


def test_a_turn_that_finishes_meanwhile_cuts_no_load_off(store: FlakyStore) -> None:
    first = Engine(store)
    for number in range(200):
        first.say([number, 2, 3], text(1000 * number + 5000, 30))
    first.flush()
    second = Engine(store)
    store.gate.clear()  # the load is on its way
    second.say([1, 1, 1], text(500))
    store.gate.set()
    assert second.load() == 200
    for number in (0, 57, 199):
        begin = 1000 * number + 5000
        name = second.start([8, *text(begin, 6)])
        assert second.draft(name) == text(begin + 6, 3)
        second.cache.abort(name)


def test_groups_come_back_on_demand_too(store: FlakyStore) -> None:
    first = Engine(store)
    first.say([1, 2, 3], text(100), session="a", group="g")
    first.say([1, 2, 3], text(300), session="b", group="g")
    first.flush()
    second = Engine(store)
    name = second.start([7, 8, 300, 301, 302], session="c", group="g")
    assert second.load() == 2
    assert second.draft(name) == text(303, 3)
    assert not second.cache.needs_load(TENANT, group="g")


def test_two_processes_on_one_session_splice_no_text_that_was_never_said(store: FlakyStore) -> None:
    one, two = Engine(store), Engine(store)
    said = []
    histories = [[1, 2, 3], [1, 2, 3]]  # each process continues its own
    for number in range(6):
        which = number % 2
        engine, prompt = (one, two)[which], histories[which]
        response = text(1000 * number + 100, 70)
        engine.say(prompt, response)
        engine.flush()
        said.append((list(prompt), response))
        histories[which] = [*prompt, *response, 5, 6]
    assert prompts(store) == said
    third = Engine(store)
    name = third.start(histories[1][:-4])
    assert third.load() == 6
    assert third.draft(name, 2) == histories[1][-4:-2]


@pytest.mark.parametrize("ahead", [-1e9, 3600.0, 1e9])
def test_a_clock_that_is_wrong_loses_no_turn(store: FlakyStore, ahead: float) -> None:
    record = TurnRecord(
        writer="0" * 16,
        number=1,
        session="s",
        tenant=TENANT,
        created=time.time() + ahead,
        prompt_tail=np.array([1, 2, 3], np.int32),
        response=np.array(text(100), np.int32),
    )
    store.append(NS, [NewEntry("s", encode(record))])
    engine = Engine(store)
    name = engine.start([7, 8, 100, 101, 102])
    assert engine.load() == 1
    assert engine.draft(name) == text(103, 3)


def test_samples_of_one_prompt_store_the_prompt_once(store: FlakyStore) -> None:
    engine = Engine(store)
    prompt = text(1000, 900)
    names = [engine.start(prompt) for _ in range(4)]  # n=4: they run side by side
    for number, name in enumerate(names):
        engine.finish(name, text(5000 + 100 * number, 50))
    engine.flush()
    assert [len(record.prompt_tail) for record in records(store)] == [900, 0, 0, 0]
    assert [response for _, response in prompts(store)] == [text(5000 + 100 * number, 50) for number in range(4)]
    again = Engine(store)
    again.start([1])
    assert again.load() == 4


def test_applying_twice_does_nothing(store: FlakyStore) -> None:
    engine = Engine(store)
    engine.say([1, 2, 3], text(100))
    engine.flush()
    held = engine.cache.stats().tokens
    for _ in range(3):
        engine.cache.abort(engine.start([1], group="g"))
        engine.load()
    assert engine.cache.stats().tokens == held


def test_a_step_applies_what_fits_its_budget_of_time(store: FlakyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(store)
    for number in range(100):
        engine.say([number, 2, 3], text(1000 * number + 5000, 30))
    engine.flush()
    again = Engine(store)
    again.start([1, 2])
    wait_until(
        lambda: again.persistence.stats()["loader"]["delivered"] + len(again.persistence._loader.ready._waiting) >= 2
    )
    clock, real, this = iter(range(10_000)), time.thread_time, threading.get_ident()
    # Each turn takes a tenth of a millisecond. The loader's thread reads a clock of its own.
    monkeypatch.setattr(time, "thread_time", lambda: next(clock) * 1e-4 if threading.get_ident() == this else real())
    assert again.persistence.apply_loaded() == 5
    assert again.persistence.apply_loaded(0.0) == 1
    assert again.persistence.apply_loaded(0.002) == 20


def test_an_erasure_is_work_until_it_has_ended_and_then_the_session_is_loaded_again(store: FlakyStore) -> None:
    engine = Engine(store)
    engine.persistence.erase("s", [TENANT]).result(60)
    assert engine.persistence.has_loaded()  # so the engine's next step calls apply_loaded
    engine.persistence.apply_loaded()
    assert not engine.persistence.has_loaded()
    other = Engine(store)
    other.say([1, 2, 3], text(100))
    other.flush()
    engine.start([7, 8])
    assert engine.load() == 1


def test_turns_that_cannot_be_used_are_counted_by_kind(store: FlakyStore, caplog: pytest.LogCaptureFixture) -> None:
    writer = Engine(store)
    writer.say([1, 2, 4], [900, 901, 902])
    writer.say([1, 2, 3], text(100))
    writer.flush()
    store.append(NS, [NewEntry("s", b"damaged"), NewEntry("s", encode_of_version(9))])
    engine = Engine(store, vocab_size=500)
    engine.start([1])
    assert engine.load() == 1
    stats = engine.persistence.stats()
    assert stats["refused_by_kind"] == {"damaged": 1, "unknown_version": 1, "InvalidTokenError": 1}
    assert (stats["refused"], stats["restored"]) == (3, 1)
    assert sum("cannot be used" in record.getMessage() for record in caplog.records) == 1


def encode_of_version(version: int) -> bytes:
    import msgpack

    packed: bytes = msgpack.packb({"v": version})
    return packed


def test_queues_are_counted_in_bytes(store: FlakyStore) -> None:
    engine = Engine(store)
    persistence = engine.persistence
    store.gate.clear()
    engine.say([1], text(0, 10_000))
    assert 40_000 < persistence.stats()["queued_bytes"] < 50_000
    store.gate.set()
    engine.flush()
    assert persistence.stats()["queued_bytes"] == 0
    again = Engine(store)
    again.start([1])
    wait_until(lambda: again.persistence.stats()["queued_bytes"] > 40_000)  # on the way back
    again.load()
    assert again.persistence.stats()["queued_bytes"] == 0
    persistence.close()


def test_the_store_is_kept_within_its_retention_and_what_is_left_is_used(store: FlakyStore) -> None:
    engine = Engine(store)
    persistence = Persistence(engine.cache, store, LOGS, preload=0, retention=Retention(records=10))
    engine.persistence = persistence
    history: list[int] = [1]
    for number in range(30):
        response = text(1000 * number + 100, 30)
        engine.say(history, response)
        history = [*history, *response, 3]
    engine.flush()
    persistence.close = lambda: None  # type: ignore[method-assign]
    while store.trim(Retention(records=10)).more:
        pass
    again = Engine(store)
    name = again.start([7, 8, *text(29_100, 5)])
    assert again.load() == 10  # a log without its head
    assert again.draft(name) == text(29_105, 3)
    assert again.persistence.stats()["refused"] == 0
    assert prompts(store) == []  # training skips a text without its beginning


def test_warm_up_reads_the_newest_and_a_slow_store_delays_the_start_only_so_long() -> None:
    slow, released = 100, threading.Event()

    class Slow(MemoryStore):
        """Read slowly behind the first entries."""

        def read(self, *args: Any, **names: Any) -> Iterator[Entry]:
            for number, entry in enumerate(super().read(*args, **names)):
                assert number < slow or released.wait(60)
                yield entry

    store = Slow()
    writer = Engine(store)
    for number in range(150):
        writer.say([number, 2, 3], text(1000 * number + 5000, 30), session=f"s{number}")
    writer.flush()
    cache = SuffixCache()
    persistence = Persistence(cache, store, LOGS, preload=140)
    begin = time.monotonic()
    count = persistence.warm_up(0.8, TENANT)
    assert 0.7 < time.monotonic() - begin < 30
    assert 0 < count <= slow
    released.set()
    wait_until(lambda: (persistence.apply_loaded(), persistence.stats()["restored"] == 140)[1])
    assert cache.needs_load(TENANT, "s100")  # its older turns may not be among the newest of the log


def test_a_record_that_cannot_be_stored_costs_itself_only(store: FlakyStore) -> None:
    persistence = Persistence(SuffixCache(), store, LOGS, preload=0)
    persistence._writer.put(NS, unwritable("s"))
    assert persistence._writer.flush(60)
    assert persistence.stats()["writer"]["refused"] == 1
    persistence.close()
