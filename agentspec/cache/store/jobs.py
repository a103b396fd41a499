"""Run jobs on a store in a thread of their own, for callers that must not wait."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from agentspec.cache.store.base import Store
from agentspec.errors import InvalidInputError, StoreUnavailableError

_MAX_WAITING = 64
_MAX_RESULTS = 256  # kept for callers that ask late; the oldest go first


@dataclass(frozen=True, slots=True)
class JobResult:
    """Hold what a job returned, or the error that it raised."""

    value: Any = None
    error: Exception | None = None


class StoreJobs:
    """Run jobs on a store, one after the other. Thread-safe; no call waits for the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(1, "agentspec-store-jobs")  # starts its thread with the first job
        self._jobs: OrderedDict[int, Future[Any]] = OrderedDict()
        self._number = 0
        self._lock = threading.Lock()

    def submit(self, job: Callable[[Store], Any]) -> int:
        """Run ``job(store)`` soon. Returns a ticket for ``result``. Raises StoreUnavailableError if too many wait."""
        with self._lock:
            if self._waiting() >= _MAX_WAITING:
                raise StoreUnavailableError(f"{_MAX_WAITING} jobs wait for the store already; try again later")
            self._number += 1
            self._jobs[self._number] = self._pool.submit(job, self._store)
            for ticket in [ticket for ticket, future in self._jobs.items() if future.done()][:-_MAX_RESULTS]:
                del self._jobs[ticket]
            return self._number

    def result(self, ticket: int) -> JobResult | None:
        """Return a job's result; None while it waits or runs. Raises InvalidInputError for an unknown ticket.

        The newest 256 results are kept.
        """
        with self._lock:
            future = self._jobs.get(ticket)
        if future is None:
            raise InvalidInputError(f"ticket {ticket!r}: unknown, or its result was forgotten; submit the job again")
        if not future.done():
            return None
        if future.cancelled():
            return JobResult(error=StoreUnavailableError("the store was closed before the job began"))
        error = future.exception()
        if isinstance(error, Exception):
            return JobResult(error=error)
        return JobResult(future.result())

    def waiting(self) -> int:
        """Return how many jobs wait or run."""
        with self._lock:
            return self._waiting()

    def close(self) -> None:
        """Drop the jobs that have not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _waiting(self) -> int:
        return sum(not future.done() for future in self._jobs.values())
