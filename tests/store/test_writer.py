"""Test the background writer: it never waits, counts every record, and survives whatever the store does."""

import sys
import threading
import time

import pytest

from agentspec.cache.store import (
    BackgroundWriter,
    CircuitBreaker,
    MessageRecord,
    Record,
    decode,
)
from agentspec.errors import StoreError, StoreUnavailableError
from tests.store.helpers import NS, FlakyStore, number_of, turn, unwritable, wait_until

from .flaky import quick, refuse, store, stored

__all__ = ["store"]


def test_records_arrive_in_order_and_in_batches(store: FlakyStore) -> None:
    writer = BackgroundWriter(store)
    store.gate.clear()  # otherwise a batch may be sent before it is full
    for number in range(1000):
        writer.put(NS, turn(f"s{number % 3}", number))
    store.gate.set()
    assert writer.flush(60)
    assert stored(store) == list(range(1000))
    assert all(len(batch) <= 64 for batch in store.appended)
    assert len(store.appended) <= 17  # sixteen, and the one under way
    stats = writer.stats()
    assert (stats.persisted, stats.dropped, stats.failed, stats.queued, stats.queued_bytes) == (1000, 0, 0, 0, 0)
    assert stats.state == "closed"
    writer.close()


def test_turns_and_messages_go_alike(store: FlakyStore) -> None:
    writer = BackgroundWriter(store)
    records: list[Record] = [turn("s", 1, group="g"), MessageRecord("s", {"role": "user", "content": "hi"}, 2.0)]
    for record in records:
        writer.put(NS, record)
    writer.close()
    assert [decode(entry.payload) for entry in store.read(NS, session="s")] == records


@pytest.mark.parametrize(("count", "batch_seconds"), [(1, 0.02), (64, 600.0)])
def test_a_lone_record_and_a_full_batch_go_soon_without_a_flush(
    store: FlakyStore, count: int, batch_seconds: float
) -> None:
    writer = BackgroundWriter(store, batch_seconds=batch_seconds)
    writer.put(NS, turn("s", 0))
    time.sleep(0.01)  # the writer waits for more by now
    for number in range(1, count):
        writer.put(NS, turn("s", number))
    wait_until(lambda: writer.stats().persisted == count)
    writer.close()


def test_a_flush_hurries_only_what_was_put_before_it(store: FlakyStore) -> None:
    writer = BackgroundWriter(store, batch_seconds=600.0)
    writer.put(NS, turn("s", 1))
    assert writer.flush(60)
    writer.put(NS, turn("s", 2))
    time.sleep(0.1)  # the writer would send it at once
    assert (writer.stats().persisted, writer.stats().queued) == (1, 1)
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
    assert not store.gate.is_set()  # the store hung all the time, and no put waited
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
    wait_until(lambda: writer.stats().state == "open")  # no batch is under way
    for number in (100, 101):
        writer.put(NS, turn("s", number, prompt=1_000_000))  # larger than all of it: the first waits beside the others
        after = writer.stats()
        assert (after.queued, after.dropped) == (stats.queued + 1, stats.dropped + number - 100)
    for number in range(200):
        writer.put(NS, turn("t", number, prompt=1000))
    assert [number_of(record) for record in writer.waiting("s")] == [100], (
        "what waits beside the others is not dropped to make room for them"
    )
    writer.close(0)


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
    """In an SQLite file with a damaged page, for example, some sessions can be written and others cannot."""
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
    assert writer.stats().erased == 1  # the record that was still queued
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
    assert time.monotonic() - begin < 10  # it would go on trying for ever
    writer._thread.join(60)  # it counts dropped records after close has stopped waiting
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
    """Python takes the interpreter from a thread only after 5 ms, and a decode step must not wait for that."""
    monkeypatch.setattr(store, "append", lambda namespace, entries: ["" for _ in entries])
    before, turns = sys.getswitchinterval(), 0
    writer = BackgroundWriter(store, batch_seconds=0.2)
    sys.setswitchinterval(30)  # so a thread keeps the interpreter until it lets go
    try:
        for number in range(3000):
            writer.put(NS, turn("s", number, prompt=300))
        while writer.stats().persisted < 3000:
            turns += bool(writer._records.in_flight)
            time.sleep(0)
    finally:
        sys.setswitchinterval(before)
    assert turns > 100
    writer.close()


def test_what_is_forgotten_before_an_append_is_not_written(store: FlakyStore) -> None:
    """A log is followed from then on, which shows what other processes have erased."""
    begun = list[tuple[str, Record]]()

    def begin(log: str, record: Record) -> None:
        begun.append((log, record))
        if len(begun) == 1:
            raise StoreUnavailableError("away")
        writer.forget("gone")

    writer = BackgroundWriter(store, breaker=quick(), before_append=begin)
    records = [turn(name, number) for number, name in enumerate(["gone", "stays", "gone"])]
    for record in records:
        writer.put(NS, record)
    assert writer.flush(60)
    assert stored(store) == [1]
    assert begun == [(NS, records[0])] * 2
    stats = writer.stats()
    assert (stats.persisted, stats.erased, stats.failed, stats.queued, stats.queued_bytes) == (1, 2, 1, 0, 0)
    writer.put(NS, turn("gone", 7))
    assert writer.flush(60)
    assert stored(store) == [1] and writer.stats().erased == 3 and not writer.waiting_sessions()
    writer.close()


def test_no_record_is_given_up_because_a_log_cannot_be_appended_to_yet(store: FlakyStore) -> None:
    failing = [MemoryError("none left"), ValueError("a damaged row"), MemoryError("none left")]

    def begin(namespace: str, record: Record) -> None:
        if failing:
            raise failing.pop()

    writer = BackgroundWriter(store, breaker=quick(), before_append=begin)
    for number in range(3):
        writer.put(NS, turn(f"s{number}", number))
    wait_until(lambda: writer.stats().persisted == 3)
    stats = writer.stats()
    assert sorted(stored(store)) == [0, 1, 2] and (stats.refused, stats.queued) == (0, 0) and not failing
    writer.close()


def test_a_refused_log_is_not_back_because_what_waited_for_it_was_erased(
    store: FlakyStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing was asked of the store."""
    erased: list[str] = []

    def begin(namespace: str, record: Record) -> None:
        for session in erased:
            writer.forget(session)

    refuse(store, StoreError("refused"), lambda number: True)
    writer = BackgroundWriter(store, before_append=begin)
    for number in range(8):
        writer.put(NS, turn(f"s{number}", number))
    wait_until(lambda: writer.stats().refused_logs == 1)
    erased.extend(sorted(writer.waiting_sessions()))
    assert erased
    wait_until(lambda: not writer.waiting_sessions())
    assert "is refused by the store" in caplog.text and "is back" not in caplog.text
    writer.close()
