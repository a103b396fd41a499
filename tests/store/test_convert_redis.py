"""Test that logs of the first schema on a Redis are converted once, also after kills, and none of another prefix."""

from collections.abc import Iterable
from typing import Any

import pytest
import redis

from agentspec.cache.store import RedisStore, open_store
from agentspec.cache.store.convert import convert
from agentspec.testing.redis_server import RedisServer
from tests.store.helpers import NS
from tests.store.test_convert import ALL, ENTRIES, SECRET, check, found, old_log, old_turn


class Killed(BaseException):
    """End a conversion as a kill does."""


@pytest.mark.parametrize("shards", [1, 3])
def test_a_conversion_that_is_killed_can_be_repeated(
    server: RedisServer, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed before each command in turn that removes or renames a key."""
    url, command = f"{server.url}?shards={shards}", RedisStore.command
    for before in range(50):
        client, left = old_log(server), [before]

        def killed(store: RedisStore, *arguments: Any, left: list[int] = left) -> Any:
            if arguments[0] in ("DEL", "RENAME"):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
            return command(store, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(RedisStore, "command", killed)
            try:
                convert(url, secret=SECRET)
            except Killed:
                patch.undo()
                convert(url, secret=SECRET)
        store = open_store(url)
        if shards == 1:
            check(store)
        assert (len(found(store)), len(found(store, "other", "other"))) == (10, 1)
        store.close()
        assert [key for key in client.scan_iter() if (b":s:" in key and b":3:" not in key) or b":log-" in key] == []
        if left[0] >= 0:
            assert before > 10
            return
    raise AssertionError("it was killed each time")


def test_an_old_log_that_was_written_to_between_two_conversions_is_added(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by an old server that was not stopped. What was converted before is kept."""
    client = old_log(server)

    def killed(_: RedisStore, keys: Iterable[str]) -> None:
        if any(keys):
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("agentspec.cache.store.convert._delete", killed)
        with pytest.raises(Killed):
            convert(server.url, secret=SECRET)
    session, payload = old_turn("late", 0, [1], [2])
    number = client.xadd(f"{{agentspec:{NS}}}:log", {"s": session})
    client.xadd(f"{{agentspec:{NS}}}:s:{session}", {"p": payload}, id=number)
    convert(server.url, secret=SECRET)
    store = open_store(server.url)
    assert (len(found(store)), len(found(store, "late"))) == (11, 1)
    store.close()


def test_a_payload_that_is_gone_counts_as_damaged(server: RedisServer) -> None:
    client = old_log(server)
    client.delete(f"{{agentspec:{NS}}}:s:s")
    lost = sum(session == "s" for session, _ in ENTRIES)
    counts = convert(server.url, secret=SECRET)
    assert (counts.converted, counts.damaged) == (ALL.converted + ALL.damaged - lost, lost)


def test_a_longer_prefix_keeps_its_logs(server: RedisServer) -> None:
    client = redis.Redis(port=server.port)
    client.flushall()
    session, payload = old_turn("s", 0, [1], [2, 3])
    for prefix in ("agentspec", "agentspec:b"):
        tag = f"{{{prefix}:{NS}}}"
        number = client.xadd(f"{tag}:log", {"s": session})
        client.xadd(f"{tag}:s:{session}", {"p": payload}, id=number)
    longer = f"{server.url}?prefix=agentspec:b"
    for url in (server.url, longer):
        assert convert(url, secret=SECRET).converted == 1
        assert len(found(open_store(url), "s")) == 1
