"""Keep a Redis store within its limits, by the index of all logs."""

import heapq
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentspec.cache.store.background.courtesy import Courtesy
from agentspec.cache.store.base import SLICE_BYTES, SLICE_ENTRIES, Retention, Trimmed, Usage
from agentspec.cache.store.redis.client import RedisClient
from agentspec.cache.store.redis.index import LogIndex
from agentspec.cache.store.redis.shard import RedisShard
from agentspec.errors import StoreError, StoreUnavailableError

logger = logging.getLogger(__name__)

_SESSION_BYTES = 400  # bytes that the server needs for a session beside its entries, measured on Redis 7
_EXPIRY_DAYS = 1.0  # payloads expire so long after the retention's age, in case no process is left to trim them


@dataclass(slots=True)
class _Slice:
    """Hold what one slice of trimming still has to remove, and count what it has removed."""

    cutoff: int
    """Remove all entries up to this time, in milliseconds since the epoch; -1: none for their age."""
    records: int = 0
    """Further entries to remove, the oldest first."""
    bytes: int = 0
    """Further bytes to remove."""
    removed: int = 0
    """Entries removed so far."""
    room: int = SLICE_BYTES
    """Bytes that this slice may still remove."""

    def takes(self, written: int) -> bool:
        """Return whether this slice removes the oldest entry of all. written: its time, in milliseconds."""
        is_room = self.removed < SLICE_ENTRIES and self.room > 0
        return is_room and (written <= self.cutoff or self.records > 0 or self.bytes > 0)

    def share(self, written: int, next_log: int | None) -> tuple[int, int, int | None]:
        """Return what to remove from the log with the oldest entry: most entries, most bytes, and up to which time.

        written: time of that entry. next_log: time of the oldest entry in the other logs; None: there is none. All
        times are in milliseconds.
        """
        entries, size = SLICE_ENTRIES - self.removed, self.room
        if written <= self.cutoff:
            return entries, size, self.cutoff if next_log is None else min(next_log, self.cutoff)
        if self.bytes <= 0:
            entries = min(entries, self.records)
        if self.records <= 0:
            size = min(size, self.bytes)
        return entries, size, next_log

    def note(self, entries: int, size: int) -> None:
        """Count removed entries and their bytes."""
        self.removed += entries
        self.room -= size
        self.records -= entries
        self.bytes -= size


class Trimming:
    """Remove the oldest entries of all logs, a slice at a time.

    shards: returns the shards of a log, or the one at a place. expiry_ms: time after which payloads expire, 0: never.
    """

    def __init__(
        self, client: RedisClient, index: LogIndex, shards: Callable[[str, int | None], list[RedisShard]]
    ) -> None:
        self.expiry_ms = 0
        self._client, self._index, self._shards = client, index, shards

    def usage(self) -> Usage:
        """Return the records and bytes of all logs together."""
        held = self._index.totals()
        return Usage(held.records, held.bytes + held.sessions * _SESSION_BYTES)

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
        self._audit()
        cutoff = -1
        if days is not None:
            seconds, microseconds = map(int, self._client.command("TIME"))
            cutoff = max(0, int((seconds - days * 86_400) * 1000) + microseconds // 1000)
        held = Usage(0, 0) if retention.records is None and retention.bytes is None else self.usage()
        count = 0 if retention.records is None else held.records - retention.records
        size = 0 if retention.bytes is None else held.bytes - retention.bytes
        removed = self._trim_oldest(_Slice(cutoff), count, size)
        if unended is not None and not removed:
            raise unended
        return Trimmed(removed, removed > 0)

    def _sweep(self) -> bool:
        """Continue an erasure that was cut off, if there is one. Return whether it had entries left to remove."""
        doomed = self._index.doomed()
        if doomed is None:
            return False
        shard = self._shard(doomed)
        try:
            left = shard.sweep() > 0
            state = shard.state()[0]
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
                found = [(shard.name, *shard.state()) for shard in self._shards(namespace, None)]
                for name, state, _, doomed in found:
                    self._index.note(name, state)
                    if doomed:
                        self._index.doom(name)
                if all(gone for _, _, gone, _ in found):
                    self._index.remove(namespace)
                    if not all(shard.state()[1] for shard in self._shards(namespace, None)):
                        self._index.enter(namespace)  # another process has appended to it meanwhile
            except StoreError as error:  # only one node may be away, or another program own this log's keys
                logger.debug("agentspec: a log could not be looked at: %s", error)
            courtesy.pause()

    def _trim_oldest(self, piece: _Slice, records: int, size: int) -> int:
        """Remove the entries that are too old, then ``records`` entries and ``size`` bytes of the larger logs.

        Return how many were removed. Logs on a node that does not answer stay for now.
        """
        away: dict[str, StoreUnavailableError] = {}  # by part of the store
        if piece.cutoff >= 0:
            self._remove(piece, self._index.oldest(SLICE_ENTRIES), away)
        piece.cutoff, piece.records, piece.bytes = -1, piece.records + records, piece.bytes + size
        if piece.takes(0):
            may_go, oldest = self._index.oldest_of_larger(SLICE_ENTRIES)
            self._remove(piece, oldest, away, may_go)
        if away and not piece.removed:
            raise next(iter(away.values()))
        return piece.removed

    def _remove(
        self,
        piece: _Slice,
        oldest: list[tuple[int, str]],
        away: dict[str, StoreUnavailableError],
        may_go: Mapping[str, int] | None = None,
    ) -> None:
        """Remove the oldest entries of these shards together, within the limits of ``piece``.

        oldest: a heap of (time of the oldest entry, shard's name). away: errors of parts of the store, by part; the
        call adds new ones. may_go: how many bytes of a shard may go; all of one that it does not name.
        """
        left = dict(may_go or {})
        while oldest and piece.takes(oldest[0][0]):
            written, name = oldest[0]
            next_log = min((head for head, _ in oldest[1:3]), default=None)
            shard, went, state = self._shard(name), 0, None
            part = self._client.part(shard.tag)
            if part not in away:
                try:
                    entries, size, until = piece.share(written, next_log)
                    went, freed, state = shard.trim(entries, min(size, left.get(name, size)), until)
                except StoreUnavailableError as error:
                    away[part] = error
                except StoreError as error:  # of this shard
                    logger.debug("agentspec: a log could not be trimmed: %s", error)
            if state is not None:
                self._index.note(name, state)
                piece.note(went, freed)
                if name in left:
                    left[name] -= freed
            if went and state is not None and state.oldest is not None and left.get(name, 1) > 0:
                heapq.heapreplace(oldest, (state.oldest, name))
            else:
                heapq.heappop(oldest)

    def _shard(self, name: str) -> RedisShard:
        """Return the shard of this name in the index."""
        namespace, _, place = name.rpartition("/")
        return self._shards(namespace, int(place))[0]
