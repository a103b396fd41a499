"""Test how stored turns enter the cache: a part at a time, and none of a session that is being erased."""

import threading
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agentspec.cache import FinishedTurn, SuffixCache
from agentspec.cache.store import BackgroundLoader, Erasure, Loaded, MemoryStore, RecordReader, Wanted
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.persistence.snapshot_erasures import SnapshotErasures
from agentspec.server_ext.persistence.stored_turns import StoredTurns
from agentspec.server_ext.persistence.turn_records import turn_of
from tests.store.helpers import LOGS, NS, FlakyStore, number_of, turn, wait_until

from .stored_engine import Holder


def test_the_rest_of_what_was_loaded_is_still_to_be_applied() -> None:
    loader, cache = BackgroundLoader(MemoryStore()), SuffixCache()
    turns = StoredTurns(cache, loader, lambda log, session: False)
    wanted, other = (Wanted(NS, session=session) for session in ("s", "another"))
    loader.ready.put(Loaded(wanted, [turn("s", number) for number in range(3)]), set())
    for left in (3, 2, 1):
        assert turns.has_ready() and turns.has_ready_of(wanted) and not turns.has_ready_of(other), left
        assert turns.apply(0.0) == 1
    assert turns.apply(1.0) == 0
    assert not turns.has_ready() and not turns.has_ready_of(wanted)


def test_sessions_of_which_nothing_is_stored_are_applied_a_part_at_a_time_too() -> None:
    loader, cache, names = BackgroundLoader(MemoryStore()), SuffixCache(), ("new", "newer", "newest")
    turns = StoredTurns(cache, loader, lambda log, session: False)
    for name in names:
        cache.start(name, [1], session=name)
        loader.ready.put(Loaded(Wanted(NS, session=name), complete=True), set())
    for left in ([False, True, True], [False, False, True], [False, False, False]):
        turns.apply(0.0)
        assert [cache.needs_load(None, name) for name in names] == left


def test_no_turn_of_a_session_that_is_being_erased_is_applied() -> None:
    loader, cache, job = BackgroundLoader(MemoryStore()), SuffixCache(), Future[Erasure]()
    turns = StoredTurns(cache, loader, lambda log, session: False)
    group = Wanted(NS, group="g")
    loader.ready.put(Loaded(group, [turn(name, number, group="g") for number, name in enumerate("abab")]), set())
    assert turns.apply(0.0) == 1  # the engine holds the rest of the batch
    turns.begin_erasure("b", lambda: job)
    turns.add(NS, turn("b", 9, group="g"))
    assert (turns.apply(1.0), turns.followed) == (1, 0)
    assert cache.has_session(None, "a") and not cache.has_session(None, "b")


def test_a_session_that_is_erased_twice_at_once_counts_as_being_erased_until_both_have_ended() -> None:
    """Owners take turns, so the job of the later call may run first."""
    loader, cache, first, second = BackgroundLoader(MemoryStore()), SuffixCache(), Future[Erasure](), Future[Erasure]()
    turns = StoredTurns(cache, loader, lambda log, session: False)
    for job in (first, second):
        turns.begin_erasure("s", lambda job=job: job)  # type: ignore[misc]
    second.set_result(Erasure(0, complete=True))
    loader.ready.put(Loaded(Wanted(NS, session="s"), [turn("s", 1)]), set())
    assert (turns.apply(1.0), turns.is_erasing("s")) == (0, True)
    turns.add(NS, turn("s", 2))
    assert turns.followed == 0
    first.set_result(Erasure(1, complete=True))
    loader.ready.put(Loaded(Wanted(NS, session="s"), [turn("s", 3)]), set())
    assert (turns.apply(1.0), turns.is_erasing("s"), turns.has_work()) == (1, False, False)


def test_a_turn_that_another_process_says_after_an_erasure_is_added_though_no_step_was_taken_since() -> None:
    """Otherwise an idle engine would take its erasures for unfinished, and its corpus would lack others' turns."""
    cache, job = SuffixCache(), Future[Erasure]()
    turns = StoredTurns(cache, BackgroundLoader(MemoryStore()), lambda log, session: False)
    cache.start("r", [1])  # so that the cache holds the tenant
    turns.begin_erasure("s", lambda: job)
    job.set_result(Erasure(1, complete=True))
    before = cache.stats().tokens
    turns.add(NS, turn("s", 1))
    assert turns.followed == 1 and cache.stats().tokens > before


@pytest.mark.parametrize("erased", ["now", "just before", "not at all"])
def test_a_session_that_was_indexed_beforehand_is_not_adopted_while_it_is_erased(erased: str) -> None:
    loader, cache = BackgroundLoader(MemoryStore()), SuffixCache()
    turns = StoredTurns(cache, loader, lambda log, session: False)
    records = [turn("s", number) for number in range(3)]
    prepared = cache.prepare([turn_of(record) for record in records])
    if erased == "now":
        turns.begin_erasure("s", lambda: Future())
    forgotten = {"s"} if erased == "just before" else set[str]()
    loader.ready.put(Loaded(Wanted(NS, session="s"), records, prepared=prepared, forgotten=forgotten), set())
    turns.apply(1.0)
    assert cache.has_session(None, "s") == (turns.adopted == 1) == (erased == "not at all")


def test_a_session_that_was_indexed_beforehand_is_not_adopted_once_it_is_forgotten() -> None:
    """Its erasure ended while it waited for the engine."""
    loader, cache = BackgroundLoader(MemoryStore()), SuffixCache()
    turns = StoredTurns(cache, loader, lambda log, session: False)
    records = [turn("s", number) for number in range(3)]
    prepared = cache.prepare([turn_of(record) for record in records])
    loader.ready.put(Loaded(Wanted(NS, session="s"), records, prepared=prepared), set())
    loader.forget("s")
    assert (turns.apply(1.0), turns.adopted) == (0, 0)
    assert not cache.has_session(None, "s") and not turns.has_ready()


def test_what_is_forgotten_of_the_turns_in_hand_is_not_applied() -> None:
    loader, cache = BackgroundLoader(MemoryStore()), SuffixCache()
    turns = StoredTurns(cache, loader, lambda log, session: False)
    loader.ready.put(Loaded(Wanted(NS, group="g"), [turn(name, 1, group="g") for name in "abc"]), set())
    assert turns.apply(0.0) == 1
    loader.forget("b")
    assert turns.apply(1.0) == 1
    assert [cache.has_session(None, name) for name in "abc"] == [True, False, True]


@pytest.mark.parametrize("in_hand", [False, True])
@pytest.mark.parametrize(
    ("wanted", "lacks"),
    [
        (Wanted(NS, session="s"), {"alone", "of a group", "of a family"}),
        (Wanted(NS, group="g"), {"of a group"}),
        (Wanted(NS, family="f"), {"of a family"}),
        (Wanted(NS, session="another"), set()),
        (Wanted("another log", session="s"), set()),
    ],
)
def test_what_is_being_loaded_takes_a_turn_that_it_may_have_been_read_without(
    wanted: Wanted, lacks: set[str], in_hand: bool
) -> None:
    """Once loaded, it counts as complete. in_hand: the engine has taken a part of it from the loader."""
    taken: set[str] = set()

    class Noting(SuffixCache):
        def restore(self, turn: FinishedTurn, *, held_only: bool = False) -> None:
            if not held_only:
                taken.add(turn.writer)

    loader = BackgroundLoader(MemoryStore())
    turns = StoredTurns(Noting(), loader, lambda log, session: False)
    loader.ready.put(Loaded(wanted, [turn("loaded", number) for number in range(2)]), set())
    if in_hand:
        assert turns.apply(0.0) == 1
        taken.clear()
    turns.add(NS, turn("s", 5, writer="alone"))
    turns.add(NS, turn("s", 6, writer="of a group", group="g"))
    turns.add(NS, replace(turn("s", 7, writer="of a family"), family="f"))
    assert taken == lacks


def test_a_session_counts_as_loaded_when_all_of_it_has_come() -> None:
    """The store may fail before the rest comes. Then the next request has to ask again."""
    loader, cache, wanted = BackgroundLoader(MemoryStore()), SuffixCache(), Wanted(NS, session="s")
    turns = StoredTurns(cache, loader, lambda log, session: False)
    for records, complete in (([turn("s", 1)], False), ([turn("s", 2)], False), ([], True)):
        loader.ready.put(Loaded(wanted, records, complete=complete), set())
        assert turns.apply(1.0) == len(records)
        assert cache.needs_load(None, "s") is not complete


def test_an_erasure_waits_for_the_turn_that_is_put_into_the_cache_just_then() -> None:
    putting, goes_on, waited = threading.Event(), threading.Event(), threading.Event()

    class Slow(SuffixCache):
        def restore(self, turn: FinishedTurn, *, held_only: bool = False) -> None:
            putting.set()
            assert goes_on.wait(60)

    turns = StoredTurns(Slow(), BackgroundLoader(MemoryStore()), lambda log, session: False)
    threading.Thread(target=turns.add, args=(NS, turn("s", 1)), daemon=True).start()
    assert putting.wait(60)

    def wait() -> None:
        turns.wait()
        waited.set()

    threading.Thread(target=wait, daemon=True).start()
    assert not waited.wait(0.2)
    goes_on.set()
    assert waited.wait(60)


def test_a_session_counts_as_being_erased_before_its_erasure_does_anything() -> None:
    turns = StoredTurns(SuffixCache(), BackgroundLoader(MemoryStore()), lambda log, session: False)
    known: list[bool] = []

    def job() -> None:
        turns.wait()
        known.append(turns.is_erasing("s"))

    def submit() -> Future[Erasure]:
        """Begin the job at once, as a free thread does."""
        thread = threading.Thread(target=job, daemon=True)
        thread.start()
        thread.join(0.2)
        return Future()

    turns.begin_erasure("s", submit)
    wait_until(lambda: known)
    assert known == [True]


def test_what_was_read_while_its_session_was_erased_is_not_applied_after_that() -> None:
    """The group was read before the store erased one of its sessions, and its turns wait for the next step."""
    cache = SuffixCache()
    persistence = Persistence(cache, MemoryStore(), LOGS, preload=0)

    def read() -> None:
        records = [turn("a", 1, group="g"), turn("b", 2, group="g")]
        persistence._loader.ready.put(Loaded(Wanted(LOGS.of(None), group="g"), records), set())

    persistence.follow(Holder(read))
    persistence.erase("b", [None]).result(60)
    assert persistence.apply_loaded(1.0) == 1
    assert cache.has_session(None, "a") and not cache.has_session(None, "b")
    persistence.close()


def test_what_was_read_while_its_session_was_erased_again_is_not_applied_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A turn behind its session's tombstone was read, with its group, before the store erased it."""
    cache, store = SuffixCache(), MemoryStore()
    persistence = Persistence(cache, store, LOGS, preload=0)
    erase = store.erase_session

    def erase_session(log: str, session: str) -> Erasure:
        read = [turn("a", 1, group="g"), turn("b", 2, group="g")]
        persistence._loader.ready.put(Loaded(Wanted(log, group="g"), read), set())
        return erase(log, session)

    monkeypatch.setattr(store, "erase_session", erase_session)
    persistence.erase_again(None, "b")
    assert persistence.apply_loaded(1.0) == 1
    assert cache.has_session(None, "a") and not cache.has_session(None, "b")
    persistence.close()


@pytest.mark.parametrize("complete", [[False, True], [True, False]])
def test_an_erasure_is_complete_if_it_is_in_the_last_log(monkeypatch: pytest.MonkeyPatch, complete: list[bool]) -> None:
    """All lie in one file of SQLite, whose last checkpoint removes what the others left for a reader."""
    store = MemoryStore()
    persistence = Persistence(SuffixCache(), store, LOGS, preload=0)
    answers = iter([Erasure(1, each) for each in complete])
    monkeypatch.setattr(store, "erase_session", lambda log, session: next(answers))
    assert persistence.erase("s", ["a", "b"]).result(60) == Erasure(2, complete[-1])
    persistence.close()


def test_an_erasure_elsewhere_leaves_no_turn_on_its_way_into_the_cache_or_the_store() -> None:
    store, erased, newest = FlakyStore(), threading.Event(), list[int]()
    store.gate.clear()
    persistence = Persistence(SuffixCache(), store, LOGS, preload=0)
    persistence.follow(Holder(erased.set))
    persistence._writer.put(NS, turn("in flight", 1))
    wait_until(lambda: persistence._writer._records.in_flight)
    for number in range(3):
        persistence.next_name()
        persistence._writer.put(NS, turn("s", number))

    def erase() -> None:
        newest.append(persistence._forget_sessions(None, ["s"]))

    with persistence._turns._applying:
        thread = threading.Thread(target=erase, daemon=True)
        thread.start()
        assert not erased.wait(0.2)
    thread.join(60)
    assert erased.is_set() and newest == [3]  # turns up to this number that still reach the store are erased again
    persistence._writer.put(NS, turn("s", 9))  # the session is used again
    store.gate.set()
    assert persistence._writer.flush(60)
    assert [number_of(record) for _, record in RecordReader().read(store.read(NS))] == [1, 9]
    persistence.close()


def test_a_snapshot_that_could_not_be_replaced_still_counts_as_there() -> None:
    """Two saves in a row fail, as on a full disk. What they would have held is not what lies there."""
    cache, store = SuffixCache(), MemoryStore()
    follower: Any = SimpleNamespace(places=lambda: {LOGS.of(name): store.newest(LOGS.of(name)) for name in "tu"})
    erasures = SnapshotErasures(cache, store, LOGS, follower)
    for tenant in "tu":
        cache.restore(replace(turn_of(turn("s", 1)), tenant=tenant))
    erasures.places()
    erasures.note_saved()
    assert cache.forget_tenant("t")
    for _ in range(2):
        erasures.places()
    assert not erasures.may_be_saved("t") and not erasures.may_be_saved("u") and not erasures.may_be_saved("v")
    store.erase_session(LOGS.of("t"), "s")
    assert erasures.may_be_saved("t")
    erasures.places()
    erasures.note_saved()
    assert not erasures.may_be_saved("t")


def test_a_snapshots_tenants_are_forgotten_unless_all_their_erasures_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.server_ext.persistence.snapshot_erasures.MAX_LOGS", 3)
    follower: Any = SimpleNamespace(catch_up=lambda *_, **__: None, stats=lambda: SimpleNamespace(erased=0))
    cache, store = SuffixCache(), MemoryStore()
    erasures = SnapshotErasures(cache, store, LOGS, follower)
    histories = {"told": "whole", "trimmed": "trimmed", "new": "whole"}
    monkeypatch.setattr(store, "history", lambda log, _: {LOGS.of(name): told for name, told in histories.items()}[log])
    for tenant in ("one too many", *histories):
        cache.restore(replace(turn_of(turn("s", 1)), tenant=tenant))
    assert cache.tenants() == ["one too many", *histories]
    places = {LOGS.of(tenant): "" for tenant in ("one too many", "told", "trimmed")}
    assert erasures.catch_up(places)
    assert cache.tenants() == ["told"]
    assert not erasures.catch_up(places)
    assert cache.tenants() == ["told"]
