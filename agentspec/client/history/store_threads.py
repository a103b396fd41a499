"""Wait for a client's store in threads, so that its event loop goes on."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_STORE_THREADS = 16  # each waits for the store, up to 0.1 s for a call of the model

T = TypeVar("T")


class StoreThreads:
    """Hold the threads in which a client waits for its store. The caller's own functions never run in them."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(_STORE_THREADS, "agentspec-store")

    async def run(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call the function, and return its result."""
        return await self._begin(functools.partial(function, *arguments, **options))

    async def run_to_end(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call the function, and return its result. Raises CancelledError only once the function has ended.

        A thread cannot be cancelled: if the caller went on before, the function would still change things.
        """
        call = self._begin(functools.partial(function, *arguments))
        cancelled: asyncio.CancelledError | None = None
        while not call.done():
            try:
                await asyncio.wait([call])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            call.exception()  # otherwise asyncio logs an error that was never retrieved
            raise cancelled
        return call.result()

    def _begin(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, contextvars.copy_context().run, call)

    def close(self) -> None:
        """End the threads once their calls have ended. Later calls run in asyncio's threads."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)
