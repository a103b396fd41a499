"""Call a reward function in threads beside the engine, and give up on calls that take too long."""

import copy
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from agentspec.awaiting import awaited, took_over
from agentspec.errors import ConfigurationError
from agentspec.problems import Problem
from agentspec.rollout.samples import Sample, as_json

logger = logging.getLogger(__name__)

Reward = Callable[[Problem, Sample], Any]
"""Function that is called in a thread for each finished sample. Returns a finite number, or an awaitable of one."""

_THREADS = 4
_LARGEST = 1e150
"""Largest reward: squares of rewards must be numbers, too."""
_FAILURES_LOGGED = 10
"""Most failures that are logged: a wrong function fails for each of a million samples, in the same way."""
_MOST_HUNG = 64
"""Most threads of calls that were given up and still run. With that many, no further call begins."""


class _Call(NamedTuple):
    """Hold a call that runs. end: time by `time.monotonic` at which it is given up."""

    sample: Sample
    end: float
    thread: threading.Thread


class Rewards:
    """Score samples, a few at a time. The threads are daemons: none of them keeps the program from ending.

    reward: function that gets copies of problem and sample; None leaves the samples as they are. Its changes to the
        sample's fields are kept if they can be written as JSON; if not, the reward has failed.
    seconds: longest time of a call; None: no limit. A sample whose call takes longer gets an error in place of a
        reward. An asynchronous call is cancelled, and the thread of any other call is left to itself.

    Raises ConfigurationError for ``seconds`` that are not above 0.
    """

    def __init__(self, reward: Reward | None, seconds: float | None = None) -> None:
        if seconds is not None and not 0 < seconds < math.inf:  # also refuses nan
            raise ConfigurationError(f"reward_seconds={seconds}: a number above 0 expected, or none for no limit")
        self._reward, self._seconds = reward, seconds
        self._waiting: deque[tuple[Problem, Sample]] = deque()
        self._running: dict[int, _Call] = {}  # by the call's number
        self._hung: list[threading.Thread] = []
        self._done: SimpleQueue[tuple[int, Sample]] = SimpleQueue()
        self._calls = 0
        self._failures = itertools.count(1)

    def __len__(self) -> int:
        """Return how many samples were given and not yet taken back."""
        return len(self._waiting) + len(self._running)

    def drop(self) -> list[Sample]:
        """Forget the samples that are not yet back, such as those of an interrupted rollout.

        Returns them as given, or with their rewards if these are known.
        """
        known = list(self._known())
        dropped = known + [call.sample for call in self._running.values()] + [sample for _, sample in self._waiting]
        self._waiting.clear()
        self._hung += [call.thread for call in self._running.values()]
        self._running.clear()
        return dropped

    def _known(self, until: float = 0.0) -> Iterator[Sample]:
        """Take back the samples whose rewards are known, without calling for others'.

        until: time by `time.monotonic` to which it waits for a next one.
        """
        with suppress(Empty):
            while True:
                pause = max(0.0, until - time.monotonic())
                number, sample = self._done.get(timeout=min(pause, threading.TIMEOUT_MAX))
                if self._running.pop(number, None) is not None:  # otherwise it was given up before
                    yield sample

    def give(self, problem: Problem, sample: Sample) -> None:
        """Let a sample wait for its reward."""
        self._waiting.append((problem, sample))
        self._start()

    def take(self, *, wait: bool = False) -> Iterator[Sample]:
        """Yield the samples whose reward is known or given up. wait: whether to wait for one if there is none yet."""
        while self._running:
            until = min(call.end for call in self._running.values()) if wait else 0.0
            sample = next(self._known(until), None) or self._given_up()
            if sample is not None:
                wait = False
                self._start()
                yield sample
            elif not wait:
                return

    def _given_up(self) -> Sample | None:
        """Give up a call that has taken too long, and take back its sample with an error. Returns None without one."""
        now = time.monotonic()
        overdue = next((number for number, call in self._running.items() if call.end <= now), None)
        if overdue is None:
            return None
        failed = self._failed(self._running[overdue].sample, f"TimeoutError: {took_over(self._seconds)}")
        self._hung.append(self._running.pop(overdue).thread)
        return failed

    def _start(self) -> None:
        self._hung = [thread for thread in self._hung if thread.is_alive()]
        while self._waiting and len(self._running) < _THREADS:
            problem, sample = self._waiting.popleft()
            self._calls += 1
            number = self._calls
            end = math.inf if self._seconds is None else time.monotonic() + self._seconds
            call = (number, problem, sample)
            thread = threading.Thread(target=self._call, args=call, name="agentspec-reward", daemon=True)
            self._running[number] = _Call(sample, end, thread)
            if self._reward is None:
                self._done.put((number, sample))
            elif len(self._hung) >= _MOST_HUNG:
                self._done.put((number, self._failed(sample, self._too_many_hang())))
            else:
                try:
                    thread.start()
                except RuntimeError as error:
                    why = f"{_described(error)}: raise the limit of threads (ulimit -u, or the container's)"
                    self._done.put((number, self._failed(sample, f"{why}, and run the rollout again")))

    def _too_many_hang(self) -> str:
        return (
            f"TimeoutError: not called, because {len(self._hung)} calls that were given up still run; give the reward "
            "function a timeout of its own, and run the rollout again"
        )

    def _call(self, number: int, problem: Problem, sample: Sample) -> None:
        value: float | None = None
        why: str | None = None
        given = sample
        try:
            given = _copied(sample)
            value = self._value(_problem_copied(problem), given)
        except BaseException as error:  # a bad answer, which may be run as code, must not end a rollout of hours
            why = _described(error)
        try:
            given = replace(sample, fields=as_json(given.fields))
        except BaseException as error:  # a value's own `str` may raise anything
            given = sample
            why = why or f"what the reward wrote into sample.fields has no form in JSON ({_described(error)})"
        if why is None:
            self._done.put((number, replace(given, reward=value, reward_error=None)))
        else:
            self._done.put((number, self._failed(given, why)))

    def _failed(self, sample: Sample, error: str) -> Sample:
        """Return the sample with an error in place of its reward. Log the error if it is one of the first."""
        number = next(self._failures)  # threads share it
        if number <= _FAILURES_LOGGED:
            logger.warning("agentspec: the reward of %s failed: %s", tuple(sample.key), error)
        if number == _FAILURES_LOGGED:
            logger.warning("agentspec: further failures are counted, and in the samples' reward_error alone")
        return replace(sample, reward=None, reward_error=error)

    def _value(self, problem: Problem, sample: Sample) -> float:
        assert self._reward is not None
        returned = awaited(self._reward(problem, sample), self._seconds)
        try:
            if isinstance(returned, str | bytes | bytearray):  # float would read "1_0" as 10
                raise TypeError
            value = float(returned)
        except (TypeError, ValueError):
            raise TypeError(f"it returned {_shown(returned)}; return a number") from None
        if not math.isfinite(value):  # all advantages of its group would be nan, and JSON has no form for it
            raise ValueError(f"{value} is not a finite number")
        if abs(value) > _LARGEST:
            raise ValueError(f"{value} is too large; return a number up to {_LARGEST:g}")
        return value


def _copied(sample: Sample) -> Sample:
    """Return a copy of a sample. Its lists of numbers need no deep copy, which would take milliseconds."""
    return replace(
        sample,
        prompt_ids=list(sample.prompt_ids),
        completion_ids=list(sample.completion_ids),
        logprobs=list(sample.logprobs),
        sampling=copy.deepcopy(sample.sampling),
        fields=copy.deepcopy(sample.fields),
    )


def _problem_copied(problem: Problem) -> Problem:
    prompt = problem.prompt
    if isinstance(prompt, list) and isinstance(prompt[0], int):
        return replace(problem, prompt=list(prompt), fields=copy.deepcopy(problem.fields))
    return copy.deepcopy(problem)


def _shown(returned: Any) -> str:
    """Return a value that is not a number as an error shows it: its type and the beginning of its text."""
    return "None" if returned is None else f"{type(returned).__name__}, {returned!r:.60}"


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the user's error class may fail to make its text
        return type(error).__name__
