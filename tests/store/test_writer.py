"""The background writer: never waits, never loses count, survives whatever the store does."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from agentspec.cache.store import (
    BackgroundWriter,
    CircuitBreaker,
    MessageRecord,
    NewEntry,
    Record,
    Retention,
    Trimmed,
    decode,
)
from agentspec.errors import StoreError, StoreUnavailableError
from tests.store.helpers import NS, FlakyStore, entry_of, number_of, turn, unwritable, wait_until


@pytest.fixture
def store() -> Iterator[FlakyStore]:
    opened = FlakyStore()
    yield opened
    opened.gate.set()


def quick() -> CircuitBreaker:
    return CircuitBreaker(first_pause=0.02, max_pause=0.05, retry_delay=0.001)


def stored(store: FlakyStore) -> list[int]:
    return [number_of(decode(entry.payload)) for entry in store.read(NS)]


def test_records_arrive_in_order_and_in_batches(store: FlakyStore) -> None:
    writer = BackgroundWriter(store)
    store.gate.clear()  # else a batch may go before it is full
    for number in range(1000):
        writer.put(NS, turn(f"s{number % 3}", number))
    store.gate.set()
    assert writer.flush(60)
    assert stored(store) == list(range(1000))
    assert all(len(batch) <= 64 for batch in store.appended)
    assert len(store.appended) <= 17  # sixteen, and the one that was on its way
    stats = writer.stats()
    assert (stats.persisted, stats.dropped, stats.failed, stats.queued, stats.queued_bytes) == (1000, 0, 0, 0, 0)
    assert stats.as_dict()["state"] == "closed"
    writer.close()


def test_turns_and_messages_go_alike(store: FlakyStore) -> None:
    writer = BackgroundWriter(store)
    records: list[Record] = [turn("s", 1, group="g"), MessageRecord("s", {"role": "user", "content": "hi"}, 2.0)]
    for record in records:
        writer.put(NS, record)
    writer.close()
    assert [decode(entry.payload) for entry in store.read(NS, session="s")] == records


def test_a_lone_record_is_written_soon_without_a_flush(store: FlakyStore) -> None:
    writer = BackgroundWriter(store, batch_seconds=0.02)
    writer.put(NS, turn("s", 1))
    wait_until(lambda: writer.stats().persisted == 1)
    writer.close()


def test_persisted_counts_only_what_the_store_acknowledged(store: FlakyStore) -> None:
    store.gate.clear()
    writer = BackgroundWriter(store)
    writer.put(NS, turn("s", 1))
    wait_until(lambda: store.calls == 1)
    assert not writer.flush(0.05)
    stats = writer.stats()
    assert (stats.persisted, stats.queued) == (0, 1)
    store.gate.set()
    assert writer.flush(60)
    assert writer.stats().persisted == 1
    writer.close()


def test_put_returns_at_once_while_the_store_hangs_and_the_oldest_go(
    store: FlakyStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.gate.clear()
    writer = BackgroundWriter(store, max_entries=100)
    writer.put(NS, turn("s", 0))
    wait_until(lambda: store.calls == 1)
    for number in range(1, 1001):
        writer.put(NS, turn("s", number))
    assert not store.gate.is_set()  # the store hung all the time, and the puts are through
    stats = writer.stats()
    assert (stats.queued, stats.dropped) == (100, 901)
    store.gate.set()
    assert writer.flush(60)
    assert stored(store) == [0, *range(902, 1001)]
    assert sum("queue is full" in record.message for record in caplog.records) == 1
    writer.close()


def test_the_queue_is_bounded_in_bytes_too(store: FlakyStore) -> None:
    store.error = StoreUnavailableError("away")
    writer = BackgroundWriter(store, max_bytes=100_000, breaker=CircuitBreaker(first_pause=60))
    for number in range(100):
        writer.put(NS, turn("s", number, prompt=1000))  # about 4 kB each
        assert writer.stats().queued_bytes <= 100_000
    stats = writer.stats()
    assert 15 < stats.queued < 25
    assert stats.queued + stats.dropped == 100
    wait_until(lambda: writer.stats().state == "open")  # nothing is on its way
    writer.put(NS, turn("s", 100, prompt=1_000_000))  # larger than all of it
    assert writer.stats().queued == 0
    assert writer.stats().dropped == 101
    writer.close(0)


def test_an_outage_is_logged_once_and_so_is_its_end_and_nothing_is_lost(
    store: FlakyStore, caplog: pytest.LogCaptureFixture
) -> None:
    writer = BackgroundWriter(store, breaker=quick())
    store.error = StoreUnavailableError("gone fishing")
    for number in range(10):
        writer.put(NS, turn("s", number))
    wait_until(lambda: writer.stats().failed > 8)
    assert writer.stats().state in ("open", "half-open")
    store.error = None
    assert writer.flush(60)
    assert stored(store) == list(range(10))
    stats = writer.stats()
    assert (stats.persisted, stats.dropped, stats.state) == (10, 0, "closed")
    writer.close()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "is lost (gone fishing)" in lines[0]
    assert "is back" in lines[1]


def test_an_open_breaker_leaves_the_store_alone(store: FlakyStore) -> None:
    store.error = StoreUnavailableError("away")
    breaker = CircuitBreaker(first_pause=60, retry_delay=0.001)
    writer = BackgroundWriter(store, breaker=breaker)
    writer.put(NS, turn("s", 0))
    wait_until(lambda: writer.stats().state == "open")
    calls = store.calls
    for number in range(1, 200):
        writer.put(NS, turn("s", number))
    time.sleep(0.1)
    assert store.calls == calls == 5
    writer.close(0)


def test_a_batch_that_failed_is_sent_again_as_it_was(store: FlakyStore) -> None:
    """Else a store could not tell that it has it already."""
    sent: list[list[NewEntry]] = []
    original = store.append

    def failing_twice(namespace: str, entries: list[NewEntry]) -> None:
        sent.append(entries)
        writer.put(NS, turn("s", 100 + len(sent)))
        if len(sent) <= 2:
            raise StoreUnavailableError("timeout")
        original(namespace, entries)

    store.append = failing_twice  # type: ignore[method-assign,assignment]
    writer = BackgroundWriter(store, batch_entries=3, batch_seconds=600, breaker=quick())  # the three go together
    for number in range(3):
        writer.put(NS, turn("s", number))
    wait_until(lambda: len(sent) >= 4)
    assert sent[0] == sent[1] == sent[2] and len(sent[0]) == 3
    assert stored(store)[:3] == [0, 1, 2]
    writer.close()


def test_a_record_that_cannot_be_encoded_costs_only_itself(store: FlakyStore, caplog: pytest.LogCaptureFixture) -> None:
    writer = BackgroundWriter(store)
    for number in range(3):
        writer.put(NS, turn("s", number))
        writer.put(NS, unwritable("s"))
    writer.close()
    assert stored(store) == [0, 1, 2]
    stats = writer.stats()
    assert (stats.persisted, stats.refused, stats.queued) == (3, 3, 0)
    assert len(caplog.records) == 1
    assert "prompt_tail" in caplog.text


def refuse(store: FlakyStore, error: Exception, never: Callable[[int], bool]) -> None:
    """Let a store refuse appends with records of numbers that it never takes."""
    original = store.append

    def picky(namespace: str, entries: list[NewEntry]) -> None:
        if any(never(number_of(decode(payload))) for _, payload, *_ in entries):
            raise error
        original(namespace, entries)

    store.append = picky  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("error", [StoreError("too large"), RuntimeError("a bug")])
def test_a_record_that_the_store_never_takes_is_found_and_given_up(
    store: FlakyStore, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(store, error, lambda number: number == 13)
    writer = BackgroundWriter(store, breaker=quick())
    for number in range(40):
        writer.put(NS, turn("s", number))
    assert writer.flush(60)
    assert stored(store) == [number for number in range(40) if number != 13]
    assert writer.stats().refused == 1
    writer.close()
    assert sum("cannot be stored" in line and str(error) in line for line in caplog.messages) == 1


def test_records_that_the_store_never_takes_are_no_outage_in_the_log(
    store: FlakyStore, caplog: pytest.LogCaptureFixture
) -> None:
    """As in an SQLite file with a damaged page: some sessions can be written, others cannot."""
    refuse(store, StoreError("malformed"), lambda number: number % 8 == 0)
    writer = BackgroundWriter(store, breaker=quick())
    for number in range(64):
        writer.put(NS, turn("s", number))
    assert writer.flush(60)
    assert (writer.stats().refused, writer.stats().persisted) == (8, 56)
    assert len(caplog.messages) == 1 and "cannot be stored: malformed" in caplog.text
    store.error = StoreUnavailableError("away")
    writer.put(NS, turn("s", 1))
    wait_until(lambda: writer.stats().state == "open")
    store.error = None
    assert writer.flush(60)
    writer.close()
    assert ["is lost" in line for line in caplog.messages[1:]] == [True, False]
    assert "is back" in caplog.messages[-1]


def test_records_of_an_erased_session_leave_the_queue(store: FlakyStore) -> None:
    store.error = StoreUnavailableError("away")
    writer = BackgroundWriter(store, breaker=quick())
    for number, session in enumerate("abab"):
        writer.put(NS, turn(session, number))
    wait_until(lambda: writer.stats().failed > 2)
    assert writer.forget("a", 60)
    writer.put(NS, turn("a", 4))  # said after the erasure
    store.error = None
    assert writer.flush(60)
    assert stored(store) == [1, 3, 4]
    stats = writer.stats()
    assert (stats.erased, stats.persisted, stats.queued, stats.queued_bytes) == (2, 3, 0, 0)
    writer.close()


def test_forgetting_waits_for_the_records_that_are_on_their_way(store: FlakyStore) -> None:
    store.gate.clear()
    writer = BackgroundWriter(store, batch_entries=2, batch_seconds=600, breaker=quick())
    writer.put(NS, turn("a", 0))
    writer.put(NS, turn("b", 1))  # with it the batch is full and goes
    wait_until(lambda: store.calls == 1)
    writer.put(NS, turn("a", 2))
    assert not writer.forget("a", 0.05)
    assert writer.forget("b") is False
    assert writer.stats().erased == 1  # what was still queued
    store.gate.set()
    assert writer.forget("a", 60)
    assert stored(store) == [0, 1]  # it was stored before, so erasing the session in the store removes it
    writer.close()


def test_records_that_were_on_their_way_in_vain_are_not_sent_again_once_forgotten(store: FlakyStore) -> None:
    store.gate.clear()
    writer = BackgroundWriter(store, batch_entries=2, batch_seconds=600, breaker=quick())
    writer.put(NS, turn("a", 0))
    writer.put(NS, turn("b", 1))  # with it the batch is full and goes
    wait_until(lambda: store.calls == 1)
    writer.forget("a")
    store.error = StoreUnavailableError("away")
    store.gate.set()
    wait_until(lambda: writer.stats().failed > 0)
    store.error = None
    assert writer.flush(60)
    assert stored(store) == [1]
    writer.close()


def test_the_store_is_trimmed_at_start_and_as_it_grows(store: FlakyStore) -> None:
    for number in range(1000):
        store.append(NS, [entry_of(turn("old", number))])
    writer = BackgroundWriter(store, retention=Retention(records=100, bytes=1 << 30))
    wait_until(lambda: writer.stats().trimmed == 900)  # counted behind the removal
    assert store.usage().records == 100
    writer.close()
    limit = 4 << 20
    writer = BackgroundWriter(store, retention=Retention(bytes=limit))
    for number in range(10 * limit // 9000):
        writer.put(NS, turn("new", number, prompt=2000))
        if number % 100 == 0:
            assert writer.flush(60)
    assert writer.flush(60)
    wait_until(lambda: store.usage().bytes < 1.25 * limit)
    assert stored(store)[-1] == 10 * limit // 9000 - 1
    writer.close()


def test_the_store_is_trimmed_also_while_it_takes_no_records(
    store: FlakyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention is a promise, and may be what makes room in a full store."""
    monkeypatch.setattr("agentspec.cache.store.trimmer._SECONDS", 0.05)
    breaker = CircuitBreaker(threshold=1, first_pause=3600.0)
    writer = BackgroundWriter(store, retention=Retention(records=10), breaker=breaker)
    store.error = StoreUnavailableError("full")
    writer.put(NS, turn("s", 0))
    wait_until(lambda: writer.stats().state == "open")
    store.append_ungated(NS, [entry_of(turn("s", number)) for number in range(20)])
    wait_until(lambda: writer.stats().trimmed == 10)
    assert writer.stats().queued == 1
    writer.close(0.1)


def test_trimming_that_fails_costs_no_record_and_is_said_once(
    store: FlakyStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(retention: Retention) -> Trimmed:
        raise StoreUnavailableError("locked")

    monkeypatch.setattr(store, "trim", broken)
    monkeypatch.setattr("agentspec.cache.store.trimmer._SECONDS", 0.01)
    writer = BackgroundWriter(store, retention=Retention(days=1))
    wait_until(lambda: writer.stats().trim_failed > 3)
    writer.put(NS, turn("s", 1))
    assert writer.flush(60)
    assert stored(store) == [1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    writer.close()


def test_close_writes_what_is_queued_and_later_puts_are_counted(store: FlakyStore) -> None:
    writer = BackgroundWriter(store, batch_seconds=600)
    for number in range(5):
        writer.put(NS, turn("s", number))
    begin = time.monotonic()
    writer.close(60)
    assert time.monotonic() - begin < 30
    assert stored(store) == [0, 1, 2, 3, 4]
    writer.put(NS, turn("s", 5))
    writer.close(5)
    stats = writer.stats()
    assert (stats.persisted, stats.dropped, stats.queued) == (5, 1, 0)
    assert writer.flush(1)


def test_close_tries_an_open_store_once_more(store: FlakyStore) -> None:
    store.error = StoreUnavailableError("away")
    writer = BackgroundWriter(store, breaker=CircuitBreaker(first_pause=60, retry_delay=0.001))
    writer.put(NS, turn("s", 1))
    wait_until(lambda: writer.stats().state == "open")
    store.error = None
    writer.close(60)
    assert writer.stats().persisted == 1


def test_close_gives_up_in_time_and_says_what_is_lost(store: FlakyStore, caplog: pytest.LogCaptureFixture) -> None:
    store.error = StoreUnavailableError("away")
    writer = BackgroundWriter(store, breaker=quick())
    for number in range(7):
        writer.put(NS, turn("s", number))
    begin = time.monotonic()
    writer.close(0.3)
    assert time.monotonic() - begin < 10  # it would try for ever
    writer._thread.join(60)  # what it drops it counts behind the time that close waits for it
    stats = writer.stats()
    assert (stats.persisted, stats.dropped, stats.queued) == (0, 7, 0)
    assert "7 records unwritten" in caplog.text


def test_threads_may_put_at_once(store: FlakyStore) -> None:
    writer = BackgroundWriter(store)

    def work(start: int) -> None:
        for number in range(start, start + 500):
            writer.put(NS, turn("s", number))

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 500, 1000, 1500)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.flush(60)
    assert sorted(stored(store)) == list(range(2000))
    writer.close()


def test_other_threads_get_the_interpreter_while_records_are_encoded(
    store: FlakyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes the interpreter from a thread only after 5 ms, which a decode step must not wait for."""
    monkeypatch.setattr(store, "append", lambda namespace, entries: ["" for _ in entries])
    before, turns = sys.getswitchinterval(), 0
    writer = BackgroundWriter(store, batch_seconds=0.2)
    sys.setswitchinterval(30)  # so a thread keeps the interpreter until it lets go
    try:
        for number in range(3000):
            writer.put(NS, turn("s", number, prompt=300))
        while writer.stats().persisted < 3000:
            turns += bool(writer._in_flight)
            time.sleep(0)
    finally:
        sys.setswitchinterval(before)
    assert turns > 100
    writer.close()


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
    """A store whose logs lie in the part that their names begin with, each of which can be away."""

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
        writer.close()  # which ends its thread, so that it has logged what it had to
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
        """The breaker lets one call through, but all that the batch has goes to a part that is away."""
        store = PartedStore()
        store.away, store.moved["n"] = {"a", ""}, ""  # nobody knows where log n is
        writer = BackgroundWriter(store, breaker=quick())
        writer.put("a", turn("s", 1))
        wait_until(lambda: len(writer._aside) == 1)
        writer.put("n", turn("gone", 2))
        wait_until(lambda: writer.stats().failed >= 6)
        writer.put("a", turn("s", 3))
        assert writer.forget("gone", 60)
        wait_until(lambda: len(writer._aside) == 2)
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
        wait_until(lambda: writer.stats().queued == len(writer._aside))
        stats = writer.stats()
        assert stats.persisted + stats.dropped + stats.queued == 1000
        store.away.clear()
        assert writer.flush(60)
        assert store.numbers("a") == sorted(store.numbers("a")) and store.numbers("a")[-1] == 499
        assert writer.stats().queued_bytes == 0
        writer.close()

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
