"""Provide the fixtures of the store's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentspec.cache.store import Store, open_store
from agentspec.testing.redis_server import RedisServer
from tests.store.followed_process import Process
from tests.store.helpers import FlakyStore


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the socket timeout for tests that are not about timeouts: a busy machine can hold a server up for long."""
    monkeypatch.setattr("agentspec.cache.store.redis.client.SOCKET_TIMEOUT", 60.0)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture(params=("memory", "sqlite", "redis"))
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a store of each kind in turn; Redis is a real server."""
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("server")
        return f"{server.url}?prefix={tmp_path.name.replace('[', '-').replace(']', '-')[:64]}"
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/a/b/store.db"


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    opened = open_store(store_url)
    yield opened
    opened.close()


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process(FlakyStore())
    yield process
    process.store.gate.set()
    process.follower.close()
