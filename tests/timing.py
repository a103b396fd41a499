"""Bounds on how long code takes, which neither a busy machine nor a slow one breaks."""

import time
from collections.abc import Callable, Mapping

_TRIES = 3


def cpu(call: Callable[[], object]) -> float:
    """Return the CPU time of this thread that the call takes, in milliseconds."""
    begin = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - begin) / 1e6


def assert_fast(measure: Callable[[], Mapping[str, float]], **most: float) -> None:
    """Measure up to three times, until each figure has kept its limit once. Raises AssertionError if one never does.

    What else the machine does makes a figure high now and then; slow code makes it high each time. So that the limits
    hold on a machine of half the speed, they are a few times what is measured on an idle one.
    """
    least: dict[str, float] = {}
    for _ in range(_TRIES):
        found = measure()
        assert found.keys() == most.keys()
        least = {name: min(value, least.get(name, value)) for name, value in found.items()}
        if all(value < most[name] for name, value in least.items()):
            return
    raise AssertionError(f"too slow in each of {_TRIES} tries: {least}, limits {most}")
