"""Test the Redis store on a real server: its keys, its failures, its secrets."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import redis

from agentspec.cache.store import (
    Erasure,
    NewEntry,
    RedisStore,
    Retention,
    Trimmed,
    check_layout,
    open_store,
)
from agentspec.cache.store.redis_client import RedisAddress, RedisClient
from agentspec.cache.store.redis_shard import RedisShard
from agentspec.errors import ConfigurationError, StoreError, StoreUnavailableError, StoreVersionError
from agentspec.testing.redis_server import RedisServer
from agentspec.testing.server import free_port
from tests.store.helpers import NS, wait_until

PASSWORD = "hunter2-correct-horse"


pytestmark = pytest.mark.usefixtures("patience")


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer({"requirepass": PASSWORD}) as running:
        yield running


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    opened = open_store(server.url)
    assert isinstance(opened, RedisStore)
    raw(opened).flushall()
    yield opened
    opened.close()


def raw(store: RedisStore) -> redis.Redis:
    client: redis.Redis = store._client._connected()
    return client


def keys(store: RedisStore) -> list[str]:
    found: list[bytes] = store.command("KEYS", "*")
    return sorted(key.decode() for key in found)


def test_every_key_has_the_prefix_and_one_hash_tag(store: RedisStore) -> None:
    store.append(NS, [NewEntry("a", b"1"), NewEntry("b{c}", b"2", "g")])
    store.erase_session(NS, "a")
    store.trim(Retention())
    listed, shards, *names = keys(store)
    assert (listed, shards) == ("agentspec:namespaces", "agentspec:shards")
    index = [name for name in names if name.startswith("{agentspec:}")]
    assert index == [f"{{agentspec:}}:{part}" for part in ("ages", "sizes", "totals")]
    names = names[: -len(index)]
    assert all(name.startswith(f"{{agentspec:{NS}}}:3:") for name in names)
    assert [name.partition("}:3:")[2] for name in names if ":w:" not in name] == [
        *("g:g", "log", "s:b{c}", "sessions", "tombstones", "usage")
    ]
    assert len(names) == 7


def test_removal_frees_the_payloads_key(store: RedisStore) -> None:
    store.append(NS, [NewEntry("a", bytes(1_000_000)), NewEntry("b", b"2")])
    full = raw(store).info("memory")["used_memory"]
    assert store.erase_session(NS, "a") == Erasure(1, complete=True)
    assert f"{{agentspec:{NS}}}:3:s:a" not in keys(store)
    assert full - raw(store).info("memory")["used_memory"] > 900_000
    assert raw(store).xlen(f"{{agentspec:{NS}}}:3:log") == 2


def test_a_session_that_expired_is_skipped_in_the_log(store: RedisStore) -> None:
    store.append(NS, [NewEntry("a", b"1"), NewEntry("b", b"2"), NewEntry("a", b"3")])
    raw(store).delete(f"{{agentspec:{NS}}}:3:s:a")
    assert [entry.payload for entry in store.read(NS)] == [b"2"]


def test_an_append_succeeds_whole_when_the_log_was_evicted_and_the_clock_set_back(store: RedisStore) -> None:
    tag = f"{{agentspec:{NS}}}:3:"
    ahead = b"%d-7" % (int(time.time() * 1000) + 3_600_000)  # an entry from before the clock was set back
    raw(store).rpush(f"{tag}s:a", ahead + b" old")
    store.append(NS, [NewEntry("b", b"1"), NewEntry("a", b"2", "g"), NewEntry("b", b"3")])
    assert [entry.payload for entry in store.read(NS)] == [b"1", b"2", b"3"]
    assert [entry.payload for entry in store.read(NS, session="a")] == [b"old", b"2"]
    (last,) = store.append(NS, [NewEntry("c", b"4")])
    assert list(store.read(NS))[-1].sequence == last


def test_an_entry_whose_notice_was_lost_ends_a_wait(store: RedisStore) -> None:
    store.append(NS, [NewEntry("a", b"0")])
    cursors = {NS: store.newest(NS)}
    assert store.wait(cursors, 0.05) == []
    raw(store).xadd(f"{{agentspec:{NS}}}:3:log", {"s": "a", "b": 1})
    assert store.wait(cursors, 10) == [NS]


def test_an_empty_log_goes_on_behind_its_last_entry_when_the_clock_was_set_back(store: RedisStore) -> None:
    """Otherwise a reader at that entry would not see the next one."""
    store.append(NS, [NewEntry("a", b"0")])
    while store.trim(Retention(records=0)).more:
        pass
    future = 32_503_680_000_000  # the year 3000
    raw(store).hset(f"{{agentspec:{NS}}}:3:usage", "last", f"{future}-7")
    assert store.append(NS, [NewEntry("a", b"1")]) == [f"{future:020}-{8:020}"]


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.append(NS, [NewEntry("a", b"1")]),
        lambda store: list(store.read(NS)),
        lambda store: store.sessions(NS),
        lambda store: store.erase_session(NS, "a"),  # erasing would leave the session in the old log
    ],
    ids=["append", "read", "sessions", "erase"],
)
def test_a_log_of_an_older_release_is_refused_with_the_command_that_converts_it(
    store: RedisStore, call: Callable[[RedisStore], object]
) -> None:
    raw(store).xadd(f"{{agentspec:{NS}}}:log", {"s": "a"})
    with pytest.raises(StoreVersionError, match="agentspec sessions convert redis://") as error:
        call(store)
    assert PASSWORD not in str(error.value)


def test_logs_are_known_again_after_the_server_lost_everything(server: RedisServer) -> None:
    with closing(open_store(f"{server.url}?shards=2")) as store:
        assert isinstance(store, RedisStore)
        raw(store).flushall()
        for log in ("a", "b"):
            store.append(log, [NewEntry("s", b"before")])
        raw(store).flushall()
        for log in ("a", "b"):
            store.append(log, [NewEntry("s", b"after")])
        assert store.namespaces() == ["a", "b"]
        with closing(open_store(f"{server.url}?shards=2")) as another:
            assert (another.namespaces(), another.usage().records) == (["a", "b"], 2)
            assert [entry.payload for entry in another.read("a")] == [b"after"]
            assert another.trim(Retention(records=0)).records == 2


def test_a_server_is_refused_that_was_given_another_number_of_shards(server: RedisServer) -> None:
    with closing(open_store(f"{server.url}?shards=2")) as store:
        assert isinstance(store, RedisStore)
        raw(store).flushall()
        check_layout(store)
        assert not raw(store).keys()  # it was only asked
        store.append(NS, [NewEntry("s", b"0")])
        check_layout(store)
    with closing(open_store(f"{server.url}?shards=3")) as other:
        with pytest.raises(StoreError, match="have 2 shards, not 3; put shards=2 into the store URL"):
            check_layout(other)
        with pytest.raises(StoreError, match="have 2 shards, not 3"):
            other.append(NS, [NewEntry("s", b"0")])
    with closing(open_store(f"redis://127.0.0.1:{free_port()}/0?shards=3")) as away:
        check_layout(away)


def test_a_log_that_the_server_lost_was_not_trimmed(store: RedisStore) -> None:
    (before,) = store.append(NS, [NewEntry("s", b"0")])
    raw(store).flushall()
    assert store.history(NS, before) == "lost"
    time.sleep(0.002)  # otherwise the first entry of both logs may have the same id
    store.append(NS, [NewEntry("s", b"1")])
    assert store.history(NS, before) == "lost"


def test_a_server_that_lost_its_secret_gets_it_back_or_it_is_said(
    server: RedisServer, store: RedisStore, caplog: pytest.LogCaptureFixture
) -> None:
    own = store.secret()
    store.keep_secret(own)
    store.append(NS, [NewEntry("a", b"1")])
    raw(store).flushall()
    store.append(NS, [NewEntry("a", b"2")])
    with closing(open_store(server.url)) as other:
        assert other.secret() == own and "another secret" not in caplog.text
        raw(store).flushall()
        later = other.secret()  # like a server that starts before this one has noticed
        assert later != own
    for number in range(3):
        store.append(f"{NS}{number}", [NewEntry("a", b"3")])
    assert store.secret() == later
    assert sum("another secret than this server" in line for line in caplog.messages) == 1


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
    monkeypatch.setattr("agentspec.cache.store.redis_index._AUDIT_SECONDS", 0.0)
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
            assert other.trim(Retention(records=12)) == Trimmed(10, True)
            assert other.trim(Retention(records=12)) == Trimmed(0, False)
            assert other.usage().records == 12
            assert other.secret() == secret
        assert len(list(store.read(NS))) == 12
    finally:
        raw(store).config_set("maxmemory", "0")


def test_a_replica_counts_as_away(store: RedisStore) -> None:
    store.command("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(StoreUnavailableError, match=r"(?i)read.?only|replica"):
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
    with pytest.raises(StoreError, match=r"WRONGTYPE|wrong kind"):
        store.append(NS, [NewEntry("a", b"1")])
    assert raw(store).get(f"{{agentspec:{NS}}}:3:log") == b"something else"


def test_a_client_that_is_closed_while_it_connects_keeps_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client asks a Cluster for its nodes before there is a connection to close."""
    connects, closed, connection = threading.Event(), threading.Event(), Mock()

    def connect(client: RedisClient) -> Mock:
        connects.set()
        closed.wait(60)
        return connection

    monkeypatch.setattr(RedisClient, "_connect", connect)
    client = RedisClient(RedisAddress("cluster", "redis+cluster://host", nodes=(("host", 6379),)))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.command, "PING")
        assert connects.wait(60)
        client.close()
        closed.set()
        with pytest.raises(StoreError, match="the store is closed"):
            asked.result()
    connection.close.assert_called_once()


@pytest.mark.parametrize("credentials", ["", ":wrong-secret@", "nobody:wrong-secret@"])
def test_wrong_credentials_name_the_remedy_and_no_password(server: RedisServer, credentials: str) -> None:
    store = open_store(f"redis://{credentials}127.0.0.1:{server.port}/0")
    with pytest.raises(StoreError, match="user and password in the store URL") as error:
        store.ping()
    assert "wrong-secret" not in str(error.value)
    assert error.value.__cause__ is None


def test_a_password_quoted_by_the_server_is_blotted_out(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def quoting(*_: object) -> None:
        raise redis.ResponseError(f"syntax error, with args beginning with: `{PASSWORD}`")

    monkeypatch.setattr(raw(store), "execute_command", quoting)
    with pytest.raises(StoreError, match=r"\*\*\*") as error:
        store.ping()
    assert PASSWORD not in str(error.value)


def test_a_missing_program_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigurationError, match="apt-get install redis-server"):
        RedisServer()


@pytest.mark.parametrize(("count", "size"), [(300, 10), (30, 200_000)])
@pytest.mark.parametrize("what", [{}, {"group": "g"}, {"session": "s"}])
def test_no_answer_to_a_read_is_so_large_that_it_takes_long(
    store: RedisStore, what: dict[str, Any], count: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(count // 10):
        store.append(NS, [NewEntry("s", bytes(size), "g")] * 10)
    answers, run = list[list[bytes]](), store._client.run

    def noted(*arguments: Any) -> Any:
        answers.append(run(*arguments))
        return answers[-1]

    monkeypatch.setattr(store._client, "run", noted)
    assert len(list(store.read(NS, **what))) == count
    assert max(map(len, answers)) <= 128
    assert max(sum(map(len, answer)) for answer in answers) < 1_300_000
