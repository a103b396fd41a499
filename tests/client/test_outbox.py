"""Test turns that wait to be stored: what the limit drops, and that this is reported."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agentspec import AgentClient, Gap
from agentspec.cache.store import MemoryStore, NewEntry
from agentspec.client.history.outbox import Outbox, read_session
from agentspec.client.history.session_log import ClientView, Said
from agentspec.errors import StoreError, StoreUnavailableError
from tests.store.helpers import wait_until

from .fake_server import FakeServer
from .stores import FailingStore


def test_a_write_of_any_size_is_stored_while_the_store_works() -> None:
    store = FailingStore()
    outbox = Outbox(lambda: store, max_bytes=4_000)
    store.delay = 0.1
    small = [ClientView(f"small{number}") for number in range(3)]
    for view in small:
        outbox.put(view, [Said(0, {"role": "user", "content": "important"})])
    outbox.put(ClientView("large"), [Said(0, {"role": "user", "content": "A" * 10_000})])
    for view in small:
        outbox.put(view, [Said(1, {"role": "user", "content": "important, too"})])
    outbox.close(60.0)
    assert [len(read_session(store, view.session).history) for view in small] == [2, 2, 2]
    assert len(read_session(store, "large").history) == 1


def test_what_is_dropped_is_the_oldest_of_who_has_most_and_the_gap_shows_at_the_end_too() -> None:
    store = FailingStore()
    outbox = Outbox(lambda: store, max_bytes=4_000)
    views = {name: ClientView(name) for name in ("small", "large", "next", "last")}
    for view in views.values():
        outbox.put(view, [Said(0, {"role": "user", "content": "first"})])
    assert all(outbox.settle(name, 60.0) for name in views)
    store.failing = {"append"}
    outbox.put(views["small"], [Said(1, {"role": "user", "content": "on its way"})])
    wait_until(lambda: outbox._failures > 0)
    outbox.put(views["small"], [Said(2, {"role": "user", "content": "kept"})])
    for name, size in (("large", 3_000), ("next", 2_000), ("last", 8_000)):
        outbox.put(views[name], [Said(1, {"role": "user", "content": "A" * size})])
    store.failing = set()
    outbox.close(60.0)
    found = {name: read_session(store, name) for name in views}
    assert {name: (len(session.history), session.next_position) for name, session in found.items()} == {
        "small": (3, 3),
        "large": (1, 2),
        "next": (2, 2),
        "last": (2, 2),
    }


def test_a_caller_with_nothing_to_wait_for_lets_no_other_wait_for_a_pause() -> None:
    store = FailingStore("append")
    outbox = Outbox(lambda: store)
    outbox.put(ClientView("a"), [Said(0, {"role": "user", "content": "waits"})])
    wait_until(lambda: outbox._failures > 0)
    outbox._failures = 20  # from now on the pauses have their full length
    store.delay = 0.3
    outbox.settle("a", 0.0)
    wait_until(lambda: outbox._current is not None)
    with ThreadPoolExecutor(1) as pool:
        settled = pool.submit(outbox.settle, "a", 5.0)
        wait_until(lambda: outbox._hurried)
        assert outbox.settle("b", 5.0)
        wait_until(lambda: outbox._current is None)
        store.failing, store.delay = set(), 0.0
        assert settled.result()
    outbox.close(60.0)


def test_a_turn_whose_answer_was_lost_is_sent_again_as_it_was() -> None:
    """Dropped in part, it would count as another client's, and the session would lose all that waits."""

    class Deaf(FailingStore):
        def append(self, *arguments: Any, **options: Any) -> Any:
            written = super().append(*arguments, **options)
            if self.lost:
                self.lost, self.failing = False, {"append"}
                raise StoreUnavailableError("the answer was lost")
            return written

        lost = False

    store, view = Deaf(), ClientView("s")
    outbox = Outbox(lambda: store, max_bytes=4_000)
    outbox.put(view, [Said(0, {"role": "user", "content": "first"})])
    assert outbox.settle("s", 60.0)
    store.lost = True
    outbox.put(view, [Said(1, {"role": "user", "content": "A" * 1_000})])
    wait_until(lambda: outbox._failures > 0)
    for position in range(2, 9):
        outbox.put(view, [Said(position, {"role": "user", "content": "A" * 1_500})])
    store.failing = set()
    outbox.close(60.0)
    assert not view.conflict
    assert [said.position for said in read_session(store, "s").history] == [0, 1, 6, 7, 8]


def test_a_session_that_the_store_refuses_costs_no_other_one_its_turns(caplog: pytest.LogCaptureFixture) -> None:
    """Its key on Redis may hold something else, or its pages in the SQLite file may be damaged."""

    class Picky(FailingStore):
        def append(self, namespace: str, entries: Sequence[NewEntry], **options: Any) -> Any:
            if "append" in self.failing and entries[0].session == "bad":
                raise StoreError("damaged")
            return MemoryStore.append(self, namespace, entries, **options)

    store = Picky()
    outbox = Outbox(lambda: store)
    bad, good = ClientView("bad"), ClientView("good")
    outbox.put(bad, [Said(0, {"role": "user", "content": "zero"})])
    assert outbox.settle("bad", 60.0)
    store.failing = {"append"}
    for number in range(1, 4):
        outbox.put(bad, [Said(number, {"role": "user", "content": f"b{number}"})])
        outbox.put(good, [Said(number, {"role": "user", "content": f"g{number}"})])
    assert outbox.settle("good", 60.0)
    assert len(read_session(store, "good").history) == 3
    outbox.put(good, [Said(4, {"role": "user", "content": "g4"})])
    assert outbox.settle("good", 60.0)
    assert len(caplog.messages) == 1 and "'bad'" in caplog.text and "damaged" in caplog.text
    store.failing = set()
    outbox.close(60.0)
    assert [said.message["content"] for said in read_session(store, "bad").history] == ["zero", "b1", "b2", "b3"]


def test_a_turn_that_cannot_be_stored_leaves_a_gap_at_the_end() -> None:
    store = FailingStore()
    outbox = Outbox(lambda: store)
    view = ClientView("s")
    outbox.put(view, [Said(0, {"role": "user", "content": "one"})])
    outbox.put(view, [Said(1, {"role": "user", "content": object()})])
    outbox.close(60.0)
    assert read_session(store, "s").next_position == 2 and len(read_session(store, "s").history) == 1


def test_a_fork_has_the_gap_at_the_end_too(server: FakeServer) -> None:
    store = FailingStore()
    outbox = Outbox(lambda: store)
    outbox.put(ClientView("s"), [Said(0, {"role": "user", "content": "one"}), Said(1, {"content": object()})])
    outbox.close(60.0)
    for _ in range(2):
        with AgentClient(base_url=server.url, model="small", store=store) as client:
            session = client.session("s")
            assert session.gaps == [Gap(before=1, lost=1)]
            if not client.session("fork").messages:
                session.fork("fork")
            assert client.session("fork").gaps == session.gaps


def test_forks_that_are_larger_than_the_outbox_are_stored(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outbox.__init__, "__defaults__", (4_000,))
    store = FailingStore()
    with AgentClient(base_url=server.url, model="small", store=store) as client:
        session = client.session("s")
        for _ in range(4):
            session.chat("A" * 1_500)
        store.delay = 0.05
        for number in range(4):
            session.fork(f"fork{number}")
    with AgentClient(base_url=server.url, model="small", store=store) as client:
        assert [len(client.session(f"fork{number}").messages) for number in range(4)] == [8] * 4
