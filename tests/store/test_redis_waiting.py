"""Test waiting for new entries of logs on Redis: notices, looks at all logs, and logs that cannot be read."""

import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from unittest.mock import Mock

import pytest

from agentspec.cache.store import NewEntry, RedisStore, open_store
from agentspec.cache.store.redis import waiting as redis_waiting
from agentspec.cache.store.redis.client import RedisClient
from agentspec.cache.store.redis.layout import Layout
from agentspec.cache.store.redis.shard import Id
from agentspec.cache.store.redis.waiting import Notices
from agentspec.errors import StoreError, StoreUnavailableError
from agentspec.testing.redis_server import RedisServer
from tests.store.helpers import NS, wait_until

from .test_redis_store import raw, server, store

__all__ = ["server", "store"]

pytestmark = pytest.mark.usefixtures("patience")


class Divided(Layout):
    """Lay logs out as on a Cluster: one node has the log "away", and does not answer."""

    def part(self, client: RedisClient, namespace: str) -> str:
        return "away" if namespace == "away" else "here"

    def ends(self, client: RedisClient, namespaces: Sequence[str]) -> dict[str, list[Id]]:
        if "away" in namespaces:
            raise StoreUnavailableError("this node does not answer")
        return super().ends(client, namespaces)


def test_a_log_that_is_refused_is_found_though_another_node_is_away(store: RedisStore) -> None:
    """Its reader gets the error, and then leaves the log alone."""
    store._waiting._layout = Divided("agentspec", 1)
    raw(store).set("{agentspec:refused}:3:log", "something else")
    assert store.wait({"refused": "", "away": ""}, 10) == ["refused"]
    with pytest.raises(StoreUnavailableError, match="does not answer"):
        store.wait({"away": ""}, 10)


def test_a_node_that_is_away_does_not_end_a_wait_for_logs_of_others(store: RedisStore) -> None:
    store._waiting._layout = Divided("agentspec", 1)
    assert store.wait({NS: "", "away": ""}, 0.05) == []
    store.append(NS, [NewEntry("s", b"0")])
    assert store.wait({NS: "", "away": ""}, 10) == [NS]


@dataclass
class Calls:
    """Count what the waits of a store do: logs that the server was asked for, and rounds."""

    asked: list[str] = field(default_factory=list)
    rounds: int = 0


@pytest.fixture
def calls(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls of a store that doesn't look at all logs within this test, once it has."""
    calls = Calls()
    ends, heard = Layout.ends, Notices.heard

    def noted_ends(layout: Layout, client: RedisClient, namespaces: Sequence[str]) -> dict[str, list[Id]]:
        calls.asked += namespaces
        return ends(layout, client, namespaces)

    def noted_heard(notices: Notices, timeout: float) -> set[str]:
        calls.rounds += 1
        return heard(notices, timeout)

    monkeypatch.setattr(redis_waiting, "_LOOK_SECONDS", 3600.0)
    monkeypatch.setattr(Layout, "ends", noted_ends)
    monkeypatch.setattr(Notices, "heard", noted_heard)
    return calls


def listened_on(store: RedisStore) -> set[str]:
    """Return the channels that somebody listens on."""
    return {channel.decode() for channel in store.command("PUBSUB", "CHANNELS")}


def test_a_notice_ends_a_wait_between_two_looks(store: RedisStore, server: RedisServer, calls: Calls) -> None:
    store.append("other", [NewEntry("a", b"0")])
    cursors = {name: store.newest(name) for name in (NS, "other")}
    assert store.wait(cursors, 0.05) == []
    calls.asked.clear()
    with closing(open_store(server.url)) as writer:
        append, erase = partial(writer.append, NS, [NewEntry("a", b"1")]), partial(writer.erase_session, NS, "a")
        for change, left in ((append, 1), (append, 2), (erase, 1)):
            begin = time.monotonic()
            later = threading.Timer(0.2, change)
            later.start()
            assert store.wait(cursors, 60) == [NS]
            later.join()
            assert 0.1 < time.monotonic() - begin < 30
            assert set(calls.asked) == {NS}, "the other log was quiet and need not be asked for"
            cursors[NS] = store.newest(NS)
            assert len(list(store.read(NS))) == left


def test_an_entry_whose_notice_was_lost_ends_a_wait(store: RedisStore) -> None:
    store.append(NS, [NewEntry("a", b"0")])
    cursors = {NS: store.newest(NS)}
    assert store.wait(cursors, 0.05) == []
    begin = time.monotonic()
    later = threading.Timer(0.2, lambda: raw(store).xadd(f"{{agentspec:{NS}}}:3:log", {"s": "a", "b": 1}))
    later.start()
    assert store.wait(cursors, 60) == [NS]
    later.join()
    assert time.monotonic() - begin < 10, "it was found at the end of the wait only"


def test_a_wait_sleeps_until_its_end(store: RedisStore, calls: Calls) -> None:
    for _ in range(2):
        begin = time.monotonic()
        assert store.wait({NS: ""}, 0.3) == []
        assert 0.25 < time.monotonic() - begin < 30
    assert calls.rounds <= 10
    assert calls.asked == [NS], "nothing was heard since"


def test_only_the_first_notice_is_waited_for(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    client, waits = store._client, list[float]()
    subscription = client.subscription()
    get_message = subscription.get_message

    def noted(timeout: float) -> object:
        waits.append(timeout)
        return get_message(timeout=timeout)

    monkeypatch.setattr(subscription, "get_message", noted)
    monkeypatch.setattr(client, "subscription", lambda: subscription)
    notices = Notices(client)
    notices.listen({f"agentspec:{NS}"})
    for _ in range(2):
        store.append(NS, [NewEntry("a", b"0")])
    assert notices.heard(60) == {f"agentspec:{NS}"}
    assert min(waits[:2]) > 30 and waits[-1] == 0, "for the server's word that it listens, and for the notice"
    waits.clear()
    assert notices.heard(0) == set() and set(waits) == {0}
    notices.drop()


def test_logs_that_nobody_waits_for_any_more_are_not_listened_on(store: RedisStore, calls: Calls) -> None:
    for names in (("a", "b"), ("b",), ("b", "c")):
        store.wait(dict.fromkeys(names, ""), 0.05)
        assert listened_on(store) == {f"agentspec:{name}" for name in names}
    store.append("a", [NewEntry("s", b"0")])
    store.append("c", [NewEntry("s", b"0")])
    assert store.wait({"b": "", "c": ""}, 60) == ["c"]


def test_an_error_ends_the_subscription_so_that_the_next_wait_finds_the_right_server(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.wait({NS: ""}, 0.05) == []
    assert listened_on(store)
    with monkeypatch.context() as failing:
        failing.setattr(Layout, "ends", Mock(side_effect=StoreUnavailableError("it fails over")))
        with pytest.raises(StoreUnavailableError):
            store.wait({NS: "", "new": ""}, 10)
    wait_until(lambda: not listened_on(store))
    store.append(NS, [NewEntry("s", b"0")])
    assert store.wait({NS: ""}, 10) == [NS]


def test_a_server_that_ends_ends_a_wait_and_is_found_again() -> None:
    with RedisServer() as server, closing(open_store(server.url)) as store:
        assert store.wait({NS: ""}, 0.05) == []
        later = threading.Timer(0.2, server.kill)
        later.start()
        with pytest.raises(StoreUnavailableError):
            store.wait({NS: ""}, 60)
        later.join()
        server.start()
        store.append(NS, [NewEntry("s", b"0")])
        assert store.wait({NS: ""}, 60) == [NS]


def test_a_closed_store_waits_no_more_and_keeps_no_connection(server: RedisServer) -> None:
    asking = server.client()
    asking.flushall()
    before = len(asking.client_list())
    store = open_store(server.url)
    assert isinstance(store, RedisStore)
    waiting = store._waiting
    assert store.wait({NS: ""}, 0.05) == []
    assert len(asking.client_list()) > before
    store.close()
    wait_until(lambda: len(asking.client_list()) == before)
    with pytest.raises(StoreError, match="closed"):
        waiting.wait({NS: ""}, 10)
