"""Test a Redis user who lacks a right: nothing is written twice or left behind, and the error names the right."""

from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from agentspec.cache.store import Losses, NewEntry, RedisStore, Retention, open_store
from agentspec.cache.store.redis import scripts
from agentspec.cache.store.redis.client import refused_commands
from agentspec.errors import StoreUnavailableError
from agentspec.testing.redis_server import RedisClusterServers, RedisServer
from tests.store.test_redis_forms import NS, PASSWORD, RIGHTS

COMMANDS = [right.removeprefix("+") for right in RIGHTS.split() if right.startswith("+")]
BATCH = [NewEntry("a", b"1", "g"), NewEntry("b", b"2"), NewEntry("a", b"3", "g")]


pytestmark = pytest.mark.usefixtures("patience")


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    server.client().flushall()
    may(server, "reset", "on", f">{PASSWORD}", *RIGHTS.split())
    with closing(open_store(f"redis://engine:{PASSWORD}@127.0.0.1:{server.port}/0")) as opened:
        assert isinstance(opened, RedisStore)
        yield opened


def may(server: RedisServer, *rights: str) -> None:
    server.client().execute_command("ACL SETUSER", "engine", *rights)


def keys(server: RedisServer) -> set[str]:
    return {key.decode().partition("}:3:")[2] for key in server.client().scan_iter("*}:3:*")}


@pytest.mark.parametrize("before", [[], [NewEntry("a", b"0")]])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_batch_is_written_once_and_its_error_names_the_command(
    server: RedisServer, store: RedisStore, command: str, before: list[NewEntry], caplog: pytest.LogCaptureFixture
) -> None:
    store.trim(Retention(days=2))  # so that sessions expire
    store.append(NS, before)
    may(server, f"-{command}")
    refused = None
    for _ in range(3):
        try:
            store.append(NS, BATCH)
            break
        except StoreUnavailableError as error:
            refused = str(error)
    written = server.client()
    lists = [written.lrange(f"{{agentspec:{NS}}}:3:{name}", 0, -1) for name in ("s:a", "s:b", "g:g")]
    assert sum(map(len, lists)) in (len(before), len(before) + 5)  # all or nothing
    assert written.xlen(f"{{agentspec:{NS}}}:3:log") in (len(before), len(before) + 3)
    if refused is not None:
        assert f"grant it with ACL SETUSER engine +{command}" in refused and PASSWORD not in refused
    may(server, f"+{command}")
    if refused is not None:
        store.append(NS, BATCH)
    assert [entry.payload for entry in store.read(NS)] == [*(entry.payload for entry in before), b"1", b"2", b"3"]
    assert [entry.payload for entry in store.read(NS, group="g")] == [b"1", b"3"]
    assert store.usage().records == len(before) + 3
    assert sum(usage.records for usage in store.sessions(NS)) == len(before) + 3
    assert store.losses() == Losses()
    assert "evict" not in caplog.text


def test_a_batch_without_a_retention_waits_for_the_right_to_persist(server: RedisServer, store: RedisStore) -> None:
    store.append(NS, BATCH[:1])
    may(server, "-persist")
    with pytest.raises(StoreUnavailableError, match=r"grant it with ACL SETUSER engine \+persist "):
        store.append(NS, BATCH[1:])
    assert server.client().xlen(f"{{agentspec:{NS}}}:3:log") == 1
    may(server, "+persist")
    store.append(NS, BATCH[1:])
    assert [entry.payload for entry in store.read(NS)] == [b"1", b"2", b"3"]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_erasure_that_was_refused_is_ended_when_the_right_is_there(
    server: RedisServer, store: RedisStore, command: str
) -> None:
    store.append(NS, [*BATCH, NewEntry("c", b"4")])
    may(server, f"-{command}")
    for _ in range(2):
        try:
            store.erase_session(NS, "a")
        except StoreUnavailableError as error:
            assert f"+{command}" in str(error)
    may(server, f"+{command}")
    store.erase_session(NS, "a")
    while store.trim(Retention()).more:
        pass
    assert not [key for key in keys(server) if key == "s:a" or key.startswith("d")]
    assert [entry.session for entry in store.read(NS)] == ["b", "c", "a"]  # the last one is the tombstone
    assert list(store.read(NS, session="a")) == [] and store.losses() == Losses()
    assert store.usage().records == 3


@pytest.mark.parametrize("command", COMMANDS)
def test_the_limits_remove_no_more_than_they_should_where_a_command_is_refused(
    server: RedisServer, store: RedisStore, command: str
) -> None:
    store.erase_session(NS, "erased")
    store.append(NS, [NewEntry(f"s{number % 4}", b"1", "g") for number in range(8)])
    store.usage()  # so that the index knows all logs
    may(server, f"-{command}")
    for _ in range(3):
        with suppress(StoreUnavailableError):
            store.trim(Retention(records=5))
    may(server, f"+{command}")
    while store.trim(Retention(records=5)).more:
        pass
    left = len(list(store.read(NS)))
    assert left in (4, 5)  # one may have been removed in a slice that ended with an error
    assert left == store.usage().records == sum(usage.records for usage in store.sessions(NS))
    assert left == len(list(store.read(NS, group="g")))


def test_a_user_without_the_keys_is_told_so(server: RedisServer, store: RedisStore) -> None:
    may(server, "resetkeys", "~agentspec:*")
    with pytest.raises(StoreUnavailableError, match=r"the keys of docs/operations\.md"):
        store.append(NS, BATCH)
    assert keys(server) == set()


@pytest.mark.parametrize("command", ["EVALSHA", "RPUSH", "GET"])
def test_turns_wait_while_the_server_lacks_a_command(command: str) -> None:
    """The command was renamed on the server. A script calls RPUSH, and Redis does not say which command it lacks."""
    with RedisServer({f"rename-command {command}": "ANOTHER"}) as server, closing(open_store(server.url)) as store:
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match=f"does not know {command}") as caught:
                store.append(NS, BATCH)
        assert "args beginning" not in str(caught.value)  # the arguments may be the text to write
        assert keys(server) <= {"usage"}


def test_a_server_in_the_place_of_a_sentinel_is_said_to_be_none() -> None:
    with RedisServer() as server, closing(open_store(f"redis+sentinel://127.0.0.1:{server.port}/mymaster")) as store:
        with pytest.raises(StoreUnavailableError, match="no Sentinel answers there") as caught:
            store.ping()
        assert "rename-command" not in str(caught.value)


def test_a_server_before_redis_6_2_is_written_to(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the option NOMKSTREAM for an id, as any server does an unknown word."""
    monkeypatch.setattr(scripts, "APPEND", scripts.APPEND.replace("NOMKSTREAM", "UNKNOWN"))
    store.append(NS, BATCH)
    assert [entry.payload for entry in store.read(NS)] == [b"1", b"2", b"3"]
    may(server, "-xadd")
    with pytest.raises(StoreUnavailableError, match=r"engine \+xadd"):
        store.append(NS, BATCH)
    assert len(list(store.read(NS, session="a"))) == 2


SCRIPT = "local a = 1\nredis.call('SET', KEYS[1], a)\nredis.pcall('PUBLISH', a)\n"


@pytest.mark.parametrize(
    ("error", "commands"),
    [
        ("this user has no permissions to run the 'cluster|slots' command", ["CLUSTER|SLOTS"]),  # Redis 7.0
        ("this user has no permissions to run the 'get' command or its subcommand", ["GET"]),  # 6.2
        (
            "Error running script (call to f_0a): @user_script:2: @user_script: 2: The user executing the script"
            " can't run this command or subcommand",  # 6.2
            ["SET"],
        ),
        (
            "The user executing the script can't run this command or subcommand script: 0a, on @user_script:2.",
            ["SET"],  # 7.0
        ),
        (
            "ACL failure in script: User u has no permissions to run the 'set' command script: on @user_script:2.",
            ["SET"],
        ),
        ("this user has no permissions to access one of the keys used as arguments", []),
        ("NOAUTH Authentication required.", []),
    ],
)
def test_the_command_is_found_in_what_each_release_says(error: str, commands: list[str]) -> None:
    assert refused_commands(error, SCRIPT) == commands


@pytest.mark.store
def test_a_user_of_a_cluster_without_a_right() -> None:
    with RedisClusterServers() as servers:
        for server in servers.servers:
            may(server, "on", f">{PASSWORD}", *RIGHTS.split(), "+cluster|slots", "+command", "-rpush")
        store = open_store(servers.url.replace("://", f"://engine:{PASSWORD}@"))
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match=r"\+rpush"):
                store.append(NS, BATCH)
        for server in servers.servers:
            may(server, "+rpush")
        store.append(NS, BATCH)
        assert [entry.payload for entry in store.read(NS)] == [b"1", b"2", b"3"]
        store.close()
