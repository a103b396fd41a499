"""Test what a Redis log tells of the entries that it had: whether retention removed some, and which were erasures."""

import time
from collections.abc import Iterator

import pytest

from agentspec.cache.store import NewEntry, RedisStore, Retention, open_store
from agentspec.testing.redis_server import RedisServer
from tests.store.helpers import NS
from tests.store.test_redis_store import raw

pytestmark = pytest.mark.usefixtures("patience")


@pytest.fixture(params=(1, 4))
def store(server: RedisServer, request: pytest.FixtureRequest) -> Iterator[RedisStore]:
    opened = open_store(f"{server.url}?shards={request.param}")
    assert isinstance(opened, RedisStore)
    raw(opened).flushall()
    yield opened
    opened.close()


def trim(store: RedisStore, records: int) -> None:
    time.sleep(0.002)  # the store trims by milliseconds
    while store.trim(Retention(records=records)).more:
        pass


def forget_what_was_trimmed(store: RedisStore) -> None:
    """Make the log one that older code wrote."""
    for shard in store._shards(NS):
        raw(store).hdel(f"{shard.tag}usage", "trimmed")


@pytest.mark.parametrize("old", (False, True))
def test_an_erasure_of_all_that_a_log_held_is_no_retention(store: RedisStore, old: bool) -> None:
    store.append(NS, [NewEntry("s", b"0"), NewEntry("s", b"1")])
    if old:
        forget_what_was_trimmed(store)
    read_to = store.newest(NS)
    store.erase_session(NS, "s")
    store.append(NS, [NewEntry("t", b"2")])
    store.erase_session(NS, "t")
    assert store.history(NS, read_to) == store.history(NS, "") == "whole"
    store.erase_session(NS, "u")
    trim(store, 1)
    assert store.history(NS, read_to) == store.history(NS, "") == "trimmed"
    assert store.history(NS, store.newest(NS)) == "whole"


def test_an_erasure_that_begins_a_log_is_no_retention(store: RedisStore) -> None:
    store.erase_session(NS, "s")
    read_to = store.newest(NS)
    store.append(NS, [NewEntry("s", b"0")])
    store.erase_session(NS, "s")  # with a tombstone that takes the place of the first
    assert store.history(NS, "") == "whole"
    assert store.history(NS, read_to) != "trimmed"


@pytest.mark.parametrize("then", ("append", "erase"))
def test_what_older_code_trimmed_is_known(store: RedisStore, then: str) -> None:
    cursors = []
    for number in range(4):
        store.append(NS, [NewEntry("s", b"%d" % number)])
        cursors.append(store.newest(NS))
        time.sleep(0.002)
    trim(store, 2)
    forget_what_was_trimmed(store)
    assert [store.history(NS, cursor) for cursor in (cursors[0], cursors[2])] == ["trimmed", "whole"]
    if then == "append":
        store.append(NS, [NewEntry("s", b"4")])
    else:
        store.erase_session(NS, "s")
    assert [store.history(NS, cursor) for cursor in (cursors[0], cursors[2])] == ["trimmed", "whole"]


def test_tombstones_of_a_log_that_was_evicted_are_found(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where only new ones are asked for, which are otherwise read from the log."""
    monkeypatch.setattr("agentspec.cache.store.redis.shard._ROWS", 2)
    store = open_store(f"{server.url}?prefix=evicted")
    assert isinstance(store, RedisStore)
    marks = [store.erase_session(NS, f"s{number}").tombstone for number in range(40)]
    raw(store).delete(f"{store._shards(NS)[0].tag}log")
    assert list(store.tombstones(NS, after=marks[37])) == ["s38", "s39"]
    assert store.history(NS, str(marks[37])) == "trimmed", "a read would tell none of them"
    store.erase_session(NS, "s0")
    assert list(store.tombstones(NS, after=marks[37])) == ["s38", "s39", "s0"]
    assert store.history(NS, str(marks[37])) == "trimmed"
    store.close()
