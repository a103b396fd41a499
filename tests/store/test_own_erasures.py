"""Test what a process knows of its own erasures while some of them run."""

import threading
from collections.abc import Iterator

import pytest

from agentspec.cache.store import Erasure, MemoryStore
from agentspec.cache.store.background.own_erasures import OwnErasures
from tests.store.helpers import NS


class HangingStore(MemoryStore):
    """Make erasures hang while ``held`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.held = False
        self.goes_on = threading.Event()
        self.reached = threading.Event()

    def erase_session(self, namespace: str, session: str, *, mark: bool = True) -> Erasure:
        if self.held:
            self.held = False
            self.reached.set()
            assert self.goes_on.wait(60)
        return super().erase_session(namespace, session, mark=mark)


@pytest.fixture
def store() -> Iterator[HangingStore]:
    opened = HangingStore()
    yield opened
    opened.goes_on.set()


def begin_erasure(store: HangingStore, own: OwnErasures) -> threading.Thread:
    """Begin an erasure that hangs in the store."""
    store.held = True
    erasing = threading.Thread(target=own.erase_session, args=(NS, "s"), daemon=True)
    erasing.start()
    assert store.reached.wait(60)
    return erasing


def test_a_session_counts_as_being_erased_until_the_last_of_its_erasures_ends(store: HangingStore) -> None:
    """Otherwise text from before that erasure would be drafted from, as its tombstone is not applied here."""
    own = OwnErasures(store, lambda log: True)
    erasing = begin_erasure(store, own)
    own.erase_session(NS, "s")
    own.note_read_begun(NS)
    assert own.may_be_older(NS, "s")
    own.note_tombstone_read(NS, "s")
    assert own.may_be_older(NS, "s")
    store.goes_on.set()
    erasing.join(60)
    own.note_read_begun(NS)
    assert not own.may_be_older(NS, "s")


def test_who_asks_waits_neither_for_what_is_known_nor_at_the_end(store: HangingStore) -> None:
    own, answers = OwnErasures(store, lambda log: True), list[bool]()
    tombstone = own.erase_session(NS, "s").tombstone
    assert tombstone is not None
    begin_erasure(store, own)
    for name, answer in ((tombstone, True), ("another", False)):
        asking = threading.Thread(target=lambda at=name: answers.append(own.wrote(NS, "s", at, 3_600.0)), daemon=True)
        asking.start()
        if not answer:
            own.close()
        asking.join(20)
        assert answers.pop() is answer


def test_who_asks_is_answered_as_soon_as_the_erasure_ends(store: HangingStore) -> None:
    own, answers = OwnErasures(store, lambda log: True), list[bool]()
    begin_erasure(store, own)
    asking = threading.Thread(target=lambda: answers.append(own.wrote(NS, "s", "another", 3_600.0)), daemon=True)
    asking.start()
    store.goes_on.set()
    asking.join(20)
    assert answers == [False]


def test_the_tombstones_known_are_bounded_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.cache.store.background.own_erasures._MAX_TOMBSTONES", 2)
    own = OwnErasures(MemoryStore(), lambda log: True)
    tombstones = [own.erase_session(NS, session).tombstone or "" for session in ("one", "two", "three")]
    assert [own.wrote(NS, "s", tombstone, 0.0) for tombstone in tombstones] == [False, True, True]
