"""Write records to the store in the background, and keep the store within its limits."""

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from agentspec.cache.store.background.aside import QueuedRecord, RefusedLog, StorePart, Target
from agentspec.cache.store.background.breaker import CircuitBreaker
from agentspec.cache.store.background.courtesy import Courtesy
from agentspec.cache.store.background.trimmer import Trimmer
from agentspec.cache.store.background.waiting_records import WaitingRecords, WriterStats
from agentspec.cache.store.base import QUEUE_BYTES, NewEntry, Retention, Store
from agentspec.cache.store.records import Record
from agentspec.errors import InvalidInputError, StoreUnavailableError

logger = logging.getLogger(__name__)

_CLOSING_DELAY = 0.05  # seconds between the attempts while closing
_SLOW_SECONDS = 1.0  # a failed append that took longer waited for a lock, and the next one would, too
_TELL_SECONDS = 60.0  # between two messages that the store is lost
_APPENDS = 64  # most appends set aside that are tried before the queue has its turn again


class _NotReadyError(Exception):
    """Raised for a log to which nothing can be appended yet, whatever the records are."""


class BackgroundWriter:
    """Append records to the logs of a store in a thread.

    Each log gets its records in the order of ``put``, which never blocks and never raises. While the store is
    unavailable, records wait, up to ``max_entries`` and ``max_bytes``; beyond that the oldest are dropped and counted.
    While a part of the store is away, or the store refuses a log, the other logs are still written. An outage and its
    end are logged once each. Between appends the thread removes entries beyond ``retention``, a slice at a time. Close
    the writer before the store.

    before_append(namespace, record): called in the writer's thread before records are appended to a log, with the first
    of them. It may wait for the store and raise its errors, and may call ``forget``: what that drops is not appended.
    No record is given up for its errors: they wait as those of a log that the store refuses.
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
        before_append: Callable[[str, Record], None] = lambda namespace, record: None,
    ) -> None:
        self._store, self._before_append = store, before_append
        self._trimmer = Trimmer(store, retention)
        self._records = WaitingRecords(max_bytes, max_entries, batch_entries)
        self._max_entries, self._batch_entries, self._batch_seconds = max_entries, batch_entries, batch_seconds
        self._breaker = breaker or CircuitBreaker(max_pause=5.0)
        self._hurry = False  # whether a batch need not wait for more records
        self._failures = 0  # appends that failed because the whole store was away
        self._refusal_logged = False
        self._lost = False  # whether it was logged that the store is lost, and not yet that it is back
        self._tell_at = 0.0  # when that may be logged again, because a full store may be lost and back many times
        self._deadline: float | None = None
        lock = threading.Lock()  # never held during a call to the store, so that no caller waits
        self._work, self._settled = threading.Condition(lock), threading.Condition(lock)
        self._thread = threading.Thread(target=self._run, name="agentspec-store-writer", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, namespace: str, record: Record) -> None:
        """Queue ``record`` for a log. Its arrays must not change afterwards."""
        with self._changing() as records:
            if self._closing():
                records.counts.dropped += 1
                return
            records.put(namespace, record)
            if records.queued in (1, self._batch_entries):
                self._work.notify()

    def forget(self, session: str, timeout: float = 0.0) -> bool:
        """Drop the queued records of a session that is being erased, so that they do not come after its tombstone.

        Waits up to ``timeout`` seconds until no record of it is on its way to the store. Returns whether none is.
        """
        with self._changing() as records:
            records.forget(session)
        with self._work:
            return self._settled.wait_for(lambda: not records.is_in_flight(session), timeout)

    def flush(self, timeout: float, *, once: bool = False) -> bool:
        """Wait until all records put so far are written, dropped or refused. Returns False after ``timeout`` s.

        once: try a store that was away at once, because it may be back, and return False as soon as an append fails.
        """
        with self._work:
            target, failures = self._records.newest, self._failures
            self._hurry = True
            if once:
                self._breaker.hurry()
            self._work.notify()
            self._settled.wait_for(
                lambda: self._records.oldest() > target or (once and self._failures > failures), timeout
            )
            return self._records.oldest() > target

    def waiting(self, session: str) -> list[Record]:
        """Return the records of a session that wait to be written, oldest first."""
        with self._work:
            items = self._records.all()
        items = [item for item in items if item.record.session == session]
        return [item.record for item in sorted(items, key=lambda item: item.number)]

    def waiting_sessions(self) -> set[str]:
        """Return the sessions with records that wait to be written."""
        with self._work:
            items = self._records.all()
        return {item.record.session for item in items}

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
            records = self._records
            return replace(
                records.counts,
                queued=len(records),
                queued_bytes=records.bytes,
                refused_logs=records.aside.refused_logs(),
                trimmed=self._trimmer.removed,
                trim_failed=self._trimmer.failed,
                state="open" if records.aside.is_part_away() else self._breaker.state,
            )

    @contextmanager
    def _changing(self) -> Iterator[WaitingRecords]:
        """Hold the lock while records change places, and then wake `flush` and `forget`."""
        with self._work:
            yield self._records
            if not (self._records.queued or self._records.in_flight):
                self._hurry = False
            self._settled.notify_all()

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            if batch:
                self._write(batch)
            self._write_aside()
            if not self._closing():
                self._trimmer.trim_if_due()  # also while appends fail, because that makes room in a full store
        self._write_aside(closing=True)
        with self._changing() as records:
            left = records.drop_all()
        if left:
            logger.warning("agentspec: the store writer stopped with %d records unwritten", left)

    def _next_batch(self) -> list[QueuedRecord] | None:
        """Wait for a batch of records and for the breaker. Return it; [] if something else is due; None to end."""
        records = self._records
        with self._work:
            pause = _shortest(self._trimmer.wait(), records.aside.wait())
            self._work.wait_for(lambda: records.queued or self._closing(), pause)
            if not (records.queued or self._closing()):
                return []
            self._work.wait_for(
                lambda: records.queued >= self._batch_entries or self._hurry or self._closing(), self._batch_seconds
            )
            # Half-open: the breaker let a call through that was not made, because the whole batch was set aside.
            while not (self._closing() or self._breaker.state == "half-open" or self._breaker.allow()):
                trim_in = self._trimmer.wait()
                if trim_in == 0.0:
                    return []
                self._work.wait(_shortest(trim_in, self._breaker.wait()))
            self._work.wait_for(self._closing, self._breaker.wait())
            if self._closing() and (not records.queued or self._deadline_is_over()):
                return None
            return records.take_batch()

    def _write(self, batch: list[QueuedRecord]) -> None:
        """Append the batch log by log. Set records aside whose log is refused, or whose part of the store is away.

        If the whole store is away, queue the rest of the batch again.
        """
        logs: dict[str, list[QueuedRecord]] = {}
        for item in batch:
            logs.setdefault(item.namespace, []).append(item)
        for namespace, items in logs.items():
            if (target := self._records.aside.target_of(namespace, self._part)) is not None:
                with self._changing() as records:
                    records.set_aside(target, items)
                continue
            begin = time.monotonic()
            if (error := self._append(namespace, items)) is None:
                continue
            if not isinstance(error, StoreUnavailableError):
                self._put_back(RefusedLog(namespace), items, error)
                continue
            part = StorePart(self._part(namespace))
            if not part.name:
                self._requeue(error, slow=time.monotonic() - begin > _SLOW_SECONDS)
                return
            with self._changing() as records:
                records.set_aside(part, items, failed=True)
                newly_away = records.aside.breaker_of(part).failure()
            if newly_away:
                logger.warning("agentspec: a part of the store is lost (%s); the others are written to", error)

    def _part(self, namespace: str) -> str:
        """Return the part of the store that holds a log; "", as if there were no parts, if the store cannot tell."""
        try:
            return self._store.part(namespace)
        except Exception:  # a store may raise anything, and the thread must survive it
            return ""

    def _append(self, namespace: str, items: list[QueuedRecord]) -> Exception | None:
        """Append records to their log. Return the error that prevented it; None if they were appended.

        Removes the records from ``items`` whose session is erased meanwhile.
        """
        try:
            self._before_append(namespace, items[0].record)
        except StoreUnavailableError as error:
            return error
        except Exception as error:  # following a log does more than the append, and may raise anything, too
            return _NotReadyError(str(error))
        try:
            with self._changing() as records:
                items[:] = records.drop_erased(items)
            if not items:
                return None
            entries = self._encode_all(items)
            if entries:
                self._store.append(namespace, entries)
            else:
                self._store.ping()  # only the result of a call closes the breaker
        except Exception as error:  # a store may raise anything, and the thread must survive it
            return error
        self._note_written(items, entries)
        return None

    def _write_aside(self, *, closing: bool = False) -> None:
        """Write some of the records set aside, for the targets that may be tried now; if ``closing``, for all."""
        aside = self._records.aside
        for target, breaker in aside.targets() if closing else aside.due():
            for _ in range(self._max_entries if closing else _APPENDS):
                if closing and self._deadline_is_over():
                    break
                with self._changing() as records:
                    items = records.take_aside(target)
                if not items:
                    break
                error = self._append(items[0].namespace, items)
                written = error is None and items  # otherwise all were erased, and nothing was asked of the store
                takes_records = written or (_is_refusal(error) and self._takes_others(target, items))
                if takes_records and breaker.success():
                    logger.warning("agentspec: %s is back; %d records wait for it", target, len(aside))
                if error is None:
                    continue
                self._put_back(target, items, error)
                if isinstance(error, StoreUnavailableError):
                    breaker.failure()
                if breaker.state == "open":
                    break

    def _takes_others(self, target: Target, refused: list[QueuedRecord]) -> bool:
        """Return whether a log that counts as refused takes a record of another session than the one refused just now.

        Then the log is not at fault.
        """
        with self._changing() as records:
            items = records.take_other(target, refused[0].record.session) if len(refused) == 1 else []
        if not items:
            return False
        error = self._append(items[0].namespace, items)
        if error is not None:
            with self._changing() as records:
                records.put_back(target, items, refused=_is_refusal(error))
        return error is None and bool(items)

    def _put_back(self, target: Target, items: list[QueuedRecord], error: Exception) -> None:
        """Let a failed append wait again. A refused one waits in halves, until the bad record is alone and given up.

        After some such records in a row, the log counts as refused, and its records wait.
        """
        refused = _is_refusal(error)
        with self._changing() as records:
            if records.put_back(target, items, refused=refused) is not None:
                self._log_refusal(error)
            at_fault = isinstance(error, _NotReadyError) or (refused and len(items) == 1)
            if at_fault and isinstance(target, RefusedLog) and records.aside.breaker_of(target).failure():
                message = "agentspec: %s is refused by the store (%s); its records wait, the other logs go on"
                logger.warning(message, target, error)

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
        with self._changing() as records:
            records.note_written(items, len(entries))
            left, dropped = records.queued + len(records.in_flight), records.counts.dropped
        if recovered:
            message = "agentspec: the store is back; %d records wait to be written, %d were dropped"
            logger.warning(message, left, dropped)

    def _log_refusal(self, error: Exception) -> None:
        """Log why a record is given up, but only for the first one."""
        if not self._refusal_logged:
            self._refusal_logged = True
            logger.warning("agentspec: a record cannot be stored: %s; further ones are only counted", error)

    def _requeue(self, error: StoreUnavailableError, *, slow: bool) -> None:
        """Queue the rest of a batch again, because the store is away. error, slow: of the append that failed."""
        with self._changing() as records:
            records.requeue()
            self._failures += 1
            queued, closing = records.queued, self._closing()
        self._breaker.failure(slow=slow)
        now = time.monotonic()
        if self._breaker.state == "open" and not self._lost and now >= self._tell_at:
            self._lost, self._tell_at = True, now + _TELL_SECONDS
            message = "agentspec: the store is lost (%s); %d records wait, decoding goes on without it"
            logger.warning(message, error, queued)
        if closing:
            time.sleep(_CLOSING_DELAY)

    def _closing(self) -> bool:
        return self._deadline is not None

    def _deadline_is_over(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline


def _shortest(*waits: float | None) -> float | None:
    """Return the shortest of these times; None stands for an endless one."""
    return min((wait for wait in waits if wait is not None), default=None)


def _is_refusal(error: Exception | None) -> bool:
    """Return whether the store refused the records of an append; False: it was away, or not asked."""
    return error is not None and not isinstance(error, StoreUnavailableError | _NotReadyError)
