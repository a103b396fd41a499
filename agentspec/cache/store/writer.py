"""Write records to the store in the background, and keep the store within its limits.

A record goes this way, from ``put`` to one of the last four:

    queued ──> in flight ──> persisted     the store has acknowledged it
      │  ^       │    ^ │
      │  └───────┘    │ └──> refused       the store takes its log, but never this record
      │ store away    v
      │           set aside                its log, or the part of the store that has it, is away or refused
      │               │
      └───────────────┴────> dropped       the oldest, where too much waits, or what is left at the end

From each of these places it goes to ``erased`` where its session is erased. While it is in flight, that happens when
its append fails; one that succeeds comes in front of the tombstone.
"""

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace

from agentspec.cache.store.aside import QueuedRecord, SetAside, is_log, log_part
from agentspec.cache.store.base import QUEUE_BYTES, NewEntry, Retention, Store
from agentspec.cache.store.breaker import CircuitBreaker, State
from agentspec.cache.store.courtesy import Courtesy
from agentspec.cache.store.records import Record
from agentspec.cache.store.trimmer import Trimmer
from agentspec.errors import InvalidInputError, StoreUnavailableError

logger = logging.getLogger(__name__)

_BATCH_BYTES = 1 << 20  # small enough that a batch is sent well within a socket timeout
_CLOSING_DELAY = 0.05  # seconds between the attempts while closing
_APPENDS = 64  # most appends set aside that are tried before the queue has its turn again


@dataclass(slots=True)
class WriterStats:
    """Count records since the start. Each is in exactly one of persisted, dropped, refused, erased and queued.

    persisted: records that the store has acknowledged. dropped: records discarded because the queue was full, or at
    close. refused: records that could not be encoded or that the store will never accept. erased: records discarded
    because their session was erased. failed: appends that failed; their records stay queued. refused_logs: logs whose
    records the store refuses. trimmed: entries that retention removed from the store. trim_failed: failed attempts to
    remove some. state: the breaker's.
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

    def as_dict(self) -> dict[str, int | str]:
        """Return the counts as a JSON-able dict."""
        return asdict(self)


class BackgroundWriter:
    """Append records to the logs of a store in a thread.

    Each log gets its records in the order of ``put``, which never blocks and never raises. While the store is
    unavailable, records wait, up to ``max_entries`` and ``max_bytes``; beyond that the oldest are dropped and counted.
    While a part of the store is away, or it refuses one log, the other logs go on. An outage and its end are logged
    once each. Between appends the thread removes what exceeds ``retention``, by slices. Close it before the store.
    """

    def __init__(
        self,
        store: Store,
        *,
        retention: Retention | None = None,
        max_bytes: int = QUEUE_BYTES,
        max_entries: int = 16_384,
        batch_entries: int = 64,
        batch_seconds: float = 0.02,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self._store = store
        self._trimmer = Trimmer(store, retention)
        self._max_bytes, self._max_entries = max_bytes, max_entries
        self._batch_entries, self._batch_seconds = batch_entries, batch_seconds
        self._breaker = breaker or CircuitBreaker()
        self._queue: deque[QueuedRecord] = deque()
        self._in_flight: list[QueuedRecord] = []
        self._aside = SetAside()
        self._bytes = 0
        self._limit = batch_entries
        self._number = 0
        self._counts = WriterStats()
        self._forgotten: set[str] = set()  # erased sessions with records in flight
        self._overflowing = self._hurry = self._refusal_logged = False
        self._lost = False  # whether a log line says that the store is lost, and none that it is back
        self._deadline: float | None = None
        lock = threading.Lock()  # never held during a call to the store, so that no caller waits
        self._work, self._settled = threading.Condition(lock), threading.Condition(lock)
        self._thread = threading.Thread(target=self._run, name="agentspec-store-writer", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, namespace: str, record: Record) -> None:
        """Queue ``record`` for a log. Its arrays must not change afterwards."""
        size = record.size
        with self._work:
            self._number += 1
            if self._closing():
                self._counts.dropped += 1
                return
            self._queue.append(QueuedRecord(self._number, namespace, record, size))
            self._bytes += size
            self._shorten()
            if len(self._queue) in (1, self._batch_entries):
                self._work.notify()

    def forget(self, session: str, timeout: float = 0.0) -> bool:
        """Drop the queued records of a session that is being erased, so that they do not come after its tombstone.

        Waits for at most ``timeout`` seconds until none of them is on its way to the store. Returns whether none is.
        """
        with self._work:
            self._queue = deque(self._without({session}, self._queue))
            self._count_erased(self._aside.forget(session))
            self._settled.notify_all()
            if self._is_in_flight(session):
                self._forgotten.add(session)  # if its batch fails, it is sent again without these records
            return self._settled.wait_for(lambda: not self._is_in_flight(session), timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until all records put so far are written, dropped or refused. Returns False after ``timeout`` s."""
        with self._work:
            target = self._number
            self._hurry = True
            self._work.notify()
            return self._settled.wait_for(lambda: self._oldest_number() > target, timeout)

    def close(self, timeout: float = 2.0) -> None:
        """Write queued records for at most ``timeout`` seconds, and stop. The rest counts as dropped."""
        with self._work:
            if self._deadline is None:
                self._deadline = time.monotonic() + timeout
            self._work.notify()
        self._thread.join(timeout + 0.5)
        if self._thread.is_alive():
            logger.warning("agentspec: the store did not answer in time; %d records unwritten", self.stats().queued)
        atexit.unregister(self.close)

    def stats(self) -> WriterStats:
        """Return the current counts."""
        with self._work:
            return replace(
                self._counts,
                queued=self._waiting(),
                queued_bytes=self._bytes,
                refused_logs=self._aside.refused_logs(),
                trimmed=self._trimmer.removed,
                trim_failed=self._trimmer.failed,
                state="open" if self._aside.is_part_away() else self._breaker.state,
            )

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            if batch:
                self._write(batch)
            self._write_aside()
            if not self._closing():
                self._trimmer.trim_if_due()  # while appends fail, too: a full store has room again after it
        self._write_aside(closing=True)
        with self._work:
            left = self._waiting()
            while self._queue or len(self._aside):
                self._drop_oldest()
            self._settled.notify_all()
        if left:
            logger.warning("agentspec: the store writer stopped with %d records unwritten", left)

    def _next_batch(self) -> list[QueuedRecord] | None:
        """Wait for a batch of records and for the breaker, or until it is time to trim. Returns None to end."""
        with self._work:
            pause = _shortest(self._trimmer.wait(), self._aside.wait())
            self._work.wait_for(lambda: self._queue or self._closing(), pause)
            if not (self._queue or self._closing()):
                return []
            self._work.wait_for(
                lambda: len(self._queue) >= self._batch_entries or self._hurry or self._closing(), self._batch_seconds
            )
            # Half-open: it let a call through that was not made, because the whole batch waits for parts that are away.
            while not (self._closing() or self._breaker.state == "half-open" or self._breaker.allow()):
                trim_in = self._trimmer.wait()
                if trim_in == 0.0:
                    return []
                self._work.wait(_shortest(trim_in, self._breaker.wait()))
            self._work.wait_for(self._closing, self._breaker.wait())
            if self._closing() and (not self._queue or self._deadline_is_over()):
                return None
            room = _BATCH_BYTES
            while self._queue and len(self._in_flight) < self._limit and room > 0:
                room -= self._queue[0].size
                self._in_flight.append(self._queue.popleft())
            return list(self._in_flight)

    def _write(self, batch: list[QueuedRecord]) -> None:
        """Append the batch log by log. If one append fails, its records and those behind it are queued again."""
        logs: dict[str, list[QueuedRecord]] = {}
        for item in batch:
            logs.setdefault(item.namespace, []).append(item)
        for namespace, items in logs.items():
            if (away := self._aside.part_of(namespace, self._part)) is not None:
                self._set_aside(away, items)
                continue
            if (error := self._append(namespace, items)) is None:
                continue
            if not isinstance(error, StoreUnavailableError):
                self._put_back(log_part(namespace), items, error)
                continue
            part = self._part(namespace)
            if not part:
                self._requeue(error)
                return
            if self._set_aside(part, items, failed=True).failure():
                logger.warning("agentspec: a part of the store is lost (%s); the others are written to", error)

    def _part(self, namespace: str) -> str:
        """Return the part of the store that has a log; "", as if there were no parts, where the store cannot tell."""
        try:
            return self._store.part(namespace)
        except Exception:  # a store may raise anything, and the thread must survive it
            return ""

    def _append(self, namespace: str, items: list[QueuedRecord]) -> Exception | None:
        """Append records to their log. Return why they were not appended."""
        try:
            entries = self._encode_all(items)
            if entries:
                self._store.append(namespace, entries)
            else:
                self._store.ping()  # only the result of a call closes the breaker
        except Exception as error:  # a store may raise anything, and the thread must survive it
            return error
        self._note_written(items, entries)
        return None

    def _set_aside(self, part: str, items: list[QueuedRecord], *, failed: bool = False) -> CircuitBreaker:
        """Let records wait for a part of the store that is away. Return its breaker. failed: their append failed."""
        with self._work:
            self._counts.failed += failed
            self._take_from_batch(items)
            breaker = self._aside.add(part, self._without(self._forgotten, items))
            self._end_flight()
            self._shorten()
        return breaker

    def _write_aside(self, *, closing: bool = False) -> None:
        """Write some of what waits for parts of the store that were away, where it is time to try again."""
        for part, breaker in self._aside.parts() if closing else self._aside.due():
            for _ in range(self._max_entries if closing else _APPENDS):
                if closing and self._deadline_is_over():
                    break
                with self._work:
                    items = self._aside.take(part)
                    self._in_flight = list(items)
                    self._settled.notify_all()
                if not items:
                    break
                error = self._append(items[0].namespace, items)
                if error is not None:
                    self._put_back(part, items, error)
                if isinstance(error, StoreUnavailableError):
                    breaker.failure()
                    break
                if error is not None and is_log(part):
                    if breaker.state == "open":
                        break
                elif breaker.success():
                    what = f"the {part}" if is_log(part) else "a part of the store"
                    logger.warning("agentspec: %s is back; %d records wait for it", what, len(self._aside))

    def _put_back(self, part: str, items: list[QueuedRecord], error: Exception) -> None:
        """Let an append wait again: in halves, if it is refused, until the bad record is alone or the log is bad."""
        passing = isinstance(error, StoreUnavailableError)
        with self._work:
            self._counts.failed += 1
            self._take_from_batch(items)
            if len(items) == 1 and not passing:
                self._counts.refused += 1
                self._bytes -= items[0].size
                self._log_refusal(error)
                if is_log(part) and self._aside.add(part, ()).failure():
                    message = "agentspec: the %s is refused by the store (%s); its records wait, the other logs go on"
                    logger.warning(message, part, error)
            else:
                middle = 0 if passing else len(items) // 2
                self._aside.add(part, self._without(self._forgotten, items[middle:]), first=True)
                self._aside.add(part, self._without(self._forgotten, items[:middle]), first=True)
            self._end_flight()
            self._shorten()

    def _without(self, erased: set[str], items: Collection[QueuedRecord]) -> list[QueuedRecord]:
        """Count the records of erased sessions, and return the others."""
        self._count_erased([item for item in items if item.record.session in erased])
        return [item for item in items if item.record.session not in erased]

    def _encode_all(self, items: list[QueuedRecord]) -> list[NewEntry]:
        entries, courtesy = [], Courtesy()
        for item in items:
            try:
                entries.append(item.entry())
            except InvalidInputError as error:
                self._log_refusal(error)
            courtesy.pause()
        return entries

    def _note_written(self, items: list[QueuedRecord], entries: list[NewEntry]) -> None:
        self._breaker.success()
        recovered, self._lost = self._lost, False
        self._trimmer.note_written(sum(len(entry.payload) for entry in entries))
        with self._work:
            self._counts.persisted += len(entries)
            self._counts.refused += len(items) - len(entries)
            self._limit = self._batch_entries
            self._bytes -= sum(item.size for item in items)
            self._take_from_batch(items)
            self._end_flight()
            left, dropped = len(self._queue) + len(self._in_flight), self._counts.dropped
        if recovered:
            message = "agentspec: the store is back; %d records wait to be written, %d were dropped"
            logger.warning(message, left, dropped)

    def _log_refusal(self, error: Exception) -> None:
        """Log why a record is given up, for the first one."""
        if not self._refusal_logged:
            self._refusal_logged = True
            logger.warning("agentspec: a record cannot be stored: %s; further ones are only counted", error)

    def _requeue(self, error: StoreUnavailableError) -> None:
        """Queue the rest of a batch again, because the append of its next records failed: the store is away."""
        with self._work:
            self._counts.failed += 1
            # The retry sends the same records, so that a store can recognise an append that it already has.
            self._limit = len(self._in_flight)
            self._queue.extendleft(reversed(self._without(self._forgotten, self._in_flight)))
            self._in_flight.clear()
            self._end_flight()
            self._shorten()
            queued, closing = len(self._queue), self._closing()
        self._breaker.failure()
        if self._breaker.state == "open" and not self._lost:
            self._lost = True
            message = "agentspec: the store is lost (%s); %d records wait, decoding goes on without it"
            logger.warning(message, error, queued)
        if closing:
            time.sleep(_CLOSING_DELAY)

    def _take_from_batch(self, items: list[QueuedRecord]) -> None:
        gone = {item.number for item in items}
        self._in_flight = [item for item in self._in_flight if item.number not in gone]

    def _end_flight(self) -> None:
        """Wake those who wait for records to settle. Forget erased sessions once nothing is in flight."""
        if not self._in_flight:
            self._forgotten.clear()
        if not (self._queue or self._in_flight):
            self._hurry = self._overflowing = False
        self._settled.notify_all()

    def _shorten(self) -> None:
        """Drop the oldest records while the queue is beyond its limits."""
        dropped = self._counts.dropped
        while (self._queue or len(self._aside)) and (
            self._bytes > self._max_bytes or self._waiting() > self._max_entries
        ):
            self._drop_oldest()
        if self._counts.dropped == dropped:
            return
        self._settled.notify_all()
        if not self._overflowing:
            self._overflowing = True
            logger.warning("agentspec: the store's queue is full; its oldest records are dropped and counted")

    def _drop_oldest(self) -> None:
        aside = self._aside.oldest()
        if aside is None or (self._queue and self._queue[0].number < aside):
            item = self._queue.popleft()
        else:
            item = self._aside.drop_oldest()
        self._bytes -= item.size
        self._counts.dropped += 1

    def _count_erased(self, items: list[QueuedRecord]) -> None:
        self._counts.erased += len(items)
        self._bytes -= sum(item.size for item in items)

    def _is_in_flight(self, session: str) -> bool:
        return any(item.record.session == session for item in self._in_flight)

    def _closing(self) -> bool:
        return self._deadline is not None

    def _deadline_is_over(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _waiting(self) -> int:
        return len(self._queue) + len(self._in_flight) + len(self._aside)

    def _oldest_number(self) -> int:
        oldest = [records[0].number for records in (self._in_flight, self._queue) if records]
        if (aside := self._aside.oldest()) is not None:
            oldest.append(aside)
        return min(oldest, default=self._number + 1)


def _shortest(*waits: float | None) -> float | None:
    """Return the shortest of these times; None stands for no end."""
    return min((wait for wait in waits if wait is not None), default=None)
