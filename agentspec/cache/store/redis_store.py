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
    prefix:secret, prefix:shards     the store's secret; the number of shards
    prefix:namespace                 channel on which each append and erasure is published

and redis_index.py describes the index of all logs.

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
from contextlib import suppress
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
from agentspec.cache.store.redis_index import LogIndex
from agentspec.cache.store.redis_losses import LossWatch
from agentspec.cache.store.redis_shard import START, Id, RedisShard, cursor, id_of, parsed, wire
from agentspec.cache.store.redis_trimming import IDLE_MS, Trimming
from agentspec.errors import StoreError, StoreUnavailableError, StoreVersionError

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # between two looks at all logs that are waited for, in case that a notice was lost
_KNOWN = 65_536  # logs of which this process remembers that it has checked and entered them
_UNSURE = 4096  # logs of which it remembers an append that failed
_PAGE = 64  # logs that are asked at once


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
        self._index = LogIndex(self._client, prefix)
        self._watch = LossWatch()
        self._trimming = Trimming(self._client, self._index, self._shards)
        self._writer = uuid.uuid4().hex
        self._number = 0
        self._append_lock = threading.Lock()
        self._unsure: OrderedDict[str, tuple[int, int]] = OrderedDict()  # by log: number and hash of a failed append
        self._known: set[str] = set()  # namespaces that hold no log of an older release
        self._entered: set[str] = set()  # namespaces that are in the index
        self._shards_checked = False

    def part(self, namespace: str) -> str:
        return self._part(self._client, namespace)

    def append(self, namespace: str, entries: Sequence[NewEntry], *, expect: str | None = None) -> list[str]:
        shards, batch = self._shards(namespace), list(entries)
        expected = None if expect is None else expected_session(batch)
        newest = b"*" if expect is None else wire(id_of("expect", expect)) if expect else b""
        if not batch:
            return []
        sequences = [""] * len(batch)
        with self._append_lock:
            self._check_log(namespace)
            self._enter(namespace)
            number = self._number_of(namespace, hash((tuple(batch), expect)))
            parts: dict[int, list[int]] = {}
            for index, entry in enumerate(batch):
                place = self._place(entry.session)
                parts.setdefault(number % len(shards) if place is None else place, []).append(index)
            for place, indices in parts.items():
                part = [batch[index] for index in indices]
                answer = shards[place].append(self._writer, number, part, self._trimming.expiry_ms, expected, newest)
                if answer is None:
                    del self._unsure[namespace]
                    raise conflict(expected or "")
                if parsed(answer.born) == answer.first:  # the log is new, or the server has lost all it had
                    self._entered.discard(namespace)
                    self._enter(namespace)
                self._watch.note(namespace, shards[place], number, [entry.name for entry in part], answer)
                self._index.note(shards[place].name, answer.state, new=parsed(answer.born) == answer.first)
                for offset, index in enumerate(indices):
                    sequences[index] = self._name(place, (answer.first[0], answer.first[1] + offset))
            del self._unsure[namespace]
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
                    ends = self._reachable_ends(changed)
                    found = [name for name in ends if any(map(_is_before, lows[name], ends[name]))]
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
        names = self._index.names(prefix)
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
        erased = []
        for shard in shards:
            self._index.doom(shard.name)
            erased.append(shard.erase(session, tombstone))
            self._index.spare(shard.name)
            self._index.note(shard.name, shard.state(IDLE_MS)[0])
        marks = [marked for _, marked in erased if marked is not None]
        name = None if not marks else self._name(0 if place is None else place, max(marks))
        return Erasure(sum(removed for removed, _ in erased), True, name)

    def secret(self) -> bytes:
        key = f"{self.prefix}:secret"
        self.command("SET", key, secrets.token_bytes(32), "NX")
        secret: bytes = self.command("GET", key)
        return secret

    def usage(self) -> Usage:
        return self._trimming.usage()

    def trim(self, retention: Retention) -> Trimmed:
        return self._trimming.trim(retention)

    def losses(self) -> Losses:
        return self._watch.losses

    def ping(self) -> None:
        self.command("PING")

    def close(self) -> None:
        with suppress(StoreError):
            self._index.flush()
        self._client.close()
        self._waiting.notices.drop()
        self._watcher.close()

    def command(self, *command: str | bytes | int) -> Any:
        """Send one command to the server, and return its answer."""
        return self._client.command(*command)

    def _number_of(self, namespace: str, batch: int) -> int:
        """Return the number of an append, whose hash is ``batch``: the one it had if it is tried again.

        A batch whose answer was lost keeps its number, so that the server recognises it.
        """
        held = self._unsure.pop(namespace, None)
        if held is None or held[1] != batch:
            self._number += 1
            held = self._number, batch
        self._unsure[namespace] = held
        if len(self._unsure) > _UNSURE:
            self._unsure.popitem(last=False)
        return held[0]

    def _ends(self, client: RedisClient, namespaces: Sequence[str]) -> dict[str, list[Id]]:
        """Return the ids of the newest entries of logs, for each shard."""
        tags = [shard.tag for namespace in namespaces for shard in self._shards(namespace)]
        rows = client.commands(("XREVRANGE", f"{tag}log", "+", "-", "COUNT", 1) for tag in tags) if tags else []
        ends = iter([parsed(row[0][0]) if row else START for row in rows])
        return {namespace: [next(ends) for _ in range(self._shard_count)] for namespace in namespaces}

    def _reachable_ends(self, namespaces: Sequence[str]) -> dict[str, list[Id]]:
        """Return the newest ids of those logs whose node answers. Raise StoreUnavailableError if none does."""
        parts: dict[str, list[str]] = {}
        for namespace in namespaces:
            parts.setdefault(self._part(self._watcher, namespace), []).append(namespace)
        ends: dict[str, list[Id]] = {}
        away = None
        for names in parts.values():
            try:
                ends |= self._ends(self._watcher, names)
            except StoreUnavailableError as error:
                away = error
        if away is not None and not ends:
            raise away
        return ends

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

    def _part(self, client: RedisClient, namespace: str) -> str:
        return ",".join(sorted({client.part(shard.tag) for shard in self._shards(namespace)}))

    def _check_log(self, namespace: str) -> None:
        """Raise StoreVersionError if an older release wrote the log, StoreError for another number of shards."""
        if namespace in self._known:
            return
        if not self._shards_checked:
            self._check_shards()
        if not self._converting and self.command("EXISTS", f"{{{self.prefix}:{namespace}}}:log"):
            raise StoreVersionError(
                f"{self._client.shown}: an older release wrote the log {namespace} here;"
                f" convert it with: agentspec sessions convert {self._client.shown} --model MODEL"
            )
        _remember(self._known, namespace)

    def _enter(self, namespace: str) -> None:
        """Enter a log in the list of all. While the list's node is away, that is tried again with each append."""
        if namespace in self._entered:
            return
        with suppress(StoreUnavailableError):
            self.command("SET", f"{self.prefix}:shards", self._shard_count, "NX")
            self._index.enter(namespace)
            _remember(self._entered, namespace)

    def _check_shards(self) -> None:
        key = f"{self.prefix}:shards"
        unmarked = self.command("GET", key) is None and not self._index.is_new()
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
        return [
            RedisShard(self._client, f"{namespace}/{place}", f"{{{name}}}:3:", channel, self._watch.miss)
            for place, name in zip(places, names, strict=True)
        ]

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


def _remember(names: set[str], name: str) -> None:
    if len(names) >= _KNOWN:
        names.clear()
    names.add(name)


def _is_before(low: Id, end: Id) -> bool:
    return low < end
