"""Test the Redis store on a real server: its keys, its logs, its secret."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import redis

from agentspec.cache.store import (
    Erasure,
    NewEntry,
    RedisStore,
    Retention,
    Trimmed,
    Usage,
    check_layout,
    open_store,
)
from agentspec.cache.store.redis.layout import Layout
from agentspec.cache.store.redis.shard import ENTRY_BYTES
from agentspec.errors import StoreError, StoreVersionError
from agentspec.testing.redis_server import RedisServer
from agentspec.testing.server import free_port
from tests.store.helpers import NS

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
    assert index == [f"{{agentspec:}}:{part}" for part in ("ages", "owned", "sizes", "totals", "weights")]
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


def test_an_empty_log_goes_on_behind_its_last_entry_when_the_clock_was_set_back(store: RedisStore) -> None:
    """Otherwise a reader at that entry would not see the next one."""
    store.append(NS, [NewEntry("a", b"0")])
    while store.trim(Retention(records=0)).more:
        pass
    future = 32_503_680_000_000  # the year 3000
    raw(store).hset(f"{{agentspec:{NS}}}:3:usage", "last", f"{future}-7")
    assert store.append(NS, [NewEntry("a", b"1")]) == [f"{future:020}-{8:020}"]


def test_a_log_without_its_sizes_goes_on_behind_its_last_entry_when_the_clock_was_set_back(store: RedisStore) -> None:
    """The server evicted the sizes. Otherwise it would write a part of each batch, and refuse the rest."""
    future = 32_503_680_000_000  # the year 3000
    raw(store).xadd(f"{{agentspec:{NS}}}:3:log", {"s": "evicted", "b": 1}, id="1-1")
    raw(store).xadd(f"{{agentspec:{NS}}}:3:log", {"s": "evicted", "b": 1}, id=f"{future}-7")
    entries = [NewEntry("a", b"1"), NewEntry("b", b"2")]
    assert store.append(NS, entries) == [f"{future:020}-{count:020}" for count in (8, 9)]


def test_each_release_looks_for_a_session_in_the_same_shard() -> None:
    """Otherwise an erasure would not find what an earlier release has written."""
    layout = Layout("agentspec", 16)
    assert [layout.place_of(name) for name in ("", "a", "b", "ünïcode", "\udcff")] == [None, 3, 9, 10, 7]
    assert layout.tags(NS, 3) == [f"{{agentspec:{NS}:3}}:3:"]
    assert Layout("agentspec", 1).tags(NS) == [f"{{agentspec:{NS}}}:3:"]


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


def test_the_secret_s_id_is_written_only_when_it_changes(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full server refuses to write, also what is there already."""
    assert store.swap_secret_id("one") is None
    command = store.command
    with monkeypatch.context() as full:
        full.setattr(store, "command", lambda *args: pytest.fail("written") if args[0] == "SET" else command(*args))
        assert store.swap_secret_id("one") == "one"
    assert store.swap_secret_id("two") == "one" and store.swap_secret_id("two") == "two"


def test_what_has_no_session_was_used_when_the_latest_of_its_shards_was(server: RedisServer) -> None:
    with closing(open_store(f"{server.url}?shards=2&prefix=no-session")) as store:
        used = []
        for _ in range(3):  # in one shard, then in the other, then in the first one again
            time.sleep(0.002)
            store.append(NS, [NewEntry("", b"x")])
            (usage,) = store.sessions(NS)
            used.append(usage.used)
        assert usage.records == 3 and used == sorted(set(used))


def test_a_log_is_trimmed_if_one_shard_is_though_the_server_lost_another(server: RedisServer) -> None:
    """A tombstone may be gone with what was trimmed, so those who follow the log must forget its text."""
    with closing(open_store(f"{server.url}?shards=2&prefix=two-fates")) as store:
        assert isinstance(store, RedisStore)
        places = [store._layout.place_of(session) for session in ("s", "t")]
        assert sorted(map(str, places)) == ["0", "1"]
        for session in ("s", "t"):
            store.append(NS, [NewEntry(session, b"0")])
        read_to = store.newest(NS)
        for _ in range(2):
            time.sleep(0.002)  # so that the store trims in this order
            store.append(NS, [NewEntry("s", b"1")])
        while store.trim(Retention(records=1)).more:
            pass
        raw(store).delete(*store.keys(f"{store._shards(NS, places[1])[0].tag}*"))
        store.append(NS, [NewEntry("t", b"2")])
        assert [
            shard.history(low)
            for shard, low in zip(store._shards(NS), store._layout.read_cursor("after", read_to), strict=True)
        ] == (["trimmed", "lost"] if places[0] == 0 else ["lost", "trimmed"])
        assert store.history(NS, read_to) == "trimmed"


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


@pytest.mark.parametrize(("count", "size"), [(300, 10), (30, 200_000)])
@pytest.mark.parametrize("what", [{}, {"group": "g"}, {"session": "s"}])
def test_no_answer_to_a_read_is_so_large_that_it_takes_long(
    store: RedisStore, what: dict[str, Any], count: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(count // 10):
        store.append(NS, [NewEntry("s", bytes(size), "g")] * 10)
    answers, run = list[list[bytes]](), store._client.run

    def noted(*arguments: Any, **named: Any) -> Any:
        answers.append(run(*arguments, **named))
        return answers[-1]

    monkeypatch.setattr(store._client, "run", noted)
    assert len(list(store.read(NS, **what))) == count
    assert max(map(len, answers)) <= 128
    assert max(sum(map(len, answer)) for answer in answers) < 1_300_000


def test_a_session_that_goes_on_after_it_expired_counts_as_what_it_still_holds(store: RedisStore) -> None:
    """No process was left to trim the log, which still refers to what expired."""
    store.append(NS, [NewEntry("a", b"old", "g")] * 2)
    raw(store).delete(f"{{agentspec:{NS}}}:3:s:a")
    store.append(NS, [NewEntry("a", b"new")])
    assert [(usage.records, usage.bytes) for usage in store.sessions(NS)] == [(1, 3)]
    assert store.usage().records == 1
    for _ in range(2):  # the oldest entries are those that expired
        assert store.trim(Retention(records=0)) == Trimmed(1, True)
        assert [entry.payload for entry in store.read(NS, session="a")] == [b"new"]
    assert store.trim(Retention(records=0)) == Trimmed(1, True)
    assert (store.usage(), store.sessions(NS)) == (Usage(0, 0), [])


def test_trimming_does_not_count_as_using_a_session(store: RedisStore) -> None:
    store.append(NS, [NewEntry("a", b"1"), NewEntry("a", b"2")])
    (before,) = store.sessions(NS)
    time.sleep(0.002)
    assert store.trim(Retention(records=1)).records == 1
    (after,) = store.sessions(NS)
    assert (after.records, after.bytes, after.used) == (1, 1, before.used)


def test_a_secret_that_a_failover_loses_as_it_is_made_is_used_and_put_back(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = store._client.command

    def failing_over(*command: str | bytes | int) -> Any:
        answer = real(*command)
        if command[:2] == ("SET", "agentspec:secret"):
            raw(store).delete("agentspec:secret")
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(store._client, "command", failing_over)
        secret = store.secret()
        store.keep_secret(secret)
        store._secret.restore()  # lost again
    store._secret.restore()
    assert len(secret) == 32 and store.secret() == secret and caplog.messages == []


@pytest.fixture
def many_erasures(store: RedisStore) -> list[str]:
    """Add 20,000 tombstones to the log, as erasures do, and return their sessions."""
    tag, sessions = f"{{agentspec:{NS}}}:3:", [f"{number:032x}" for number in range(20_000)]
    for at in range(0, len(sessions), 1000):
        pipeline = raw(store).pipeline(transaction=False)
        for number, session in enumerate(sessions[at : at + 1000], at):
            pipeline.xadd(f"{tag}log", {"s": session, "t": b"tombstone"}, id=f"1-{number}")
            pipeline.hset(f"{tag}tombstones", session, f"1-{number}")
        pipeline.execute()
    return sessions


def test_tombstones_behind_a_cursor_cost_what_lies_behind_it(store: RedisStore, many_erasures: list[str]) -> None:
    def sent() -> int:
        return int(raw(store).info("stats")["total_net_output_bytes"])

    store.append(NS, [NewEntry("s", b"1")])
    end = store.newest(NS)
    again = [store.erase_session(NS, session).tombstone for session in ("s", many_erasures[3])]
    before = sent()
    assert store.tombstones(NS, after=end) == dict(zip(("s", many_erasures[3]), again, strict=True))
    assert sent() - before < 20_000  # all tombstones take a megabyte


def test_many_tombstones_are_read_in_pieces(
    store: RedisStore, many_erasures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = raw(store)
    sizes, execute = [], client.execute_command

    def measured(*command: Any, **options: Any) -> Any:
        answer = execute(*command, **options)
        sizes.append(len(repr(answer)))
        return answer

    monkeypatch.setattr(client, "execute_command", measured)
    marks = store.tombstones(NS)
    assert list(marks) == many_erasures
    assert list(store.tombstones(NS, after=marks[many_erasures[99]])) == many_erasures[100:]
    assert max(sizes) < 200_000


def test_tombstones_count_once_until_they_are_trimmed(store: RedisStore) -> None:
    store.append(NS, [NewEntry("a", b"1")])
    for _ in range(3):
        store.erase_session(NS, "a")
    store.erase_session(NS, "b")
    tombstones = list(store.read(NS))
    assert len(tombstones) == store.usage().records == 2
    assert store.usage().bytes == sum(len(entry.payload) + ENTRY_BYTES for entry in tombstones)
    while store.trim(Retention(records=0)).more:
        pass
    assert store.usage() == Usage(0, 0)


@pytest.mark.parametrize("lost", ["namespaces", "secret", "secret-id", "shards"])
def test_what_the_server_loses_beside_a_log_is_put_back(
    store: RedisStore, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when someone removes a key. Otherwise the log's sessions would be in no list, and no erasure would find it."""
    monkeypatch.setattr("agentspec.cache.store.redis.store._ENTERED_SECONDS", 0.2)
    store.keep_secret(store.secret())
    store.swap_secret_id("id of the secret")
    store.append(NS, [NewEntry("s", b"1")])
    before = raw(store).dump(f"agentspec:{lost}")
    assert raw(store).delete(f"agentspec:{lost}") == 1
    time.sleep(0.25)
    store.append(NS, [NewEntry("s", b"2")])
    assert raw(store).dump(f"agentspec:{lost}") == before
    assert store.namespaces() == [NS]


def test_a_list_of_logs_that_cannot_be_written_is_named_once(
    store: RedisStore, caplog: pytest.LogCaptureFixture
) -> None:
    raw(store).set("agentspec:namespaces", "theirs")
    for number in range(3):
        store.append(NS, [NewEntry("s", b"%d" % number)])
    (line,) = caplog.messages
    assert "the list of logs lacks theirs" in line and "WRONGTYPE of agentspec:namespaces" in line
    raw(store).delete("agentspec:namespaces")
    store.append(NS, [NewEntry("s", b"3")])
    assert store.namespaces() == [NS]
