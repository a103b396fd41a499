"""Test the background writer while the store is away and when it is back: what waits, and what the log says."""

import time
from typing import Any

import pytest

from agentspec.cache.store import (
    BackgroundWriter,
    CircuitBreaker,
    NewEntry,
)
from agentspec.errors import StoreUnavailableError
from tests.store.helpers import NS, FlakyStore, turn, wait_until

from .flaky import quick, store, stored

__all__ = ["store"]


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


def test_a_store_that_is_lost_and_back_all_the_time_is_logged_once_a_minute(
    store: FlakyStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a Redis at its limit is, which now and then evicts a key."""
    writer = BackgroundWriter(store, breaker=quick())

    def outage(number: int) -> None:
        store.error = StoreUnavailableError("full")
        writer.put(NS, turn("s", number))
        wait_until(lambda: writer.stats().state in ("open", "half-open"))
        store.error = None
        assert writer.flush(60)

    for number in range(5):
        outage(number)
    assert ["is lost" in line for line in caplog.messages] == [True, False]
    monkeypatch.setattr("agentspec.cache.store.background.writer._TELL_SECONDS", 0.0)
    writer._tell_at = 0.0
    outage(5)
    writer.close()
    assert ["is lost" in line for line in caplog.messages] == [True, False] * 2


def test_an_append_that_waits_long_for_a_lock_and_fails_is_an_outage_at_once(
    store: FlakyStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentspec.cache.store.background.writer._SLOW_SECONDS", 0.02)
    writer = BackgroundWriter(store)
    store.error = StoreUnavailableError("locked")
    store.gate.clear()
    writer.put(NS, turn("s", 0))
    wait_until(lambda: store.calls == 1)
    time.sleep(0.05)
    store.gate.set()
    wait_until(lambda: writer.stats().state != "closed")
    assert (writer.stats().failed, len(caplog.messages)) == (1, 1)
    store.error = None
    assert writer.flush(60)
    writer.close()


def test_a_failed_append_waits_before_it_is_tried_again(store: FlakyStore) -> None:
    """Otherwise a brief error would count as an outage, after five attempts within a millisecond."""
    at: list[float] = []
    original = store.append

    def failing_twice(namespace: str, entries: list[NewEntry]) -> None:
        at.append(time.monotonic())
        if len(at) <= 2:
            raise StoreUnavailableError("timeout")
        original(namespace, entries)

    store.append = failing_twice  # type: ignore[method-assign,assignment]
    writer = BackgroundWriter(store, breaker=CircuitBreaker(retry_delay=0.1))
    writer.put(NS, turn("s", 1))
    assert writer.flush(60)
    assert at[1] - at[0] >= 0.1 and at[2] - at[1] >= 0.2
    writer.close()


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


def test_who_asks_for_a_flush_once_finds_out_at_once_whether_the_store_is_back(store: FlakyStore) -> None:
    writer = BackgroundWriter(store, breaker=CircuitBreaker(threshold=1, first_pause=600.0))
    store.error = StoreUnavailableError("away")
    writer.put(NS, turn("s", 1))
    wait_until(lambda: writer.stats().state == "open")
    begin = time.monotonic()
    assert not writer.flush(60, once=True)
    store.error = None
    assert writer.flush(60, once=True)
    assert time.monotonic() - begin < 30
    assert stored(store) == [1]
    writer.close()


@pytest.mark.parametrize(
    ("count", "options"),
    [(3, {"batch_entries": 3, "batch_seconds": 600}), (1, {"batch_entries": 64, "batch_seconds": 0.0})],
    ids=["full", "with room for more"],
)
def test_a_batch_that_failed_is_sent_again_as_it_was(store: FlakyStore, count: int, options: dict[str, Any]) -> None:
    """Otherwise a store could not recognise a batch that it has already."""
    sent: list[list[NewEntry]] = []
    original = store.append

    def failing_twice(namespace: str, entries: list[NewEntry]) -> None:
        sent.append(entries)
        writer.put(NS, turn("s", 100 + len(sent)))
        if len(sent) <= 2:
            raise StoreUnavailableError("timeout")
        original(namespace, entries)

    store.append = failing_twice  # type: ignore[method-assign,assignment]
    writer = BackgroundWriter(store, breaker=quick(), **options)
    for number in range(count):
        writer.put(NS, turn("s", number))
    wait_until(lambda: len(sent) >= 4)
    assert sent[0] == sent[1] == sent[2] and len(sent[0]) == count
    assert len(sent[3]) == 3, "what was put meanwhile goes together again"
    assert stored(store)[:count] == list(range(count))
    writer.close()
