"""Test when payloads in Redis expire: after the retention's age, if no process is left to trim them."""

from contextlib import closing

import pytest

from agentspec.cache.store import Losses, NewEntry, RedisStore, Retention, Trimmed, open_store
from agentspec.cache.store.redis import index as redis_index
from agentspec.cache.store.redis import shard as redis_shard
from agentspec.cache.store.redis.shard import RedisShard
from agentspec.errors import StoreUnavailableError
from agentspec.testing.redis_server import RedisServer
from tests.store.helpers import NS

from .test_redis_store import raw, server, store

__all__ = ["server", "store"]

pytestmark = pytest.mark.usefixtures("patience")

DAY = 86_400_000


@pytest.fixture
def audits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every slice of trimming look at all logs."""
    monkeypatch.setattr(redis_index, "_AUDIT_SECONDS", 0.0)


def days_left(store: RedisStore, *keys: str) -> list[int]:
    """Return in how many days, rounded up, these keys expire; 0: never."""
    left = [raw(store).pttl(f"{{agentspec:{NS}}}:3:{key}") for key in keys]
    assert -2 not in left, "a key is gone"
    return [-(-ms // DAY) if ms >= 0 else 0 for ms in left]


def trim(store: RedisStore, retention: Retention) -> int:
    """Trim slice by slice. Return how many slices it took."""
    for slices in range(1, 1000):
        removed, more = store.trim(retention)
        assert removed == 0
        if not more:
            return slices
    raise AssertionError("trimming does not end")


def test_payloads_expire_after_the_retention_if_nobody_trims_them(store: RedisStore) -> None:
    store.trim(Retention(days=2))
    store.append(NS, [NewEntry("a", b"1", "g")])
    for key in ("log", "sessions", "usage"):  # a server that evicts expiring keys keeps these
        assert raw(store).pttl(f"{{agentspec:{NS}}}:3:{key}") == -1
    for key in ("s:a", "g:g"):
        assert 2.9 < raw(store).pttl(f"{{agentspec:{NS}}}:3:{key}") / 86_400_000 <= 3
    assert 0.9 < raw(store).pttl(f"{{agentspec:{NS}}}:3:w:{store._writer}") / 3_600_000 <= 1
    raw(store).delete(f"{{agentspec:{NS}}}:3:s:a")  # expired before the log was trimmed
    store.append(NS, [NewEntry("b", b"2")])
    assert store.trim(Retention(records=1)) == Trimmed(1, more=True)
    assert store.usage().records == 1
    assert [usage.session for usage in store.sessions(NS)] == ["b"]


def test_what_is_appended_without_a_retention_does_not_expire_by_an_earlier_one(store: RedisStore) -> None:
    store.trim(Retention(days=2))
    store.append(NS, [NewEntry("a", b"1", "g"), NewEntry("b", b"2")])
    store.trim(Retention())
    store.append(NS, [NewEntry("a", b"3", "g")])
    assert [raw(store).pttl(f"{{agentspec:{NS}}}:3:{key}") for key in ("s:a", "g:g")] == [-1, -1]


@pytest.mark.usefixtures("audits")
@pytest.mark.parametrize(("days", "left"), [(None, 0), (30, 31), (1, 2)])
def test_what_was_stored_before_expires_by_a_retention_that_was_changed(
    store: RedisStore, server: RedisServer, days: int | None, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_shard, "_RENEWED", 3)
    trim(store, Retention(days=2))
    sessions = [f"s{number}" for number in range(7)]
    for session in sessions:
        store.append(NS, [NewEntry(session, b"x", f"g-{session}")])
    store.erase_session(NS, "other")
    names = [f"{kind}{session}" for session in sessions for kind in ("s:", "g:g-")]
    assert days_left(store, *names) == [3] * 14
    with closing(open_store(server.url)) as later:
        assert isinstance(later, RedisStore)
        assert trim(later, Retention(days=days)) == 3, "a page in each slice"
        assert days_left(store, *names) == [left] * 14
        later.append(NS, [NewEntry("new", b"x")])
        assert days_left(store, "s:new") == [left]
        assert trim(later, Retention(days=days)) == 1 and later.losses() == Losses()


@pytest.mark.usefixtures("audits")
def test_payloads_that_are_renewed_expire_by_their_own_age(store: RedisStore) -> None:
    """What would have expired is left for retention to remove, which keeps the counts right."""
    trim(store, Retention(days=2))
    day, log = DAY, f"{{agentspec:{NS}}}:3:"
    now = raw(store).time()[0] * 1000
    raw(store).hset(f"{log}usage", mapping={"last": f"{now - 20 * day}-0", "born": f"{now - 20 * day}-0"})
    for session, age in (("old", 19), ("used", 18), ("used", 5)):
        raw(store).xadd(f"{log}log", {"s": session, "b": 1}, f"{now - age * day}-0")
        raw(store).rpush(f"{log}s:{session}", f"{now - age * day}-0 x")
    store.trim(Retention())
    store._index.enter(NS)
    store.trim(Retention(days=9))
    assert raw(store).hget(f"{log}usage", "expiry") == b"%d" % (10 * day)
    assert days_left(store, "s:used") == [5]


@pytest.mark.usefixtures("audits")
def test_servers_with_different_retentions_do_not_renew_for_ever(store: RedisStore, server: RedisServer) -> None:
    with closing(open_store(server.url)) as other:
        assert isinstance(other, RedisStore)
        for _ in range(3):
            store.append(NS, [NewEntry("a", b"x")])
            trim(store, Retention(days=2))
            other.append(NS, [NewEntry("b", b"x")])
            trim(other, Retention(days=20))
        assert days_left(store, "s:a", "s:b") == [3, 21]
    store.append(NS, [NewEntry("a", b"x")])
    with closing(open_store(server.url)) as restarted:
        assert isinstance(restarted, RedisStore)
        trim(restarted, Retention(days=20))
    assert days_left(store, "s:a", "s:b") == [21, 21], "one that was stopped last appended by an old retention"


@pytest.mark.usefixtures("audits")
def test_a_log_that_cannot_be_renewed_is_renewed_later(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    trim(store, Retention(days=2))
    store.append(NS, [NewEntry("a", b"x")])
    with monkeypatch.context() as away:
        away.setattr(RedisShard, "renew", lambda *_: (_ for _ in ()).throw(StoreUnavailableError("away")))
        assert trim(store, Retention()) == 1
    assert days_left(store, "s:a") == [3]
    trim(store, Retention())
    assert days_left(store, "s:a") == [0]


@pytest.mark.usefixtures("audits")
def test_a_change_that_was_cut_off_is_gone_on_with(
    store: RedisStore, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with a wrong number of days was stopped at once. Those that were right all the time must see it."""
    monkeypatch.setattr(redis_shard, "_RENEWED", 3)
    trim(store, Retention(days=30))
    sessions = [f"s{number}" for number in range(7)]
    store.append(NS, [NewEntry(session, b"x") for session in sessions])
    names = [f"s:{session}" for session in sessions]
    with closing(open_store(server.url)) as wrong:
        assert wrong.trim(Retention(days=1)) == Trimmed(0, more=True)
    assert sorted(days_left(store, *names)) == [2] * 3 + [31] * 4
    with closing(open_store(server.url)) as later:
        assert isinstance(later, RedisStore)
        trim(later, Retention(days=30))
    assert days_left(store, *names) == [31] * 7
