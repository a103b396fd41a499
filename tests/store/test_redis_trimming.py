"""Test retention in Redis: what is removed and counted, and the index by which trimming finds the logs."""

import itertools
import time
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from agentspec.cache.store import Losses, NewEntry, RedisStore, Retention, Trimmed, Usage, open_store
from agentspec.cache.store.redis import index as redis_index
from agentspec.cache.store.redis.index import LogIndex
from agentspec.cache.store.redis.shard import RedisShard, ShardState
from agentspec.errors import StoreUnavailableError
from agentspec.testing.redis_server import RedisServer
from tests.store.helpers import NS, wait_until

from .test_redis_store import keys, raw, server, store

__all__ = ["server", "store"]

pytestmark = pytest.mark.usefixtures("patience")


def test_trimming_gives_the_servers_memory_back(store: RedisStore) -> None:
    store.append(NS, [NewEntry("first", b"")])  # scripts and connections take some .4 MB that do not grow

    def used() -> int:
        """Return the server's memory without the buffer of its append-only file."""
        server = raw(store)
        wait_until(lambda: server.info("persistence")["aof_buffer_length"] == 0)
        return int(server.info("memory")["used_memory"])

    empty = used()
    for number in range(0, 12_000, 100):
        store.append(
            NS, [NewEntry(f"s{n // 200}-{n % 20}", bytes(1_800), f"g{n % 9}") for n in range(number, number + 100)]
        )
    full = used() - empty
    assert 0.8 < store.usage().bytes / full < 1.25
    limit = full // 10
    while store.trim(Retention(bytes=limit)).more:
        pass
    wait_until(lambda: used() - empty < 1.25 * limit)  # a thread of the server frees deleted data
    assert sum(raw(store).memory_usage(key) or 0 for key in raw(store).scan_iter()) < 1.25 * limit
    assert len(list(store.read(NS))) == store.usage().records > 800


def test_age_takes_nothing_newer_though_it_lies_beside_something_older(store: RedisStore) -> None:
    usage = f"{{agentspec:{NS}}}:3:usage"
    store.append(NS, [NewEntry("s", b"old")])
    raw(store).hset(usage, "last", "32503680000000-0")  # the year 3000
    store.append(NS, [NewEntry("s", b"new")])
    raw(store).hset("{agentspec:other}:3:usage", "last", "32535216000000-0")
    store.append("other", [NewEntry("s", b"newer")])
    assert store.trim(Retention(days=0.0)) == Trimmed(1, True)
    assert [entry.payload for entry in store.read(NS)] == [b"new"]


def calls(store: RedisStore, what: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many calls of the server `what` makes."""
    count, client = [0], store._client

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            count[0] += 1
            return real(*arguments, **named)

        return call

    with monkeypatch.context() as counting:
        for name in ("command", "run"):
            counting.setattr(client, name, counted(getattr(client, name)))
        what()
    return count[0]


def test_many_small_sessions_count_with_what_the_server_needs_for_each(store: RedisStore) -> None:
    store.append(NS, [NewEntry("one", b"1")] * 100)
    one = store.usage().bytes
    store.append(NS, [NewEntry(f"s{number}", b"1") for number in range(100)])
    assert store.usage().bytes > 4 * one


def test_the_limits_cost_what_the_logs_beyond_them_do(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not cost what all logs do: each call looks at only one page of those again."""
    for number in range(400):
        store.append(f"{NS}.{number:03d}", [NewEntry("s", b"x")] * 2)
    monkeypatch.setattr(redis_index, "_AUDIT_SECONDS", 1000.0)
    assert calls(store, lambda: store.trim(Retention(days=1, records=800)), monkeypatch) < 2 * 130 + 10  # an audit
    assert calls(store, lambda: store.trim(Retention(days=1, records=800)), monkeypatch) < 10
    assert calls(store, lambda: store.trim(Retention(records=797)), monkeypatch) < 20
    assert store.usage().records == 797
    assert [len(list(store.read(f"{NS}.{number:03d}"))) for number in range(3)] == [0, 1, 2]
    assert calls(store, store.usage, monkeypatch) < 3


def test_so_many_small_logs_are_spared_and_no_more(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a search for old entries would go over all logs of a server, however many there are."""
    for number in range(40):
        store.append(f"{NS}.{number:02d}", [NewEntry("s", b"x")])
    time.sleep(0.002)
    store.append(f"{NS}.large", [NewEntry("s", b"x")] * 100)
    monkeypatch.setattr(redis_index, "_AGE_PAGE", 16)
    assert store.trim(Retention(records=139)).records == 1
    assert len(list(store.read(f"{NS}.large"))) == 99
    monkeypatch.setattr(redis_index, "_MOST_SPARED", 32)
    assert store.trim(Retention(records=138)).records == 1
    assert len(list(store.read(f"{NS}.large"))) == 99 and list(store.read(f"{NS}.00")) == []


def test_the_index_of_logs_comes_back_after_it_was_lost(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_index, "_AUDIT_SECONDS", 0.0)
    for number in range(200):
        store.append(f"{NS}.{number}", [NewEntry("s", b"x")] * 2)
    usage = store.usage()
    assert usage.records == 400
    raw(store).delete(*(f"{{agentspec:}}:{part}" for part in ("ages", "sizes", "totals")))
    for _ in range(8):
        store.trim(Retention())
    assert store.usage() == usage
    while store.trim(Retention(records=0)).more:
        pass
    assert store.usage() == Usage(0, 0) and keys_of_index(store) == ["totals"]


def keys_of_index(store: RedisStore) -> list[str]:
    return [key.partition("}:")[2] for key in keys(store) if key.startswith("{agentspec:}")]


def test_the_index_takes_no_older_state_unless_a_clock_was_set_back(store: RedisStore) -> None:
    index, late = LogIndex(store._client, "agentspec"), LogIndex(store._client, "agentspec")
    now = 1_700_000_000_000_000
    index.note("a/0", ShardState(5, 500, 2, 77, now))
    late.note("a/0", ShardState(4, 400, 1, 66, now - 1_000_000))
    assert index.totals() == (5, 500, 2, 0) and index.oldest(9) == [(77, "a/0")]
    for records, later in ((7, 2), (6, 1)):  # two threads, before the next write
        index.note("a/0", ShardState(records, 700, 2, 77, now + later))
    assert index.totals() == (7, 700, 2, 0)
    late.note("a/0", ShardState(1, 100, 1, 88, now - 3_600_000_000))
    late.flush()
    assert index.totals() == (1, 100, 1, 0) and index.oldest(9) == [(88, "a/0")]
    index.note("a/0", ShardState(0, 0, 0, None, now + 3))
    assert index.oldest(9) == []


def test_a_log_alone_and_one_of_unknown_size_may_go_whole(store: RedisStore) -> None:
    index, now = LogIndex(store._client, "agentspec"), 1_700_000_000_000_000
    assert index.totals() == (0, 0, 0, 0) and index.oldest_of_larger(9)[1] == []
    index.note("a/0", ShardState(5, 500, 2, 77, now))
    may_go, oldest = index.oldest_of_larger(9)
    assert may_go.of("a/0") is None and oldest == [(77, "a/0")]
    index.note("b/0", ShardState(5, 500, 2, 88, now))
    index.note("c/0", ShardState(1, 1, 1, 99, now))
    assert index.oldest(1) == [(77, "a/0")]
    for part in ("sizes", "weights"):
        raw(store).hdel(f"{{agentspec:}}:{part}", "b/0")
    raw(store).hdel("{agentspec:}:owned", "b")
    may_go, oldest = index.oldest_of_larger(9)
    assert oldest == [(77, "a/0"), (88, "b/0")]
    assert may_go.of("a/0") == 250, "half of the mean stays of a"
    assert may_go.of("b/0") is None
    assert index.oldest_of_larger(1)[1] == [(77, "a/0")]


def test_logs_are_weighed_by_their_owners_once_an_older_release_has_written_them(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_index, "_AUDIT_SECONDS", 0.0)
    for number in range(20):
        store.append(f"m.greedy.{number}", [NewEntry("s", b"x")] * 4)
    time.sleep(0.002)
    store.append("m.small", [NewEntry("s", b"x")] * 20)
    store.append("m.salted", [NewEntry("s", b"x", owner="m.greedy")])
    store._index.flush()

    def owned() -> dict[str | bytes, int]:
        return {owner: int(size) // 91 for owner, size in raw(store).hgetall("{agentspec:}:owned").items()}

    assert owned() == {b"m.greedy": 20 * 4 + 1, b"m.small": 20}
    raw(store).delete("{agentspec:}:weights", "{agentspec:}:owned")
    assert store.trim(Retention(records=100)).records == 1, "each log counts alone"
    store.trim(Retention())
    store._index.flush()
    assert raw(store).hlen("{agentspec:}:weights") == 22 and sum(owned().values()) == 100
    for shard in ("m.salted/0", "m.greedy.7/0"):
        raw(store).hset("{agentspec:}:weights", shard, b"91 stale")
        raw(store).hset("{agentspec:}:owned", "stale", 91)
    while store.trim(Retention(records=0)).more:
        pass
    assert not raw(store).exists("{agentspec:}:weights")


def noting(index: LogIndex) -> Callable[..., None]:
    """Return a function that notes how many records a shard has, each time a little later."""
    times = itertools.count(1_700_000_000_000_000)
    return lambda name, records, **new: index.note(name, ShardState(records, 1, 1, 1, next(times)), **new)


def test_the_index_has_a_new_log_at_once_and_what_others_get_once_in_a_while(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server trims by it, and an append costs no second write."""
    reader = LogIndex(store._client, "agentspec")
    monkeypatch.setattr(redis_index, "_FLUSH_SECONDS", 3600.0)
    note = noting(LogIndex(store._client, "agentspec"))
    note("a/0", 1)
    note("b/0", 1)
    assert reader.totals().records == 2
    note("a/0", 5)
    assert reader.totals().records == 2
    note("a/0", 6, new=True)  # the server had lost it
    assert reader.totals().records == 7
    monkeypatch.setattr(redis_index, "_FLUSH_SECONDS", 0.0)
    note = noting(LogIndex(store._client, "agentspec"))
    raw(store).flushall()
    for records in (8, 9):
        note("a/0", records)
        assert reader.totals().records == records


def test_an_index_that_is_away_is_tried_now_and_then_and_gets_all_when_it_is_back(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(redis_index, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(redis_index, "_FLUSH_SECONDS", 20.0)
    index, reader = LogIndex(store._client, "agentspec"), LogIndex(store._client, "agentspec")
    note, away = noting(index), Mock(side_effect=StoreUnavailableError("this node does not answer"))
    with monkeypatch.context() as patch:
        patch.setattr(store._client, "run", away)
        for name in ("a/0", "b/0", "c/0", "a/0"):
            note(name, 2)
        assert away.call_count == 1
        for later, tries in ((29, 1), (31, 2)):
            now[0] = 1000.0 + later
            note("b/0", 2)
            assert away.call_count == tries
    assert index.totals().records == 6
    note("d/0", 1)
    note("a/0", 3)
    assert reader.totals().records == 7  # as before it was away


def test_the_index_remembers_so_many_shards_and_no_more(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are found by an audit."""
    monkeypatch.setattr(redis_index, "_MOST_CHANGED", 3)
    monkeypatch.setattr(redis_index, "_FLUSH_SECONDS", 20.0)
    index = LogIndex(store._client, "agentspec")
    note = noting(index)
    for number in range(10):
        note(f"{number}/0", 1)
        assert len(index._noted) <= 3 + 1
    assert index.totals().records == 10
    with monkeypatch.context() as patch:
        patch.setattr(store._client, "run", Mock(side_effect=StoreUnavailableError("away")))
        for number in range(20, 30):
            note(f"{number}/0", 1)
        note("20/0", 5)
        assert len(index._changed) == 3
    assert index.totals().records == 17


def test_a_log_that_stays_empty_leaves_nothing(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_index, "_AUDIT_SECONDS", 0.0)
    store.append("kept", [NewEntry("s", b"x")])
    for number in range(30):
        store.append(f"{NS}.{number}", [NewEntry("s", b"x", name=f"w:{number}")])
    while store.trim(Retention(records=0)).more:
        pass
    store.append("kept", [NewEntry("s", b"x")])
    assert len(store.namespaces()) == 31
    monkeypatch.setattr("agentspec.cache.store.redis.shard.IDLE_SECONDS", -1)  # as if a day later
    monkeypatch.setattr("agentspec.cache.store.redis.losses.IDLE_SECONDS", -1)
    store.trim(Retention())
    assert store.namespaces() == ["kept"]
    assert not [key for key in keys(store) if NS in key and ":w:" not in key]
    store.append(f"{NS}.7", [NewEntry("s", b"again")])
    assert store.namespaces() == [f"{NS}.7", "kept"]
    assert [entry.payload for entry in store.read(f"{NS}.7")] == [b"again"]
    assert store.losses() == Losses()


def test_erasing_from_a_long_group_holds_up_the_server_only_for_a_moment_at_a_time(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.cache.store.redis.shard._WALKED", 200)
    for session in ("first", "middle", "last"):
        store.append(NS, [NewEntry(session, b"x", "g")] * 100)
    pages, sweep = list[int](), RedisShard.sweep

    def noted(shard: RedisShard) -> int:
        pages.append(sweep(shard))
        return pages[-1]

    monkeypatch.setattr(RedisShard, "sweep", noted)
    store.erase_session(NS, "middle")
    assert pages == [2] * 50 + [0]  # about 100 other entries are on either side of it
    store.erase_session(NS, "last")
    assert pages[51] > 2  # the search begins at the end
    assert [entry.session for entry in store.read(NS, group="g")] == ["first"] * 100
    assert raw(store).llen(f"{{agentspec:{NS}}}:3:g:g") == 100


def test_logs_are_trimmed_while_an_erasure_cannot_be_ended_because_a_node_is_away(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the other nodes of a Cluster would grow beyond the limits while one is away."""
    store.append(NS, [NewEntry("s", b"x")] * 3)
    store._index.doom("away/0")
    sweep = RedisShard.sweep

    def half_away(shard: RedisShard) -> int:
        if shard.name == "away/0":
            raise StoreUnavailableError("this node does not answer")
        return sweep(shard)

    monkeypatch.setattr(RedisShard, "sweep", half_away)
    assert store.trim(Retention(records=1)) == Trimmed(2, True)
    with pytest.raises(StoreUnavailableError, match="does not answer"):
        store.trim(Retention(records=1))
    monkeypatch.undo()
    assert store.trim(Retention(records=1)) == Trimmed(0, False)
    assert store._index.doomed() is None


def test_a_node_that_is_away_is_tried_once_in_a_slice_and_told_of_if_nothing_could_be_removed(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("away-1", "away-2", "here"):
        store.append(name, [NewEntry("s", b"x")] * 2)
        time.sleep(0.002)  # Redis knows milliseconds
    tried, trim = list[str](), RedisShard.trim

    def half_away(shard: RedisShard, *limits: Any) -> Any:
        tried.append(shard.name)
        if shard.name.startswith("away"):
            raise StoreUnavailableError("this node does not answer")
        return trim(shard, *limits)

    monkeypatch.setattr(RedisShard, "trim", half_away)
    monkeypatch.setattr(store._client, "part", lambda tag: tag[:15])
    assert store.trim(Retention(days=0.0)) == Trimmed(2, True)
    assert tried == ["away-1/0", "here/0"]
    with pytest.raises(StoreUnavailableError, match="does not answer"):
        store.trim(Retention(days=0.0))


def test_a_log_to_which_another_process_appends_while_it_is_taken_off_the_list_stays_on_it(
    store: RedisStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its sessions could not be listed, and nothing would trim it."""
    monkeypatch.setattr(redis_index, "_AUDIT_SECONDS", 0.0)
    store.append(NS, [NewEntry("s", b"x")])
    while store.trim(Retention(records=0)).more:
        pass
    monkeypatch.setattr("agentspec.cache.store.redis.shard.IDLE_SECONDS", -1)  # as if a day later
    remove = LogIndex.remove
    with closing(open_store(server.url)) as other:

        def late(index: LogIndex, namespace: str) -> None:
            other.append(NS, [NewEntry("s", b"y")])
            remove(index, namespace)

        monkeypatch.setattr(LogIndex, "remove", late)
        store.trim(Retention())
    assert store.namespaces() == [NS]


def test_the_index_has_the_last_appends_of_a_store_that_was_closed(store: RedisStore, server: RedisServer) -> None:
    """They are noted within a second if appends go on, and otherwise when the store closes."""
    with closing(open_store(server.url)) as other:
        for _ in range(3):
            other.append(NS, [NewEntry("s", b"x")])
    assert store.usage().records == 3


def test_a_log_that_gets_an_entry_while_its_history_is_asked_for_is_whole(
    store: RedisStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention has emptied the log up to where it was read. Counting as cut further would forget its tenant."""
    store.append(NS, [NewEntry("s", b"1")])
    read_to = store.newest(NS)
    while store.trim(Retention(records=0)).more:
        pass
    assert store.history(NS, read_to) == "whole"
    with closing(open_store(server.url)) as other:

        def one_by_one(commands: list[tuple[str, ...]]) -> list[Any]:
            answers = [store.command(*commands[0])]
            other.append(NS, [NewEntry("s", b"2")])
            return answers + [store.command(*command) for command in commands[1:]]

        monkeypatch.setattr(store._client, "commands", one_by_one)
        assert store.history(NS, read_to) == "whole"
