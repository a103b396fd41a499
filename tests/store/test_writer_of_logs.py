"""Test the background writer on several logs: each keeps its order, and one that is away costs the others nothing."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from agentspec.cache.store import BackgroundWriter, NewEntry, decode
from agentspec.errors import StoreError, StoreUnavailableError
from tests.store.helpers import NS, FlakyStore, number_of, turn, unwritable, wait_until

from .flaky import quick, refuse, store

__all__ = ["store"]


def test_each_log_gets_its_records_in_order(store: FlakyStore) -> None:
    writer = BackgroundWriter(store)
    store.gate.clear()
    for number in range(1000):
        writer.put(f"log-{number % 7}", turn("s", number))
    store.gate.set()
    assert writer.flush(60)
    for log in range(7):
        found = [number_of(decode(entry.payload)) for entry in store.read(f"log-{log}")]
        assert found == list(range(log, 1000, 7))
    assert len(store.appended) < 200  # batches, not records
    writer.close()


def test_a_log_whose_append_is_unsure_gets_the_same_records_again_and_no_other_does(store: FlakyStore) -> None:
    sent: list[tuple[str, list[NewEntry]]] = []
    original = store.append

    def unsure(namespace: str, entries: list[NewEntry]) -> None:
        sent.append((namespace, entries))
        if namespace == "b" and len(sent) < 6:
            raise StoreUnavailableError("timeout")
        original(namespace, entries)

    store.append = unsure  # type: ignore[method-assign,assignment]
    writer = BackgroundWriter(store, batch_seconds=60, breaker=quick())
    for number in range(9):
        writer.put("abc"[number % 3], turn("s", number))
    assert writer.flush(60)
    tried = [entries for namespace, entries in sent if namespace == "b"]
    assert len(tried) > 3 and all(entries == tried[0] for entries in tried)
    assert [namespace for namespace, _ in sent if namespace != "b"] == ["a", "c"]
    assert [len(list(store.read(log))) for log in "abc"] == [3, 3, 3]
    stats = writer.stats()
    assert (stats.persisted, stats.queued, stats.queued_bytes) == (9, 0, 0)
    writer.close()


def test_a_record_that_is_never_taken_costs_no_other_log_anything(store: FlakyStore) -> None:
    refuse(store, StoreError("too large"), lambda number: number == 13)
    writer = BackgroundWriter(store, breaker=quick())
    for number in range(60):
        writer.put(f"log-{number % 3}", turn("s", number))
    assert writer.flush(60)
    found = sorted(number_of(decode(entry.payload)) for log in range(3) for entry in store.read(f"log-{log}"))
    assert found == [number for number in range(60) if number != 13]
    assert (writer.stats().refused, writer.stats().persisted) == (1, 59)
    writer.close()


def test_flush_waits_for_the_queue_while_a_newer_record_of_a_refused_log_is_tried(store: FlakyStore) -> None:
    """One log is refused. Then the store is away for another log, whose records are older."""
    original, tried, go_on = store.append, threading.Event(), threading.Event()

    def picky(namespace: str, entries: list[NewEntry]) -> None:
        numbers = [number_of(decode(payload)) for _, payload, *_ in entries]
        if namespace == "b" and not go_on.is_set():
            raise StoreUnavailableError("timeout")
        if namespace == "a":
            if numbers == [3]:  # alone, and the newest
                tried.set()
                assert go_on.wait(60)
            raise StoreError("too large")
        original(namespace, entries)

    store.append = picky  # type: ignore[method-assign,assignment]
    writer = BackgroundWriter(store, batch_entries=4, batch_seconds=60, breaker=quick())
    for number, namespace in enumerate("abba"):
        writer.put(namespace, turn("s", number))
        if number == 2:
            target = writer._records.newest
    assert tried.wait(60)
    with writer._work:
        assert writer._records.oldest() <= target  # it is a record that waits for the other log
    assert not writer.flush(0.0)
    go_on.set()
    assert writer.flush(60)
    assert [number_of(decode(entry.payload)) for entry in store.read("b")] == [1, 2]
    writer.close()


def test_the_writer_goes_on_though_the_store_cannot_say_where_a_log_lies(store: FlakyStore) -> None:
    errors: list[Exception] = []
    original = store.append

    def part(namespace: str) -> str:
        if errors:
            raise errors[0]
        return "node"

    def away(namespace: str, entries: list[NewEntry]) -> None:
        if not errors:
            errors.append(KeyError(5))
            raise StoreUnavailableError("timeout")
        original(namespace, entries)

    store.part, store.append = part, away  # type: ignore[method-assign,assignment]
    writer = BackgroundWriter(store, breaker=quick())
    writer.put("a", turn("s", 1))
    wait_until(lambda: errors)
    writer.put("b", turn("s", 2))
    assert writer.flush(10)
    assert [number_of(decode(entry.payload)) for log in "ab" for entry in store.read(log)] == [1, 2]
    writer.close()


def test_a_store_that_is_away_is_not_back_because_nothing_could_be_written(store: FlakyStore) -> None:
    """A record that cannot be encoded needs no append, so the writer asks the store whether it is there."""
    writer = BackgroundWriter(store, breaker=quick())
    store.error = StoreUnavailableError("away")
    writer.put(NS, unwritable("s"))
    wait_until(lambda: writer.stats().state == "open")
    assert writer.stats().refused == 0
    store.error = None
    wait_until(lambda: writer.stats().refused == 1)
    assert writer.stats().state == "closed"
    writer.close()


def test_an_erased_session_leaves_the_queue_of_every_log(store: FlakyStore) -> None:
    store.error = StoreUnavailableError("away")
    writer = BackgroundWriter(store, breaker=quick())
    for number in range(6):
        writer.put("ab"[number % 2], turn("gone" if number < 4 else "kept", number))
    wait_until(lambda: writer.stats().failed > 2)
    assert writer.forget("gone", 60)
    store.error = None
    assert writer.flush(60)
    assert [[number_of(decode(entry.payload)) for entry in store.read(log)] for log in "ab"] == [[4], [5]]
    assert (writer.stats().erased, writer.stats().queued_bytes) == (4, 0)
    writer.close()


class PartedStore(FlakyStore):
    """Keep each log in the part that its name begins with. Each part can be away."""

    def __init__(self) -> None:
        super().__init__()
        self.away: set[str] = set()
        self.moved: dict[str, str] = {}
        self.tried: list[str] = []

    def part(self, namespace: str) -> str:
        return self.moved.get(namespace, namespace[0])

    def append(self, namespace: str, entries: Sequence[NewEntry], *, expect: str | None = None) -> list[str]:
        self.tried.append(namespace)
        if self.part(namespace) in self.away:
            raise StoreUnavailableError("this part is away")
        return super().append(namespace, entries, expect=expect)

    def numbers(self, namespace: str) -> list[int]:
        return [number_of(decode(entry.payload)) for entry in self.read(namespace)]


class TestAPartThatIsAway:
    def test_holds_up_its_own_logs_only(self, caplog: pytest.LogCaptureFixture) -> None:
        store = PartedStore()
        writer = BackgroundWriter(store, batch_entries=8)
        store.away = {"a"}
        begin = time.monotonic()
        for number in range(0, 300, 3):
            for offset, log in enumerate(("a1", "b1", "a2")):
                writer.put(log, turn("s", number + offset))
        wait_until(lambda: writer.stats().persisted == 100)
        stats = writer.stats()
        assert len(store.numbers("b1")) == 100
        assert (stats.persisted, stats.queued, stats.state, stats.dropped) == (100, 200, "open", 0)
        tried = len([log for log in store.tried if log != "b1"])
        assert 1 <= tried < 2 + (time.monotonic() - begin)  # it is left alone for a second, then for longer
        store.away.clear()
        assert writer.flush(60)
        assert store.numbers("a1") == list(range(0, 300, 3)) and store.numbers("a2") == list(range(2, 300, 3))
        wait_until(lambda: writer.stats().state == "closed")
        assert (writer.stats().persisted, writer.stats().queued_bytes) == (300, 0)
        writer.close()  # this ends its thread, so all messages are logged
        messages = [record.getMessage() for record in caplog.records]
        assert ["lost" in line for line in messages] == [True, False] and "is back" in messages[1]

    def test_sends_what_was_unsure_again_as_it_was_and_keeps_the_order_of_a_log_that_moves(self) -> None:
        store = PartedStore()
        writer = BackgroundWriter(store, batch_entries=4, batch_seconds=60)
        store.away = {"a"}
        for number in range(4):
            writer.put("a", turn("s", number))
        wait_until(lambda: writer.stats().state == "open")
        store.moved["a"] = "b"
        for number in range(4, 8):
            writer.put("a", turn("s", number))
        assert writer.flush(60)
        assert store.numbers("a") == list(range(8))
        assert [len(batch) for batch in store.appended] == [4, 4]
        writer.close()

    def test_keeps_nobody_waiting_for_a_call_that_is_not_made(self) -> None:
        """The breaker lets one call through, but the whole batch is for a part that is away."""
        store = PartedStore()
        store.away, store.moved["n"] = {"a", ""}, ""  # the part of log n is unknown
        writer = BackgroundWriter(store, breaker=quick())
        writer.put("a", turn("s", 1))
        wait_until(lambda: len(writer._records.aside) == 1)
        writer.put("n", turn("gone", 2))
        wait_until(lambda: writer.stats().failed >= 6)
        writer.put("a", turn("s", 3))
        assert writer.forget("gone", 60)
        wait_until(lambda: len(writer._records.aside) == 2)
        writer.put("b", turn("s", 4))
        wait_until(lambda: store.numbers("b") == [4])
        store.away.clear()
        assert writer.flush(60)
        assert store.numbers("a") == [1, 3]
        writer.close()

    def test_is_bounded_and_the_oldest_of_all_go_first(self) -> None:
        store = PartedStore()
        store.away = {"a"}
        writer = BackgroundWriter(store, max_entries=50, batch_entries=8)
        for number in range(500):
            writer.put("a", turn("s", number))
            writer.put("b", turn("s", number))
            assert writer.stats().queued <= 50
        wait_until(lambda: writer.stats().queued == len(writer._records.aside))
        stats = writer.stats()
        assert stats.persisted + stats.dropped + stats.queued == 1000
        store.away.clear()
        assert writer.flush(60)
        assert store.numbers("a") == sorted(store.numbers("a")) and store.numbers("a")[-1] == 499
        assert writer.stats().queued_bytes == 0
        writer.close()

    def test_is_said_to_drop_records_once_for_an_outage(self, caplog: pytest.LogCaptureFixture) -> None:
        """A line for each dropped record would fill the disk."""
        store = PartedStore()
        store.away = {"a"}
        writer = BackgroundWriter(store, max_entries=4)
        for outage in (1, 2):
            for number in range(20):
                writer.put("a", turn("s", number))
                wait_until(lambda: writer.stats().queued == len(writer._records.aside))
            assert writer.stats().dropped == 16 * outage
            assert sum("queue is full" in line for line in caplog.messages) == outage
            store.away.clear()
            assert writer.flush(60)
            store.away = {"a"}
        writer.close()

    def test_remembers_no_log_of_which_nothing_waits(self) -> None:
        """While a node is away, more and more logs may come, and the queue drops the records of older ones."""
        store = PartedStore()
        store.away = {"a"}
        writer = BackgroundWriter(store, max_entries=8, batch_entries=8)
        writer.put("a", turn("s", 0))
        wait_until(lambda: len(writer._records.aside) == 1)
        for number in range(100):
            writer.put(f"a{number}", turn("gone" if number % 2 else "s", number))
            wait_until(lambda: writer.stats().queued == len(writer._records.aside))
        (waiting,) = writer._records.aside._waiting.values()
        assert len(waiting.logs) == 8
        assert writer.forget("gone", 60)
        assert sorted(waiting.logs) == ["a92", "a94", "a96", "a98"]
        store.away.clear()
        assert writer.flush(60)
        writer.close()
        assert not waiting.logs
        assert [store.numbers(f"a{number}") for number in range(90, 100, 2)] == [[], [92], [94], [96], [98]]

    def test_forgets_an_erased_session_and_finds_a_record_that_is_never_taken(self) -> None:
        store = PartedStore()
        store.away = {"a"}
        writer = BackgroundWriter(store, batch_entries=16, batch_seconds=0.1)
        for number in range(12):
            writer.put("a", turn(f"s{number % 3}", number) if number != 5 else unwritable("s2"))
        wait_until(lambda: writer.stats().state == "open")
        assert writer.forget("s1", 60)
        assert (writer.stats().erased, writer.stats().queued) == (4, 8)
        store.away.clear()
        assert writer.flush(60)
        assert store.numbers("a") == [0, 2, 3, 6, 8, 9, 11]
        assert (writer.stats().refused, writer.stats().queued_bytes) == (1, 0)
        writer.close()

    def test_is_tried_once_more_at_the_end_and_what_is_lost_is_counted(self) -> None:
        for away in (True, False):
            store = PartedStore()
            store.away = {"a"}
            writer = BackgroundWriter(store)
            for number in range(3):
                writer.put("a", turn("s", number))
            wait_until(lambda at=writer: at.stats().state == "open")  # type: ignore[misc]
            if not away:
                store.away.clear()
            writer.close(60)
            assert (writer.stats().persisted, writer.stats().dropped) == ((0, 3) if away else (3, 0))
            assert (writer.stats().queued, writer.stats().queued_bytes) == (0, 0)


@pytest.mark.parametrize("error", [StoreUnavailableError("one shard is away"), StoreError("refused")])
def test_what_waits_aside_is_without_the_session_that_was_erased_while_its_append_failed(
    store: FlakyStore, error: StoreError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its records would come after the tombstone."""
    append = store.append

    def fail_once(*args: Any, **options: Any) -> list[str]:
        store.calls += 1
        if store.calls > 1:
            return append(*args, **options)
        assert store.gate.wait(60)
        raise error

    monkeypatch.setattr(store, "part", lambda namespace: "shard 1")
    monkeypatch.setattr(store, "append", fail_once)
    store.gate.clear()
    writer = BackgroundWriter(store, breaker=quick(), batch_entries=4, batch_seconds=60.0)
    for number, session in enumerate(("gone", "stays", "stays", "gone")):  # one in each half
        writer.put("log", turn(session, number))
    wait_until(lambda: store.calls)
    assert not writer.forget("gone")
    store.gate.set()
    assert writer.flush(60)
    assert [number_of(decode(entry.payload)) for entry in store.read("log")] == [1, 2]
    writer.put("log", turn("gone", 9))  # the session is used again
    assert writer.flush(60)
    stats = writer.stats()
    assert (stats.persisted, stats.erased, stats.queued_bytes) == (3, 2, 0)
    writer.close()
