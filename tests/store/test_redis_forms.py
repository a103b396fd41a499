"""Test the Redis store in each of its forms, on real servers: unix socket, ACL user, Sentinel, Cluster, shards."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

import pytest

from agentspec.cache.store import (
    BackgroundWriter,
    EraseRecord,
    Follower,
    NewEntry,
    RedisStore,
    Retention,
    Store,
    decode,
    open_store,
)
from agentspec.cache.store.base import entry_name
from agentspec.errors import InvalidInputError, SessionConflictError, StoreError, StoreUnavailableError
from agentspec.testing.redis_server import RedisClusterServers, RedisSentinels, RedisServer
from tests.store.helpers import entry_of, number_of, turn, wait_until

NS = "0123456789abcdef.0123456789abcdef01234567"
PASSWORD = "hunter2-correct-horse"

# These are the rights in docs/operations.md, without name and password.
RIGHTS = (
    "~agentspec:* ~{agentspec:* resetchannels &agentspec:* +eval +evalsha +ping +time +get +set +exists +del +pexpire"
    " +persist +rename +sadd +srem +srandmember +sscan +zadd +zrem +zrange +hget +hset +hdel +hincrby +hmget +hlen"
    " +hscan +xadd +xdel +xlen +xrange +xrevrange +rpush +lrange +lindex +llen +lpop +lrem +ltrim"
    " +publish +subscribe +unsubscribe"
)


pytestmark = pytest.mark.usefixtures("patience")


def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(StoreUnavailableError, match="no-such-setting"):
        RedisServer({"no-such-setting": "1"}).start()


def works(store: Store, namespaces: int = 1) -> None:
    """Check each operation of a store."""
    names = [f"{NS}{number}" for number in range(namespaces)]
    ends = {name: store.newest(name) for name in names}
    assert set(ends.values()) == {""}
    assert store.wait(ends, 0.02) == []
    for name in names:
        first = store.append(name, [NewEntry("s", b"1", "g"), NewEntry("s", b"2")])
        store.append(name, [NewEntry("s", b"3", "g")], expect=first[-1])
        with pytest.raises(SessionConflictError):
            store.append(name, [NewEntry("s", b"lost")], expect=first[-1])
        store.append(name, [NewEntry("t", b"4", "g"), NewEntry("", b"5")])
        assert [entry.payload for entry in store.read(name, session="s")] == [b"1", b"2", b"3"]
        assert [entry.payload for entry in store.read(name, session="s", after=first[0])] == [b"2", b"3"]
        assert [entry.sequence for entry in store.read(name, session="s")][:2] == first
        assert sorted(entry.payload for entry in store.read(name, group="g")) == [b"1", b"3", b"4"]
        assert sorted(entry.payload for entry in store.read(name)) == [b"1", b"2", b"3", b"4", b"5"]
        assert len(list(store.read(name, newest=2))) == 2
        assert [usage.session for usage in store.sessions(name)] == ["", "s", "t"]
        erasure = store.erase_session(name, "s")
        assert (erasure.records, erasure.complete) == (3, True)
        assert store.tombstones(name) == {"s": erasure.tombstone}
    assert sorted(store.wait(ends, 5)) == names
    assert store.namespaces(NS) == store.namespaces(NS, session="t") == names
    assert store.namespaces(NS, session="s") == []  # erased
    assert store.usage().records == 3 * namespaces
    assert store.trim(Retention(days=1)).records == 0
    while store.trim(Retention(records=1)).more:
        pass
    assert store.usage().records in (1, 2)  # a tombstone may be left beside the last turn
    assert len(store.secret()) == 32
    store.ping()
    store.close()


def test_a_unix_socket(tmp_path: Path) -> None:
    with RedisServer({"unixsocket": f"{tmp_path}/r.sock"}):
        works(open_store(f"unix://{tmp_path}/r.sock?db=2&prefix=x"))


def test_a_user_with_the_documented_rights_does_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer() as server:
        server.client().execute_command("ACL SETUSER", "engine", "on", f">{PASSWORD}", *RIGHTS.split())
        server.client().execute_command("ACL SETUSER", "default", "resetpass")
        monkeypatch.setenv("AGENTSPEC_REDIS_USERNAME", "engine")
        monkeypatch.setenv("AGENTSPEC_REDIS_PASSWORD", PASSWORD)
        works(open_store(f"redis://127.0.0.1:{server.port}/0"))
        works(open_store(f"redis://127.0.0.1:{server.port}/0?prefix=agentspec:more&shards=3"))
        store = open_store(f"redis://127.0.0.1:{server.port}/0?prefix=theirs")
        with pytest.raises(StoreError, match="what the user may do") as error:
            store.append(NS, [NewEntry("s", b"1")])
        assert PASSWORD not in str(error.value)
        with pytest.raises(StoreError, match="AGENTSPEC_REDIS_PASSWORD") as error:
            open_store(f"redis://somebody:wrong-secret@127.0.0.1:{server.port}/0").ping()  # the URL's user wins
        assert "wrong-secret" not in str(error.value)


def test_the_documented_rights_are_those(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    documented = text.partition("ACL SETUSER engine")[2].partition("```")[0].replace("\\\n", " ").split()
    assert documented == ["on", ">PASSWORD", *RIGHTS.split()]


def test_an_append_works_without_the_right_to_publish() -> None:
    with RedisServer() as server:
        rights = RIGHTS.replace(" +publish", "").replace(" &agentspec:*", "")
        server.client().execute_command("ACL SETUSER", "engine", "on", f">{PASSWORD}", *rights.split())
        store = open_store(f"redis://engine:{PASSWORD}@127.0.0.1:{server.port}/0")
        store.append(NS, [NewEntry("s", b"1")])
        assert [entry.payload for entry in store.read(NS)] == [b"1"]
        newest = store.newest(NS)  # nothing comes after it, so only the refusal ends the wait
        with pytest.raises(StoreError, match="what the user may do"):
            store.wait({NS: newest}, 10)
        server.client().execute_command("ACL SETUSER", "engine", "-rpush")
        with pytest.raises(StoreError, match="what the user may do"):
            store.append(NS, [NewEntry("s", b"2")])
        store.close()


@pytest.mark.store
def test_sentinel() -> None:
    with RedisSentinels() as servers:
        works(open_store(servers.url))


@pytest.mark.store
def test_sentinels_with_a_password_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisSentinels(password=PASSWORD) as servers:
        store = open_store(servers.url)
        with pytest.raises(StoreUnavailableError, match="AGENTSPEC_SENTINEL_PASSWORD"):
            store.ping()
        monkeypatch.setenv("AGENTSPEC_SENTINEL_PASSWORD", PASSWORD + "-wrong")
        with pytest.raises(StoreUnavailableError, match="AGENTSPEC_SENTINEL_PASSWORD") as error:
            open_store(servers.url).ping()
        assert PASSWORD not in str(error.value)
        monkeypatch.setenv("AGENTSPEC_SENTINEL_PASSWORD", PASSWORD)
        works(open_store(servers.url))


@pytest.mark.store
def test_a_url_of_another_form_is_told_with_the_one_to_write() -> None:
    with RedisClusterServers() as servers, RedisServer() as single:
        for database in (0, 1):
            node = open_store(f"redis://127.0.0.1:{servers.servers[0].port}/{database}")
            with pytest.raises(
                StoreUnavailableError, match=r"node of a Cluster.*begin the store URL with redis\+cluster://"
            ):
                for number in range(9):  # it has the keys of some
                    node.append(f"{NS}{number}", [NewEntry("s", b"1")])
            node.close()
        cluster = open_store(f"redis+cluster://127.0.0.1:{single.port}")
        with pytest.raises(StoreUnavailableError, match="single server: begin the store URL with redis://"):
            cluster.ping()
        cluster.close()


@pytest.mark.store
@pytest.mark.parametrize("shards", [1, 4])
def test_a_cluster_spreads_logs_over_its_nodes(shards: int) -> None:
    with RedisClusterServers() as servers:
        works(open_store(f"{servers.url}?shards={shards}"), namespaces=6)
        store = open_store(f"{servers.url}?shards={shards}")
        for number in range(12):
            store.append(f"{NS}x{number}", [NewEntry(f"s{part}", b"1") for part in range(8)])
        assert all(server.client().dbsize() > 12 for server in servers.servers)
        ends = {f"{NS}x{number}": store.newest(f"{NS}x{number}") for number in range(12)}
        other = open_store(f"{servers.url}?shards={shards}")
        assert other.wait(ends, 0.1) == []
        waits = []
        for name in ends:  # one connection gets what is published on any node
            store.append(name, [NewEntry("s", b"1")])
            begin = time.monotonic()
            assert other.wait(ends, 60) == [name]
            waits.append(time.monotonic() - begin)
            ends[name] = other.newest(name)
        assert median(waits) < 0.3  # it was woken, as all logs are looked at only once a second
        store.close()
        other.close()


@pytest.mark.store
def test_a_user_of_a_cluster() -> None:
    with RedisClusterServers() as servers:
        for server in servers.servers:
            rights = [*RIGHTS.split(), "+cluster|slots", "+command"]
            server.client().execute_command("ACL SETUSER", "engine", "on", f">{PASSWORD}", *rights)
            server.client().execute_command("ACL SETUSER", "default", "resetpass")
        works(open_store(servers.url.replace("://", f"://engine:{PASSWORD}@")), namespaces=3)


@pytest.fixture
def sharded() -> Iterator[tuple[RedisServer, RedisStore]]:
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer())
        store = open_store(f"{server.url}?shards=4")
        assert isinstance(store, RedisStore)
        stack.callback(store.close)
        yield server, store


def test_tombstones_do_not_count_among_the_newest_of_several_shards(sharded: tuple[RedisServer, RedisStore]) -> None:
    _, store = sharded
    for number in range(40):
        store.append("erased", [NewEntry(f"s{number}", b"%d" % number)])
        store.erase_session("erased", f"gone{number}")
        time.sleep(0.0011)
    whole = list(store.read("erased"))
    for newest in (1, 7, 39, 40, 50):
        found = list(store.read("erased", newest=newest))
        turns = [int(entry.payload) for entry in found if entry.payload.isdigit()]
        assert turns == list(range(40))[-newest:]
        assert [entry.payload for entry in found] == [entry.payload for entry in whole[-len(found) :]]
    assert list(store.read("erased", newest=0)) == []


def test_shards_spread_sessions_and_readers_merge_them(sharded: tuple[RedisServer, RedisStore]) -> None:
    server, store = sharded
    works(open_store(f"{server.url}?shards=4&prefix=x"))
    expected: list[bytes] = []
    for number in range(300):
        store.append(NS, [NewEntry(f"s{number % 17}", b"%d" % number, "g")])
        expected.append(b"%d" % number)
        time.sleep(0.0011)  # ids of different shards are in order by the millisecond
    tags = {key.decode().partition("}")[0] for key in server.client().scan_iter("{agentspec:*log")}
    assert tags == {f"{{agentspec:{NS}:{shard}" for shard in range(4)}
    entries = list(store.read(NS))
    assert [entry.payload for entry in entries] == expected
    assert [entry.sequence for entry in entries] == sorted(entry.sequence for entry in entries)
    assert [entry.payload for entry in store.read(NS, group="g")] == expected
    assert [entry.payload for entry in store.read(NS, newest=150)] == expected[150:]
    assert [entry.payload for entry in store.read(NS, session="s3")] == expected[3::17]
    for index in (0, 128, 298):
        assert [entry.payload for entry in store.read(NS, after=entries[index].sequence)] == expected[index + 1 :]
    assert store.wait({NS: store.newest(NS)}, 0.02) == []
    assert store.wait({NS: entries[-2].sequence}, 0.02) == [NS]
    assert store.usage().records == 300


def test_a_cursor_of_several_shards_misses_no_entry_with_an_older_id(sharded: tuple[RedisServer, RedisStore]) -> None:
    """A cluster's nodes have their own clocks, so an entry can come with an id below what was read."""
    _, store = sharded
    places = {store._layout.place_of(name): name for name in map(str, range(100))}
    store.append(NS, [NewEntry(places[0], b"1")])
    end = store.newest(NS)
    ahead, behind = (store._shards(NS)[shard].tag for shard in (0, 1))
    store.command("HSET", f"{ahead}usage", "last", "2000000000000-0")
    store.append(NS, [NewEntry(places[0], b"of a clock ahead")])
    (found,) = store.read(NS, after=end)
    store.append(NS, [NewEntry(places[1], b"of a clock behind")])
    assert behind != ahead
    assert store.wait({NS: found.sequence}, 0.5) == [NS]
    assert [entry.payload for entry in store.read(NS, after=found.sequence)] == [b"of a clock behind"]


def test_a_cursor_of_another_number_of_shards_is_refused_by_name(sharded: tuple[RedisServer, RedisStore]) -> None:
    _, store = sharded
    store.append(NS, [NewEntry("s", b"1")])
    with pytest.raises(InvalidInputError, match="after: not a cursor of this store"):
        list(store.read(NS, after=store.newest(NS) + ",1-1"))


def test_a_tombstone_in_another_shard_is_seen(sharded: tuple[RedisServer, RedisStore]) -> None:
    _, store = sharded
    for name in map(str, range(8)):
        store.append(NS, [NewEntry(name, b"1")])
    end = store.newest(NS)
    erased = []
    for name in ("3", "5", "6"):
        erased.append(store.erase_session(NS, name).tombstone)
        time.sleep(0.0011)
    assert store.tombstones(NS, after=end) == dict(zip(("3", "5", "6"), erased, strict=True))
    found = list(store.read(NS, after=end))
    assert [entry_name(entry.sequence) for entry in found] == erased
    assert [decode(entry.payload) for entry in found] == [EraseRecord(name) for name in ("3", "5", "6")]


def test_a_log_of_several_shards_is_followed(sharded: tuple[RedisServer, RedisStore]) -> None:
    """Entries read out of order are delivered, and each tombstone of others is applied once."""
    server, store = sharded
    erased: list[str] = []
    taken: list[int] = []

    def erase(_: str | None, sessions: Sequence[str]) -> int:
        erased.extend(sessions)
        return 0

    follower = Follower(
        store,
        "f" * 16,
        take=lambda _, record: taken.append(number_of(record)),
        forget_sessions=erase,
        erase_again=lambda *_: None,
        forget_tenant=lambda _: True,
    )
    try:
        store.append(NS, [entry_of(turn("a", 1))])
        follower.begin(NS, "t")
        writer = open_store(f"{server.url}?shards=4")
        for number in range(2, 60):
            writer.append(NS, [entry_of(turn(f"s{number % 9}", number))])
        wait_until(lambda: follower.stats().delivered == 58)
        for session in ("s2", "s3", "s4"):
            writer.erase_session(NS, session)
            wait_until(lambda: session in erased)  # noqa: B023
        writer.append(NS, [entry_of(turn("s2", 60))])
        wait_until(lambda: follower.stats().delivered == 59)
        assert erased == ["s2", "s3", "s4"]
        assert sorted(taken) == list(range(2, 61))
        writer.close()
    finally:
        follower.close()


def test_another_number_of_shards_is_refused_with_the_remedy(sharded: tuple[RedisServer, RedisStore]) -> None:
    server, store = sharded
    store.append(NS, [NewEntry("s", b"1")])
    for given in (1, 8):
        other = open_store(f"{server.url}?shards={given}")
        for call in (lambda: other.append(NS, [NewEntry("s", b"2")]), lambda: list(other.read(NS))):  # noqa: B023
            with pytest.raises(StoreError, match="shards=4"):
                call()
    server.client().delete("agentspec:shards")  # as a release without shards leaves it
    server.client().set("agentspec:shards", 1)
    with pytest.raises(StoreError, match="shards=1"):
        open_store(f"{server.url}?shards=4").append(NS, [NewEntry("s", b"1")])


def test_turns_wait_while_the_server_wants_a_password_that_nobody_gave() -> None:
    """To a client without a password, Redis calls long commands a protocol error."""
    with RedisServer() as server, closing(open_store(server.url)) as store:
        writer = BackgroundWriter(store)
        writer.put(NS, turn("s", 1))
        assert writer.flush(60)
        admin = server.client()
        admin.config_set("requirepass", PASSWORD)
        admin.execute_command("CLIENT KILL SKIPME yes")
        for number in range(2, 20):
            writer.put(NS, turn("s", number))
        wait_until(lambda: writer.stats().state == "open")
        with pytest.raises(StoreUnavailableError, match="AGENTSPEC_REDIS_PASSWORD"):
            store.append(NS, [entry_of(turn("t", number)) for number in range(20)])
        admin.config_set("requirepass", "")
        wait_until(lambda: writer.stats().queued == 0)
        assert (writer.stats().persisted, writer.stats().refused) == (19, 0)
        writer.close()


def test_turns_wait_while_the_password_is_wrong() -> None:
    """It may be changed on the server first, or on the clients first."""
    with RedisServer({"requirepass": PASSWORD}) as server:
        store = open_store(f"redis://:another@127.0.0.1:{server.port}/0")
        writer = BackgroundWriter(store)
        for number in range(1, 4):
            writer.put(NS, turn("s", number))
        wait_until(lambda: writer.stats().failed > 2)
        assert (writer.stats().refused, writer.stats().queued) == (0, 3)
        server.client().config_set("requirepass", "another")
        wait_until(lambda: writer.stats().persisted == 3)
        writer.close()
        assert len(list(store.read(NS))) == 3
        store.close()


def test_the_end_of_a_log_is_whole_though_retention_has_emptied_one_of_its_shards(server: RedisServer) -> None:
    with closing(open_store(f"{server.url}?shards=2&prefix=emptied")) as store:
        store.append(NS, [NewEntry("s", b"x")])
        time.sleep(0.002)
        store.append(NS, [NewEntry("t", b"x")])  # in the other shard
        while store.trim(Retention(records=1)).more:
            pass
        assert [entry.session for entry in store.read(NS)] == ["t"]
        assert store.history(NS, store.newest(NS)) == "whole"
