"""Store records on a Redis that several replicas share.

All keys of a namespace have one hash tag, so that a cluster keeps them on one node::

    {prefix:namespace}:3:log         stream, one reference an entry: s = session, b = bytes, g = group; t = tombstone
    {prefix:namespace}:3:s:SESSION   list of "id payload"; ids as in the log
    {prefix:namespace}:3:g:GROUP     list of references: "id bytes session"
    {prefix:namespace}:3:sessions    hash, session: "entries bytes last-milliseconds"
    {prefix:namespace}:3:usage       hash: records, bytes, last = id of the newest entry
    {prefix:namespace}:3:tombstones  hash, session: id of its tombstone
    {prefix:namespace}:3:d:ID        what is left of an erased session; all of these are in the set :3:doomed
    {prefix:namespace}:3:w:WRITER    number and first id of the last batch that this writer has appended; expires
    prefix:namespaces, prefix:secret the set of namespaces; the store's secret
    prefix:shards                    number of shards
    prefix:namespace                 channel on which each append and erasure is published

With ``shards`` above 1 a namespace has so many sets of these keys, with the hash tags {prefix:namespace:0} and so on.
Each session lies in one of them. A reader merges them by id; its cursors say how far it is in each.

Other replicas follow the log's order. Each session's payloads lie in a key of their own, so that erasing a session
frees its memory. The server's append-only file holds it until the server rewrites that (BGREWRITEAOF). One script does
an append, so it is atomic within a shard. The script recognises a batch that is sent again because its answer was lost,
and tells which batch of this writer it had before: if acknowledged ones are missing, the server lost them, which is
counted and logged. The server's settings decide how durable a record is (``appendonly yes`` survives its kill -9) and
whether it evicts keys. It should not (``maxmemory-policy noeviction``): sizes are wrong then. Only sessions, groups and
writers expire, so that the volatile policies spare logs and tombstones.
"""

import heapq
import logging
import secrets
import threading
import time
import uuid
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentspec.cache.store.base import (
    Entry,
    Erasure,
    Losses,
    NewEntry,
    Retention,
    SessionUsage,
    Trimmed,
    Usage,
    bad_cursor,
    check_namespace,
    check_read,
    conflict,
    expected_session,
)
from agentspec.cache.store.breaker import Courtesy
from agentspec.cache.store.records import EraseRecord, encode
from agentspec.cache.store.redis_client import Notices, RedisAddress, RedisClient
from agentspec.cache.store.redis_shard import (
    START,
    WRITER_SECONDS,
    Appended,
    Id,
    RedisShard,
    cursor,
    id_of,
    parsed,
    wire,
)
from agentspec.errors import StoreError, StoreVersionError

logger = logging.getLogger(__name__)

_SLICE_ENTRIES = 256
_SLICE_BYTES = 1 << 20
_SESSION_BYTES = 400  # measured on Redis 7: what the server needs for a session beside its entries
_EXPIRY_DAYS = 1.0  # payloads expire so long after the retention's age, in case nobody is left to trim them
_LOOK_SECONDS = 1.0  # between two looks at all logs that are waited for, in case that a notice was lost
_REMEMBERED = 4096  # shards, and batches, that this process remembers to have had acknowledged
_PAGE = 64  # logs that are asked at once
_NAMED = 20  # lost records that a line of the log names


@dataclass(slots=True)
class _Acknowledged:
    """Hold what the server acknowledged of this process in one shard.

    batch, last, at: number, last id and time of the last batch. records: how many in all. born: as in Appended.
    """

    batch: int = 0
    last: Id = START
    at: float = 0.0
    records: int = 0
    born: bytes = b""


@dataclass(slots=True)
class _Waiting:
    """Hold the state of ``wait``.

    quiet: logs that had nothing behind this cursor, and of which nothing was heard since. look_at: when to look at all.
    """

    notices: Notices
    quiet: dict[str, str] = field(default_factory=dict)
    look_at: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class RedisStore:
    """Implement Store on a Redis. The first call connects, so the server may start later.

    shards: over how many hash tags a namespace's sessions are spread; the same for all who use the prefix. converting:
    whether to write beside a log of an older release, which is refused otherwise.
    """

    shared = True
    held_bytes = 0

    def __init__(
        self, address: RedisAddress, *, prefix: str = "agentspec", shards: int = 1, converting: bool = False
    ) -> None:
        self.prefix = prefix
        self._shard_count = shards
        self._converting = converting
        self._client = RedisClient(address)
        self._watcher = RedisClient(address, patient=False)  # a follower must know soon that the server is away
        self._waiting = _Waiting(Notices(self._watcher))
        self._writer = uuid.uuid4().hex
        self._number = 0
        self._append_lock = threading.Lock()
        self._unsure: tuple[str, list[NewEntry], str | None] | None = None
        self._acknowledged: OrderedDict[str, _Acknowledged] = OrderedDict()  # by tag
        self._batches: deque[tuple[str, int, list[str]]] = deque(maxlen=_REMEMBERED)  # tag, batch, names of records
        self._losses = Losses()
        self._known: set[str] = set()  # namespaces that hold no log of an older release
        self._shards_checked = False
        self._expiry_ms = 0

    def append(self, namespace: str, entries: Sequence[NewEntry], *, expect: str | None = None) -> list[str]:
        shards, batch = self._shards(namespace), list(entries)
        expected = None if expect is None else expected_session(batch)
        newest = b"*" if expect is None else wire(id_of("expect", expect)) if expect else b""
        if not batch:
            return []
        sequences = [""] * len(batch)
        with self._append_lock:
            # A batch whose answer was lost keeps its number, so that the server recognises it.
            if self._unsure != (namespace, batch, expect):
                self._number += 1
            self._unsure = (namespace, batch, expect)
            self._check_log(namespace)
            parts: dict[int, list[int]] = {}
            for index, entry in enumerate(batch):
                place = self._place(entry.session)
                parts.setdefault(self._number % len(shards) if place is None else place, []).append(index)
            for place, indices in parts.items():
                part = [batch[index] for index in indices]
                answer = shards[place].append(self._writer, self._number, part, self._expiry_ms, expected, newest)
                if answer is None:
                    self._unsure = None
                    raise conflict(expected or "")
                if parsed(answer.born) == answer.first:  # the log is new, or the server has lost all it had
                    self.command("SET", f"{self.prefix}:shards", self._shard_count, "NX")
                    self.command("SADD", f"{self.prefix}:namespaces", namespace)
                self._note(namespace, shards[place], answer, part)
                for offset, index in enumerate(indices):
                    sequences[index] = self._name(place, (answer.first[0], answer.first[1] + offset))
            self._unsure = None
        return sequences

    def read(
        self,
        namespace: str,
        *,
        session: str | None = None,
        group: str | None = None,
        after: str | None = None,
        newest: int | None = None,
    ) -> Iterator[Entry]:
        check_read(session, group, newest)
        place = None if session is None else self._place(session)
        shards, lows = self._shards(namespace, place), self._places("after", after)
        if place is not None:
            lows = lows[place : place + 1]
        if session is None:
            reads = [shard.referenced(group, low, newest) for shard, low in zip(shards, lows, strict=True)]
        else:
            reads = [shard.session(session, low, newest) for shard, low in zip(shards, lows, strict=True)]
        if len(reads) == 1:
            return self._alone(namespace, place or 0, reads[0])
        return self._merged(namespace, reads, lows, newest)

    def sessions(self, namespace: str) -> list[SessionUsage]:
        self._check_log(namespace)
        found: dict[str, SessionUsage] = {}
        for shard in self._shards(namespace):
            for session, usage in shard.sessions().items():
                other = found.get(session, replace(usage, records=0, bytes=0))
                records, size, used = usage.records + other.records, usage.bytes + other.bytes, usage.used
                found[session] = SessionUsage(session, records, size, max(used, other.used))
        return [found[session] for session in sorted(found)]

    def newest(self, namespace: str) -> str:
        (ends,) = self._ends(self._client, [namespace]).values()
        last = max(ends)
        return "" if last == START else self._cursor(ends.index(last), last, ends)

    def wait(self, cursors: Mapping[str, str], timeout: float) -> list[str]:
        deadline = time.monotonic() + timeout
        lows = {name: self._places("cursors", at) for name, at in cursors.items()}
        channels = {self._channel(name): name for name in cursors}
        waiting = self._waiting
        with waiting.lock:
            try:
                heard, pause = waiting.notices.listen(set(channels)), 0.0
                if waiting.look_at <= deadline:
                    waiting.look_at = 0.0  # now, so that a server that is away is noticed before the wait is over
                while True:
                    for channel in heard | waiting.notices.heard(pause):
                        waiting.quiet.pop(channels.get(channel, ""), None)
                    now, heard = time.monotonic(), set()
                    if now >= waiting.look_at:
                        waiting.quiet, waiting.look_at = {}, now + _LOOK_SECONDS
                    changed = sorted(name for name, at in cursors.items() if waiting.quiet.get(name) != at)
                    ends = self._ends(self._watcher, changed)
                    found = [name for name in changed if any(map(_is_before, lows[name], ends[name]))]
                    waiting.quiet |= {name: cursors[name] for name in set(changed).difference(found)}
                    left = deadline - time.monotonic()
                    if found or left <= 0:
                        return found
                    pause = min(left, max(0.0, waiting.look_at - now))
            except BaseException:
                waiting.notices.drop()  # when it answers again, another server may be the right one
                waiting.look_at = 0.0
                raise

    def tombstones(self, namespace: str, *, after: str | None = None) -> dict[str, str]:
        shards = zip(self._shards(namespace), self._places("after", after), strict=True)
        marks = [(*mark, place) for place, (shard, low) in enumerate(shards) for mark in shard.tombstones(low)]
        return {session: self._name(place, number) for number, session, place in sorted(marks)}

    def namespaces(self, prefix: str = "", *, session: str | None = None) -> list[str]:
        names = sorted(self._client.members(f"{self.prefix}:namespaces", prefix))
        if session is None:
            return names
        place, courtesy = self._place(session), Courtesy()
        found: set[str] = set()
        for page in (names[at : at + _PAGE] for at in range(0, len(names), _PAGE)):
            shards = [(name, shard) for name in page for shard in self._shards(name, place)]
            held = self._client.commands(("HGET", f"{shard.tag}sessions", session) for _, shard in shards)
            found.update(name for (name, _), usage in zip(shards, held, strict=True) if usage is not None)
            courtesy.pause()
        return sorted(found)

    def erase_session(self, namespace: str, session: str, *, mark: bool = True) -> Erasure:
        place = self._place(session)
        shards = self._shards(namespace, place)
        self._check_log(namespace)
        tombstone = encode(EraseRecord(session)) if mark else b""
        erased = [shard.erase(session, tombstone) for shard in shards]
        marks = [marked for _, marked in erased if marked is not None]
        name = None if not marks else self._name(0 if place is None else place, max(marks))
        return Erasure(sum(removed for removed, _ in erased), True, name)

    def secret(self) -> bytes:
        key = f"{self.prefix}:secret"
        self.command("SET", key, secrets.token_bytes(32), "NX")
        secret: bytes = self.command("GET", key)
        return secret

    def usage(self) -> Usage:
        tags = [shard.tag for shard in self._all_shards()]
        held = self._client.commands(("HMGET", f"{tag}usage", "records", "bytes") for tag in tags)
        sessions = self._client.commands(("HLEN", f"{tag}sessions") for tag in tags)
        records, sizes = (sum(max(0, int(one[part] or 0)) for one in held) for part in (0, 1))
        return Usage(records, sizes + sum(sessions) * _SESSION_BYTES)

    def trim(self, retention: Retention) -> Trimmed:
        days, shards = retention.days, self._all_shards()
        self._expiry_ms = 0 if days is None else int((days + _EXPIRY_DAYS) * 86_400_000)
        doomed = self._client.commands(("EXISTS", f"{shard.tag}doomed") for shard in shards)
        if any(left and shard.sweep() for shard, left in zip(shards, doomed, strict=True)):
            return Trimmed(0, True)  # whoever erased a session did not live to end it
        cutoff = -1
        if days is not None:
            seconds, microseconds = map(int, self.command("TIME"))
            cutoff = max(0, int((seconds - days * 86_400) * 1000) + microseconds // 1000)
        held = Usage(0, 0) if retention.records is None and retention.bytes is None else self.usage()
        count = 0 if retention.records is None else held.records - retention.records
        size = 0 if retention.bytes is None else held.bytes - retention.bytes
        removed = self._trim_oldest(shards, cutoff, count, size)
        return Trimmed(removed, removed > 0)

    def _trim_oldest(self, shards: Sequence[RedisShard], cutoff: int, count: int, size: int) -> int:
        """Remove a slice of the oldest entries of all logs together. Return their number.

        cutoff: milliseconds up to which all go. count, size: how many entries and bytes have to go besides.
        """
        heads = self._client.commands(("XRANGE", f"{shard.tag}log", "-", "+", "COUNT", 1) for shard in shards)
        oldest = [(parsed(rows[0][0]), place) for place, rows in enumerate(heads) if rows]
        heapq.heapify(oldest)
        entries, room = _SLICE_ENTRIES, _SLICE_BYTES
        while oldest and entries > 0 and room > 0:
            (first, _), place = oldest[0]
            if first > cutoff and count <= 0 and size <= 0:
                break
            until = min((head for (head, _), _ in oldest[1:3]), default=None)  # there the next log's oldest entry is
            wanted, most = entries, room
            if first <= cutoff:
                until = cutoff if until is None else min(until, cutoff)
            else:
                wanted = entries if size > 0 else min(entries, count)
                most = room if count > 0 else min(room, size)
            went, freed = shards[place].trim(wanted, most, until)
            entries, room, count, size = entries - went, room - freed, count - went, size - freed
            rows = self.command("XRANGE", f"{shards[place].tag}log", "-", "+", "COUNT", 1) if went else []
            if rows:
                heapq.heapreplace(oldest, (parsed(rows[0][0]), place))
            else:
                heapq.heappop(oldest)
        return _SLICE_ENTRIES - entries

    def losses(self) -> Losses:
        return self._losses

    def ping(self) -> None:
        self.command("PING")

    def close(self) -> None:
        self._client.close()
        self._waiting.notices.drop()
        self._watcher.close()

    def command(self, *command: str | bytes | int) -> Any:
        """Send one command to the server, and return its answer."""
        return self._client.command(*command)

    def _note(self, namespace: str, shard: RedisShard, answer: Appended, part: Sequence[NewEntry]) -> None:
        """Compare what a shard had before a batch with what it has acknowledged, and name what it has lost."""
        held = self._acknowledged.setdefault(shard.tag, _Acknowledged(born=answer.born))
        self._acknowledged.move_to_end(shard.tag)
        if len(self._acknowledged) > _REMEMBERED:
            self._acknowledged.popitem(last=False)
        if answer.born != held.born:
            self._name_lost(namespace, shard.tag, 0, held)
        elif answer.before < held.batch and not (answer.before == 0 and self._rested(shard, held)):
            self._name_lost(namespace, shard.tag, answer.before, held)
        held.batch, held.at, held.born = self._number, time.monotonic(), answer.born
        held.last = (answer.first[0], answer.first[1] + len(part) - 1)
        held.records += len(part)
        self._batches.append((shard.tag, self._number, [entry.name for entry in part]))

    def _rested(self, shard: RedisShard, held: _Acknowledged) -> bool:
        """Return whether the server forgot only the number of the last batch, after its time or by eviction."""
        return time.monotonic() - held.at > WRITER_SECONDS / 2 or shard.has(held.last)

    def _name_lost(self, namespace: str, tag: str, before: int, held: _Acknowledged) -> None:
        """Count and log the records that a shard had acknowledged behind batch ``before``, its last one."""
        lost = [name for at, batch, names in self._batches if at == tag and batch > before for name in names]
        count = held.records if before == 0 else len(lost)
        held.records -= count
        self._batches = deque((one for one in self._batches if one[0] != tag or one[1] <= before), _REMEMBERED)
        self._losses = replace(self._losses, lost=self._losses.lost + count)
        names = ", ".join(filter(None, lost[-_NAMED:])) or "without names"
        logger.warning(
            "agentspec: the store has lost %d records that it had acknowledged, of log %s; the last are %s",
            *(count, namespace, names),
        )

    def _miss(self, count: int) -> None:
        """Count entries that are referred to, but which the server has evicted."""
        if count and not self._losses.missing:
            logger.warning("agentspec: Redis evicts stored records; set its maxmemory-policy to noeviction")
        self._losses = replace(self._losses, missing=self._losses.missing + count)

    def _ends(self, client: RedisClient, namespaces: Sequence[str]) -> dict[str, list[Id]]:
        """Return the ids of the newest entries of logs, for each shard."""
        tags = [shard.tag for namespace in namespaces for shard in self._shards(namespace)]
        rows = client.commands(("XREVRANGE", f"{tag}log", "+", "-", "COUNT", 1) for tag in tags) if tags else []
        ends = iter([parsed(row[0][0]) if row else START for row in rows])
        return {namespace: [next(ends) for _ in range(self._shard_count)] for namespace in namespaces}

    def _alone(self, namespace: str, place: int, read: Iterator[tuple[Id, Entry]]) -> Iterator[Entry]:
        """Yield the entries of one shard."""
        self._check_log(namespace)
        for number, entry in read:
            yield entry if self._shard_count == 1 else replace(entry, sequence=self._name(place, number))

    def _merged(
        self, namespace: str, reads: Sequence[Iterator[tuple[Id, Entry]]], lows: list[Id], newest: int | None
    ) -> Iterator[Entry]:
        """Yield the entries of all shards in the order of their ids. The cursors say how far each was read."""
        self._check_log(namespace)

        def numbered(place: int) -> Iterator[tuple[Id, int, Entry]]:
            for number, entry in reads[place]:
                yield number, place, entry

        def merged() -> Iterator[Entry]:
            for number, place, entry in heapq.merge(*map(numbered, range(len(reads))), key=lambda found: found[:2]):
                lows[place] = number
                yield replace(entry, sequence=self._cursor(place, number, lows))

        yield from merged() if newest is None else deque(merged(), newest)

    def _check_log(self, namespace: str) -> None:
        """Enter the namespace in the list of all.

        Raises StoreVersionError if an older release has written its log, StoreError for another number of shards.
        """
        if namespace in self._known:
            return
        if not self._shards_checked:
            self._check_shards()
        if not self._converting and self.command("EXISTS", f"{{{self.prefix}:{namespace}}}:log"):
            raise StoreVersionError(
                f"{self._client.shown}: an older release wrote the log {namespace} here;"
                f" convert it with: agentspec sessions convert {self._client.shown} --model MODEL"
            )
        self.command("SADD", f"{self.prefix}:namespaces", namespace)
        self._known.add(namespace)

    def _check_shards(self) -> None:
        key = f"{self.prefix}:shards"
        unmarked = self.command("GET", key) is None and self.command("EXISTS", f"{self.prefix}:namespaces")
        self.command("SET", key, 1 if unmarked else self._shard_count, "NX")
        held = int(self.command("GET", key))
        if held != self._shard_count:
            raise StoreError(
                f"{self._client.shown}: the logs under the prefix {self.prefix!r} have {held} shards, not"
                f" {self._shard_count}; put shards={held} into the store URL of every server, or take another prefix"
            )
        self._shards_checked = True

    def _shards(self, namespace: str, place: int | None = None) -> list[RedisShard]:
        """Return the shards of a log, or the one at a place."""
        name, channel = f"{self.prefix}:{check_namespace(namespace)}", self._channel(namespace)
        places = range(self._shard_count) if place is None else [place]
        names = [name] if self._shard_count == 1 else [f"{name}:{place}" for place in places]
        return [RedisShard(self._client, f"{{{name}}}:3:", channel, self._miss) for name in names]

    def _all_shards(self) -> list[RedisShard]:
        return [shard for namespace in self.namespaces() for shard in self._shards(namespace)]

    def _place(self, session: str) -> int | None:
        """Return the place of a session's shard. None: entries without a session are in all."""
        if self._shard_count == 1:
            return 0
        return zlib.crc32(session.encode("utf-8", "surrogatepass")) % self._shard_count if session else None

    def _channel(self, namespace: str) -> str:
        return f"{self.prefix}:{namespace}"

    def _name(self, place: int, number: Id) -> str:
        """Return the cursor of an entry alone."""
        return cursor(number) if self._shard_count == 1 else f"{cursor(number)}.{place:02d}"

    def _cursor(self, place: int, number: Id, reached: Sequence[Id]) -> str:
        """Return the cursor of an entry, with the ids up to which each shard was read."""
        several = "" if self._shard_count == 1 else "@" + ",".join(wire(one).decode() for one in reached)
        return self._name(place, number) + several

    def _places(self, name: str, at: str | None) -> list[Id]:
        """Return the id that a cursor stands for in each shard. Raises InvalidInputError, naming the argument."""
        own, several, rest = (at or "").partition("@")
        if not several:
            return [id_of(name, own) if own else START] * self._shard_count
        places = [id_of(name, one) for one in rest.split(",")]
        if len(places) != self._shard_count:
            raise bad_cursor(name, at or "")
        return places


def _is_before(low: Id, end: Id) -> bool:
    return low < end
