"""Hold the records that wait to be written to a store, within limits, and count what becomes of each.

A record goes this way, from ``put`` to one of the last four. Beside the arrows are the calls that move it:

    queued ──take_batch──> in flight ──note_written──> persisted   the store has acknowledged it
      │  ^                  │  │ ^ │
      │  └─────requeue──────┘  │ │ └─────put_back────> refused     the store takes its log, but never this record
      │      (store away)      │ │
      │    set_aside, put_back │ │ take_aside, take_other
      │                        v │
      │                     set aside                              what it waits for (`Target`) is away or refused
      │                         │
      └─────────────────────────┴────────────────────> dropped     the oldest if too many wait, and the rest at the end

A waiting record goes to ``erased`` if its session is erased. A record in flight does so only if its append fails or
was not begun yet. If the append succeeds, the record lies in front of the tombstone.
"""

import itertools
import logging
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from agentspec.cache.store.background.aside import QueuedRecord, SetAside, Target
from agentspec.cache.store.background.breaker import State
from agentspec.cache.store.records import Record

logger = logging.getLogger(__name__)

_BATCH_BYTES = 1 << 20  # small enough that a batch is sent well within a socket timeout


@dataclass(slots=True)
class WriterStats:
    """Count records since the start. Each counts in exactly one of persisted, dropped, refused, erased and queued.

    persisted: records that the store has acknowledged. dropped: records discarded because the queue was full, or at
    close. refused: records that could not be encoded or that the store will never accept. erased: records discarded
    because their session was erased. failed: appends that failed; their records stay queued. queued_bytes: memory of
    the queued records. refused_logs: logs whose records the store refuses. trimmed: entries that retention removed from
    the store. trim_failed: failed attempts to remove some. state: the breaker's state.
    """

    persisted: int = 0
    dropped: int = 0
    refused: int = 0
    erased: int = 0
    failed: int = 0
    queued: int = 0
    queued_bytes: int = 0
    refused_logs: int = 0
    trimmed: int = 0
    trim_failed: int = 0
    state: State = "closed"


class WaitingRecords:
    """Hold records in the order of ``put``: at most ``max_entries`` of at most ``max_bytes``. Not thread-safe.

    Beyond these limits the oldest are dropped. One record that is larger than ``max_bytes`` may wait beside the others;
    further ones are dropped meanwhile. in_flight: records of the present batch. aside: records that wait for a part of
    the store or a refused log. counts: outcomes of the records that no longer wait. bytes: memory of the waiting ones.
    newest: number of the latest record.
    """

    def __init__(self, max_bytes: int, max_entries: int, batch_entries: int) -> None:
        self.in_flight: list[QueuedRecord] = []
        self.aside = SetAside()
        self.counts = WriterStats()
        self.bytes = 0
        self.newest = 0
        self._max_bytes, self._max_entries, self._batch_entries = max_bytes, max_entries, batch_entries
        self._queue: deque[QueuedRecord] = deque()
        self._next_entries = batch_entries  # most records of the next batch
        self._forgotten: set[str] = set()  # erased sessions with records in flight
        self._too_large: QueuedRecord | None = None  # the record beside the others, if it waits
        self._overflowing = False  # whether records were dropped since none waited, which is logged once

    def __len__(self) -> int:
        """Return how many records wait."""
        return len(self._queue) + len(self.in_flight) + len(self.aside)

    @property
    def queued(self) -> int:
        """Return how many records are neither in flight nor set aside."""
        return len(self._queue)

    def all(self) -> list[QueuedRecord]:
        """Return the records that wait, in no order."""
        return [*self.in_flight, *self._queue, *self.aside.records()]

    def oldest(self) -> int:
        """Return the lowest number of a record that waits, or the next one's if none does."""
        numbers = [records[0].number for records in (self.in_flight, self._queue) if records]
        if (aside := self.aside.oldest()) is not None:
            numbers.append(aside)
        return min(numbers, default=self.newest + 1)

    def is_in_flight(self, session: str) -> bool:
        """Return whether a record of a session is on its way to the store."""
        return any(item.record.session == session for item in self.in_flight)

    def put(self, namespace: str, record: Record) -> None:
        """Queue a record, behind the others."""
        self.newest += 1
        item = QueuedRecord(self.newest, namespace, record, record.size)
        if item.size > self._max_bytes:
            if self._too_large is not None:
                self.counts.dropped += 1
                self._tell_overflow(
                    "agentspec: a record of %d bytes is dropped and counted, because another one that is larger than"
                    " the store's queue of %d bytes still waits",
                    *(item.size, self._max_bytes),
                )
                return
            self._too_large = item
        self._queue.append(item)
        self.bytes += item.size
        self._shorten()

    def forget(self, session: str) -> None:
        """Drop the records of a session that is being erased. Those in flight are dropped if their append fails."""
        self._queue = deque(self._without({session}, self._queue))
        self._count_erased(self.aside.forget(session))
        if self.is_in_flight(session):
            self._forgotten.add(session)

    def take_batch(self) -> list[QueuedRecord]:
        """Put the next batch in flight, and return it."""
        room = _BATCH_BYTES
        while self._queue and len(self.in_flight) < self._next_entries and room > 0:
            room -= self._queue[0].size
            self.in_flight.append(self._queue.popleft())
        self._next_entries = self._batch_entries
        return list(self.in_flight)

    def drop_erased(self, items: list[QueuedRecord]) -> list[QueuedRecord]:
        """Drop the records of erased sessions from an append that is yet to be made, and return the others."""
        kept = self._without(self._forgotten, items)
        numbers = {item.number for item in kept}
        self._end_flight_of([item for item in items if item.number not in numbers])
        return kept

    def take_aside(self, target: Target) -> list[QueuedRecord]:
        """Put the first append that waits for a target in flight, and return it."""
        items = self.aside.take(target)
        self.in_flight += items
        return items

    def take_other(self, target: Target, session: str | None) -> list[QueuedRecord]:
        """Put the first record of another session in flight, if the target is a log that counts as refused."""
        items = self.aside.take_other(target, session) if self.aside.is_refused(target) else []
        self.in_flight += items
        return items

    def note_written(self, items: list[QueuedRecord], persisted: int) -> None:
        """Note that an append succeeded. persisted: how many records it wrote; the others cannot be encoded."""
        self.counts.persisted += persisted
        self.counts.refused += len(items) - persisted
        self._leave(items)
        self._end_flight_of(items)

    def requeue(self) -> None:
        """Queue the records in flight again, because the store is away."""
        self.counts.failed += 1
        # The retry sends the same records, so that a store can recognise an append that it already has.
        self._next_entries = len(self.in_flight)
        self._queue.extendleft(reversed(self._without(self._forgotten, self.in_flight)))
        self._end_flight_of(self.in_flight)

    def set_aside(self, target: Target, items: list[QueuedRecord], *, failed: bool = False) -> None:
        """Let an append wait for a target. failed: it was tried."""
        self.counts.failed += failed
        self.aside.add(target, self._without(self._forgotten, items))
        self._end_flight_of(items)

    def put_back(self, target: Target, items: list[QueuedRecord], *, refused: bool) -> QueuedRecord | None:
        """Let a failed append wait again, in halves if it was refused. Return the record that is given up, if any.

        That is the record of a refused append which has only one. If its log counts as refused, it waits instead,
        because the log is at fault.
        """
        self.counts.failed += 1
        given_up = items[0] if refused and len(items) == 1 and not self.aside.is_refused(target) else None
        if given_up is not None:
            self.counts.refused += 1
            self._leave([given_up])
        else:
            middle = len(items) // 2 if refused else 0
            self.aside.add(target, self._without(self._forgotten, items[middle:]), again=True)
            self.aside.add(target, self._without(self._forgotten, items[:middle]), again=True)
        self._end_flight_of(items)
        return given_up

    def drop_all(self) -> int:
        """Drop the records that are not in flight. Return how many waited before, those in flight included."""
        left = len(self)
        while self._queue or len(self.aside):
            self._drop_oldest()
        return left

    def _end_flight_of(self, items: list[QueuedRecord]) -> None:
        """Remove records from the batch. Forget the erased sessions once nothing is in flight."""
        gone = {item.number for item in items}
        self.in_flight = [item for item in self.in_flight if item.number not in gone]
        if not self.in_flight:
            self._forgotten.clear()
            self._overflowing = self._overflowing and len(self) > 0

    def _shorten(self) -> None:
        """Drop the oldest records beyond the limits. Records in flight stay: they alone never exceed the limits."""
        dropped = self.counts.dropped
        while (too_much := self._bytes_in_limit() > self._max_bytes) or len(self) > self._max_entries:
            self._drop_oldest(but=self._too_large if too_much else None)  # which is not in the limit
        if self.counts.dropped > dropped:
            self._tell_overflow("agentspec: the store's queue is full; its oldest records are dropped and counted")

    def _bytes_in_limit(self) -> int:
        """Return the memory of the waiting records but the one that is larger than the limit."""
        return self.bytes - (0 if self._too_large is None else self._too_large.size)

    def _tell_overflow(self, message: str, *values: int) -> None:
        """Log that records are dropped, but only for the first since none waited."""
        if not self._overflowing:
            self._overflowing = True
            logger.warning(message, *values)

    def _drop_oldest(self, but: QueuedRecord | None = None) -> None:
        """Drop the oldest record that is not in flight. but: one that is passed over in the queue if others wait."""
        aside = self.aside.oldest()
        oldest = next((item for item in itertools.islice(self._queue, 2) if item is not but), None)
        if oldest is not None and (aside is None or oldest.number < aside):
            item = oldest
            self._queue.remove(oldest)
        elif aside is not None:
            item = self.aside.drop_oldest()
        else:
            item = self._queue.popleft()
        self._leave([item])
        self.counts.dropped += 1

    def _without(self, erased: set[str], items: Collection[QueuedRecord]) -> list[QueuedRecord]:
        """Count the records of erased sessions, and return the others."""
        self._count_erased([item for item in items if item.record.session in erased])
        return [item for item in items if item.record.session not in erased]

    def _count_erased(self, items: list[QueuedRecord]) -> None:
        self.counts.erased += len(items)
        self._leave(items)

    def _leave(self, items: Collection[QueuedRecord]) -> None:
        """Give back the memory of records that wait no more."""
        self.bytes -= sum(item.size for item in items)
        if any(item is self._too_large for item in items):
            self._too_large = None
