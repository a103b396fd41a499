"""Test retention beside the background writer: when the store is trimmed, and what a failure costs."""

from unittest.mock import Mock

import pytest

from agentspec.cache.store import BackgroundWriter, CircuitBreaker, Retention, Trimmed
from agentspec.cache.store.background.trimmer import Trimmer
from agentspec.errors import StoreUnavailableError
from tests.store.helpers import NS, FlakyStore, entry_of, turn, wait_until

from .flaky import store, stored

__all__ = ["store"]


def test_the_store_is_trimmed_at_start_and_as_it_grows(store: FlakyStore) -> None:
    for number in range(1000):
        store.append(NS, [entry_of(turn("old", number))])
    writer = BackgroundWriter(store, retention=Retention(records=100, bytes=1 << 30))
    wait_until(lambda: writer.stats().trimmed == 900)  # counted after the removal
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
    """Retention is a promise, and may make the room that a full store needs."""
    monkeypatch.setattr("agentspec.cache.store.background.trimmer._SECONDS", 0.05)
    breaker = CircuitBreaker(threshold=1, first_pause=3600.0)
    writer = BackgroundWriter(store, retention=Retention(records=10), breaker=breaker)
    store.error = StoreUnavailableError("full")
    writer.put(NS, turn("s", 0))
    wait_until(lambda: writer.stats().state == "open")
    store.append_ungated(NS, [entry_of(turn("s", number)) for number in range(20)])
    wait_until(lambda: writer.stats().trimmed == 10)
    assert writer.stats().queued == 1
    writer.close(0.1)


def test_the_store_is_not_trimmed_again_before_it_has_grown(store: FlakyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    trim = Mock(return_value=Trimmed(0, more=False))
    monkeypatch.setattr(store, "trim", trim)
    trimmer = Trimmer(store, Retention(bytes=1_000))
    looks = list[int]()
    for size in (0, 20, 1, 20):  # more than 2 % is enough
        trimmer.note_written(size)
        trimmer.trim_if_due()
        looks.append(trim.call_count)
    assert looks == [1, 1, 2, 2]


def test_trimming_that_fails_costs_no_record_and_is_said_once(
    store: FlakyStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(retention: Retention) -> Trimmed:
        raise StoreUnavailableError("locked")

    monkeypatch.setattr(store, "trim", broken)
    monkeypatch.setattr("agentspec.cache.store.background.trimmer._SECONDS", 0.01)
    writer = BackgroundWriter(store, retention=Retention(days=1))
    wait_until(lambda: writer.stats().trim_failed > 3)
    writer.put(NS, turn("s", 1))
    assert writer.flush(60)
    assert stored(store) == [1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    writer.close()


def test_trimming_that_fails_again_after_it_worked_is_said_again(
    store: FlakyStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weeks may lie between the two, and the second fault may be another one, which lets the store grow."""
    monkeypatch.setattr("agentspec.cache.store.background.trimmer._SECONDS", 0.0)
    trimmer = Trimmer(store, Retention(days=1))
    for error in ("away", "away", None, "forbidden", "forbidden"):
        trim = Mock(side_effect=StoreUnavailableError(error) if error else None, return_value=Trimmed(0, False))
        monkeypatch.setattr(store, "trim", trim)
        trimmer.trim_if_due()
    assert [text for record in caplog.records for text in ("away", "forbidden") if text in record.getMessage()] == [
        "away",
        "forbidden",
    ]
    assert trimmer.failed == 4
