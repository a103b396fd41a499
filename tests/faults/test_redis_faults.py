"""Test that decoding goes on whatever Redis does, and that acknowledged turns are kept, or named as lost.

Each test decodes on the real cache while a real Redis fails.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from agentspec.cache.store import BackgroundWriter, NewEntry, Retention, decode, open_store
from agentspec.errors import StoreUnavailableError
from agentspec.testing.redis_server import RedisClusterServers, RedisSentinels, RedisServer
from tests.faults.serving import LOG, TENANT, Serving, SlowNetwork, wait_for_server
from tests.store.helpers import number_of, turn

pytestmark = [pytest.mark.store, pytest.mark.alone]


def has_all(serving: Serving) -> None:
    """Check that each turn is stored once, in its order, and none is counted as lost."""
    serving.settle()
    assert serving.stored() == list(range(1, serving.turns + 1))
    stats = serving.persistence.stats()
    assert (stats["lost"], stats["missing"], stats["writer"]["dropped"], stats["writer"]["refused"]) == (0, 0, 0, 0)


def test_frozen() -> None:
    with RedisServer() as server, Serving(server.url) as serving:
        server.freeze()
        serving.go_on(60)
        wait_for_server(lambda: serving.persistence.stats()["writer"]["state"] != "closed")
        server.thaw()
        serving.go_on(20)
        has_all(serving)
        serving.never_waited()


def test_killed() -> None:
    with RedisServer() as server, Serving(server.url) as serving:
        acknowledged = serving.acknowledged()
        server.kill()
        serving.go_on(60)
        server.start()
        assert len(serving.stored()) >= acknowledged
        serving.go_on(20)
        has_all(serving)
        serving.never_waited()


def test_restarted_empty(caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer({"appendonly": "no"}) as server, Serving(server.url) as serving:
        serving.go_on(20)
        server.kill()
        serving.go_on(20)
        wait_for_server(lambda: serving.persistence.stats()["writer"]["state"] != "closed")
        acknowledged = serving.acknowledged()
        held = serving.engine.cache.stats().tokens
        time.sleep(1.1)  # a longer outage of a log cut by retention would drop its tenant's text
        server.start()
        serving.go_on(20)
        serving.settle()
        assert serving.engine.cache.stats().tokens > held
        assert serving.stored() == list(range(acknowledged + 1, serving.turns + 1))
        assert serving.persistence.stats()["lost"] == acknowledged
        (line,) = [record.getMessage() for record in caplog.records if "has lost" in record.getMessage()]
        writer = serving.persistence._writer_id
        assert f"lost {acknowledged} records" in line
        assert f"{writer}:{acknowledged - 1}, {writer}:{acknowledged}" in line
        serving.never_waited()


def test_full() -> None:
    with RedisServer({"maxmemory-policy": "noeviction"}) as server, Serving(server.url) as serving:
        server.client().config_set("maxmemory", "1mb")
        serving.go_on(40)
        wait_for_server(lambda: serving.persistence.stats()["writer"]["failed"] > 0)
        server.client().config_set("maxmemory", "0")
        has_all(serving)
        serving.never_waited()


def test_evicting() -> None:
    """Only keys that expire are evicted. With a retention in days, all keys expire."""
    options = {"maxmemory-policy": "volatile-lru", "maxmemory-samples": "10"}
    with RedisServer(options) as server, Serving(server.url, retention=Retention(days=1)) as serving:
        store = open_store(server.url)
        store.trim(Retention(days=1))
        for number in range(40):
            store.append(LOG, [NewEntry(f"{number:032x}", bytes(20_000))])
        limit = server.client().info("memory")["used_memory"] + 100_000
        server.client().config_set("maxmemory", limit)
        for number in range(40, 60):
            store.append(LOG, [NewEntry(f"{number:032x}", bytes(20_000))])
            serving.go_on(1)
        serving.settle()
        assert server.client().info("stats")["evicted_keys"] > 0
        fresh = open_store(server.url)
        found = list(fresh.read(LOG))
        referenced = server.client().xlen(f"{{agentspec:{LOG}}}:3:log")
        missing, lost = fresh.losses().missing, serving.store.losses().lost + store.losses().lost
        assert len(found) + missing == referenced
        assert referenced + lost >= 60 + serving.turns  # lost records are counted
        assert missing + lost > 0
        serving.never_waited()


def test_slow() -> None:
    with (
        RedisServer() as server,
        SlowNetwork(server.port, delay=0.1) as network,
        Serving(f"redis://127.0.0.1:{network.port}/0") as serving,
    ):
        serving.go_on(60)
        has_all(serving)
        serving.never_waited()


def test_a_failover_by_sentinels(caplog: pytest.LogCaptureFixture) -> None:
    with RedisSentinels() as servers, Serving(servers.url) as serving:
        serving.go_on(40)
        first = servers.master()
        first.kill()
        wait_for_server(lambda: servers.master() is not first)
        serving.go_on(40)
        serving.settle()
        stored, lost = serving.stored(), serving.persistence.stats()["lost"]
        assert len(stored) == len(set(stored)) == serving.turns - lost
        missing = set(range(1, serving.turns + 1)).difference(stored)
        lines = " ".join(record.getMessage() for record in caplog.records if "has lost" in record.getMessage())
        assert all(f":{number}" in lines for number in missing)
        assert servers.master() is not first
        serving.never_waited()


def test_a_frozen_master_is_left_for_the_replica() -> None:
    with RedisSentinels() as servers, Serving(servers.url) as serving:
        first = servers.master()
        first.freeze()
        wait_for_server(lambda: servers.master() is not first)
        serving.go_on(20)
        serving.settle()
        first.thaw()
        assert len(serving.stored()) == serving.turns - serving.persistence.stats()["lost"]
        serving.never_waited()


def test_resharded_while_it_is_written_and_read() -> None:
    with RedisClusterServers() as servers, Serving(servers.url) as serving:
        slot = servers.slot(f"{{agentspec:{LOG}}}:3:log")
        reader, ended, reads = open_store(servers.url), threading.Event(), [0]

        def read() -> None:
            while not ended.is_set():
                try:
                    list(reader.read(LOG, newest=20))
                    reads[0] += 1
                except Exception:
                    reads.append(1)

        thread = threading.Thread(target=read)
        thread.start()
        for _ in range(2):
            for target in servers.servers:
                if servers.owner(slot) is not target:
                    servers.move(slot, target, pause=0.02)
                    serving.go_on(10)
        ended.set()
        thread.join()
        assert reads[0] > 10
        has_all(serving)
        serving.never_waited()


def test_a_node_of_a_cluster_frozen() -> None:
    with RedisClusterServers() as servers, Serving(servers.url) as serving:
        owner = servers.owner(servers.slot(f"{{agentspec:{LOG}}}:3:log"))
        owner.freeze()
        serving.go_on(60)
        wait_for_server(lambda: serving.persistence.stats()["writer"]["state"] != "closed")
        owner.thaw()
        has_all(serving)
        serving.never_waited()


@pytest.mark.parametrize("fault", ["frozen", "killed"])
def test_a_node_of_a_cluster_that_is_away_holds_up_no_log_of_the_others(fault: str) -> None:
    """It holds up neither writing nor following."""
    with RedisClusterServers() as servers:
        store = open_store(servers.url)
        writer = BackgroundWriter(store)
        logs = [f"{LOG}{number}" for number in range(12)]
        owners = {log: servers.owner(servers.slot(f"{{agentspec:{log}}}:3:log")) for log in logs}
        first = owners[logs[0]]
        others = [log for log in logs if owners[log] is not first]
        assert len(others) > 3
        for number in range(20):
            for log in logs:
                writer.put(log, turn("s", number))
        assert writer.flush(60)
        first.freeze() if fault == "frozen" else first.kill()
        reader = open_store(servers.url)
        ends = {log: store.newest(log) for log in others}
        slowest = 0.0
        for number in range(20, 60):
            begin = time.monotonic()
            for log in logs:
                writer.put(log, turn("s", number))
            acknowledged = 20 * len(logs) + (number - 19) * len(others)
            wait_for_server(lambda count=acknowledged: writer.stats().persisted >= count)  # type: ignore[misc]
            slowest = max(slowest, time.monotonic() - begin)
            time.sleep(0.1)  # altogether longer than the Cluster takes to notice
        assert slowest < 15, slowest  # one attempt at the node; they come once a second, then more rarely
        assert writer.stats().state != "closed"
        followed: set[str] = set()
        cursors = ends | {log: "" for log in logs if log not in others}
        deadline = time.monotonic() + 180
        while followed != set(others) and time.monotonic() < deadline:
            with suppress(StoreUnavailableError):  # the reader may have subscribed at the node that is away
                followed.update(reader.wait({log: at for log, at in cursors.items() if log not in followed}, 1.0))
        assert followed == set(others)
        reader.close()
        first.thaw() if fault == "frozen" else first.start()
        assert writer.flush(60)
        for log in logs:
            assert [number_of(decode(entry.payload)) for entry in store.read(log)] == list(range(60))
        writer.close()
        store.close()


def held_until(event: threading.Event, begun: threading.Event, call: Callable[..., object]) -> Callable[..., object]:
    def held(*args: object, **options: object) -> object:
        begun.set()
        assert event.wait(60)
        return call(*args, **options)

    return held


def test_back_after_what_the_server_knew_of_the_writer_has_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer is forgotten after an hour, which is a second here."""
    for module in ("shard", "losses"):
        monkeypatch.setattr(f"agentspec.cache.store.redis.{module}.WRITER_SECONDS", 1)
    with RedisServer() as server, Serving(server.url) as serving:
        server.kill()
        begin = time.monotonic()
        while time.monotonic() - begin < 2.5:
            serving.go_on(5)
        with monkeypatch.context() as patch:
            back, begun = threading.Event(), threading.Event()
            patch.setattr(serving.store, "append", held_until(back, begun, serving.store.append))
            assert begun.wait(60)  # otherwise an earlier call could still reach the server
            server.start()
            assert not server.client().keys("*:w:*")
            back.set()
            has_all(serving)
        serving.never_waited()


def test_a_slow_session_holds_up_no_other() -> None:
    """The server never answers for one session. The others are loaded, and decoding goes on."""
    with RedisServer() as server:
        with Serving(server.url) as before:
            before.go_on(20)
        slow, *others = (f"{number:032x}" for number in range(4))
        with (
            SlowNetwork(server.port, swallowed=b"s:" + slow.encode()) as network,
            Serving(f"redis://127.0.0.1:{network.port}/0") as serving,
        ):
            cache = serving.engine.cache
            wait_for_server(lambda: not any(cache.needs_load(TENANT, other) for other in others))
            assert cache.needs_load(TENANT, slow)
            assert serving.persistence.stats()["loader"]["failed"] > 0
            serving.stop()
            serving.never_waited()
