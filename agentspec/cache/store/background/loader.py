"""Load sessions, groups and tenants' corpora from the store, in the background of a running server."""

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from agentspec.cache.store.background.breaker import CircuitBreaker, State
from agentspec.cache.store.background.courtesy import Courtesy
from agentspec.cache.store.background.ready import Loaded, ReadyRecords, Wanted
from agentspec.cache.store.base import QUEUE_BYTES, Entry, Store
from agentspec.cache.store.record_reader import RecordReader
from agentspec.cache.store.records import Record, TurnRecord
from agentspec.errors import StoreUnavailableError

if TYPE_CHECKING:  # stores work without the compiled core
    from agentspec.cache.core import PreparedSession

logger = logging.getLogger(__name__)

_BATCH_ENTRIES = 64  # most entries in a batch; after each batch of a corpus the loader looks for other requests
_BATCH_BYTES = 1 << 20  # about the most bytes in a batch
_WHOLE_BYTES = 4 << 20  # most bytes of a session that is delivered in one batch; a larger one comes in several
_PREPARED_TOKENS = 100_000  # a session of at least so many tokens in one batch is indexed before it is delivered
_MAX_RECORDS = 2048  # most records of a session or group that a request delivers: the newest
_LONGEST_PAUSE = 5.0  # seconds between two looks at a store that is away; as the follower's
_MAX_TRIES = 3  # failures of one read after which it is given up, although the store answers other calls


@dataclass(slots=True)
class LoaderStats:
    """Count what the loader has done since the start.

    delivered: records that ``take`` returned. damaged, unknown: records that RecordReader skipped. failed: reads that
    failed; the loader retries them if that may help. given_up: requests whose reads failed for good. refused: requests
    rejected because too many were waiting. The next request for the same tries again in both cases. pending: sessions
    and groups requested and not yet read. corpora: tenants whose corpus was requested and not yet taken. ready_bytes:
    memory of the records that wait. state: the breaker's state.
    """

    delivered: int = 0
    damaged: int = 0
    unknown: int = 0
    failed: int = 0
    given_up: int = 0
    refused: int = 0
    pending: int = 0
    corpora: int = 0
    ready_bytes: int = 0
    state: State = "closed"


@dataclass(slots=True)
class _Job:
    """Hold a read that waits or is under way.

    newest: most entries to read, the last ones. after: cursor of the last entry read. tries: failures since the last
    progress. forgotten: sessions erased since the read began.
    """

    wanted: Wanted
    newest: int
    after: str | None = None
    tries: int = 0
    entries: Iterator[tuple[Entry, Record | None]] | None = None
    forgotten: set[str] = field(default_factory=set)


class BackgroundLoader:
    """Read sessions, groups and tenants' corpora from a store in a thread.

    No call blocks or raises because of the store. Each request delivers the newest of the store's records in log order,
    also those that the cache holds already: the cache ignores them. A limit on their number keeps an endless session
    from pushing out all others each time it is loaded. Sessions and groups are read before corpora. A read that fails
    while the store answers is put off behind the others, and given up after some tries. Close the loader before the
    store.

    before_read(namespace, tenant): called in the loader's thread before a log is read; it may wait for the store and
    raise its errors. prepare(records): called in that thread with all turns of a large session; returns their indexes,
    or None if it cannot. ready: the queue from which ``take`` returns records.
    """

    def __init__(
        self,
        store: Store,
        *,
        max_pending: int = 4096,
        max_ready_bytes: int = QUEUE_BYTES,
        breaker: CircuitBreaker | None = None,
        before_read: Callable[[str, str | None], None] = lambda namespace, tenant: None,
        prepare: "Callable[[list[TurnRecord]], PreparedSession | None]" = lambda records: None,
    ) -> None:
        self._store = store
        self.ready = ReadyRecords(max_ready_bytes)
        self._whole_bytes = min(_WHOLE_BYTES, max_ready_bytes // 4)
        self._max_pending, self._before_read, self._prepare = max_pending, before_read, prepare
        self._breaker = breaker or CircuitBreaker(max_pause=_LONGEST_PAUSE)
        self._reader = RecordReader()
        self._requests: deque[_Job] = deque()
        self._corpora: deque[_Job] = deque()
        self._requested: set[Wanted] = set()  # sessions and groups until their read begins, corpora until all was taken
        self._untaken: set[Wanted] = set()  # sessions and groups until all their records were taken
        self._again: dict[Wanted, int] = {}  # those of them to read again then, and how many records
        self._current: _Job | None = None
        self._counts = LoaderStats()
        self._closed = self._failure_logged = False
        self._wake = threading.Condition(threading.Lock())  # never held during a call to the store
        self._thread = threading.Thread(target=self._run, name="agentspec-store-loader", daemon=True)
        self._thread.start()

    def request(self, wanted: Wanted, newest: int = _MAX_RECORDS) -> bool:
        """Request the newest records of a session, group or corpus. Returns whether they will come.

        Returns False if too many requests wait, and after `close`. If a session or group is requested while it is read
        or waits to be taken, it is read once more afterwards, because the first read may miss newer records. That waits
        until all records were taken, because a second copy of a large group would hold up other sessions.
        """
        with self._wake:
            if self._closed:
                return False
            if wanted in self._requested:
                return True
            if wanted in self._untaken:
                self._again[wanted] = newest
                return True
            if len(self._queue_of(wanted)) >= self._max_pending:
                self._counts.refused += 1
                return False
            self._counts.corpora += wanted.is_corpus
            self._queue(_Job(wanted, newest))
            return True

    def take(self) -> Loaded | None:
        """Return the next records to apply, or None if none are ready. Never blocks."""
        loaded = self.ready.take()
        if loaded is None:
            return None
        with self._wake:
            self._counts.delivered += len(loaded.records)
            if loaded.complete:
                self._end(loaded.wanted)
        return loaded

    def is_pending(self, wanted: Wanted) -> bool:
        """Return whether ``take`` may still return records of a session, group or corpus."""
        return self.is_reading(wanted) or self.ready.holds(wanted)

    def is_reading(self, wanted: Wanted) -> bool:
        """Return whether a session or group is still to be read, even in part, or a corpus to be taken."""
        with self._wake:
            read = self._current is not None and self._current.wanted == wanted
            return read or wanted in self._requested

    def forget(self, *sessions: str) -> None:
        """Drop the records of erased sessions that were read already. Call it again when the store has erased them."""
        with self._wake:
            for job in filter(None, (self._current, *self._corpora)):
                if job.entries is not None:
                    job.forgotten.update(sessions)
        self.ready.forget(*sessions)

    def close(self, timeout: float = 1.0) -> None:
        """Stop reading. ``take`` still returns what is ready."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self.ready.close()
        self._thread.join(timeout)

    def stats(self) -> LoaderStats:
        """Return the current counts."""
        with self._wake:
            return replace(
                self._counts,
                damaged=self._reader.damaged,
                unknown=self._reader.unknown,
                pending=len(self._requests) + (self._current is not None and not self._current.wanted.is_corpus),
                ready_bytes=self.ready.bytes,
                state=self._breaker.state,
            )

    def _run(self) -> None:
        while job := self._next_job():
            try:
                finished = self._load(job)
            except Exception as error:  # a store may raise anything, and the thread must survive it
                self._put_off(job, error)
                continue
            self._note_answer()
            if finished:
                self._publish(job, Loaded(job.wanted, complete=True))
            else:
                with self._wake:
                    self._corpora.appendleft(job)

    def _next_job(self) -> _Job | None:
        """Wait for a job and for the breaker. Returns None when closed."""
        with self._wake:
            self._current = None
            while not self._closed:
                if not (self._requests or self._corpora):
                    self._wake.wait()
                elif (pause := self._breaker.wait()) > 0 or not self._breaker.allow():
                    self._wake.wait(pause)
                elif self._requests:
                    self._current = self._requests.popleft()
                    self._requested.discard(self._current.wanted)
                    return self._current
                else:
                    self._current = self._corpora.popleft()
                    return self._current
            return None

    def _load(self, job: _Job) -> bool:
        """Deliver a session or group, or one batch of a corpus. Returns whether the job is done."""
        if job.entries is None:
            wanted = job.wanted
            self._before_read(wanted.namespace, wanted.tenant)
            job.forgotten.clear()
            entries = self._store.read(
                wanted.namespace,
                session=wanted.session,
                group=wanted.group if wanted.family is None else wanted.family,
                after=job.after,
                newest=job.newest,
            )
            job.entries = self._reader.read(entries)
        done = self._load_batch(job, job.entries)
        while not (done or job.wanted.is_corpus):
            done = self._load_batch(job, job.entries)
        return done

    def _load_batch(self, job: _Job, entries: Iterator[tuple[Entry, Record | None]]) -> bool:
        """Deliver the next records together, a whole session if it is not too large. Returns whether none is left."""
        whole = job.wanted.session is not None and job.after is None
        most, most_bytes = (sys.maxsize, self._whole_bytes) if whole else (_BATCH_ENTRIES, _BATCH_BYTES)
        loaded, courtesy = Loaded(job.wanted), Courtesy()
        try:
            for seen, (entry, record) in enumerate(entries, 1):
                if isinstance(record, TurnRecord):
                    loaded.add(record)
                job.after, job.tries = entry.sequence, 0
                if seen == most or loaded.size >= most_bytes:
                    return False
                courtesy.pause()
            if whole and sum(record.tokens for record in loaded.records) >= _PREPARED_TOKENS:
                loaded.prepared = self._prepare(loaded.records)
                loaded.size += loaded.prepared.bytes() if loaded.prepared else 0
        finally:
            self._publish(job, loaded)
        return True

    def _publish(self, job: _Job, loaded: Loaded) -> None:
        """Queue records for ``take``. Waits while the queue is full."""
        if loaded.records or loaded.complete:
            self.ready.put(loaded, job.forgotten)

    def _queue_of(self, wanted: Wanted) -> deque[_Job]:
        return self._corpora if wanted.is_corpus else self._requests

    def _queue(self, job: _Job) -> None:
        self._requested.add(job.wanted)
        if not job.wanted.is_corpus:
            self._untaken.add(job.wanted)
        self._queue_of(job.wanted).append(job)
        self._wake.notify()

    def _end(self, wanted: Wanted) -> None:
        """Note that all of a session, group or corpus was taken or given up. Read it again if that was requested."""
        if wanted.is_corpus:
            self._requested.discard(wanted)
            self._counts.corpora -= 1
            return
        self._untaken.discard(wanted)
        if wanted in self._again:
            self._queue(_Job(wanted, self._again.pop(wanted)))

    def _put_off(self, job: _Job, error: Exception) -> None:
        """Queue a failed job again, behind the others, if a retry may help. It goes on behind the last entry read."""
        job.entries = None
        passing = isinstance(error, StoreUnavailableError)
        answers = not passing or self._answers()
        job.tries += answers
        given_up = not passing or job.tries >= _MAX_TRIES
        with self._wake:
            self._counts.failed += 1
            if given_up:
                self._counts.given_up += 1
                self._end(job.wanted)
            else:
                self._queue(job)
        if not answers and self._breaker.failure():
            logger.warning("agentspec: stored turns cannot be read: %s", error)
        elif answers:
            self._note_answer()
        if given_up and not self._failure_logged:
            self._failure_logged = True
            logger.warning("agentspec: a stored session cannot be read: %s; further ones are only counted", error)

    def _note_answer(self) -> None:
        if self._breaker.success():
            logger.warning("agentspec: the store can be read again")

    def _answers(self) -> bool:
        """Return whether the store answers a ping, so that the fault was of the last read alone."""
        try:
            self._store.ping()
        except Exception:
            return False
        return True
