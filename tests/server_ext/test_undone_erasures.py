"""Test engines on a real Redis that goes back to a state before an erasure, as after a restart from its last dump."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentspec.cache.store import Retention, Store
from agentspec.testing.redis_server import RedisServer
from tests.store.helpers import wait_until

from .replicas import NS, Replica, Start, meet, patience, replicas_on, stored, text

__all__ = ["patience"]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer({"appendonly": "no"}) as server:
        yield server


@pytest.fixture
def start(server: RedisServer) -> Iterator[Start]:
    with replicas_on(server.url) as start:
        yield start


def go_back(server: RedisServer) -> None:
    """Kill the server, and start it from its last dump."""
    server.kill()
    server.start()


def written(replica: Replica) -> None:
    assert replica.persistence._writer.flush(60)


def looked(replica: Replica) -> None:
    """Wait until the replica has looked for lost erasures since the failure, and has had them repeated."""
    follower = replica.persistence._follower
    assert follower is not None
    wait_until(lambda: follower._lost.look_at > 0 and not follower._lost.unsure)
    follower.settle(20.0)


def held(store: Store, session: str) -> int:
    return sum(1 for _ in store.read(NS, session=session))


@pytest.mark.parametrize("seconds", [0.0, 0.7])
def test_an_erasure_that_the_store_lost_is_repeated(start: Start, server: RedisServer, seconds: float) -> None:
    """However soon it is back, and whether or not other turns came before anybody noticed."""
    a, b = start(), start()
    meet(a, b)
    a.say([1, 2, 3], text(100), "gone")
    written(a)
    server.client().save()
    a.erase("gone")
    wait_until(lambda: b.follower("erased"))
    server.kill()
    time.sleep(seconds)
    server.start()
    assert held(b.store, "gone") == 1
    b.say([1, 2, 3], text(200), "stays")
    written(b)
    wait_until(lambda: not held(b.store, "gone"))
    assert a.follower("undone") + b.follower("undone") >= 1
    assert held(b.store, "stays") == 1
    b.wait(lambda: not b.drafts(text(100, 5), "gone"))
    a.wait(lambda: not a.drafts(text(100, 5), "gone"))
    for replica in (a, b):  # both know of the erasure
        looked(replica)
    a.say([1, 2, 3], text(300), "gone")  # it may be used again
    written(a)
    b.wait(lambda: b.drafts(text(300, 5), "gone") == text(305, 4))


def test_an_erasure_of_another_process_is_repeated_too(start: Start, server: RedisServer) -> None:
    """The one that erased may have ended by then, and the other may have started since."""
    a = start()
    meet(a)
    a.say([1, 2, 3], text(100), "gone")
    written(a)
    server.client().save()
    a.erase("gone")
    b = start()
    meet(b)
    a.engine.close()
    go_back(server)
    wait_until(lambda: not held(b.store, "gone"))
    assert b.follower("undone") == 1


def test_a_stopped_servers_snapshot_drafts_nothing_that_the_store_had_erased(
    start: Start, server: RedisServer, tmp_path: Path
) -> None:
    a, b = start(), start(snapshot=tmp_path / "b.snapshot")
    meet(a, b)
    server.client().save()
    b.say([1, 2, 3], text(100), "gone")  # the dump lacks it
    b.stop()
    a.erase("gone")
    go_back(server)
    a.say([1, 2, 3], text(200), "stays")
    written(a)
    wait_until(lambda: a.follower("undone"))
    wait_until(lambda: "gone" in a.store.tombstones(NS))
    again = start(snapshot=tmp_path / "b.snapshot")
    assert again.drafts(text(100, 5), "gone") == []


def test_nothing_is_erased_that_the_store_has_kept(start: Start, server: RedisServer) -> None:
    """Not after a restart that lost nothing, nor where retention has removed the tombstone."""
    a = start()
    meet(a)
    for session in ("used", "trimmed"):
        a.say([1, 2, 3], text(100), session)
        written(a)
        a.erase(session)
    a.store.trim(Retention(records=0))
    for session in ("used", "trimmed"):
        a.say([1, 2, 3], text(300), session)
    written(a)
    a.erase("used")
    a.say([1, 2, 3], text(400), "used")
    written(a)
    before = len(stored(a))
    server.client().save()
    failed = a.follower("failed")
    go_back(server)
    wait_until(lambda: a.follower("failed") > failed)
    looked(a)
    assert (a.follower("undone"), len(stored(a))) == (0, before)
