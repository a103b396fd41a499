"""Wait for what a user's function returns, which may be asynchronous."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable
from contextlib import suppress
from functools import cache
from typing import Any

_LOOP_LOCK = threading.Lock()


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of the user's asynchronous functions. A daemon thread runs it."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            with suppress(SystemExit, KeyboardInterrupt):  # such an error of a task ends run_forever, too
                loop.run_forever()

    threading.Thread(target=run, name="agentspec-async", daemon=True).start()
    return loop


def awaited(value: Any, seconds: float | None = None) -> Any:
    """Return a value, or an awaitable's result. Cancel the awaitable after ``seconds``, or if this thread is stopped.

    All awaitables run on one event loop, so that functions can keep a client from call to call. It is not that of the
    calling thread, which may run one, as in a notebook. Raises TimeoutError.
    """
    if not inspect.isawaitable(value):
        return value
    with _LOOP_LOCK:
        loop = _event_loop()
    future = asyncio.run_coroutine_threadsafe(_result_of(value), loop)
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # the function raised it itself
            raise
        raise TimeoutError(took_over(seconds)) from None
    finally:
        future.cancel()  # does nothing once it has ended


async def _result_of(awaitable: Awaitable[Any]) -> Any:
    """Return the result of an awaitable. This makes it a coroutine, which is all that an event loop takes."""
    return await awaitable


def took_over(seconds: float | None) -> str:
    """Return why a function was given up."""
    return f"took over {seconds:g} s"
