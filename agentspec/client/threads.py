"""Run functions that block in threads, for asyncio."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_STORE_THREADS = 16  # each waits for the store, for 0.1 s in a call


class StoreThreads:
    """Hold the threads in which a client waits for its store. No function of the caller's occupies them."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(_STORE_THREADS, "agentspec-store")

    async def run(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call the function, and return its result."""
        call = functools.partial(contextvars.copy_context().run, function, *arguments, **options)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def close(self) -> None:
        """End the threads once their calls have ended. Later calls run in asyncio's threads."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)
