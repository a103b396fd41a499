"""Do the steps of a generator, in a synchronous program or in asyncio.

Loops and requests to the extension are such generators. They yield a step, and are sent its result or error.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import closing
from typing import Any, NamedTuple, TypeAlias, TypeVar

from agentspec.client.loops.budget import Account, BudgetSpentError, LoopResult, Stopped
from agentspec.errors import InvalidInputError

T = TypeVar("T")
Steps: TypeAlias = Generator[Any, Any, T]
"""Generator that yields Apply and Together, and returns its result."""


class Apply(NamedTuple):
    """Ask for a call of a function, which may be asynchronous. seconds: when asyncio cancels it; None: never."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = {}
    seconds: float | None = None


class Together(NamedTuple):
    """Ask for several generators of steps, `at_once` of them at a time: in threads, or in tasks in asyncio."""

    loops: Sequence[Steps[None]]
    at_once: int


def check_count(name: str, count: int) -> None:
    """Raise InvalidInputError unless `count` is at least 1."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidInputError(f"{name}: a number of at least 1 is needed, not {count!r}")


def run_loop(account: Account, steps: Steps[Stopped]) -> LoopResult[Any]:
    """Run a loop to its end, in this thread and others."""
    try:
        stopped = run_steps(steps, contained=True)
    except BudgetSpentError as error:
        stopped = error.what
    finally:
        account.close()
    return account.result(stopped)


def run_steps(steps: Steps[T], *, contained: bool = False) -> T:
    """Do the steps in this thread, and return their result.

    contained: whether an exit or a cancellation that a called function raises becomes an error of its step. The model's
    code, if a tool or critic runs it, must not exit the program; a signal's handler must.
    """
    with closing(steps):
        result, error = None, None
        while True:
            try:
                step = steps.send(result) if error is None else steps.throw(error)
            except StopIteration as end:
                value: T = end.value
                return value
            try:
                result, error = _perform(step), None
            except Exception as raised:
                result, error = None, raised
            except (SystemExit, asyncio.CancelledError) as raised:
                if not contained:
                    raise
                result, error = None, _as_error(raised)


def _perform(step: Any) -> Any:
    if isinstance(step, Apply):
        result = _called(step)
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()  # or Python warns that it was never awaited
            function = getattr(step.function, "func", step.function)  # of a tool with its arguments
            name = getattr(function, "__qualname__", type(function).__name__)
            raise InvalidInputError(f"{name}: asynchronous functions need an AsyncSession")
        return result
    check_count("at_once", step.at_once)
    _run_together(step)
    return None


def _run_together(step: Together) -> None:
    """Run loops in threads. Raises the error of the first loop that has one, after which no other begins.

    The threads are daemons, so that the program ends at Ctrl-C. With a ThreadPoolExecutor's threads it would go on
    until the model has answered the calls that run.
    """
    waiting = deque((steps, Future[None]()) for steps in step.loops)

    def run() -> None:
        while True:
            try:
                steps, future = waiting.popleft()
            except IndexError:  # there is none left
                return
            _settle(future, functools.partial(run_steps, steps, contained=True))
            if future.exception() is not None:
                waiting.clear()
                return

    futures = [future for _, future in waiting]
    try:
        for _ in range(min(step.at_once, len(futures))):
            context = contextvars.copy_context()  # of the caller, for its tools and for tracing
            threading.Thread(target=context.run, args=(run,), name="agentspec-loop", daemon=True).start()
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future in done:
                future.result()
    finally:  # after an error or interrupt no loop begins; the calls that run end by themselves and change nothing here
        waiting.clear()


def _called(step: Apply) -> Any:
    """Return the function's result. Raises RuntimeError in place of StopIteration, which asyncio cannot hand on."""
    try:
        return step.function(*step.arguments, **step.options)
    except StopIteration as error:  # a tool's next() may raise it
        raise RuntimeError(f"StopIteration: {error}") from error


async def _called_in_thread(step: Apply) -> Any:
    """Call the function in a thread of its own, and return its result. The thread is a daemon, as in `_run_together`.

    Python joins the threads of `asyncio.to_thread`: after Ctrl-C, or a budget's seconds, the program would go on until
    the tool returns.
    """
    future = Future[Any]()
    future.set_running_or_notify_cancel()  # so the thread may set a result after the waiting task was cancelled
    call = functools.partial(contextvars.copy_context().run, _called, step)
    threading.Thread(target=_settle, args=(future, call), name="agentspec-loop", daemon=True).start()
    return await asyncio.wrap_future(future)


def _settle(future: Future[T], call: Callable[[], T]) -> None:
    """Call a function in a thread, and put its result or its error into the future."""
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def _as_error(raised: SystemExit | asyncio.CancelledError) -> Exception:
    """Return an error that says what was raised."""
    error = RuntimeError(f"{type(raised).__name__}: {raised}")
    error.__cause__ = raised
    return error


async def run_loop_async(account: Account, steps: Steps[Stopped]) -> LoopResult[Any]:
    """Run a loop to its end, in this task and others."""
    try:
        stopped = await run_steps_async(steps, contained=True)
    except BudgetSpentError as error:
        stopped = error.what
    finally:
        account.close()
    return account.result(stopped)


async def run_steps_async(steps: Steps[T], *, contained: bool = False) -> T:
    """Do the steps in this task, and return their result. contained: as for `run_steps`."""
    with closing(steps):
        result, error = None, None
        while True:
            try:
                step = steps.send(result) if error is None else steps.throw(error)
            except StopIteration as end:
                value: T = end.value
                return value
            try:
                result, error = await _perform_async(step), None
            except Exception as raised:
                result, error = None, raised
            except (SystemExit, asyncio.CancelledError) as raised:
                task = asyncio.current_task()
                cancelled = isinstance(raised, asyncio.CancelledError) and (task is None or task.cancelling())
                if cancelled or not contained:
                    raise
                result, error = None, _as_error(raised)  # an exit, or something that the function awaited was cancelled


async def _perform_async(step: Any) -> Any:
    if isinstance(step, Apply):
        async with asyncio.timeout(step.seconds):
            if inspect.iscoroutinefunction(step.function):
                result = step.function(*step.arguments, **step.options)
            else:
                result = await _called_in_thread(step)
            return await result if inspect.isawaitable(result) else result
    check_count("at_once", step.at_once)
    free = asyncio.Semaphore(step.at_once)

    async def one(steps: Steps[None]) -> None:
        async with free:
            await run_steps_async(steps, contained=True)

    tasks = [asyncio.create_task(one(steps)) for steps in step.loops]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return None
