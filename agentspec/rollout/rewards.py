"""Call a reward function in threads beside the engine, and give up on calls that take too long."""

import asyncio
import inspect
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any

from agentspec.errors import ConfigurationError
from agentspec.rollout.journal import Sample
from agentspec.rollout.problems import Problem
from agentspec.server_ext.vllm_adapter.offline import result_of

logger = logging.getLogger(__name__)

Reward = Callable[[Problem, Sample], Any]
"""Called once for each finished sample, in a thread. Returns a finite number, or an awaitable of one."""

_THREADS = 4


class Rewards:
    """Score samples, a few at a time. The threads are daemons: none of them keeps the program from ending.

    reward: None leaves the samples as they are. seconds: after so long a sample gets an error for its reward, and its
    thread is left to itself; None: a call may take any time. Raises ConfigurationError for seconds that are no time.
    """

    def __init__(self, reward: Reward | None, seconds: float | None = None) -> None:
        if seconds is not None and not 0 < seconds < math.inf:  # also refuses nan
            raise ConfigurationError(f"reward_seconds={seconds}: a number above 0 expected, or none for no limit")
        self._reward, self._seconds = reward, seconds
        self._waiting: deque[tuple[Problem, Sample]] = deque()
        self._running: dict[int, tuple[Sample, float]] = {}  # by the call's number, with the time at which it is over
        self._done: SimpleQueue[tuple[int, Sample]] = SimpleQueue()
        self._calls = 0

    def __len__(self) -> int:
        """Return how many samples were given and are not back."""
        return len(self._waiting) + len(self._running)

    def give(self, problem: Problem, sample: Sample) -> None:
        """Let a sample wait for its reward."""
        self._waiting.append((problem, sample))
        self._start()

    def take(self, *, wait: bool = False) -> Iterator[Sample]:
        """Yield the samples whose reward is known or given up. wait: for the next one, if there is none yet."""
        while self._running:
            until = min(end for _, end in self._running.values())
            pause = max(0.0, until - time.monotonic()) if wait else 0.0
            try:
                number, sample = self._done.get(timeout=min(pause, threading.TIMEOUT_MAX))
            except Empty:
                overdue = [number for number, (_, end) in self._running.items() if end <= time.monotonic()]
                if not overdue:
                    if wait:
                        continue
                    return
                number = overdue[0]
                sample = _failed(self._running[number][0], f"TimeoutError: took over {self._seconds:g} s")
            if self._running.pop(number, None) is None:
                continue  # which was given up before
            wait = False
            self._start()
            yield sample

    def _start(self) -> None:
        while self._waiting and len(self._running) < _THREADS:
            problem, sample = self._waiting.popleft()
            self._calls += 1
            end = math.inf if self._seconds is None else time.monotonic() + self._seconds
            self._running[self._calls] = sample, end
            if self._reward is None:
                self._done.put((self._calls, sample))
            else:
                call = (self._reward, self._calls, problem, sample)
                threading.Thread(target=self._call, args=call, name="agentspec-reward", daemon=True).start()

    def _call(self, reward: Reward, number: int, problem: Problem, sample: Sample) -> None:
        try:
            value = float(_awaited(reward(problem, sample)))
            if not math.isfinite(value):  # a group's advantages would all be nan, and JSON has no such number
                raise ValueError(f"{value} is not a finite number")
            sample = replace(sample, reward=value, reward_error=None)
        except BaseException as error:  # one bad answer, perhaps run as code, must not end a rollout of hours
            sample = _failed(sample, _described(error))
        self._done.put((number, sample))


_LOOP_LOCK = threading.Lock()


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all asynchronous rewards, which may share a client then. It runs in a daemon thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="agentspec-reward-loop", daemon=True).start()
    return loop


def _awaited(value: Any) -> Any:
    """Return a value, or what an awaitable gives."""
    if not inspect.isawaitable(value):
        return value

    with _LOOP_LOCK:
        loop = _event_loop()
    return asyncio.run_coroutine_threadsafe(result_of(value), loop).result()


def _failed(sample: Sample, error: str) -> Sample:
    logger.warning("agentspec: the reward of %s failed: %s", tuple(sample.key), error)
    return replace(sample, reward=None, reward_error=error)


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an error of the user's, whose text has an error, too
        return type(error).__name__
