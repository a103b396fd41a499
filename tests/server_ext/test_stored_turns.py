"""Stored turns on their way into the cache: a part at a time, and none of a session that is being erased."""

import threading
from concurrent.futures import Future

from agentspec.cache import FinishedTurn, SuffixCache
from agentspec.cache.store import BackgroundLoader, Erasure, Loaded, MemoryStore, Wanted
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.persistence.stored_turns import StoredTurns
from tests.store.helpers import LOGS, NS, turn, wait_until


def test_the_rest_of_what_was_loaded_is_still_to_be_applied() -> None:
    loader, cache = BackgroundLoader(MemoryStore()), SuffixCache()
    turns = StoredTurns(loader, lambda log, session: False)
    wanted, other = (Wanted(NS, session=session) for session in ("s", "another"))
    loader.ready.put(Loaded(wanted, [turn("s", number) for number in range(3)]), set())
    for left in (3, 2, 1):
        assert turns.has_ready() and turns.has_ready_of(wanted) and not turns.has_ready_of(other), left
        assert turns.apply(cache, 0.0) == 1
    assert turns.apply(cache, 1.0) == 0
    assert not turns.has_ready() and not turns.has_ready_of(wanted)


def test_no_turn_of_a_session_that_is_being_erased_is_applied() -> None:
    loader, cache, job = BackgroundLoader(MemoryStore()), SuffixCache(), Future[Erasure]()
    turns = StoredTurns(loader, lambda log, session: False)
    group = Wanted(NS, group="g")
    loader.ready.put(Loaded(group, [turn(name, number, group="g") for number, name in enumerate("abab")]), set())
    assert turns.apply(cache, 0.0) == 1  # the others of these are in the engine's hands
    turns.begin_erasure("b", lambda: job)
    turns.add(cache, NS, turn("b", 9, group="g"))
    assert (turns.apply(cache, 1.0), turns.followed) == (1, 0)
    assert cache.has_session(None, "a") and not cache.has_session(None, "b")


def test_an_erasure_waits_for_the_turn_that_is_put_into_the_cache_just_then() -> None:
    turns = StoredTurns(BackgroundLoader(MemoryStore()), lambda log, session: False)
    putting, goes_on, waited = threading.Event(), threading.Event(), threading.Event()

    class Slow(SuffixCache):
        def restore(self, turn: FinishedTurn, *, held_only: bool = False) -> None:
            putting.set()
            assert goes_on.wait(60)

    threading.Thread(target=turns.add, args=(Slow(), NS, turn("s", 1)), daemon=True).start()
    assert putting.wait(60)

    def wait() -> None:
        turns.wait()
        waited.set()

    threading.Thread(target=wait, daemon=True).start()
    assert not waited.wait(0.2)
    goes_on.set()
    assert waited.wait(60)


def test_a_session_counts_as_being_erased_before_its_erasure_does_anything() -> None:
    turns = StoredTurns(BackgroundLoader(MemoryStore()), lambda log, session: False)
    known: list[bool] = []

    def job() -> None:
        turns.wait()
        known.append(turns.is_erasing("s"))

    def submit() -> Future[Erasure]:
        """Begin the job at once, as a thread that happens to be free does."""
        thread = threading.Thread(target=job, daemon=True)
        thread.start()
        thread.join(0.2)
        return Future()

    turns.begin_erasure("s", submit)
    wait_until(lambda: known)
    assert known == [True]


def test_what_was_read_while_its_session_was_erased_is_not_applied_after_that() -> None:
    """A group was read before the store had erased one of its sessions, and its turns wait for the next step."""
    persistence, cache = Persistence(MemoryStore(), LOGS, preload=0), SuffixCache()

    def forget() -> list[str | None]:
        read = [turn("a", 1, group="g"), turn("b", 2, group="g")]
        persistence._loader.ready.put(Loaded(Wanted(LOGS.of(None), group="g"), read), set())
        return []

    persistence.erase("b", [None], forget).result(60)
    assert persistence.apply_loaded(cache, 1.0) == 1
    assert cache.has_session(None, "a") and not cache.has_session(None, "b")
    persistence.close()
