"""Fixtures of the store's tests."""

from collections.abc import Iterator

import pytest

from agentspec.testing.redis_server import RedisServer


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that are not about timeouts: a busy test machine can hold a server up for long."""
    monkeypatch.setattr("agentspec.cache.store.redis_client.SOCKET_TIMEOUT", 60.0)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running
