"""Run jobs on a store in a thread of their own, for callers that must not wait."""

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from agentspec.cache.store.base import Store
from agentspec.errors import StoreUnavailableError

_MAX_WAITING = 64
"""Most jobs of one owner that wait or run."""
_MAX_ALL = 1024
"""Most jobs of all owners together."""

Result = TypeVar("Result")


class StoreJobs:
    """Run jobs on a store, one after the other. Thread-safe; no call waits for the store.

    The owners of jobs take turns, so that an owner with many jobs does not hold up the others. Each owner's jobs keep
    their order.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(1, "agentspec-store-jobs")  # starts its thread with the first job
        self._queues: dict[str | None, deque[tuple[Future[Any], Callable[[Store], Any]]]] = {}  # next owner first
        self._counts: Counter[str | None] = Counter()  # of the jobs that wait or run, by owner
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, job: Callable[[Store], Result], owner: str | None = None) -> "Future[Result]":
        """Run ``job(store)`` soon. Returns its future.

        Raises StoreUnavailableError if too many jobs wait, of the owner or of all together, and after `close`.
        """
        future: Future[Result] = Future()
        with self._lock:
            waiting = self._counts.total()
            if self._counts.get(owner, 0) >= _MAX_WAITING or waiting >= _MAX_ALL:
                raise StoreUnavailableError(f"{waiting} jobs wait for the store already; try again later")
            try:
                self._pool.submit(self._run_next)
            except RuntimeError as error:  # also where no thread can be started
                why = "the store is closed; it takes no more jobs" if self._closed else f"{error}; try again later"
                raise StoreUnavailableError(why) from None
            self._queues.setdefault(owner, deque()).append((future, job))
            self._counts[owner] += 1
        future.add_done_callback(lambda _: self._end(owner))
        return future

    def waiting(self) -> int:
        """Return how many jobs wait or run."""
        with self._lock:
            return self._counts.total()

    def close(self) -> None:
        """Cancel the jobs that have not begun."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting = [future for queue in self._queues.values() for future, _ in queue]
            self._queues.clear()
        for future in waiting:
            future.cancel()

    def _run_next(self) -> None:
        with self._lock:
            if not self._queues:  # closed meanwhile
                return
            owner = next(iter(self._queues))
            queue = self._queues.pop(owner)
            future, job = queue.popleft()
            if queue:
                self._queues[owner] = queue  # behind the other owners
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(job(self._store))
        except BaseException as error:
            future.set_exception(error)

    def _end(self, owner: str | None) -> None:
        with self._lock:
            self._counts[owner] -= 1
            if not self._counts[owner]:
                del self._counts[owner]
