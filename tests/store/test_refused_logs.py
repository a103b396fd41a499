"""Test a single log that the store refuses, say because another program owns one of its keys: other logs go on."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import pytest

from agentspec.cache.store import (
    BackgroundLoader,
    BackgroundWriter,
    CircuitBreaker,
    Entry,
    NewEntry,
    RedisStore,
    Retention,
    Trimmed,
    Wanted,
    decode,
    open_store,
)
from agentspec.cache.store.background.aside import REFUSED_LOGS
from agentspec.cache.store.base import History
from agentspec.errors import StoreError, StoreUnavailableError
from agentspec.testing.redis_server import RedisServer
from tests.store.followed_process import Process
from tests.store.helpers import FlakyStore, entry_of, gather, number_of, turn, wait_until
from tests.store.test_redis_store import raw

pytestmark = pytest.mark.usefixtures("patience")

BAD, GOOD = "0bad", "0good"
OF_BAD = f"{{agentspec:{BAD}}}:3:"
"""Beginning of the bad log's keys."""


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    with closing(open_store(server.url)) as opened:
        assert isinstance(opened, RedisStore)
        raw(opened).flushall()
        yield opened


class RefusingStore(FlakyStore):
    """Refuse all operations on some logs."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: set[str] = set()
        self.refused_session: str | None = None
        self.tried = 0

    def _check(self, namespace: str) -> None:
        if namespace in self.refused:
            self.tried += 1
            raise StoreError("WRONGTYPE")

    def append(self, namespace: str, entries: Sequence[NewEntry], *, expect: str | None = None) -> list[str]:
        self._check(namespace)
        if any(entry.session == self.refused_session for entry in entries):
            self.tried += 1
            raise StoreError("WRONGTYPE")
        return super().append(namespace, entries, expect=expect)

    def read(self, namespace: str, **options: Any) -> Iterator[Entry]:
        self._check(namespace)
        return super().read(namespace, **options)

    def history(self, namespace: str, after: str) -> History:
        self._check(namespace)
        return super().history(namespace, after)

    def wait(self, cursors: Mapping[str, str], timeout: float) -> list[str]:
        found = super().wait(cursors, timeout)
        return sorted({*found, *self.refused & cursors.keys()})


def test_records_are_stored_though_something_else_owns_a_key_of_the_index(store: RedisStore) -> None:
    raw(store).set("{agentspec:}:sizes", "theirs")
    raw(store).set("agentspec:namespaces", "theirs")
    writer = BackgroundWriter(store)
    for number in range(3):
        writer.put(GOOD, turn("s", number))
    assert writer.flush(60)
    stats = writer.stats()
    assert (stats.persisted, stats.refused, stats.queued) == (3, 0, 0)
    writer.close()
    assert numbers(store, GOOD) == [0, 1, 2]
    with pytest.raises(StoreError, match="WRONGTYPE"):
        store.usage()


def numbers(store: FlakyStore | RedisStore, namespace: str) -> list[int]:
    return [number_of(decode(entry.payload)) for entry in store.read(namespace)]


def never_back() -> CircuitBreaker:
    """Return a breaker that lets nothing through once it has opened."""
    return CircuitBreaker(first_pause=600.0, max_pause=600.0)


class TestWriting:
    def test_other_logs_are_written_without_a_pause(self, caplog: pytest.LogCaptureFixture) -> None:
        store = RefusingStore()
        store.refused = {BAD}
        writer = BackgroundWriter(store, batch_entries=8, breaker=never_back())
        for number in range(200):
            writer.put(BAD, turn("s", number))
            writer.put(GOOD, turn("s", number))
        wait_until(lambda: (writer.stats().persisted, writer.stats().refused_logs) == (200, 1), 60)
        stats = writer.stats()
        assert numbers(store, GOOD) == list(range(200))
        assert (stats.state, stats.dropped) == ("closed", 0)
        assert 1 <= stats.refused < 10 and stats.refused + stats.queued == 200  # the rest waits
        assert stats.failed < 30
        writer.close()
        lines = [line for line in caplog.messages if "refused by the store" in line]
        assert len(lines) == 1 and BAD in lines[0] and "WRONGTYPE" in lines[0]

    def test_it_is_tried_rarely_and_written_in_order_when_it_is_repaired(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("agentspec.cache.store.background.aside._PAUSE", 0.1)
        store = RefusingStore()
        store.refused = {BAD}
        writer = BackgroundWriter(store, batch_entries=8)
        for number in range(40):
            writer.put(BAD, turn("s", number))
        wait_until(lambda: writer.stats().refused_logs == 1)
        tried, begun = store.tried, time.monotonic()
        wait_until(lambda: store.tried >= tried + 3)
        assert time.monotonic() - begun > 0.1 + 0.2 - 0.05  # the pause doubles
        assert (writer.stats().refused, writer.stats().queued) == (5, 35)  # no further record is given up
        store.refused = set()
        assert writer.flush(60)
        assert numbers(store, BAD) == list(range(writer.stats().refused, 40))
        assert (writer.stats().refused_logs, writer.stats().queued_bytes) == (0, 0)
        writer.put(BAD, turn("s", 40))
        assert writer.flush(60)
        writer.close()
        assert sum(f"log {BAD} is back" in line for line in caplog.messages) == 1

    def test_a_session_that_is_refused_holds_up_no_other_of_its_log(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agentspec.cache.store.background.aside._PAUSE", 0.01)
        store = RefusingStore()
        store.refused_session = "bad"
        writer = BackgroundWriter(store, batch_entries=8)
        for number in range(12):
            writer.put(BAD, turn("bad", number))
        wait_until(lambda: writer.stats().refused_logs == 1)
        tried = store.tried
        wait_until(lambda: store.tried > tried + 3)
        assert (writer.stats().refused, writer.stats().queued) == (5, 7)  # it may be the log's fault
        for number in range(12, 40):
            writer.put(BAD, turn("bad" if number % 2 else "good", number))
        assert writer.flush(60)
        assert sorted(numbers(store, BAD)) == list(range(12, 40, 2))
        assert (writer.stats().persisted, writer.stats().refused, writer.stats().queued_bytes) == (14, 26, 0)
        writer.close()

    def test_a_log_with_few_records_is_found_out_too(self) -> None:
        """Each of its records comes after the previous one was refused."""
        store = RefusingStore()
        store.refused = {BAD}
        writer = BackgroundWriter(store, breaker=never_back())
        for number in range(5):
            writer.put(BAD, turn("s", number))
            wait_until(lambda at=number: writer.stats().refused == at + 1)  # type: ignore[misc]
        tried = store.tried
        writer.put(BAD, turn("s", 5))
        writer.put(GOOD, turn("s", 5))
        wait_until(lambda: writer.stats().persisted == 1)
        assert (writer.stats().refused, writer.stats().queued, writer.stats().refused_logs) == (5, 1, 1)
        assert store.tried == tried
        writer.close()

    def test_only_so_many_are_remembered(self) -> None:
        """Each log costs memory, and may never be written to again."""
        store = RefusingStore()
        logs = [f"0bad{number}" for number in range(10 * REFUSED_LOGS)]
        store.refused = set(logs)
        writer = BackgroundWriter(store)
        for log in logs:
            writer.put(log, turn("s", 0))
        wait_until(lambda: writer.stats().refused == len(logs), 60)
        assert len(writer._records.aside.targets()) == REFUSED_LOGS
        assert (writer.stats().queued, writer.stats().queued_bytes) == (0, 0)
        assert writer._records.aside.target_of(logs[-1], store.part) is not None  # the latest log
        writer.close()

    def test_the_end_loses_no_record_that_the_store_takes(self) -> None:
        store = RefusingStore()
        store.refused = {BAD}
        writer = BackgroundWriter(store, breaker=never_back())
        for number in range(20):
            writer.put(BAD, turn("s", number))
        wait_until(lambda: writer.stats().refused_logs == 1)
        store.refused = set()
        writer.close(60)
        stats = writer.stats()
        assert (stats.persisted + stats.refused, stats.dropped, stats.queued_bytes) == (20, 0, 0)

    def test_an_outage_meanwhile_ends_as_without_it(self) -> None:
        store = RefusingStore()
        store.refused = {BAD}
        writer = BackgroundWriter(store, breaker=CircuitBreaker(first_pause=0.02, max_pause=0.05, retry_delay=0.001))
        for number in range(20):
            writer.put(BAD, turn("s", number))
        wait_until(lambda: writer.stats().refused_logs == 1)
        store.error = StoreUnavailableError("away")
        writer.put(GOOD, turn("s", 1))
        wait_until(lambda: writer.stats().state == "open")
        store.error = None
        wait_until(lambda: numbers(store, GOOD) == [1])
        wait_until(lambda: writer.stats().state == "closed")
        writer.close()

    @pytest.mark.parametrize("key", ["log", "sessions", "usage"])
    def test_on_redis(self, store: RedisStore, key: str) -> None:
        assert raw(store).set(OF_BAD + key, "something else")
        writer = BackgroundWriter(store, breaker=never_back())
        for number in range(100):
            writer.put(BAD, turn("s", number))
            writer.put(GOOD, turn("s", number))
        wait_until(lambda: (writer.stats().persisted, writer.stats().refused_logs) == (100, 1), 60)
        assert numbers(store, GOOD) == list(range(100))
        writer.close(0.1)
        assert raw(store).get(OF_BAD + key) == b"something else"

    def test_one_session_of_a_log_on_redis(self, store: RedisStore) -> None:
        raw(store).set(f"{OF_BAD}s:bad", "something else")
        writer = BackgroundWriter(store, breaker=never_back())
        for number in range(60):
            writer.put(BAD, turn("bad" if number % 3 == 0 else "good", number))
        assert writer.flush(60)
        assert (writer.stats().refused, writer.stats().persisted, writer.stats().refused_logs) == (20, 40, 0)
        writer.close()


class TestFollowing:
    @pytest.fixture
    def process(self) -> Iterator[Process]:
        process = Process(RefusingStore())
        yield process
        process.follower.close()

    def refuse_one_log(self, process: Process, monkeypatch: pytest.MonkeyPatch) -> RefusingStore:
        """Let a process follow two logs, and find one of them refused. Return its store."""
        monkeypatch.setattr("agentspec.cache.store.background.followed._PAUSE_SECONDS", 0.1)
        store = process.store
        assert isinstance(store, RefusingStore)
        process.begin(BAD, "bad")
        process.begin(GOOD, "good")
        store.refused = {BAD}
        wait_until(lambda: process.follower.stats().refused == 1)
        return store

    def test_the_others_are_followed_and_it_is_later(
        self, process: Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = self.refuse_one_log(process, monkeypatch)
        store.append(GOOD, [entry_of(turn("s", 1))])
        store.erase_session(GOOD, "gone")
        store.erase_session(BAD, "gone")
        process.wait(delivered=1, erased=1)
        assert process.erased == [("good", "gone")]
        assert process.follower.stats().state == "closed" and process.follower.is_current()
        store.refused = set()
        process.wait(erased=2, refused=0)
        assert process.erased[1:] == [("bad", "gone")]

        def of_the_log() -> list[str]:
            return [line for line in caplog.messages if BAD in line]

        wait_until(lambda: len(of_the_log()) > 1)  # it is counted as followed before that
        lines = of_the_log()
        assert ["cannot be followed" in line for line in lines] == [True, False] and "again" in lines[1]

    def test_what_was_trimmed_meanwhile_is_not_drafted_from(
        self, process: Process, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Trimming may have removed the tombstone of an erasure."""
        store = self.refuse_one_log(process, monkeypatch)
        store.erase_session(BAD, "gone")
        store.append(GOOD, [entry_of(turn("s", 1))])
        process.wait(delivered=1)
        while store.trim(Retention(records=0)).more:
            pass
        store.refused = set()
        wait_until(lambda: process.forgotten == ["bad"])
        process.wait(refused=0)

    def test_on_redis(self, store: RedisStore) -> None:
        process = Process(store)  # type: ignore[arg-type]
        for name in (BAD, GOOD, "0other"):
            store.append(name, [entry_of(turn("s", 1))])
            process.begin(name, name)
        raw(store).set(OF_BAD + "log", "something else")
        process.wait(refused=1)
        store.append("0other", [entry_of(turn("s", 2))])
        store.erase_session(GOOD, "gone")
        process.wait(erased=1, delivered=1)
        assert process.erased == [(GOOD, "gone")] and process.numbers() == [2]
        assert process.follower.stats().state == "closed"
        process.follower.close()


class TestOnRedis:
    def test_others_are_loaded(self, store: RedisStore) -> None:
        store.append(GOOD, [entry_of(turn("s", 1))])
        raw(store).set(OF_BAD + "log", "something else")
        loader = BackgroundLoader(store, breaker=never_back())
        bad = [Wanted(BAD, None), Wanted(BAD, None, session="s"), Wanted(BAD, None, group="g")]
        for wanted in (*bad, Wanted(GOOD, None, session="s")):
            assert loader.request(wanted)
        assert [number_of(record) for record in gather(loader, Wanted(GOOD, None, session="s"))] == [1]
        loader.close()

    def test_sessions_of_others_are_found_and_erased(self, store: RedisStore, caplog: pytest.LogCaptureFixture) -> None:
        for name in (BAD, GOOD):
            store.append(name, [NewEntry("s", b"1"), NewEntry("t", b"1")])
        raw(store).set(OF_BAD + "sessions", "something else")
        assert store.namespaces(session="s") == [GOOD]
        assert "WRONGTYPE" in caplog.text
        assert store.erase_session(GOOD, "s").records == 1
        with pytest.raises(StoreError, match="WRONGTYPE"):
            store.erase_session(BAD, "s")

    @pytest.mark.parametrize("key", ["log", "sessions", "usage"])
    def test_others_are_trimmed(self, store: RedisStore, key: str) -> None:
        for name in (BAD, GOOD):
            store.append(name, [NewEntry("s", b"1")] * 3)
        raw(store).set(OF_BAD + key, "something else")
        with pytest.raises(StoreError, match="WRONGTYPE"):
            store.erase_session(BAD, "s")  # the store notes that the erasure must be finished
        slices = [store.trim(Retention(records=1)) for _ in range(3)]
        assert slices == [Trimmed(2, True), Trimmed(1, True), Trimmed(0, False)]  # first it spares half of the mean log
        assert list(store.read(GOOD)) == []
