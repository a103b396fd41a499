"""Wait for what a user's function returns, which may be asynchronous."""

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

_ANSWER_SECONDS = 0.5
"""Time in which an event loop answers unless a function blocks it."""
_MOST_STUCK = 64
"""Most event loops that are left to functions which block them."""


class _Loops:
    """Hold the event loop of the user's asynchronous functions. A daemon thread runs it.

    All run on one loop, so that functions can keep a client from call to call. One that is blocked is left alone, and
    later functions get another.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin without any loop, as a forked process must: it lacks the threads."""
        self._lock = threading.Lock()
        self._present: asyncio.AbstractEventLoop | None = None
        self._stuck = 0

    def present(self) -> asyncio.AbstractEventLoop:
        """Return the event loop, and make it if there is none."""
        with self._lock:
            if self._present is None:
                self._present = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._present,), name="agentspec-async", daemon=True).start()
            return self._present

    def leave_if_stuck(self, loop: asyncio.AbstractEventLoop) -> None:
        """Leave a loop alone if it does not answer."""
        answered = threading.Event()
        loop.call_soon_threadsafe(answered.set)
        if answered.wait(_ANSWER_SECONDS):
            return
        with self._lock:
            if self._present is loop and self._stuck < _MOST_STUCK:
                self._present, self._stuck = None, self._stuck + 1


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        with suppress(SystemExit, KeyboardInterrupt):  # such an error of a task ends run_forever, too
            loop.run_forever()


_loops = _Loops()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_loops.forget)


def awaited(value: Any, seconds: float | None = None) -> Any:
    """Return a value, or an awaitable's result. Cancel the awaitable after ``seconds``, or if this thread is stopped.

    The event loop is not that of the calling thread, which may run one, as in a notebook. Raises TimeoutError.
    """
    if not inspect.isawaitable(value):
        return value
    loop = _loops.present()
    future = asyncio.run_coroutine_threadsafe(_result_of(value), loop)
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # the function raised it itself
            raise
        _loops.leave_if_stuck(loop)
        raise TimeoutError(took_over(seconds)) from None
    finally:
        future.cancel()  # does nothing once it has ended


async def _result_of(awaitable: Awaitable[Any]) -> Any:
    """Return the result of an awaitable. This makes it a coroutine, which is all that an event loop takes."""
    return await awaitable


def took_over(seconds: float | None) -> str:
    """Return why a function was given up."""
    return f"took over {seconds:g} s"
