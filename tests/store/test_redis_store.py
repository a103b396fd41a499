"""The Redis store on a real server: its keys, its failures, its secrets."""

from collections.abc import Iterator

import pytest
import redis

from agentspec.cache.store import RedisStore, open_store
from agentspec.errors import ConfigurationError, StoreError, StoreUnavailableError
from agentspec.testing.redis_server import RedisServer
from tests.store.helpers import NS

PASSWORD = "hunter2-correct-horse"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are not about timeouts, and a busy test machine can hold a server up for long."""
    monkeypatch.setattr("agentspec.cache.store.redis_store.SOCKET_TIMEOUT", 10.0)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer({"requirepass": PASSWORD}) as running:
        yield running


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    opened = open_store(server.url)
    assert isinstance(opened, RedisStore)
    opened._client.flushall()
    yield opened
    opened.close()


def keys(store: RedisStore) -> list[str]:
    found: list[bytes] = store._execute("KEYS", "*")
    return sorted(key.decode() for key in found)


def test_every_key_has_the_prefix_and_one_hash_tag(store: RedisStore) -> None:
    store.append(NS, [("a", b"1"), ("b{c}", b"2")])
    names = keys(store)
    assert all(name.startswith(f"{{agentspec:{NS}}}:") for name in names)
    assert [name.partition("}:")[2] for name in names if ":w:" not in name] == ["log", "s:a", "s:b{c}", "sessions"]
    assert len(names) == 5


def test_removal_frees_the_payloads_key(store: RedisStore) -> None:
    store.append(NS, [("a", bytes(1_000_000)), ("b", b"2")])
    full = store._client.info("memory")["used_memory"]
    assert store.remove_session(NS, "a") == 1
    assert f"{{agentspec:{NS}}}:s:a" not in keys(store)
    assert full - store._client.info("memory")["used_memory"] > 900_000
    assert store._client.xlen(f"{{agentspec:{NS}}}:log") == 1


def test_a_session_that_expired_is_skipped_in_the_log(store: RedisStore) -> None:
    store.append(NS, [("a", b"1"), ("b", b"2"), ("a", b"3")])
    store._client.delete(f"{{agentspec:{NS}}}:s:a")
    assert [entry.payload for entry in store.read(NS)] == [b"2"]


def test_a_batch_whose_answer_was_lost_is_not_written_twice(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    script = store._append

    def answer_lost(**arguments: object) -> None:
        script(**arguments)  # type: ignore[arg-type]
        raise redis.TimeoutError("Timeout reading from socket")

    batch = [("a", b"1"), ("b", b"2")]
    monkeypatch.setattr(store, "_append", answer_lost)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError, match="Timeout"):
            store.append(NS, batch)
    monkeypatch.undo()
    store.append(NS, batch)
    assert [entry.payload for entry in store.read(NS)] == [b"1", b"2"]
    store.append(NS, batch)  # acknowledged before: so the same once more is meant
    assert [entry.payload for entry in store.read(NS)] == [b"1", b"2"] * 2


def test_a_restarted_server_has_what_it_acknowledged_and_is_found_again() -> None:
    with RedisServer() as server:
        store = open_store(server.url)
        store.append(NS, [("a", b"1")])
        server.kill()
        with pytest.raises(StoreUnavailableError):
            store.append(NS, [("a", b"lost")])
        server.start()
        store.append(NS, [("a", b"2")])  # the script has to be loaded again, too
        assert [entry.payload for entry in store.read(NS)] == [b"1", b"2"]
        store.close()


def test_a_full_server_refuses_the_whole_batch_and_counts_as_away(store: RedisStore) -> None:
    store.append(NS, [("a", b"before")])
    store._client.config_set("maxmemory", "1mb")
    try:
        with pytest.raises(StoreUnavailableError, match="maxmemory"):
            store.append(NS, [("a", b"1"), ("b", b"2")])
        assert [entry.payload for entry in store.read(NS)] == [b"before"]
    finally:
        store._client.config_set("maxmemory", "0")
    store.append(NS, [("a", b"1"), ("b", b"2")])
    assert [entry.payload for entry in store.read(NS)] == [b"before", b"1", b"2"]


def test_a_replica_counts_as_away(store: RedisStore) -> None:
    store._execute("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(StoreUnavailableError, match=r"(?i)read.?only|replica"):
            store.append(NS, [("a", b"1")])
    finally:
        store._execute("REPLICAOF", "NO", "ONE")


def test_a_key_that_something_else_owns_is_an_error_and_stays(store: RedisStore) -> None:
    store._client.set(f"{{agentspec:{NS}}}:log", "something else")
    with pytest.raises(StoreError, match=r"WRONGTYPE|wrong kind"):
        store.append(NS, [("a", b"1")])
    assert store._client.get(f"{{agentspec:{NS}}}:log") == b"something else"


@pytest.mark.parametrize("credentials", ["", ":wrong-secret@", "nobody:wrong-secret@"])
def test_wrong_credentials_name_the_remedy_and_no_password(server: RedisServer, credentials: str) -> None:
    store = open_store(f"redis://{credentials}127.0.0.1:{server.port}/0")
    with pytest.raises(StoreError, match="user and password in the store URL") as error:
        store.ping()
    assert "wrong-secret" not in str(error.value)
    assert error.value.__cause__ is None


def test_a_password_quoted_by_the_server_is_blotted_out(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def quoting(*_: object) -> None:
        raise redis.ResponseError(f"unknown command `AUTH`, with args beginning with: `{PASSWORD}`")

    monkeypatch.setattr(store, "_execute", quoting)
    with pytest.raises(StoreError, match=r"\*\*\*") as error:
        store.ping()
    assert PASSWORD not in str(error.value)


def test_a_missing_program_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigurationError, match="apt-get install redis-server"):
        RedisServer()
