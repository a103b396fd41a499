"""Run jobs on a store in a thread of their own, for callers that must not wait."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from agentspec.cache.store.base import Store
from agentspec.errors import StoreUnavailableError

_MAX_WAITING = 64

Result = TypeVar("Result")


class StoreJobs:
    """Run jobs on a store, one after the other. Thread-safe; no call waits for the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(1, "agentspec-store-jobs")  # starts its thread with the first job
        self._waiting = 0
        self._lock = threading.Lock()

    def submit(self, job: Callable[[Store], Result]) -> "Future[Result]":
        """Run ``job(store)`` soon. Returns its future. Raises StoreUnavailableError if too many jobs wait."""
        with self._lock:
            if self._waiting >= _MAX_WAITING:
                raise StoreUnavailableError(f"{_MAX_WAITING} jobs wait for the store already; try again later")
            self._waiting += 1
        try:
            future = self._pool.submit(job, self._store)
        except RuntimeError:
            self._end()
            raise StoreUnavailableError("the store is closed; it takes no more jobs") from None
        future.add_done_callback(lambda _: self._end())
        return future

    def waiting(self) -> int:
        """Return how many jobs wait or run."""
        with self._lock:
            return self._waiting

    def close(self) -> None:
        """Cancel the jobs that have not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _end(self) -> None:
        with self._lock:
            self._waiting -= 1
