"""Bound how long code takes, so that neither a busy machine nor a slow one breaks the bound."""

import os
import threading
import time
from collections.abc import Callable, Mapping

_TRIES = 3


def cpu(call: Callable[[], object]) -> float:
    """Return the CPU time of this thread that the call takes, in milliseconds."""
    begin = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - begin) / 1e6


def beside(work: Callable[[], object], call: Callable[[], object], pause: float) -> tuple[list[float], float]:
    """Do the work in a thread, and meanwhile call again and again, with pauses of `pause` seconds in between.

    Return the CPU time that the thread took during each call, and for all of the work, in milliseconds. A call that
    waits for a lock of the thread lets it work for as long.
    """
    done, measured, took = threading.Event(), threading.Event(), list[float]()

    def run() -> None:
        try:
            took.append(cpu(work))
        finally:
            done.set()
            measured.wait()  # the clock of a thread ends with it

    thread, calls = threading.Thread(target=run), list[float]()
    thread.start()
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    while not done.is_set():
        begin = time.clock_gettime_ns(clock)
        call()
        calls.append((time.clock_gettime_ns(clock) - begin) / 1e6)
        time.sleep(pause)
    measured.set()
    thread.join()
    return calls, took[0]


def assert_fast(measure: Callable[[], Mapping[str, float]], **most: float) -> None:
    """Measure up to three times, until each figure has kept its limit once. Raises AssertionError if one never does.

    Mark the test `alone`, so that no other test runs beside it.

    Other work on the machine makes a figure high now and then; slow code makes it high each time. Limits are a few
    times what is measured on an idle machine, so that they hold on one of half the speed.
    """
    assert "PYTEST_XDIST_WORKER" not in os.environ, "mark this test `alone`"
    least: dict[str, float] = {}
    for _ in range(_TRIES):
        found = measure()
        assert found.keys() == most.keys()
        least = {name: min(value, least.get(name, value)) for name, value in found.items()}
        if all(value < most[name] for name, value in least.items()):
            return
    raise AssertionError(f"too slow in each of {_TRIES} tries: {least}, limits {most}")
