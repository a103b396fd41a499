"""Keep a Redis store within its limits, by the index of all logs."""

import heapq
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from agentspec.cache.store.background.courtesy import Courtesy
from agentspec.cache.store.base import SLICE_BYTES, SLICE_ENTRIES, Retention, Trimmed, Usage
from agentspec.cache.store.redis.client import RedisClient
from agentspec.cache.store.redis.index import Allowance, LogIndex, Totals
from agentspec.cache.store.redis.shard import START, Id, Look, RedisShard
from agentspec.errors import StoreError, StoreUnavailableError

logger = logging.getLogger(__name__)

_SESSION_BYTES = 400  # bytes that the server needs for a session beside its entries, measured on Redis 7
_MOST_LISTED = 65_536  # most shards of which a process remembers that it has renewed them
_EXPIRY_DAYS = 1.0  # payloads expire so long after the retention's age, in case no process is left to trim them


class _Share(NamedTuple):
    """Hold the most entries and bytes to remove from one log, and the time (in milliseconds) of the last; None: any."""

    entries: int
    bytes: int
    until: int | None


@dataclass(slots=True)
class _Slice:
    """Count the entries that one slice of trimming has removed, and their bytes."""

    entries: int = 0
    bytes: int = 0

    def has_room(self) -> bool:
        """Return whether the slice may remove more."""
        return self.entries < SLICE_ENTRIES and self.bytes < SLICE_BYTES

    def rest(self, until: int | None) -> _Share:
        """Return what the slice may still remove."""
        return _Share(SLICE_ENTRIES - self.entries, SLICE_BYTES - self.bytes, until)


@dataclass(frozen=True, slots=True)
class _AgeLimit:
    """Remove all entries up to a time."""

    cutoff: int

    def is_exceeded(self, piece: _Slice, oldest: int) -> bool:
        """Return whether the oldest entry of all, of this time, is to be removed."""
        return oldest <= self.cutoff

    def share(self, piece: _Slice, next_log: int | None) -> _Share:
        """Return what to remove from the log with the oldest entry.

        next_log: time of the oldest entry in the other logs; None: there is none.
        """
        return piece.rest(self.cutoff if next_log is None else min(next_log, self.cutoff))


@dataclass(frozen=True, slots=True)
class _SizeLimit:
    """Remove so many entries, and so many bytes, including those that the slice has removed for their age."""

    entries: int
    bytes: int

    def is_exceeded(self, piece: _Slice, oldest: int = 0) -> bool:
        """Return whether entries of any time are to be removed."""
        return piece.entries < self.entries or piece.bytes < self.bytes

    def share(self, piece: _Slice, next_log: int | None) -> _Share:
        """Return what to remove from the log with the oldest entry, as for `_AgeLimit`."""
        entries, size, until = piece.rest(next_log)
        if piece.bytes >= self.bytes:
            entries = min(entries, self.entries - piece.entries)
        if piece.entries >= self.entries:
            size = min(size, self.bytes - piece.bytes)
        return _Share(entries, size, until)


class _Renewals:
    """List the shards whose payloads were stored under another retention, and so expire too early or too late.

    Under one retention a process lists a shard once, so that servers with different ones do not undo each other's work
    for ever.
    """

    def __init__(self) -> None:
        self._expiry_ms: int | None = None
        self._places: dict[str, Id] = {}  # by shard: how far it is renewed
        self._listed: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._places)

    def begin(self, expiry_ms: int) -> None:
        """Begin anew if payloads now expire after another time."""
        if expiry_ms != self._expiry_ms:
            self._expiry_ms, self._places, self._listed = expiry_ms, {}, set()

    def note(self, name: str, look: Look) -> None:
        """List a shard if its payloads expire after another time."""
        if look.gone or look.expiry_ms == self._expiry_ms or name in self._listed:
            return
        if len(self._listed) >= _MOST_LISTED:
            self._listed = set(self._places)
        self._listed.add(name)
        self._places[name] = START

    def next(self) -> tuple[str, Id]:
        """Return a listed shard, and how far it is renewed."""
        return next(iter(self._places.items()))

    def move(self, name: str, place: Id | None) -> None:
        """Note how far a shard is renewed. None: as far as it can be."""
        del self._places[name]
        if place is not None:
            self._places[name] = place  # behind the others

    def drop(self, name: str) -> None:
        """Take a shard off the list, until it is noted again."""
        del self._places[name]
        self._listed.discard(name)


class Trimming:
    """Remove the oldest entries of all logs, a slice at a time.

    shards: returns the shards of a log, or the one at a place. expiry_ms: time after which payloads expire, 0: never.
    """

    def __init__(
        self, client: RedisClient, index: LogIndex, shards: Callable[[str, int | None], list[RedisShard]]
    ) -> None:
        self.expiry_ms = 0
        self._client, self._index, self._shards = client, index, shards
        self._renewals = _Renewals()

    def usage(self) -> Usage:
        """Return the records and bytes of all logs together."""
        return _usage(self._index.totals())

    def trim(self, retention: Retention) -> Trimmed:
        """Remove a slice, as Store.trim does."""
        days = retention.days
        self.expiry_ms = 0 if days is None else int((days + _EXPIRY_DAYS) * 86_400_000)
        unended: StoreUnavailableError | None = None
        try:
            if self._sweep():
                return Trimmed(0, True)
        except StoreUnavailableError as error:  # perhaps only one node is away, so the logs of the others are trimmed
            unended = error
        self._renewals.begin(self.expiry_ms)
        self._audit()
        self._renew()
        age = None
        if days is not None:
            seconds, microseconds = map(int, self._client.command("TIME"))
            age = _AgeLimit(max(0, int((seconds - days * 86_400) * 1000) + microseconds // 1000))
        count = size = 0
        if retention.records is not None or retention.bytes is not None:
            held = self._index.totals()
            if retention.records is not None:
                count = held.records - min(held.tombstones, retention.records) - retention.records
            if retention.bytes is not None:
                size = _usage(held).bytes - retention.bytes
        removed = self._trim_oldest(age, _SizeLimit(count, size))
        if unended is not None and not removed:
            raise unended
        return Trimmed(removed, removed > 0 or bool(self._renewals))

    def _sweep(self) -> bool:
        """Continue an erasure that was cut off, if there is one. Return whether it had entries left to remove."""
        doomed = self._index.doomed()
        if doomed is None:
            return False
        shard = self._shard(doomed)
        try:
            left = shard.sweep() > 0
            state = shard.look().state
        except StoreUnavailableError:
            raise
        except StoreError as error:  # of this shard
            logger.debug("agentspec: an erasure could not be ended: %s", error)
            return False
        if left:
            self._index.note(shard.name, state)
        else:
            self._index.spare(doomed)
        return left

    def _audit(self) -> None:
        """Update the index for a page of logs, and remove logs from it that have long been empty.

        The call also notes erasures that were cut off. Their first note is lost if another process looked for entries
        to remove before the erasure began.
        """
        courtesy = Courtesy()
        for namespace in self._index.to_audit():
            try:
                found = [(shard.name, shard.look()) for shard in self._shards(namespace, None)]
                for name, look in found:
                    self._index.note(name, look.state)
                    if look.doomed:
                        self._index.doom(name)
                    self._renewals.note(name, look)
                if all(look.gone for _, look in found):
                    self._index.remove(namespace)
                    if not all(shard.look().gone for shard in self._shards(namespace, None)):
                        self._index.enter(namespace)  # another process has appended to it meanwhile
            except StoreError as error:  # only one node may be away, or another program own this log's keys
                logger.debug("agentspec: a log could not be looked at: %s", error)
            courtesy.pause()

    def _renew(self) -> None:
        """Let a page of payloads expire as the present retention wants it, if some were stored under another one."""
        if not self._renewals:
            return
        name, place = self._renewals.next()
        try:
            self._renewals.move(name, self._shard(name).renew(self.expiry_ms, place))
        except StoreError as error:  # only one node may be away; the next audit of the log lists it again
            self._renewals.drop(name)
            logger.debug("agentspec: the expiry of a log could not be renewed: %s", error)

    def _trim_oldest(self, age: _AgeLimit | None, size: _SizeLimit) -> int:
        """Remove the entries that are too old, and then the oldest of the larger logs. Return how many were removed.

        Logs on a node that does not answer stay for now.
        """
        piece, away = _Slice(), dict[str, StoreUnavailableError]()  # errors by part of the store
        if age is not None:
            self._remove(age, piece, self._index.oldest(SLICE_ENTRIES), Allowance(), away)
        if piece.has_room() and size.is_exceeded(piece):
            may_go, oldest = self._index.oldest_of_larger(SLICE_ENTRIES)
            self._remove(size, piece, oldest, may_go, away)
        if away and not piece.entries:
            raise next(iter(away.values()))
        return piece.entries

    def _remove(
        self,
        limit: _AgeLimit | _SizeLimit,
        piece: _Slice,
        oldest: list[tuple[int, str]],
        may_go: Allowance,
        away: dict[str, StoreUnavailableError],
    ) -> None:
        """Remove the oldest entries of these shards together, as far as the limit is exceeded and ``piece`` has room.

        oldest: a heap of (time of the oldest entry, shard's name). may_go: how many bytes of each shard may go. away:
        errors of parts of the store, by part. The call changes the last three.
        """
        while oldest and piece.has_room() and limit.is_exceeded(piece, oldest[0][0]):
            _, name = heapq.heappop(oldest)
            entries, size, until = limit.share(piece, oldest[0][0] if oldest else None)
            shard = self._shard(name)
            left = may_go.of(name)
            if (part := self._client.part(shard.tag)) in away or (left is not None and left <= 0):
                continue
            try:
                removed, freed, state = shard.trim(entries, size if left is None else min(size, left), until)
            except StoreUnavailableError as error:
                away[part] = error
                continue
            except StoreError as error:  # of this shard
                logger.debug("agentspec: a log could not be trimmed: %s", error)
                continue
            self._index.note(name, state)
            piece.entries, piece.bytes = piece.entries + removed, piece.bytes + freed
            may_go.take(name, freed)
            if removed and state.oldest is not None:
                heapq.heappush(oldest, (state.oldest, name))

    def _shard(self, name: str) -> RedisShard:
        """Return the shard of this name in the index."""
        namespace, _, place = name.rpartition("/")
        return self._shards(namespace, int(place))[0]


def _usage(held: Totals) -> Usage:
    return Usage(held.records, held.bytes + held.sessions * _SESSION_BYTES)
