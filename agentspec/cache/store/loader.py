"""Stored turns on their way into the trees, read in the background."""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice

from agentspec.cache.store.base import Entry, Store, check_namespace, check_newest
from agentspec.cache.store.breaker import CircuitBreaker, State
from agentspec.cache.store.chain import Chain
from agentspec.cache.store.reader import RecordReader
from agentspec.cache.store.records import Record, TurnRecord
from agentspec.errors import StoreUnavailableError

logger = logging.getLogger(__name__)

_SLICE = 64  # records handed over together, and entries of the preload between two looks at the requests
_BATCH_BYTES = 1 << 20
_MAX_CHAINS = 100_000
_OVERHEAD = 256


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """Counts since the start."""

    delivered: int
    """Records handed out by ``poll``."""
    damaged: int
    """Records skipped because their bytes do not hold."""
    unknown: int
    """Records skipped because this release does not know their version or kind."""
    failed: int
    """Reads that failed; tried again where that may help."""
    refused: int
    """Requests turned away because too many were waiting."""
    pending: int
    """Sessions requested and not yet delivered."""
    preloading: bool
    state: State

    def as_dict(self) -> dict[str, int | str]:
        """As JSON."""
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


@dataclass(frozen=True, slots=True)
class _Batch:
    records: list[TurnRecord]
    size: int
    finishes: _Request | _Preload | None
    """The job that ends with this batch."""


class BackgroundLoader:
    """Reads sessions, and the newest part of a whole log, from a store in a thread of its own.

    No call blocks or raises because of the store. A session's records come in log order and each at most once, however
    preload and requests overlap. Records written after the request for them are left out: they are of turns that this
    process, or another replica, has run since. The store stays the caller's, to be closed after this.
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
        self._preloading = False
        self._chains: OrderedDict[str, Chain] = OrderedDict()
        self._batch: list[TurnRecord] = []  # of the thread alone
        self._batch_bytes = 0
        self._ready: deque[_Batch] = deque()
        self._ready_bytes = 0
        self._delivered = self._failed = self._refused = 0
        self._closed = False
        self._wake = threading.Condition(threading.Lock())  # held for moments only, never while the store is called
        self._thread = threading.Thread(target=self._run, name="agentspec-store-loader", daemon=True)
        self._thread.start()

    def request(self, session: str) -> None:
        """Have the session's records read that were not delivered before. Repeating a pending request does nothing."""
        with self._wake:
            if session in self._pending or self._closed:
                return
            if len(self._pending) >= self._max_pending:
                self._refused += 1
                return
            self._pending.add(session)
            self._requests.append(_Request(session, self._clock()))
            self._wake.notify()

    def preload(self, newest: int) -> None:
        """Have the ``newest`` records of the log read, and what their sessions said before. Once, at the start."""
        check_newest(newest)
        with self._wake:
            if self._preloading or self._closed:
                return
            self._preloading = True
            self._preload = _Preload(newest, self._clock())
            self._wake.notify()

    def poll(self) -> list[list[TurnRecord]]:
        """Batches read since the last call, in the order in which to restore them; at once empty if there are none."""
        if not self._ready:
            return []
        with self._wake:
            batches = list(self._ready)
            self._ready.clear()
            self._ready_bytes = 0
            for batch in batches:
                self._delivered += len(batch.records)
                if isinstance(batch.finishes, _Request):
                    self._pending.discard(batch.finishes.session)
                elif batch.finishes is not None:
                    self._preloading = False
            self._wake.notify()  # the thread may be waiting for room
        return [batch.records for batch in batches if batch.records]

    def is_pending(self, session: str | None) -> bool:
        """Whether ``poll`` may yet give records because of a request for ``session``; None: because of the preload."""
        return self._preloading if session is None else session in self._pending

    def forget(self, session: str) -> None:
        """The session has left the trees: a later request delivers all of its records again."""
        with self._wake:
            self._forgotten.add(session)

    def close(self, timeout: float = 1.0) -> None:
        """Stop reading; what is ready can still be polled."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join(timeout)

    def stats(self) -> LoaderStats:
        """Figures of this moment."""
        with self._wake:
            return LoaderStats(
                delivered=self._delivered,
                damaged=self._reader.damaged,
                unknown=self._reader.unknown,
                failed=self._failed,
                refused=self._refused,
                pending=len(self._pending),
                preloading=self._preloading,
                state=self._breaker.state,
            )

    def _run(self) -> None:
        while job := self._next_job():
            try:
                if isinstance(job, _Request):
                    self._load_session(job.session, job.asked)
                    finished = True
                else:
                    finished = self._advance(job)
            except Exception as error:  # whatever a store may raise: this thread must live
                self._put_off(job, error)
                continue
            if self._breaker.success():
                logger.warning("agentspec: the store can be read again")
            self._publish(job if finished else None)

    def _next_job(self) -> _Request | _Preload | None:
        """Wait for something to do and for the breaker; requests go before the preload. None: closed."""
        with self._wake:
            while not self._closed:
                if not (self._requests or self._preload):
                    self._wake.wait()
                elif (pause := self._breaker.wait()) > 0 or not self._breaker.allow():
                    self._wake.wait(pause)
                else:
                    return self._requests.popleft() if self._requests else self._preload
            return None

    def _load_session(self, session: str, asked: float) -> None:
        chain = self._chain(session)
        for entry, record in self._reader.read(self._store, self._namespace, session=session, after=chain.cursor):
            self._deliver(chain, entry, record, asked)
        if chain.cursor is None:
            self._chains.pop(session, None)  # the store has nothing of it

    def _advance(self, job: _Preload) -> bool:
        """Deliver one slice of the preload. Returns whether it was the last."""
        if job.entries is None:
            job.entries = self._reader.read(self._store, self._namespace, after=job.after, newest=job.newest)
        seen = 0
        for entry, record in islice(job.entries, _SLICE):
            seen += 1
            chain = self._chain(entry.session)
            if chain.cursor is None and isinstance(record, TurnRecord) and record.kept:
                self._load_session(entry.session, job.asked)  # it goes on from turns older than the window
            elif chain.cursor is None or chain.cursor < entry.sequence:
                self._deliver(chain, entry, record, job.asked)
            job.after, job.newest = entry.sequence, job.newest - 1
        return seen < _SLICE

    def _deliver(self, chain: Chain, entry: Entry, record: Record | None, asked: float) -> None:
        chain.cursor = entry.sequence
        if not isinstance(record, TurnRecord) or record.created >= asked:
            chain.lose()
            return
        self._batch.append(chain.link(record))
        self._batch_bytes += _OVERHEAD + record.prompt_tail.nbytes + record.response.nbytes
        if len(self._batch) >= _SLICE or self._batch_bytes >= _BATCH_BYTES:
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

    def _publish(self, finishes: _Request | _Preload | None) -> None:
        """Hand the batch to the caller; waits while too much is ready and nobody polls."""
        if not self._batch and finishes is None:
            return
        batch = _Batch(self._batch, self._batch_bytes, finishes)
        self._batch, self._batch_bytes = [], 0
        with self._wake:
            self._wake.wait_for(lambda: self._closed or self._ready_bytes < self._max_ready_bytes)
            self._ready.append(batch)
            self._ready_bytes += batch.size
            if isinstance(finishes, _Preload):
                self._preload = None

    def _put_off(self, job: _Request | _Preload, error: Exception) -> None:
        """Keep a job for later if that may help; it then goes on behind the last entry that it has seen."""
        passing = isinstance(error, StoreUnavailableError)
        self._publish(None if passing else job)
        with self._wake:
            self._failed += 1
            if isinstance(job, _Preload):
                job.entries = None
            elif passing:
                self._requests.appendleft(job)
        if self._breaker.failure() or not passing:
            logger.warning("agentspec: stored turns cannot be read: %s", error)
