"""Test the Redis store on a server that is killed, full or read-only, and calls that were cut off."""

from contextlib import closing
from pathlib import Path

import pytest
import redis

from agentspec.cache.store import NewEntry, RedisStore, Retention, Trimmed, open_store
from agentspec.cache.store.redis.shard import RedisShard
from agentspec.errors import StoreError, StoreUnavailableError
from agentspec.testing.redis_server import RedisServer
from tests.store.helpers import NS, wait_until

from .test_redis_store import keys, raw, server, store

__all__ = ["server", "store"]

pytestmark = pytest.mark.usefixtures("patience")


def killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_erasure_that_was_cut_off_is_ended_by_the_next_call(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append(NS, [NewEntry("a", bytes(1000), "g")] * 200)
    with monkeypatch.context() as cut_off:
        cut_off.setattr(RedisShard, "sweep", killed)
        with pytest.raises(KeyboardInterrupt):
            store.erase_session(NS, "a")
    assert any(":d:" in key for key in keys(store))
    assert [entry.session for entry in store.read(NS, group="g")] == []
    while store.trim(Retention()).more:
        pass
    assert [key.partition("}:3:")[2] for key in keys(store) if ":3:" in key and ":w:" not in key] == [
        *("log", "tombstones", "usage")
    ]
    assert raw(store).xlen(f"{{agentspec:{NS}}}:3:log") == 1


def test_an_erasure_that_was_cut_off_is_ended_though_another_server_looked_in_between(
    store: RedisStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other server found nothing to remove yet, and took the log off its list just before the erasure began."""
    monkeypatch.setattr("agentspec.cache.store.redis.index._AUDIT_SECONDS", 0.0)
    store.append(NS, [NewEntry("a", bytes(1000))] * 200)
    erase = RedisShard.erase
    with closing(open_store(server.url)) as other, monkeypatch.context() as cut_off:

        def late(shard: RedisShard, session: str, tombstone: bytes) -> object:
            assert other.trim(Retention()) == Trimmed(0, False)
            cut_off.setattr(RedisShard, "sweep", killed)
            return erase(shard, session, tombstone)

        cut_off.setattr(RedisShard, "erase", late)
        with pytest.raises(KeyboardInterrupt):
            store.erase_session(NS, "a")
    assert any(":d:" in key for key in keys(store))
    for _ in range(2):  # the first one's audit finds it
        while store.trim(Retention()).more:
            pass
    assert not any(":d:" in key for key in keys(store))
    assert raw(store).xlen(f"{{agentspec:{NS}}}:3:log") == 1


def test_a_batch_whose_answer_was_lost_is_not_written_twice(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    evalsha = raw(store).evalsha

    def answer_lost(*arguments: str) -> None:
        evalsha(*arguments)  # type: ignore[arg-type]
        raise redis.TimeoutError("Timeout reading from socket")

    batch = [NewEntry("a", b"1"), NewEntry("b", b"2")]
    monkeypatch.setattr(raw(store), "evalsha", answer_lost)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError, match="Timeout"):
            store.append(NS, batch)
    monkeypatch.undo()
    store.append(NS, batch)
    assert [entry.payload for entry in store.read(NS)] == [b"1", b"2"]
    store.append(NS, batch)  # it was acknowledged before, so it is meant twice
    assert [entry.payload for entry in store.read(NS)] == [b"1", b"2"] * 2


def test_a_restarted_server_has_what_it_acknowledged_and_is_found_again() -> None:
    with RedisServer() as server:
        store = open_store(server.url)
        store.append(NS, [NewEntry("a", b"1")])
        server.kill()
        with pytest.raises(StoreUnavailableError):
            store.append(NS, [NewEntry("a", b"lost")])
        server.start()
        store.append(NS, [NewEntry("a", b"2")])  # the script has to be loaded again, too
        assert [entry.payload for entry in store.read(NS)] == [b"1", b"2"]
        store.close()


def test_a_full_server_refuses_the_whole_batch_and_counts_as_away(store: RedisStore) -> None:
    store.append(NS, [NewEntry("a", b"before")])
    raw(store).config_set("maxmemory", "1mb")
    try:
        with pytest.raises(StoreUnavailableError, match=r"is full: raise its maxmemory.* retention_bytes"):
            store.append(NS, [NewEntry("a", b"1"), NewEntry("b", b"2")])
        assert [entry.payload for entry in store.read(NS)] == [b"before"]
    finally:
        raw(store).config_set("maxmemory", "0")
    store.append(NS, [NewEntry("a", b"1"), NewEntry("b", b"2")])
    assert [entry.payload for entry in store.read(NS)] == [b"before", b"1", b"2"]


def test_a_full_server_can_still_be_erased_from_and_trimmed(store: RedisStore, server: RedisServer) -> None:
    """Nothing else would make room on it."""
    store.erase_session(NS, "erased before anything was said")  # a tombstone is the oldest entry
    for number in range(20):
        store.append(NS, [NewEntry("a", b"1"), NewEntry(f"b{number}", b"2", "g")])
    secret = store.secret()
    raw(store).config_set("maxmemory", "1mb")
    try:
        assert store.erase_session(NS, "a").records == 20
        assert store.erase_session(NS, "unknown").tombstone is not None
        assert store.usage().records == 23
        with closing(open_store(server.url)) as other:
            assert other.erase_session(NS, "b0", mark=False).records == 1
            assert other.trim(Retention(records=12)) == Trimmed(7, True)  # with the first tombstone
            assert other.trim(Retention(records=12)) == Trimmed(1, True)
            assert other.trim(Retention(records=12)) == Trimmed(0, False)
            assert other.usage().records == 12 + 2
            assert other.secret() == secret
        assert len(list(store.read(NS))) == 12 + 2
    finally:
        raw(store).config_set("maxmemory", "0")


def test_a_server_that_was_full_before_its_first_turn_reads_as_empty(store: RedisStore) -> None:
    redis = raw(store)
    redis.config_set("maxmemory", "1mb")
    try:
        assert (list(store.read(NS)), list(store.sessions(NS)), store.newest(NS)) == ([], [], "")
        assert store.erase_session(NS, "a").complete
        with pytest.raises(StoreUnavailableError, match="is full"):
            store.append(NS, [NewEntry("a", b"1")])
    finally:
        redis.config_set("maxmemory", "0")
    store.append(NS, [NewEntry("a", b"1")])
    assert [entry.payload for entry in store.read(NS, session="a")] == [b"1"]
    assert redis.get(f"{store.prefix}:shards") == b"1"


def test_a_replica_counts_as_away(store: RedisStore) -> None:
    store.command("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(StoreUnavailableError, match="READONLY, it is a replica; give the store URL of its master"):
            store.append(NS, [NewEntry("a", b"1")])
    finally:
        store.command("REPLICAOF", "NO", "ONE")


def test_a_server_that_cannot_save_counts_as_away() -> None:
    with RedisServer({"save": "3600 1"}) as server, closing(open_store(server.url)) as store:
        store.append(NS, [NewEntry("a", b"1")])
        folder = Path(server.client().config_get("dir")["dir"]) / "dump.rdb"
        (folder / "in the way").mkdir(parents=True)
        server.client().bgsave()
        wait_until(lambda: server.client().info("persistence")["rdb_last_bgsave_status"] == "err")
        for call in (lambda: store.append(NS, [NewEntry("a", b"2")]), lambda: store.erase_session(NS, "a")):
            with pytest.raises(StoreUnavailableError, match="MISCONF"):
                call()
        assert [entry.payload for entry in store.read(NS)] == [b"1"]
        server.client().config_set("stop-writes-on-bgsave-error", "no")
        store.append(NS, [NewEntry("a", b"2")])
        assert [entry.payload for entry in store.read(NS)] == [b"1", b"2"]


def test_a_key_that_something_else_owns_is_an_error_and_stays(store: RedisStore) -> None:
    raw(store).set(f"{{agentspec:{NS}}}:3:log", "something else")
    for _ in range(2):  # the first call sends the script, the second one its hash
        with pytest.raises(StoreError, match=rf"WRONGTYPE of one of the keys {{agentspec:{NS}}}:3:\*: .* remove it$"):
            store.append(NS, [NewEntry("a", b"1")])
    assert raw(store).get(f"{{agentspec:{NS}}}:3:log") == b"something else"
