"""Keep an index of all logs under a prefix on Redis, so that a look at all logs need not ask for each.

The logs of a Cluster lie on several nodes, so no transaction covers a log and its index. Every change of a shard
returns the shard's new state with the server's time, and the index keeps the latest state. If a process is killed
before it tells the index, an audit finds the change. Each slice of trimming audits a page of logs. The keys::

    prefix:namespaces      the set of logs
    {prefix:}:ages         sorted set, shard: milliseconds of its oldest entry
    {prefix:}:sizes        hash, shard: "entries bytes sessions microseconds"; the last: the time of this state
    {prefix:}:tombstones   hash, shard: how many of its entries are tombstones; none: 0
    {prefix:}:totals       hash: records, bytes, sessions, tombstones; the sums of sizes and tombstones
    {prefix:}:weights      hash, shard: "bytes owner", as its bytes count for the owner of its log
    {prefix:}:owned        hash, owner: the sum of these bytes
    {prefix:}:doomed       the set of shards in which an erasure may have been cut off

A shard is named ``namespace/place``. The owner of a log is the one that its entries named, else what the log's name
begins with (`log_family`). Logs of mere tombstones have one owner, "": anybody can make such a log, by erasing nothing
under a new salt. Older code writes neither weights nor owned; the audit catches up with that.
"""

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from agentspec.cache.store.naming import log_family
from agentspec.cache.store.redis.client import RedisClient
from agentspec.cache.store.redis.shard import ShardState
from agentspec.errors import StoreError

_FLUSH_SECONDS = 1.0  # between two writes of changed states
_LONGEST_PAUSE = 30.0  # between two attempts if writes fail
_MOST_CHANGED = 65_536  # most shards whose state waits to be written; the audit finds the others
_AUDIT_SECONDS = 1.0  # between two pages of an audit
_AUDIT_PAGE = 64  # logs in a page, about
_AGE_PAGE = 512  # shards that a search for old entries looks at in one go
_MOST_SPARED = 4_096  # most shards that such a search looks at

_NOTE = """
-- KEYS: ages, sizes, totals, tombstones, weights, owned. ARGV: for each shard its name, entries, bytes, sessions,
-- milliseconds of its oldest entry ('': none), the microseconds when it was so, tombstones, owner ('': the one that was
-- noted before), and the owner if none was. A state that is older than the one here changes nothing, unless it is by so
-- much that a clock was set back.
redis.call('HDEL', KEYS[2], '')  -- so that a full server takes the rest
redis.call('HINCRBY', KEYS[3], 'records', 0)  -- refused here, before anything is changed, to a user who may not
for i = 1, #ARGV, 9 do
  local name, r, b, s, at = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], tonumber(ARGV[i + 5])
  local hr, hb, hs, hat = string.match(redis.call('HGET', KEYS[2], name) or '0 0 0 0', '^(%S+) (%S+) (%S+) (%S+)$')
  hat = tonumber(hat)
  if at >= hat or hat - at > 60000000 then
    if ARGV[i + 4] == '' then
      redis.call('ZREM', KEYS[1], name)
    else
      redis.call('ZADD', KEYS[1], ARGV[i + 4], name)
    end
    if r == '0' and s == '0' then
      redis.call('HDEL', KEYS[2], name)
    else
      redis.call('HSET', KEYS[2], name, r .. ' ' .. b .. ' ' .. s .. ' ' .. ARGV[i + 5])
    end
    local t, ht = ARGV[i + 6], redis.call('HGET', KEYS[4], name) or '0'
    if t == '0' then
      redis.call('HDEL', KEYS[4], name)
    else
      redis.call('HSET', KEYS[4], name, t)
    end
    local hw, ho = string.match(redis.call('HGET', KEYS[5], name) or '', '^(%d+) (.*)$')
    local noted = ho ~= '' and ho or nil
    local owner = ARGV[i + 7] ~= '' and ARGV[i + 7] or noted or (t == r and '' or ARGV[i + 8])
    if hw and redis.call('HINCRBY', KEYS[6], ho, '-' .. hw) <= 0 then redis.call('HDEL', KEYS[6], ho) end
    if b == '0' then
      redis.call('HDEL', KEYS[5], name)
    else
      redis.call('HSET', KEYS[5], name, b .. ' ' .. owner)
      redis.call('HINCRBY', KEYS[6], owner, b)
    end
    redis.call('HINCRBY', KEYS[3], 'tombstones', t - ht)
    redis.call('HINCRBY', KEYS[3], 'records', r - hr)
    redis.call('HINCRBY', KEYS[3], 'bytes', string.format('%.0f', b - hb))
    redis.call('HINCRBY', KEYS[3], 'sessions', s - hs)
  end
end
return redis.status_reply('OK')
"""

_DOOM = """
-- KEYS: doomed. ARGV: shard.
redis.call('SREM', KEYS[1], '')  -- so that a full server takes the rest
return redis.call('SADD', KEYS[1], ARGV[1])
"""


class Totals(NamedTuple):
    """Count what all logs hold: entries, their bytes, sessions, and tombstones among the entries.

    A session in two logs counts twice.
    """

    records: int
    bytes: int
    sessions: int
    tombstones: int


class Allowance:
    """Say how many bytes of shards may go. Shards of one owner share theirs; a shard without an owner may go whole."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}  # by shard
        self._bytes: dict[str, int] = {}  # by owner

    def set(self, shard: str, owner: str, size: int) -> None:
        """Let so many bytes of an owner go, to whom a shard belongs."""
        self._owners[shard], self._bytes[owner] = owner, size

    def of(self, shard: str) -> int | None:
        """Return how many bytes of a shard may go; None: all."""
        return self._bytes.get(self._owners.get(shard, ""))

    def take(self, shard: str, size: int) -> None:
        """Note that so many bytes of a shard are gone."""
        if shard in self._owners:
            self._bytes[self._owners[shard]] -= size


class LogIndex:
    """Keep the index of the logs under a prefix. Thread-safe."""

    def __init__(self, client: RedisClient, prefix: str) -> None:
        self._client = client
        self._names = f"{prefix}:namespaces"
        self._ages, self._sizes, self._totals, self._doomed, self._tombstones, self._weights, self._owned = (
            f"{{{prefix}:}}:{part}" for part in ("ages", "sizes", "totals", "doomed", "tombstones", "weights", "owned")
        )
        self._lock = threading.Lock()
        self._changed: dict[str, ShardState] = {}
        self._noted: set[str] = set()  # shards that this process has written, so that others know of them
        self._flush_at, self._pause = 0.0, _FLUSH_SECONDS
        self._audit_at = 0.0
        self._audited = 0  # where the audit goes on

    def names(self, prefix: str) -> list[str]:
        """Return the names of the logs that begin with a prefix, sorted."""
        return sorted(self._client.members(self._names, prefix))

    def enter(self, namespace: str) -> None:
        """Add a log to the list of all logs."""
        self._client.command("SADD", self._names, namespace)

    def is_new(self) -> bool:
        """Return whether the list of logs is empty."""
        return not self._client.command("EXISTS", self._names)

    def note(self, name: str, state: ShardState, *, new: bool = False) -> None:
        """Note the state of a shard, and write all noted states if the last write is a second old.

        The call also writes if this process has not written the shard's state before, or if ``new``: the shard is new
        on the server. It ignores errors. While writes fail, the pause between two attempts grows to 30 seconds.
        """
        with self._lock:
            self._add(name, state)
            if new:
                self._noted.discard(name)
            now = time.monotonic()
            if now < self._flush_at and (name in self._noted or self._pause > _FLUSH_SECONDS):
                return
            self._flush_at = now + self._pause
        try:
            self.flush()
        except StoreError:
            with self._lock:
                self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
                self._flush_at = time.monotonic() + self._pause

    def flush(self) -> None:
        """Write the noted states. Raises as RedisClient does; then they still wait."""
        with self._lock:
            changed, self._changed = self._changed, {}
        keys = [self._ages, self._sizes, self._totals, self._tombstones, self._weights, self._owned]
        arguments: list[str | int] = []
        for name, state in changed.items():
            oldest = "" if state.oldest is None else state.oldest
            arguments += (name, state.records, state.bytes, state.sessions, oldest, state.at, state.tombstones)
            arguments += (state.owner, log_family(name.rpartition("/")[0]))
        try:
            for at in range(0, len(arguments), 9 * 256):
                page = arguments[at : at + 9 * 256]
                self._client.run(_NOTE, keys, page)
        except BaseException:
            with self._lock:
                for name, state in changed.items():
                    self._add(name, state)
            raise
        with self._lock:
            self._pause = _FLUSH_SECONDS
            if len(self._noted) > _MOST_CHANGED:
                self._noted.clear()
            self._noted.update(changed)

    def totals(self) -> Totals:
        """Return the records, bytes and sessions of all logs together."""
        self.flush()
        held = self._client.command("HMGET", self._totals, *Totals._fields)
        return Totals(*(max(0, int(one or 0)) for one in held))

    def oldest(self, count: int) -> list[tuple[int, str]]:
        """Return the `count` shards with the oldest entries, as (milliseconds of that entry, shard), oldest first."""
        self.flush()
        return self._by_age(0, count)

    def oldest_of_larger(self, count: int) -> tuple[Allowance, list[tuple[int, str]]]:
        """Return the oldest shards of owners with at least half of the mean owner's bytes, and how much of each may go.

        The shards are as `oldest` returns them. A shard whose owner and size are not known may go whole. If the oldest
        4,096 shards all belong to owners below that half, it returns the oldest shards of all, which may go whole.
        """
        size, weighed = self.totals().bytes, self._client.command("HLEN", self._weights)
        # A shard that was not weighed yet counts as one of an owner of its own.
        owners = self._client.command("HLEN", self._owned) + self._client.command("HLEN", self._sizes) - weighed
        least = size / 2 / owners if owners > 1 else 0.0
        found: list[tuple[int, str]] = []
        may_go = Allowance()
        for begin in range(0, _MOST_SPARED, _AGE_PAGE):
            page = self._by_age(begin, _AGE_PAGE)
            shares = self._shares([name for _, name in page])
            for one, (owner, held) in zip(page, shares, strict=True):
                if held is None or held >= least:
                    found.append(one)
                    if held is not None and least:
                        may_go.set(one[1], owner, int(held - least) + 1)
            if len(page) < _AGE_PAGE or len(found) >= count:
                break
        return (may_go, found[:count]) if found else (Allowance(), self._by_age(0, count))

    def _shares(self, names: Sequence[str]) -> list[tuple[str, int | None]]:
        """Return the owner of each shard, and all bytes of that owner; None: they are not known."""
        if not names:
            return []
        weights, sizes = (self._client.command("HMGET", key, *names) for key in (self._weights, self._sizes))
        owners = [None if weight is None else weight.decode().partition(" ")[2] for weight in weights]
        asked = list(dict.fromkeys(owner for owner in owners if owner is not None))
        owned = dict(zip(asked, self._client.command("HMGET", self._owned, *asked) if asked else (), strict=True))
        found: list[tuple[str, int | None]] = []
        for name, owner, state in zip(names, owners, sizes, strict=True):
            if owner is not None and (held := owned[owner]) is not None:
                found.append((owner, int(held)))
            else:
                found.append((f"{name}/", None if state is None else int(state.split()[1])))
        return found

    def doom(self, name: str) -> None:
        """Note that a shard's erased sessions are about to be removed."""
        self._client.run(_DOOM, [self._doomed], [name])

    def spare(self, name: str) -> None:
        """Note that nothing of a shard's erased sessions is left."""
        self._client.command("SREM", self._doomed, name)

    def doomed(self) -> str | None:
        """Return a shard in which something of erased sessions may be left."""
        name = self._client.command("SRANDMEMBER", self._doomed)
        return None if name is None else name.decode()

    def to_audit(self) -> list[str]:
        """Return a page of logs whose states must be noted again; none within a second of the last page."""
        if time.monotonic() < self._audit_at:
            return []
        self._audit_at = time.monotonic() + _AUDIT_SECONDS
        at, page = self._client.command("SSCAN", self._names, self._audited, "COUNT", _AUDIT_PAGE)
        self._audited = int(at)
        return [name.decode() for name in page]

    def remove(self, namespace: str) -> None:
        """Remove a log from the list of all logs."""
        self._client.command("SREM", self._names, namespace)

    def _by_age(self, begin: int, count: int) -> list[tuple[int, str]]:
        found = self._client.command("ZRANGE", self._ages, begin, begin + count - 1, "WITHSCORES")
        if found and isinstance(found[0], bytes):  # names and ages in turn
            found = list(zip(found[::2], found[1::2], strict=True))
        return [(int(float(age)), name.decode()) for name, age in found]

    def _add(self, name: str, state: ShardState) -> None:
        held = self._changed.get(name)
        if held is None and len(self._changed) >= _MOST_CHANGED:
            return
        if held is None or held.at <= state.at:
            self._changed[name] = state if held is None or state.owner else state._replace(owner=held.owner)
