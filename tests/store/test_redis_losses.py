"""Test that records which a real Redis acknowledged and lost are counted and named, and no others."""

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import redis

from agentspec.cache.store import Losses, NewEntry, RedisStore, Retention, open_store
from agentspec.cache.store.redis import scripts
from agentspec.cache.store.redis.losses import LossWatch
from agentspec.cache.store.redis.shard import RedisShard
from agentspec.errors import StoreError, StoreUnavailableError
from agentspec.testing.redis_server import RedisServer
from tests.store.helpers import NS

pytestmark = pytest.mark.usefixtures("patience")


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    server.client().flushall()
    with closing(open_store(server.url)) as opened:
        assert isinstance(opened, RedisStore)
        yield opened


def raw(store: RedisStore) -> redis.Redis:
    client: redis.Redis = store._client._connected()
    return client


def named(session: str, *numbers: int) -> list[NewEntry]:
    return [NewEntry(session, b"%d" % number, name=f"w:{number}") for number in numbers]


def test_records_that_a_restart_lost_are_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer({"appendonly": "no"}) as server:
        store, other = open_store(server.url), open_store(server.url)
        store.append(NS, named("a", 1, 2))
        store.append(NS, named("b", 3))
        store.append("other", named("a", 4))
        other.append(NS, [NewEntry("c", b"x")])
        server.kill()
        server.start()  # empty
        other.append(NS, [NewEntry("c", b"y")])
        store.append(NS, named("a", 5))
        assert (store.losses(), other.losses()) == (Losses(lost=3), Losses(lost=1))
        store.append(NS, named("a", 6))
        assert store.losses() == Losses(lost=3)  # counted once
        store.append("other", named("a", 7))
        assert store.losses() == Losses(lost=4)
        assert [entry.payload for entry in store.read(NS)] == [b"y", b"5", b"6"]
        others, own, of_other_log = (record.getMessage() for record in caplog.records)
        assert "1 records" in others and others.endswith("without names")
        assert "3 records" in own and f"log {NS};" in own and own.endswith("are w:1, w:2, w:3")
        assert "1 records" in of_other_log and of_other_log.endswith("are w:4")


@pytest.mark.parametrize("rested", [False, True])
def test_records_that_a_server_lost_at_its_end_are_named(
    store: RedisStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, rested: bool
) -> None:
    """After a failover to a lagging replica, the writer's key and the log end earlier."""
    if rested:
        monkeypatch.setattr("agentspec.cache.store.redis.losses.WRITER_SECONDS", 0.0)
    tag = store._shards(NS)[0].tag
    store.append(NS, named("a", 1))
    copies = {key: raw(store).dump(key) or b"" for key in raw(store).scan_iter("{*")}
    store.append(NS, named("a", 2, 3))
    store.append(NS, named("b", 4))
    for key in raw(store).scan_iter("{*"):
        raw(store).delete(key)
    for key, copy in copies.items():
        raw(store).restore(key, 0, copy)
    store.append(NS, named("a", 5))
    assert store.losses() == Losses(lost=3)
    assert "w:2, w:3, w:4" in caplog.records[-1].getMessage()
    assert [entry.payload for entry in store.read(NS)] == [b"1", b"5"]
    raw(store).delete(f"{tag}w:{store._writer}")  # it expired while this writer was idle
    store.append(NS, named("a", 6))
    assert store.losses() == Losses(lost=3)
    monkeypatch.setattr("agentspec.cache.store.redis.losses._TELL_SECONDS", 0.0)
    raw(store).flushall()
    store.append(NS, named("a", 7))
    assert store.losses() == Losses(lost=6)
    assert "are w:1, w:5, w:6;" in caplog.records[-1].getMessage()  # what was lost before is gone


def test_all_that_a_process_wrote_to_a_log_of_others_is_counted_when_the_server_lost_it(
    store: RedisStore, server: RedisServer
) -> None:
    """The log is the same as before, but the server no longer knows the writer."""
    with closing(open_store(server.url)) as other:
        other.append(NS, [NewEntry("b", b"x")])
    copies = {key: raw(store).dump(key) or b"" for key in raw(store).scan_iter("{*")}
    store.append(NS, named("a", 1, 2))
    raw(store).flushall()
    for key, copy in copies.items():
        raw(store).restore(key, 0, copy)
    store.append(NS, named("a", 3))
    assert store.losses() == Losses(lost=2)


def test_a_log_that_loses_records_again_and_again_is_told_of_once_a_minute(
    store: RedisStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If Redis evicts keys, a line with each append would fill the disk."""
    for number in range(1, 12):
        store.append(NS, named("a", number))
        raw(store).delete(f"{{agentspec:{NS}}}:3:log")
    assert store.losses() == Losses(lost=10)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "lost 1 records" in line and "w:1" in line
    monkeypatch.setattr("agentspec.cache.store.redis.losses._TELL_SECONDS", 0.0)
    store.append(NS, named("a", 12))
    line = caplog.records[-1].getMessage()
    assert "lost 10 records" in line and "w:11" in line and "maxmemory-policy to noeviction" in line


def test_an_evicted_log_is_counted_whole(store: RedisStore) -> None:
    store.append(NS, named("a", 1, 2))
    raw(store).delete(f"{{agentspec:{NS}}}:3:log")
    store.append(NS, named("a", 3))
    assert store.losses() == Losses(lost=2)
    while store.trim(Retention(records=0)).more:
        pass
    store.append(NS, named("a", 4))  # after the log was trimmed to nothing
    assert store.losses() == Losses(lost=2)


def test_records_that_retention_had_removed_are_not_lost(
    store: RedisStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.cache.store.redis.losses._REMEMBERED", 8)
    store._watch = LossWatch()
    for number in range(1, 21):
        store.append(NS, named("a", number))
        while store.trim(Retention(records=4)).more:
            pass
        time.sleep(0.002)  # the server tells the age of its oldest record by the millisecond
    raw(store).flushall()
    store.append(NS, named("a", 21))
    assert store.losses() == Losses(lost=5)  # the records that it held at the last append
    assert "5 records" in caplog.text and "are w:16, w:17, w:18, w:19, w:20" in caplog.text


def test_records_that_retention_had_removed_are_not_lost_where_others_write_the_log_too(
    store: RedisStore, server: RedisServer
) -> None:
    with closing(open_store(server.url)) as other:
        store.append(NS, named("a", *range(1, 9)))
        time.sleep(0.002)
        store.append(NS, named("a", 9))
        while store.trim(Retention(records=1)).more:
            pass
        other.append(NS, [NewEntry("b", b"x")] * 20)
        store.append(NS, named("a", 10))
    raw(store).flushall()
    store.append(NS, named("a", 11))
    assert store.losses() == Losses(lost=2)


def test_records_of_an_erased_session_are_not_lost(store: RedisStore) -> None:
    store.append(NS, named("a", 1, 2))
    store.append(NS, named("b", *range(3, 103)))
    store.erase_session(NS, "b")
    store.append(NS, named("a", 103))
    raw(store).flushall()
    store.append(NS, named("a", 104))
    assert store.losses() == Losses(lost=4)  # including the tombstone


def test_more_than_is_remembered_is_lost_by_what_the_log_held(
    store: RedisStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.cache.store.redis.losses._REMEMBERED", 8)
    store._watch = LossWatch()
    with closing(open_store(server.url)) as other:
        for number in range(1, 31):
            store.append(NS, named("a", number))
        while store.trim(Retention(records=12)).more:
            pass
        other.append(NS, [NewEntry("b", b"x")])
        store.append(NS, named("a", 31))
        raw(store).flushall()
        store.append(NS, named("a", 32))
        other.append(NS, [NewEntry("b", b"y")])
        assert store.losses() == Losses(lost=14)  # one of these is the other writer's, which is not known
        assert other.losses() == Losses(lost=1)


def test_what_was_lost_once_is_not_counted_with_the_next_loss(
    store: RedisStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.cache.store.redis.losses._REMEMBERED", 2)
    store._watch = LossWatch()
    for number in range(1, 6):
        store.append(NS, named("a", number))
    raw(store).flushall()
    store.append(NS, named("a", 6))
    assert store.losses() == Losses(lost=5)
    with closing(open_store(server.url)) as other:
        other.append(NS, [NewEntry("b", b"x")] * 20)
    store.append(NS, named("a", 7))
    raw(store).flushall()
    for number in range(8, 12):
        store.append(NS, named("a", number))
    assert store.losses() == Losses(lost=7)
    assert len(store._watch._batches) == 2


def test_what_was_evicted_is_counted_and_what_was_erased_is_not(
    store: RedisStore, caplog: pytest.LogCaptureFixture
) -> None:
    for session in ("a", "b", "c"):
        store.append(NS, named(session, 1, 2)[:2])
        store.append(NS, [NewEntry(session, b"3", "g")])
    raw(store).delete(f"{{agentspec:{NS}}}:3:s:a")
    store.erase_session(NS, "b")
    assert [entry.session for entry in store.read(NS)] == ["c", "c", "c", "b"]
    assert store.losses() == Losses(missing=3)
    assert [entry.session for entry in store.read(NS, group="g")] == ["c"]
    assert store.losses() == Losses(missing=4)
    assert list(store.read(NS, session="a")) == []
    assert store.losses() == Losses(missing=7)
    assert list(store.read(NS, session="b")) == []
    assert list(store.read(NS, session="c", after=store.newest(NS))) == []
    assert list(store.read(NS, session="a", newest=0)) == []
    assert store.losses() == Losses(missing=7)
    store.append(NS, [NewEntry("b", b"4")])  # after the erasure
    raw(store).delete(f"{{agentspec:{NS}}}:3:s:b")
    assert [entry.session for entry in store.read(NS)] == ["c", "c", "c", "b"]
    assert store.losses() == Losses(missing=11)
    assert ["noeviction" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("change", ["trim", "erase"])
@pytest.mark.parametrize("what", [{}, {"group": "g"}, {"session": "a"}])
def test_what_goes_while_it_is_read_is_not_missing(
    store: RedisStore,
    change: str,
    what: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Otherwise the log would say that the server evicts records, and ask for another setting."""
    store.append(NS, [NewEntry("a", b"1", "g"), NewEntry("a", b"2", "g"), NewEntry("b", b"3", "g")])
    run = store._client.run

    def between(script: str, *args: Any, **named: Any) -> Any:
        if script == (scripts.BOUNDS if "session" in what else scripts.GATHER):
            monkeypatch.setattr(store._client, "run", run)
            if change == "erase":
                store.erase_session(NS, "a", mark=False)
            while change == "trim" and store.trim(Retention(records=1)).more:
                pass
        return run(script, *args, **named)

    monkeypatch.setattr(store._client, "run", between)
    assert [entry.payload for entry in store.read(NS, **what)] == ([] if "session" in what else [b"3"])
    assert store._client.run == run
    assert store.losses() == Losses() and "evicts" not in caplog.text


def test_what_is_remembered_of_acknowledged_records_is_bounded(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.cache.store.redis.losses._REMEMBERED", 8)
    monkeypatch.setattr("agentspec.cache.store.redis.store._KNOWN", 8)
    store._watch = watch = LossWatch()
    for number in range(80):
        store.append(f"{NS}.{number}", named("a", number))
    assert len(watch._acknowledged) == len(watch._batches) == 8
    assert f"{{agentspec:{NS}.79}}:3:" in watch._acknowledged, "the oldest are forgotten first"
    assert len(store._checked) <= 8 and len(store._entered) <= 8
    monkeypatch.setattr("agentspec.cache.store.redis.store._UNSURE", 8)
    for number in range(80):
        raw(store).set(f"{{agentspec:other.{number}}}:3:log", "of something else")
        with pytest.raises(StoreError):
            store.append(f"other.{number}", named("a", number))
    assert len(store._unsure) == 8


def test_an_eviction_is_told_of_once_however_small(caplog: pytest.LogCaptureFixture) -> None:
    watch = LossWatch()
    watch.miss(0)
    assert not caplog.records
    for missing in (1, 2):
        watch.miss(1)
        assert len(caplog.records) == 1 and "noeviction" in caplog.text
        assert watch.losses == Losses(missing=missing)


def test_what_two_threads_miss_at_once_is_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader and the follower read in their own threads, so both may miss records."""
    watch = LossWatch()
    other = threading.Thread(target=lambda: watch.miss(2))

    def slow(losses: Losses, **changes: int) -> Losses:
        if threading.current_thread() is not other:
            other.start()
            other.join(0.1)  # the other thread comes in between, or waits
        return dataclasses.replace(losses, **changes)

    monkeypatch.setattr("agentspec.cache.store.redis.losses.replace", slow)
    watch.miss(1)
    other.join()
    assert watch.losses == Losses(missing=3)


def lose_answer(store: RedisStore, batch: list[NewEntry], monkeypatch: pytest.MonkeyPatch) -> None:
    """Append a batch whose answer gets lost."""
    evalsha = raw(store).evalsha

    def answer_lost(*arguments: Any) -> None:
        evalsha(*arguments)
        raise redis.TimeoutError("Timeout reading from socket")

    with monkeypatch.context() as patch, pytest.raises(StoreUnavailableError):
        patch.setattr(raw(store), "evalsha", answer_lost)
        store.append(NS, batch)


def test_a_batch_that_is_sent_again_is_known_though_the_log_s_sizes_were_evicted(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append(NS, named("a", 1))
    lose_answer(store, named("a", 2), monkeypatch)
    raw(store).delete(f"{{agentspec:{NS}}}:3:usage")
    store.append(NS, named("a", 2))
    assert [entry.payload for entry in store.read(NS)] == [b"1", b"2"]


def test_another_batch_is_not_taken_for_the_one_whose_answer_was_lost(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append(NS, named("a", 1))  # the server knows the script from now on
    lose_answer(store, named("a", 2), monkeypatch)
    store.append(NS, named("a", 3))
    assert [entry.payload for entry in store.read(NS)] == [b"1", b"2", b"3"]


def test_a_batch_that_is_sent_again_for_one_shard_alone_is_lost_once_in_the_others(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.client().flushall()
    url = f"{server.url}?shards=2"
    with closing(open_store(url)) as store, closing(open_store(url)) as other:
        assert isinstance(store, RedisStore)
        names = {store._layout.place_of(name): name for name in "abcdefgh"}
        first, second = names[0], names[1]
        other.append(NS, [NewEntry(first, b"x")] * 5)
        batch, append = named(first, 1) + named(second, 2), RedisShard.append

        def half(shard: RedisShard, *arguments: Any) -> Any:
            if shard.name.endswith("/1"):
                raise StoreUnavailableError("this shard does not answer")
            return append(shard, *arguments)

        with monkeypatch.context() as patch, pytest.raises(StoreUnavailableError):
            patch.setattr(RedisShard, "append", half)
            store.append(NS, batch)
        store.append(NS, batch)
        server.client().flushall()
        store.append(NS, named(first, 3))
        assert store.losses() == Losses(lost=1)
