"""Test turns that wait to be stored: what the limit drops, and that this is reported."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentspec import AgentClient, Gap
from agentspec.cache.store import MemoryStore, MessageRecord, NewEntry, encode
from agentspec.client.history import outbox as outbox_module
from agentspec.client.history.outbox import NAMESPACE, Outbox, read_session
from agentspec.client.history.session_log import ClientView, Said
from agentspec.errors import SessionConflictError, StoreError, StoreUnavailableError
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


def test_the_largest_turn_is_kept_beside_a_larger_one_that_is_sent_again() -> None:
    store = FailingStore("append")
    outbox = Outbox(lambda: store, max_bytes=4_000)
    outbox.put(ClientView("larger"), [Said(0, {"role": "user", "content": "A" * 10_000})])
    wait_until(lambda: outbox._failures > 0)
    outbox.put(ClientView("large"), [Said(0, {"role": "user", "content": "A" * 9_000})])
    store.failing = set()
    outbox.close(60.0)
    assert [len(read_session(store, name).history) for name in ("larger", "large")] == [1, 1]


def test_what_is_sent_again_counts_while_it_waits() -> None:
    store = FailingStore("append")
    outbox = Outbox(lambda: store)
    outbox.put(ClientView("s"), [Said(0, {"role": "user", "content": "one"})])
    wait_until(lambda: outbox._failures > 1)
    with outbox._changed:
        assert outbox._bytes == sum(write.size for write in outbox._queue)
    store.failing = set()
    outbox.close(60.0)
    assert outbox._bytes == 0


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


def test_messages_without_a_position_come_in_their_order() -> None:
    store = MemoryStore()
    records = [MessageRecord("s", {"role": "user", "content": text}, 0.0) for text in ("one", "two")]
    store.append(NAMESPACE, [NewEntry("s", encode(record)) for record in records])
    found = read_session(store, "s")
    assert [(said.position, said.message["content"]) for said in found.history] == [(0, "one"), (1, "two")]


@pytest.mark.parametrize(("texts", "position"), [(("one", "one"), None), (("one", "two"), 0)])
def test_a_record_counts_unless_it_repeats_one_at_its_position(texts: tuple[str, str], position: int | None) -> None:
    store = MemoryStore()
    records = [MessageRecord("s", {"role": "user", "content": text}, 0.0, position) for text in texts]
    store.append(NAMESPACE, [NewEntry("s", encode(record)) for record in records])
    found = read_session(store, "s")
    assert [(said.position, said.message["content"]) for said in found.history] == [(0, texts[0]), (1, texts[1])]


def test_a_damaged_record_at_the_end_is_no_other_client() -> None:
    store = FailingStore()
    store.append(NAMESPACE, [NewEntry("s", b"damaged")])
    outbox = Outbox(lambda: store)
    view = ClientView("s", read_session(store, "s").last)
    outbox.put_now(view, [Said(1, {"role": "user", "content": "one"})], None, 60.0)
    outbox.close(60.0)
    assert len(read_session(store, "s").history) == 1


def test_whatever_a_store_raises_is_its_error_and_holds_up_nothing() -> None:
    class Broken(FailingStore):
        def append(self, *arguments: Any, **options: Any) -> Any:
            if "interrupt" in self.failing:
                raise KeyboardInterrupt
            if self.failing:
                raise ZeroDivisionError("a fault of the store's")
            return super().append(*arguments, **options)

    store, view = Broken("append"), ClientView("s")
    outbox = Outbox(lambda: store)
    with pytest.raises(StoreError, match="a fault of the store's"):
        outbox.put_now(view, [Said(0, {"role": "user", "content": "one"})], None, 60.0)
    store.failing = {"interrupt"}
    with pytest.raises(KeyboardInterrupt):
        outbox.put_now(view, [Said(0, {"role": "user", "content": "one"})], None, 60.0)
    store.failing = set()
    outbox.put_now(view, [Said(0, {"role": "user", "content": "one"})], None, 1.0)
    outbox.close(60.0)


def test_a_store_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.client.history.outbox.WAIT_S", 0.5)
    store, view = FailingStore(), ClientView("s")
    outbox = Outbox(lambda: store)
    store.delay = 2.0
    outbox.put(view, [Said(0, {"role": "user", "content": "one"})])
    outbox.confirm(view)
    begin = time.monotonic()
    for _ in range(3):
        outbox.check(view)
        outbox.confirm(view)
    assert time.monotonic() - begin < 0.4
    assert not outbox._queue, "what would be looked at is known already to take long"
    outbox.close(60.0)


def test_who_waits_for_a_store_that_is_back_does_not_wait_for_the_pause_after_its_failures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentspec.client.history.outbox._LONGEST_PAUSE_S", 60.0)
    store = FailingStore("append")
    outbox, view = Outbox(lambda: store), ClientView("s")
    outbox.put(view, [Said(0, {"role": "user", "content": "one"})])
    wait_until(lambda: outbox._failures > 0)
    outbox._failures = 20  # as after a minute
    wait_until(lambda: outbox._failures > 20)
    outbox.check(view)
    assert len(outbox._queue) == 1, "nothing can be looked at now"
    store.failing = set()
    assert outbox.settle("s", 20.0)
    outbox.close(60.0)


def test_room_is_waited_for_while_the_store_works_only() -> None:
    store = FailingStore()
    outbox = Outbox(lambda: store, max_bytes=4_000)
    store.delay = 0.3
    outbox.put(ClientView("s"), [Said(0, {"role": "user", "content": "A" * 10_000})])
    wait_until(lambda: outbox._current is not None)
    outbox.wait_for_room(60.0)
    assert outbox._current is None, "what is being written counts, too"
    store.delay, store.failing = 0.0, {"append"}
    outbox.put(ClientView("t"), [Said(0, {"role": "user", "content": "A" * 10_000})])
    wait_until(lambda: outbox._failures > 0)
    begin = time.monotonic()
    outbox.wait_for_room(20.0)
    assert time.monotonic() - begin < 10
    store.failing = set()
    outbox.close(60.0)


def test_what_is_put_during_a_pause_is_discarded_and_nothing_else() -> None:
    store = FailingStore()
    outbox = Outbox(lambda: store)
    with outbox.paused("s", 60.0):
        outbox.put(ClientView("s"), [Said(0, {"role": "user", "content": "one"})])
        time.sleep(0.1)  # the thread has seen it
    assert outbox.settle("s", 60.0) and outbox._bytes == 0
    time.sleep(0.1)  # the thread finds nothing to write
    with outbox.paused("s", 60.0):
        outbox.put(ClientView("other"), [Said(0, {"role": "user", "content": "one"})])
    assert outbox.settle("other", 60.0)
    assert [len(read_session(store, name).history) for name in ("s", "other")] == [0, 1]
    outbox.close(60.0)


def test_what_is_being_written_at_the_end_counts_as_lost(caplog: pytest.LogCaptureFixture) -> None:
    store = FailingStore()
    store.delay = 2.0
    outbox = Outbox(lambda: store)
    for name in "st":
        outbox.put(ClientView(name), [Said(0, {"role": "user", "content": "one"})])
    wait_until(lambda: outbox._current is not None)
    outbox.close(0.1)
    assert caplog.messages == ["agentspec: the session store is away; 2 messages are lost unwritten"]


def test_a_gap_at_the_end_shows_though_a_check_was_queued_behind_what_was_dropped() -> None:
    store = FailingStore()
    outbox = Outbox(lambda: store, max_bytes=4_000)
    store.delay = 0.3
    views = {name: ClientView(name) for name in ("first", "s", "large")}
    outbox.put(views["first"], [Said(0, {"role": "user", "content": "first"})])
    wait_until(lambda: outbox._current is not None)
    outbox.put(views["s"], [Said(0, {"role": "user", "content": "A" * 4_500})])
    outbox.check(views["s"])
    outbox.put(views["large"], [Said(0, {"role": "user", "content": "A" * 9_000})])
    store.delay = 0.0
    outbox.close(60.0)
    assert (read_session(store, "s").next_position, read_session(store, "s").history) == (1, [])
    assert len(read_session(store, "large").history) == 1


def test_what_shows_gaps_is_bounded_too() -> None:
    store = FailingStore("append")
    outbox = Outbox(lambda: store, max_bytes=4_000)
    view = ClientView("first")
    outbox.put(view, [Said(0, {"role": "user", "content": "on its way"})])
    wait_until(lambda: outbox._failures > 0)
    for number in range(200):
        outbox.put(ClientView(f"s{number}"), [Said(0, {"role": "user", "content": "A" * 1_000})])
    assert outbox._bytes < 4_000 + 2_000
    store.failing = set()
    outbox.close(60.0)
    assert len(read_session(store, "first").history) == 1


def test_of_turns_that_were_dropped_nothing_waits_but_what_shows_the_gap(caplog: pytest.LogCaptureFixture) -> None:
    store, view = FailingStore("append"), ClientView("s")
    outbox = Outbox(lambda: store, max_bytes=4_000)
    for position in range(100):
        outbox.put(view, [Said(position, {"role": "user", "content": "A" * 1_000})])
    assert len(outbox._queue) < 10
    wait_until(lambda: outbox._failures > 0)
    store.failing = set()
    outbox.close(60.0)
    found = read_session(store, "s")
    assert found.next_position == 100
    assert sum("more than 4000 bytes of messages wait" in message for message in caplog.messages) == 1
    dropped = 100 - len(found.history)
    assert caplog.messages[-1] == f"agentspec: the session store is back; {dropped} messages were dropped"


def test_what_is_stored_at_once_behind_another_clients_messages_is_a_conflict() -> None:
    store = MemoryStore()
    outbox = Outbox(lambda: store)
    outbox.put_now(ClientView("s"), [Said(0, {"role": "user", "content": "one"})], None, 60.0)
    with pytest.raises(SessionConflictError):
        outbox.put_now(ClientView("s"), [Said(0, {"role": "user", "content": "two"})], None, 60.0)
    outbox.close(60.0)


def test_a_thread_that_cannot_start_is_started_with_the_next_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store = FailingStore()
    outbox, view = Outbox(lambda: store), ClientView("a")
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        outbox.put(view, [Said(0, {"role": "user", "content": "waits"})])
    outbox.put(view, [Said(1, {"role": "user", "content": "goes"})])
    outbox.close(60.0)
    assert len(read_session(store, "a").history) == 2


def test_messages_are_stored_where_no_thread_can_be_started_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts none once the interpreter ends."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    store = FailingStore()
    outbox = Outbox(lambda: store)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    outbox.put(ClientView("a"), [Said(0, {"role": "user", "content": "kept"})])
    outbox.close(60.0)
    assert len(read_session(store, "a").history) == 1


def test_a_client_that_the_outboxs_own_thread_collects_is_closed(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any allocation there may start a collection, and a client whose owner forgot it may lie in a cycle."""
    dropped, collected, url = threading.Event(), threading.Event(), f"sqlite:///{tmp_path}/s.db"

    def encode_and_collect(record: Any) -> bytes:
        if threading.current_thread().name == "agentspec-outbox" and not collected.is_set():
            dropped.wait(60)
            gc.collect()  # takes long in a process that has run many tests
            collected.set()
        return encode(record)

    monkeypatch.setattr(outbox_module, "encode", encode_and_collect)
    gc.disable()
    try:
        forgotten: Any = SimpleNamespace(client=AgentClient(base_url=server.url, model="m", store=url))
        forgotten.itself = forgotten
        session = forgotten.client.session("s")
        session.load()
        for number in range(5):
            session.add({"role": "user", "content": str(number)})
        del session
        thread = forgotten.client._log._outbox._thread
        forgotten = None
        dropped.set()
        wait_until(lambda: not thread.is_alive() and [file.name for file in tmp_path.iterdir()] == ["s.db"])
    finally:
        gc.enable()
        gc.collect()
    with AgentClient(base_url=server.url, model="m", store=url) as client:
        assert [message["content"] for message in client.session("s").messages] == ["0", "1", "2", "3", "4"]
    assert [file.name for file in tmp_path.iterdir()] == ["s.db"], "another client still had it open"
