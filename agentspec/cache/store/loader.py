"""Read stored records, link them to contexts, and load them in the background of a running server."""

import logging
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice

from agentspec.cache.store.base import Entry, Store, check_namespace
from agentspec.cache.store.breaker import CircuitBreaker, State
from agentspec.cache.store.records import Record, TurnRecord, decode
from agentspec.errors import CorruptRecordError, RecordError, StoreUnavailableError

logger = logging.getLogger(__name__)

_SLICE = 64  # records in a batch, and entries that the preload reads before it looks for requests
_BATCH_BYTES = 1 << 20
_MAX_CHAINS = 100_000
_ALL = sys.maxsize


class RecordReader:
    """Decode the entries of a store, and skip those that cannot be used.

    damaged: records skipped because their bytes are corrupt. unknown: records skipped because of their version or
    kind. The first of either kind is logged.
    """

    def __init__(self) -> None:
        self.damaged = 0
        self.unknown = 0

    def read(
        self,
        store: Store,
        namespace: str,
        *,
        session: str | None = None,
        after: str | None = None,
        newest: int | None = None,
    ) -> Iterator[tuple[Entry, Record | None]]:
        """Yield each entry of Store.read with its record, or with None if the record cannot be used."""
        for entry in store.read(namespace, session=session, after=after, newest=newest):
            yield entry, self._decode(entry)

    def _decode(self, entry: Entry) -> Record | None:
        try:
            record = decode(entry.payload)
            if record.session != entry.session:
                raise CorruptRecordError("damaged record: it belongs to another session than its entry")
        except RecordError as error:
            if isinstance(error, CorruptRecordError):
                first, self.damaged = self.damaged == 0, self.damaged + 1
            else:
                first, self.unknown = self.unknown == 0, self.unknown + 1
            if first:
                logger.warning(
                    "agentspec: stored record %s of session %r is skipped: %s; further ones are only counted",
                    entry.sequence,
                    entry.session,
                    error,
                )
            return None
        return record


@dataclass(slots=True)
class Chain:
    """Link a session's records into one context, even if some turns are missing.

    A record repeats the first ``kept`` tokens of the turn before it. That turn may be missing: damaged, lost, or older
    than the first one read. The record's own prompt tail and response are still contiguous, so it is linked with
    ``kept`` 0. The records after it are linked with ``kept`` less the tokens that their context lacks in front.

    cursor: sequence of the last entry seen. missing: tokens that the context so far lacks in front; sys.maxsize before
    the first record. length: tokens of the context so far.
    """

    cursor: str | None = None
    missing: int = _ALL
    length: int = 0

    def lose(self) -> None:
        """Forget the context, because a turn could not be read."""
        self.missing, self.length = _ALL, 0

    def link(self, record: TurnRecord) -> TurnRecord:
        """Return the session's next record with ``kept`` adjusted to the context so far."""
        if record.gap:
            self.lose()
        kept = record.kept - self.missing
        if kept < 0 or kept > self.length:
            kept, self.missing = 0, record.kept
        self.length = kept + len(record.prompt_tail) + len(record.response)
        return record if kept == record.kept and not record.gap else replace(record, kept=kept, gap=False)


@dataclass(slots=True)
class LoaderStats:
    """Count what the loader has done since the start.

    delivered: records that ``poll`` returned. damaged, unknown: records that RecordReader skipped. failed: reads that
    failed; the loader retries them if that may help. refused: requests rejected because too many were waiting.
    pending: sessions requested and not yet delivered. state: the breaker's.
    """

    delivered: int = 0
    damaged: int = 0
    unknown: int = 0
    failed: int = 0
    refused: int = 0
    pending: int = 0
    preloading: bool = False
    state: State = "closed"

    def as_dict(self) -> dict[str, int | str]:
        """Return the counts as a JSON-able dict."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Request:
    session: str
    asked: float


@dataclass(slots=True)
class _Preload:
    newest: int
    asked: float
    after: str | None = None
    entries: Iterator[tuple[Entry, Record | None]] | None = None


_Job = _Request | _Preload


@dataclass(slots=True)
class _Batch:
    """Hold records to deliver together; ``finishes`` is the job that ends with them."""

    records: list[TurnRecord]
    size: int = 0
    finishes: _Job | None = None


class BackgroundLoader:
    """Read sessions, and the newest part of a log, from a store in a thread.

    No call blocks or raises because of the store. A session's records come in log order and each at most once, even if
    preload and requests overlap. Records written after the request are left out: this process or another replica has
    run those turns since. Close the loader before the store.
    """

    def __init__(
        self,
        store: Store,
        namespace: str,
        *,
        max_pending: int = 4096,
        max_ready_bytes: int = 64 << 20,
        breaker: CircuitBreaker | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._namespace = check_namespace(namespace)
        self._max_pending, self._max_ready_bytes = max_pending, max_ready_bytes
        self._breaker = breaker or CircuitBreaker()
        self._clock = clock
        self._reader = RecordReader()
        self._requests: deque[_Request] = deque()
        self._pending: set[str] = set()
        self._forgotten: set[str] = set()
        self._preload: _Preload | None = None
        self._chains: OrderedDict[str, Chain] = OrderedDict()
        self._batch = _Batch([])  # only the thread uses these
        self._ready: deque[_Batch] = deque()
        self._ready_bytes = 0
        self._counts = LoaderStats()
        self._closed = False
        self._wake = threading.Condition(threading.Lock())  # never held during a call to the store
        self._thread = threading.Thread(target=self._run, name="agentspec-store-loader", daemon=True)
        self._thread.start()

    def request(self, session: str) -> None:
        """Request the session's records that were not delivered before. Repeating a pending request does nothing."""
        with self._wake:
            if session in self._pending or self._closed:
                return
            if len(self._pending) >= self._max_pending:
                self._counts.refused += 1
                return
            self._pending.add(session)
            self._requests.append(_Request(session, self._clock()))
            self._wake.notify()

    def preload(self, newest: int) -> None:
        """Request the ``newest`` records of the log and the earlier ones of their sessions. Call once, at start."""
        with self._wake:
            if self._counts.preloading or self._closed:
                return
            self._counts.preloading = True
            self._preload = _Preload(newest, self._clock())
            self._wake.notify()

    def poll(self) -> list[list[TurnRecord]]:
        """Return the batches read since the last call. Restore them in this order. Never blocks."""
        if not self._ready:
            return []
        with self._wake:
            batches = list(self._ready)
            self._ready.clear()
            self._ready_bytes = 0
            for batch in batches:
                self._counts.delivered += len(batch.records)
                if isinstance(batch.finishes, _Request):
                    self._pending.discard(batch.finishes.session)
                elif batch.finishes is not None:
                    self._counts.preloading = False
            self._wake.notify()  # wake the thread if it waits for room
        return [batch.records for batch in batches if batch.records]

    def is_pending(self, session: str | None) -> bool:
        """Return whether ``poll`` may still return records for ``session``, or of the preload if it is None."""
        return self._counts.preloading if session is None else session in self._pending

    def forget(self, session: str) -> None:
        """Forget what was delivered of an evicted session, so that the next request delivers all of it again."""
        with self._wake:
            self._forgotten.add(session)

    def close(self, timeout: float = 1.0) -> None:
        """Stop reading. ``poll`` still returns the batches that are ready."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join(timeout)

    def stats(self) -> LoaderStats:
        """Return the current counts."""
        with self._wake:
            return replace(
                self._counts,
                damaged=self._reader.damaged,
                unknown=self._reader.unknown,
                pending=len(self._pending),
                state=self._breaker.state,
            )

    def _run(self) -> None:
        while job := self._next_job():
            try:
                finished = self._load(job)
            except Exception as error:  # a store may raise anything, and the thread must survive it
                self._put_off(job, error)
                continue
            if self._breaker.success():
                logger.warning("agentspec: the store can be read again")
            self._publish(job if finished else None)

    def _next_job(self) -> _Job | None:
        """Wait for a job and for the breaker. Requests go before the preload. Returns None when closed."""
        with self._wake:
            while not self._closed:
                if not (self._requests or self._preload):
                    self._wake.wait()
                elif (pause := self._breaker.wait()) > 0 or not self._breaker.allow():
                    self._wake.wait(pause)
                else:
                    return self._requests.popleft() if self._requests else self._preload
            return None

    def _load(self, job: _Job) -> bool:
        """Deliver a session or one slice of the preload. Returns whether the job is done."""
        if isinstance(job, _Request):
            self._load_session(job.session, job.asked)
            return True
        if job.entries is None:
            job.entries = self._reader.read(self._store, self._namespace, after=job.after, newest=job.newest)
        seen = 0
        for entry, record in islice(job.entries, _SLICE):
            seen += 1
            chain = self._chain(entry.session)
            if chain.cursor is None and isinstance(record, TurnRecord) and record.kept:
                self._load_session(entry.session, job.asked)  # its first record continues turns older than the window
            elif chain.cursor is None or chain.cursor < entry.sequence:
                self._deliver(chain, entry, record, job.asked)
            job.after, job.newest = entry.sequence, job.newest - 1
        return seen < _SLICE

    def _load_session(self, session: str, asked: float) -> None:
        chain = self._chain(session)
        for entry, record in self._reader.read(self._store, self._namespace, session=session, after=chain.cursor):
            self._deliver(chain, entry, record, asked)
        if chain.cursor is None:
            self._chains.pop(session, None)  # the store has no record of this session

    def _deliver(self, chain: Chain, entry: Entry, record: Record | None, asked: float) -> None:
        chain.cursor = entry.sequence
        if not isinstance(record, TurnRecord) or record.created >= asked:
            chain.lose()
            return
        self._batch.records.append(chain.link(record))
        self._batch.size += record.size
        if len(self._batch.records) >= _SLICE or self._batch.size >= _BATCH_BYTES:
            self._publish(None)

    def _chain(self, session: str) -> Chain:
        with self._wake:
            if session in self._forgotten:
                self._forgotten.discard(session)
                self._chains.pop(session, None)
        chain = self._chains.get(session)
        if chain is None:
            chain = self._chains[session] = Chain()
            if len(self._chains) > _MAX_CHAINS:
                self._chains.popitem(last=False)
        return chain

    def _publish(self, finishes: _Job | None) -> None:
        """Queue the batch for ``poll``. Waits while the queue is full."""
        if not self._batch.records and finishes is None:
            return
        batch, self._batch = self._batch, _Batch([])
        batch.finishes = finishes
        with self._wake:
            self._wake.wait_for(lambda: self._closed or self._ready_bytes < self._max_ready_bytes)
            self._ready.append(batch)
            self._ready_bytes += batch.size
            if isinstance(finishes, _Preload):
                self._preload = None

    def _put_off(self, job: _Job, error: Exception) -> None:
        """Queue a failed job again if a retry may help. It resumes behind the last entry that it has seen."""
        passing = isinstance(error, StoreUnavailableError)
        self._publish(None if passing else job)
        with self._wake:
            self._counts.failed += 1
            if isinstance(job, _Preload):
                job.entries = None
            elif passing:
                self._requests.appendleft(job)
        if self._breaker.failure() or not passing:
            logger.warning("agentspec: stored turns cannot be read: %s", error)
