"""Store records on a Redis that several replicas share.

All keys of a namespace have one hash tag, so that a cluster keeps them on one node::

    {prefix:namespace}:3:log         stream, one reference an entry: s = session, b = bytes, g = group; t = tombstone
    {prefix:namespace}:3:s:SESSION   list of "id payload"; ids as in the log
    {prefix:namespace}:3:g:GROUP     list of references: "id bytes session"
    {prefix:namespace}:3:sessions    hash, session: "entries bytes last-milliseconds"
    {prefix:namespace}:3:usage       hash: records, bytes, last = id of the newest entry, born = first id of all,
                                     trimmed = id of the last entry that retention removed, 0-0: none,
                                     expiry = milliseconds after which all payloads expire, 0: never, '': mixed
    {prefix:namespace}:3:tombstones  hash, session: id of its tombstone
    {prefix:namespace}:3:d:ID        entries of an erased session, still to be removed; the set :3:doomed has these keys
    {prefix:namespace}:3:w:WRITER    number and first id of the last batch that this writer has appended; expires
    prefix:secret, prefix:secret-id  the store's secret, and the id of the one in use (secret.py)
    prefix:shards                    the number of shards
    prefix:namespace                 channel on which each append and erasure is published

and index.py describes the index of all logs.

With ``shards`` above 1 a namespace has so many sets of these keys, with the hash tags {prefix:namespace:0} and so on.
Each session lies in one of them. A reader merges them by id; its cursors say how far it has read each.

Other replicas follow the log's order. Each session's payloads lie in a key of their own, so that erasing a session
frees its memory. The server's append-only file holds them until the server rewrites it (BGREWRITEAOF). One script does
an append, so it is atomic within a shard. The script recognises a batch that is sent again because its answer was lost.
It also returns which batch of this writer the server had before. If acknowledged batches are missing, the server lost
them, and LossWatch counts and logs that. Redis 7.0, killed while it writes a batch to its append-only file, may bring
back the first records of that batch at its second start from then on, beside those that were sent again. Readers ignore
a record that they already have.

The server's settings decide how durable a record is (``appendonly yes`` survives its kill -9, with ``appendfsync
everysec`` only while the disk syncs fast) and whether the server evicts keys. It should not (``maxmemory-policy
noeviction``), because the sizes are wrong afterwards. Only sessions, groups and writers expire, so that the volatile
policies spare logs and tombstones.
"""

import heapq
import logging
import math
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from agentspec.cache.store import forks
from agentspec.cache.store.background.courtesy import Courtesy
from agentspec.cache.store.base import (
    Entry,
    Erasure,
    History,
    Losses,
    NewEntry,
    Retention,
    SessionUsage,
    Trimmed,
    Usage,
    check_read,
    conflict,
    expected_session,
)
from agentspec.cache.store.codec import encode
from agentspec.cache.store.records import EraseRecord
from agentspec.cache.store.redis.client import RedisAddress, RedisClient
from agentspec.cache.store.redis.index import LogIndex
from agentspec.cache.store.redis.layout import Layout
from agentspec.cache.store.redis.losses import LossWatch
from agentspec.cache.store.redis.secret import RedisSecret
from agentspec.cache.store.redis.shard import START, Found, Id, RedisShard, id_of, parsed, wire
from agentspec.cache.store.redis.trimming import Trimming
from agentspec.cache.store.redis.waiting import Waiting
from agentspec.errors import StoreError, StoreUnavailableError, StoreVersionError

logger = logging.getLogger(__name__)

_KNOWN = 65_536  # most logs that this process remembers to have checked, and to have entered in the index
_ENTERED_SECONDS = 60.0  # how long it trusts that the index has a log
_UNSURE = 4096  # most logs of which it remembers an append that failed
_PAGE = 64  # logs that are looked into in one go


class RedisStore:
    """Implement Store on a Redis. The first call connects, so the server may start later.

    shards: number of hash tags over which a namespace's sessions are spread; the same in all processes that use the
    prefix. converting: whether to write beside a log of an older release, which is refused otherwise.
    """

    shared = True
    held_bytes = 0

    def __init__(
        self, address: RedisAddress, *, prefix: str = "agentspec", shards: int = 1, converting: bool = False
    ) -> None:
        self.prefix = prefix
        self._address = address
        self._layout = Layout(prefix, shards)
        self._converting = converting
        self._begin()
        forks.notify(self)

    def _begin(self) -> None:
        """Begin as a writer that the server does not know yet."""
        address, prefix = self._address, self.prefix
        self._client = RedisClient(address)
        # not patient, because a follower must know soon that the server is away
        self._waiting = Waiting(RedisClient(address, patient=False), self._layout)
        self._index = LogIndex(self._client, prefix)
        self._watch = LossWatch()
        self._trimming = Trimming(self._client, self._index, self._shards)
        self._writer = uuid.uuid4().hex
        self._number = 0
        self._append_lock = threading.Lock()
        self._unsure: OrderedDict[str, tuple[int, int]] = OrderedDict()  # by log: number and hash of a failed append
        self._checked: set[str] = set()  # namespaces that hold no log of an older release
        self._entered: dict[str, float] = {}  # by namespace in the index: when to look whether it still is
        self._not_entered = False  # whether the latest try failed, which is logged once
        self._shards_checked = False
        self._secret = RedisSecret(self._client, prefix)

    def before_fork(self) -> None:
        pass  # the forked process takes nothing over

    def after_fork(self, *, in_child: bool) -> None:
        if in_child and not self._client.closed:
            expiry_ms, secret = self._trimming.expiry_ms, self._secret
            self._begin()
            self._trimming.expiry_ms = expiry_ms
            self._secret.inherit(secret)

    def part(self, namespace: str) -> str:
        return self._layout.part(self._client, namespace)

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
                place = self._layout.place_of(entry.session)
                parts.setdefault(number % len(shards) if place is None else place, []).append(index)
            for place, indices in parts.items():
                part = [batch[index] for index in indices]
                answer = shards[place].append(self._writer, number, part, self._trimming.expiry_ms, expected, newest)
                if answer is None:
                    del self._unsure[namespace]
                    raise conflict(expected or "")
                is_new = parsed(answer.born) == answer.first  # also if the server has lost all that it had
                if is_new:
                    self._entered.pop(namespace, None)
                    self._enter(namespace)
                self._watch.note(namespace, shards[place], number, [entry.name for entry in part], answer)
                owner = next((entry.owner for entry in part if entry.owner), "")
                self._index.note(shards[place].name, answer.state._replace(owner=owner), new=is_new)
                for offset, index in enumerate(indices):
                    sequences[index] = self._layout.name(place, (answer.first[0], answer.first[1] + offset))
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
        place = None if session is None else self._layout.place_of(session)
        shards, lows = self._shards(namespace, place), self._layout.read_cursor("after", after)
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
                other = found.get(session, SessionUsage(session, 0, 0, 0.0))  # "" is in all shards
                records, size = usage.records + other.records, usage.bytes + other.bytes
                found[session] = SessionUsage(session, records, size, max(usage.used, other.used))
        return [found[session] for session in sorted(found)]

    def newest(self, namespace: str) -> str:
        (ends,) = self._layout.ends(self._client, [namespace]).values()
        shards = zip(self._shards(namespace), ends, strict=True)
        ends = [shard.last() if end == START else end for shard, end in shards]  # `history` calls START "trimmed"
        last = max(ends)
        return "" if last == START else self._layout.cursor(ends.index(last), last, ends)

    def wait(self, cursors: Mapping[str, str], timeout: float) -> list[str]:
        return self._waiting.wait(cursors, timeout)

    def tombstones(self, namespace: str, *, after: str | None = None) -> dict[str, str]:
        shards = zip(self._shards(namespace), self._layout.read_cursor("after", after), strict=True)
        found = [(place, shard.tombstones(low)) for place, (shard, low) in enumerate(shards)]
        marks = [(number, session, place) for place, of in found for session, number in of.items()]
        return {session: self._layout.name(place, number) for number, session, place in sorted(marks)}

    def history(self, namespace: str, after: str) -> History:
        shards = zip(self._shards(namespace), self._layout.read_cursor("after", after), strict=True)
        found = {shard.history(low) for shard, low in shards}
        return "trimmed" if "trimmed" in found else "lost" if "lost" in found else "whole"

    def undone_erasures(self, namespace: str, erased: Mapping[str, str]) -> list[str]:
        marks: dict[int | None, dict[str, Id]] = {}
        for session, name in erased.items():
            marks.setdefault(self._layout.place_of(session), {})[session] = id_of("erased", name)
        shards = [(shard, of) for place, of in marks.items() for shard in self._shards(namespace, place)]
        return [session for shard, of in shards for session in shard.undone_erasures(of)]

    def namespaces(self, prefix: str = "", *, session: str | None = None) -> list[str]:
        names = self._index.names(prefix)
        if session is None:
            return names
        place, courtesy = self._layout.place_of(session), Courtesy()
        found: set[str] = set()
        for page in (names[at : at + _PAGE] for at in range(0, len(names), _PAGE)):
            shards = [(name, shard) for name in page for shard in self._shards(name, place)]
            commands = [("HGET", f"{shard.tag}sessions", session) for _, shard in shards]
            try:
                held = self._client.commands(commands)
            except StoreUnavailableError:
                raise
            except StoreError:  # one log is at fault
                held = [self._answer(command) for command in commands]
            found.update(name for (name, _), usage in zip(shards, held, strict=True) if usage is not None)
            courtesy.pause()
        return sorted(found)

    def erase_session(self, namespace: str, session: str, *, mark: bool = True) -> Erasure:
        place = self._layout.place_of(session)
        shards = self._shards(namespace, place)
        self._check_log(namespace)
        tombstone = encode(EraseRecord(session)) if mark else b""
        erased = []
        for shard in shards:
            self._index.doom(shard.name)
            erased.append(shard.erase(session, tombstone))
            self._index.spare(shard.name)
            self._index.note(shard.name, shard.look().state)
        marks = [marked for _, marked in erased if marked is not None]
        name = None if not marks else self._layout.name(0 if place is None else place, max(marks))
        return Erasure(sum(removed for removed, _ in erased), True, name)

    def secret(self) -> bytes:
        return self._secret.get()

    def keep_secret(self, secret: bytes) -> None:
        self._secret.keep(secret)

    def swap_secret_id(self, secret_id: str) -> str | None:
        return self._secret.swap_id(secret_id)

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
        self._waiting.close()

    def command(self, *command: str | bytes | int) -> Any:
        """Send one command to the server, and return its answer."""
        return self._client.command(*command)

    def keys(self, pattern: str) -> set[str]:
        """Return the keys that match a pattern, on all nodes of a Cluster."""
        return self._client.keys(pattern)

    def keys_of(self, namespace: str) -> set[str]:
        """Return the keys of all shards of a log."""
        tags = tuple(self._layout.tags(namespace))
        return {key for key in self.keys(f"{{{self.prefix}:{namespace}*") if key.startswith(tags)}

    def _answer(self, command: Sequence[str]) -> Any:
        """Return a command's answer; None if the server refuses it because another program owns its key."""
        try:
            return self.command(*command)
        except StoreUnavailableError:
            raise
        except StoreError as error:
            logger.warning("agentspec: a log is passed over: %s", error)
            return None

    def _number_of(self, namespace: str, batch: int) -> int:
        """Return the number of an append. batch: hash of its entries.

        An append that failed and is tried again keeps its number, so that the server recognises it if only its answer
        was lost.
        """
        held = self._unsure.pop(namespace, None)
        if held is None or held[1] != batch:
            self._number += 1
            held = self._number, batch
        self._unsure[namespace] = held
        if len(self._unsure) > _UNSURE:
            self._unsure.popitem(last=False)
        return held[0]

    def _alone(self, namespace: str, place: int, read: Iterator[Found]) -> Iterator[Entry]:
        """Yield the entries of one shard."""
        self._check_log(namespace)
        for number, entry, _ in read:
            yield entry if self._layout.shards == 1 else replace(entry, sequence=self._layout.name(place, number))

    def _merged(
        self, namespace: str, reads: Sequence[Iterator[Found]], lows: list[Id], newest: int | None
    ) -> Iterator[Entry]:
        """Yield the entries of all shards in the order of their ids. The cursors say how far each was read."""
        self._check_log(namespace)

        def numbered(place: int) -> Iterator[tuple[Id, int, Found]]:
            for found in reads[place]:
                yield found.id, place, found

        left: deque[tuple[Entry, bool]] = deque()  # the newest, and whether each is a tombstone
        counted, cut = 0, False
        for number, place, found in heapq.merge(*map(numbered, range(len(reads))), key=lambda found: found[:2]):
            lows[place] = number
            entry = replace(found.entry, sequence=self._layout.cursor(place, number, lows))
            if newest is None:
                yield entry
                continue
            left.append((entry, found.is_tombstone))
            counted += not found.is_tombstone
            while counted > newest or (cut and left and left[0][1]):
                counted, cut = counted - (not left.popleft()[1]), True
        yield from (entry for entry, _ in left)

    def _check_log(self, namespace: str) -> None:
        """Raise StoreVersionError if an older release wrote the log, StoreError for another number of shards."""
        if namespace in self._checked:
            return
        if not self._shards_checked:
            key = f"{self.prefix}:shards"
            if self.command("GET", key) is None:
                is_new = self._index.is_new()
                try:
                    self.command("SET", key, self._layout.shards if is_new else 1, "NX")
                except StoreUnavailableError:
                    if not is_new:
                        raise
                    return  # it is full, or a replica, and has nothing yet: there is nothing to read
            self.check_shards()
            self._shards_checked = True
        if not self._converting and self.command("EXISTS", f"{{{self.prefix}:{namespace}}}:log"):
            raise StoreVersionError(
                f"{self._client.shown}: an older release wrote the log {namespace} here;"
                f" convert it with: agentspec sessions convert {self._client.shown} --model MODEL"
            )
        if len(self._checked) >= _KNOWN:
            self._checked.clear()
        self._checked.add(namespace)

    def _enter(self, namespace: str) -> None:
        """Add a log to the list of all logs. If the list cannot be written, each append tries it again.

        Do so once a minute, because the server may lose the list or the secret, and not the log.
        """
        if time.monotonic() < self._entered.get(namespace, -math.inf):
            return
        try:
            self.command("SET", f"{self.prefix}:shards", self._layout.shards, "NX")
            self._index.enter(namespace)
            self._secret.restore()
        except StoreUnavailableError:  # the append says so, too
            return
        except StoreError as error:
            if not self._not_entered:
                logger.warning("agentspec: turns are stored, but the list of logs lacks theirs: %s", error)
            self._not_entered = True
            return
        self._not_entered = False
        if len(self._entered) >= _KNOWN:
            self._entered.clear()
        self._entered[namespace] = time.monotonic() + _ENTERED_SECONDS

    def check_shards(self) -> None:
        """Raise StoreError if the logs have another number of shards. Does nothing if the store has no number yet."""
        held = self.command("GET", f"{self.prefix}:shards")
        if held is not None and int(held) != self._layout.shards:
            raise StoreError(
                f"{self._client.shown}: the logs under the prefix {self.prefix!r} have {int(held)} shards, not"
                f" {self._layout.shards}; put shards={int(held)} into the store URL of every server, or take another"
                " prefix"
            )

    def _shards(self, namespace: str, place: int | None = None) -> list[RedisShard]:
        """Return the shards of a log, or the one at a place."""
        places, tags = self._layout.places(place), self._layout.tags(namespace, place)
        channel = self._layout.channel(namespace)
        return [
            RedisShard(self._client, f"{namespace}/{place}", tag, channel, self._watch.miss)
            for place, tag in zip(places, tags, strict=True)
        ]
