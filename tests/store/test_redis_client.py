"""Test connections to a Redis server: closed ones, refused ones, and the password, which no error shows."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import cast
from unittest.mock import Mock

import pytest
import redis

from agentspec.cache.store import NewEntry, RedisStore, open_store
from agentspec.cache.store.redis import scripts
from agentspec.cache.store.redis.client import LARGE, RedisAddress, RedisClient
from agentspec.errors import ConfigurationError, StoreError, StoreUnavailableError
from agentspec.testing.redis_server import RedisServer

from .test_redis_store import PASSWORD, raw, server, store

__all__ = ["server", "store"]

pytestmark = pytest.mark.usefixtures("patience")


def test_a_client_that_is_closed_while_it_connects_keeps_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client asks a Cluster for its nodes before there is a connection to close."""
    connects, closed, connection = threading.Event(), threading.Event(), Mock()

    def connect(client: RedisClient, timeout: float) -> Mock:
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


def test_a_large_command_is_given_more_time_than_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow network or server needs more than the usual timeout for a turn with images in it."""
    monkeypatch.setattr("agentspec.cache.store.redis.client.SOCKET_TIMEOUT", 0.5)
    payload = b"x" * (LARGE + 1)
    with RedisServer() as server, closing(open_store(server.url)) as store:
        assert isinstance(store, RedisStore)
        store.append("log", [NewEntry("small", b"1")])

        def while_it_is_slow(call: Callable[[], object]) -> object:
            server.freeze()
            timer = threading.Timer(2.0, server.thaw)
            timer.start()
            try:
                return call()
            finally:
                timer.join()

        with pytest.raises(StoreUnavailableError, match="Timeout"):
            while_it_is_slow(lambda: store.append("log", [NewEntry("small", b"2")]))
        while_it_is_slow(lambda: store.append("log", [NewEntry("large", payload)]))
        key = "{agentspec:log}:3:s:large"
        found = while_it_is_slow(lambda: store._client.run(scripts.RANGE, [key], ["0-0", 1], size=len(payload)))
        assert [element.partition(b" ")[2] for element in cast(list[bytes], found)] == [payload]


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
