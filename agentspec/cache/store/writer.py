"""Write records to the store in the background."""

import atexit
import logging
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, replace

from agentspec.cache.store.base import NewEntry, Store, check_namespace
from agentspec.cache.store.breaker import CircuitBreaker, State
from agentspec.cache.store.records import Record, TurnRecord, encode
from agentspec.errors import InvalidInputError, StoreUnavailableError

logger = logging.getLogger(__name__)

_BATCH_BYTES = 1 << 20  # small enough that a batch is sent well within a socket timeout
_CLOSING_DELAY = 0.05  # seconds between the attempts while closing
_MAX_GAPS = 100_000  # most sessions remembered as having lost a turn; forgetting one costs some wrong drafts


@dataclass(slots=True)
class WriterStats:
    """Count records since the start. Each is in exactly one of persisted, dropped, refused and queued.

    persisted: records that the store has acknowledged. dropped: records discarded because the queue was full, or at
    close. refused: records that could not be encoded or that the store will never accept. failed: appends that failed;
    their records stay queued. state: the breaker's.
    """

    persisted: int = 0
    dropped: int = 0
    refused: int = 0
    failed: int = 0
    queued: int = 0
    queued_bytes: int = 0
    state: State = "closed"

    def as_dict(self) -> dict[str, int | str]:
        """Return the counts as a JSON-able dict."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Item:
    number: int
    record: Record
    size: int  # in bytes; computed once


class BackgroundWriter:
    """Append records to a store in a thread.

    ``put`` never blocks and never raises. While the store is unavailable, records wait, up to ``max_entries`` and
    ``max_bytes``; beyond that the oldest are dropped and counted. An outage and its end are logged once each. Close
    the writer before the store.
    """

    def __init__(
        self,
        store: Store,
        namespace: str,
        *,
        max_bytes: int = 64 << 20,
        max_entries: int = 16_384,
        batch_entries: int = 256,
        batch_seconds: float = 0.02,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self._store = store
        self._namespace = check_namespace(namespace)
        self._max_bytes, self._max_entries = max_bytes, max_entries
        self._batch_entries, self._batch_seconds = batch_entries, batch_seconds
        self._breaker = breaker or CircuitBreaker()
        self._queue: deque[_Item] = deque()
        self._in_flight: list[_Item] = []
        self._bytes = 0
        self._limit = batch_entries
        self._number = 0
        self._counts = WriterStats()
        self._gaps: set[str] = set()
        self._overflowing = self._hurry = self._refusal_logged = False
        self._deadline: float | None = None
        lock = threading.Lock()  # never held during a call to the store, so that no caller waits
        self._work, self._settled = threading.Condition(lock), threading.Condition(lock)
        self._thread = threading.Thread(target=self._run, name="agentspec-store-writer", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, record: Record) -> None:
        """Queue ``record``. Its arrays must not change afterwards."""
        size = record.size
        with self._work:
            self._number += 1
            if self._closing():
                self._counts.dropped += 1
                return
            self._queue.append(_Item(self._number, record, size))
            self._bytes += size
            self._trim()
            if len(self._queue) in (1, self._batch_entries):
                self._work.notify()

    def flush(self, timeout: float) -> bool:
        """Wait until all records put so far are written, dropped or refused. Returns False after ``timeout`` s."""
        with self._work:
            target = self._number
            self._hurry = True
            self._work.notify()
            return self._settled.wait_for(lambda: self._oldest() > target, timeout)

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
            queued = len(self._queue) + len(self._in_flight)
            return replace(self._counts, queued=queued, queued_bytes=self._bytes, state=self._breaker.state)

    def _run(self) -> None:
        while batch := self._next_batch():
            self._write(batch)
        with self._work:
            left = len(self._queue)
            while self._queue:
                self._drop_oldest()
            self._settled.notify_all()
        if left:
            logger.warning("agentspec: the store writer stopped with %d records unwritten", left)

    def _next_batch(self) -> list[_Item]:
        """Wait for a batch of records and for the breaker. Returns an empty batch to end the thread."""
        with self._work:
            self._work.wait_for(lambda: self._queue or self._closing())
            self._work.wait_for(
                lambda: len(self._queue) >= self._batch_entries or self._hurry or self._closing(), self._batch_seconds
            )
            while not self._closing() and not self._breaker.allow():
                self._work.wait(self._breaker.wait())
            self._work.wait_for(self._closing, self._breaker.wait())
            if self._deadline is not None and time.monotonic() >= self._deadline:
                return []
            room = _BATCH_BYTES
            while self._queue and len(self._in_flight) < self._limit and room > 0:
                room -= self._queue[0].size
                self._in_flight.append(self._queue.popleft())
            return list(self._in_flight)

    def _write(self, batch: list[_Item]) -> None:
        with self._work:
            before, self._gaps = self._gaps, set()
        gaps = set(before)
        try:
            entries = [entry for item in batch if (entry := self._encode(item.record, gaps)) is not None]
            if entries:
                self._store.append(self._namespace, entries)
            else:
                self._store.ping()  # only the result of a call closes the breaker
        except Exception as error:  # a store may raise anything, and the thread must survive it
            self._keep(batch, before, error)
            return
        recovered = self._breaker.success()
        with self._work:
            self._counts.persisted += len(entries)
            self._counts.refused += len(batch) - len(entries)
            self._limit = self._batch_entries
            self._gaps |= gaps
            self._leave(batch)
            left, dropped = len(self._queue), self._counts.dropped
        if recovered:
            logger.warning(
                "agentspec: the store is back; %d records wait to be written, %d were dropped", left, dropped
            )

    def _encode(self, record: Record, gaps: set[str]) -> NewEntry | None:
        """Return the record as an entry, or None if it cannot be encoded. gaps: sessions that just lost a turn."""
        try:
            if isinstance(record, TurnRecord) and record.session in gaps:
                record = replace(record, gap=True)
            payload = encode(record)
        except InvalidInputError as error:
            if not self._refusal_logged:
                self._refusal_logged = True
                logger.warning("agentspec: a record cannot be stored: %s; further ones are only counted", error)
            gaps.add(record.session)
            return None
        gaps.discard(record.session)
        return NewEntry(record.session, payload)

    def _keep(self, batch: list[_Item], gaps: set[str], error: Exception) -> None:
        """Queue a failed batch again. If the store will never accept it, halve it until the bad record is alone."""
        passing = isinstance(error, StoreUnavailableError)
        with self._work:
            self._counts.failed += 1
            self._gaps |= gaps
            if len(batch) == 1 and not passing:
                self._counts.refused += 1
                self._gaps.add(batch[0].record.session)
                self._leave(batch)
            else:
                # The retry sends the same records, so that a store can recognise a batch that it already has.
                self._limit = len(batch) if passing else len(batch) // 2
                self._queue.extendleft(reversed(batch))
                self._in_flight.clear()
                self._trim()
            queued, closing = len(self._queue), self._closing()
        if self._breaker.failure():
            logger.warning(
                "agentspec: the store is lost (%s); %d records wait, decoding goes on without it", error, queued
            )
        if closing:
            time.sleep(_CLOSING_DELAY)

    def _leave(self, batch: list[_Item]) -> None:
        self._bytes -= sum(item.size for item in batch)
        self._in_flight.clear()
        if not self._queue:
            self._hurry = self._overflowing = False
        self._settled.notify_all()

    def _trim(self) -> None:
        dropped = self._counts.dropped
        while self._queue and (
            self._bytes > self._max_bytes or len(self._queue) + len(self._in_flight) > self._max_entries
        ):
            self._drop_oldest()
        if self._counts.dropped == dropped:
            return
        self._settled.notify_all()
        if not self._overflowing:
            self._overflowing = True
            logger.warning("agentspec: the store's queue is full; its oldest records are dropped and counted")

    def _drop_oldest(self) -> None:
        item = self._queue.popleft()
        self._bytes -= item.size
        self._counts.dropped += 1
        if len(self._gaps) >= _MAX_GAPS:
            self._gaps.clear()
        self._gaps.add(item.record.session)

    def _closing(self) -> bool:
        return self._deadline is not None

    def _oldest(self) -> int:
        waiting = self._in_flight or self._queue
        return waiting[0].number if waiting else self._number + 1
