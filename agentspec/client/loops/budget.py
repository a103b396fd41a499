"""Limit what a loop may spend, and hold its results: Budget, Spent, Attempt, Progress and LoopResult."""

from __future__ import annotations

import inspect
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeAlias

import openai
from openai.types.chat import ChatCompletion

from agentspec.client.answers.reply import ParsedT, Reply
from agentspec.client.loops.tools import ToolRun
from agentspec.client.messages import shown
from agentspec.client.option_checks import check_retries, check_timeout
from agentspec.errors import AgentSpecError, InvalidInputError

_SHORTEST_TIMEOUT_S = 0.001  # the HTTP client refuses 0
_LONGEST_PAUSE_S = 8.0  # of the OpenAI client before a retry, where the server asks for none
_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")
_PHASES = ("connect", "read", "write", "pool")

Stopped: TypeAlias = Literal["done", "attempts", "requests", "tokens", "seconds", "error"]
"""Why a loop ended: it has its answer; it made all its attempts; a budget is spent; or a call failed."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limit one loop. None is no limit. Raises InvalidInputError for a limit that is not positive.

    requests: most calls of the model; retries are not counted.
    tokens: most tokens that the model may generate. Each call asks for at most the rest; its `n` choices share that. A
        call whose server gives no answer of that length, because the context or the model allows less, has no limit.
        The OpenAI client's retries are not counted: where answers are lost behind a gateway, give max_retries=0.
    seconds: longest duration. No part of a call's timeout is longer than the time left. The OpenAI client retries a
        failed call only as often as surely fits, if each pause is the longest and each try takes the whole timeout. A
        shorter `timeout` leaves more retries. In asyncio a call, tool or critic that runs into the limit is cancelled.
        A synchronous loop interrupts no tool and no critic. It ends a call only if the server sends nothing for as long
        as was left when the call began. So an answer that comes in small pieces can take longer. So can a retry before
        which the server asks for a pause (Retry-After, up to two minutes).
    """

    requests: int | None = None
    tokens: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name, kind in (("requests", int), ("tokens", int), ("seconds", (int, float))):
            limit = getattr(self, name)
            if limit is None:
                continue
            if isinstance(limit, bool) or not isinstance(limit, kind) or not 0 < limit < math.inf:  # refuses nan, too
                whole = " whole" if kind is int else ""
                raise InvalidInputError(f"budget.{name}: a positive{whole} number or None is needed, not {limit!r}")


@dataclass(frozen=True, slots=True)
class Spent:
    """Count a loop's calls, its tokens as the server counts them, and its seconds.

    An answer that was lost, or does not fit its format, counts as all tokens that its call asked for with a budget of
    tokens, and as none without.
    """

    requests: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Attempt(Generic[ParsedT]):
    """Hold one call of a loop, its answer and the verdict on it.

    name: the attempt's name, such as "attempt 2" or the name of a pipeline's stage.
    number: the call's number in its loop, from 1.
    reply: the answer; None if the call failed.
    error: the error that the call, the critic or the reward raised.
    feedback: the critic's objection; None if the critic is content or was not asked.
    score: the reward.
    tools: the tool calls of the answer.
    seconds: from the request to the verdict.
    """

    name: str
    number: int
    reply: Reply[ParsedT] | None = None
    error: Exception | None = None
    feedback: str | None = None
    score: float | None = None
    tools: tuple[ToolRun, ...] = ()
    seconds: float = 0.0

    @property
    def reason(self) -> str | None:
        """Return what the error says, with the notes that name the remedy; None without an error."""
        if self.error is None:
            return None
        notes: list[str] = getattr(self.error, "__notes__", [])
        return "; ".join([str(self.error) or type(self.error).__name__, *notes])


@dataclass(frozen=True, slots=True)
class Progress:
    """Report an attempt that just ended, and the loop's costs so far."""

    attempt: Attempt[Any]
    spent: Spent


OnProgress: TypeAlias = Callable[[Progress], object]
"""Function that is called, not awaited, after each attempt, one call at a time. If it raises, the loop ends with that
error."""


@dataclass(frozen=True, slots=True)
class LoopResult(Generic[ParsedT]):
    """Hold all that a loop did.

    best: the attempt that the loop chose; None if it chose none.
    attempts: all attempts, in the order in which they began.
    stopped: why the loop ended; "done" if it has the answer that was wanted.
    """

    best: Attempt[ParsedT] | None
    attempts: tuple[Attempt[ParsedT], ...]
    stopped: Stopped
    spent: Spent

    @property
    def done(self) -> bool:
        """Return whether the loop has the answer that was wanted."""
        return self.stopped == "done"

    @property
    def reply(self) -> Reply[ParsedT]:
        """Return the chosen answer. Raises the last attempt's error, or AgentSpecError, if there is none."""
        if self.best is not None and self.best.reply is not None:
            return self.best.reply
        errors = [attempt.error for attempt in self.attempts if attempt.error is not None]
        raise errors[-1] if errors else AgentSpecError(f"reply: the loop has no answer; it stopped for: {self.stopped}")

    @property
    def text(self) -> str:
        """Return the chosen answer's text. Raises as `reply` does."""
        return self.reply.text


class BudgetSpentError(Exception):
    """Say that a loop may make no further call. what: the limit that is reached. Loops catch this error."""

    def __init__(self, what: Stopped) -> None:
        super().__init__(what)
        self.what: Stopped = what


def check_function(name: str, function: object) -> None:
    """Raise InvalidInputError unless `function` is None or can be called."""
    if function is not None and not callable(function):
        raise InvalidInputError(f"{name}: a function is needed, not {shown(function)}")


def check_loop_options(options: Mapping[str, Any]) -> None:
    """Raise InvalidInputError for options of calls that a loop sets itself."""
    for name in ("stream", "session", "group", "parent", "tools"):
        if name in options:
            raise InvalidInputError(f"{name}: not an option of a loop, whose calls are the session's, unstreamed")


class BegunCall(NamedTuple):
    """Hold a call that an Account has counted: its number, its options, and the tokens reserved for its answer.

    bound: whether the budget, and no limit of the caller's or of the model's, limits the answer.
    unlimited: the options without the limit, if they have one and the caller has given none; else None.
    """

    number: int
    options: dict[str, Any]
    reserved: int
    bound: bool = False
    unlimited: dict[str, Any] | None = None


class Account:
    """Count what a loop spends, and collect its attempts. Threads may share an account.

    options: options of every call, to which a `response_format` other than None is added. Raises InvalidInputError for
    an option that a loop sets itself.
    """

    def __init__(
        self, budget: Budget | None, on_progress: OnProgress | None, response_format: Any, options: Mapping[str, Any]
    ) -> None:
        check_loop_options(options)
        if budget is not None and not isinstance(budget, Budget):
            raise InvalidInputError(f"budget: Budget(requests=…, tokens=…, seconds=…) is needed, not {shown(budget)}")
        check_function("on_progress", on_progress)
        if inspect.iscoroutinefunction(on_progress):
            raise InvalidInputError("on_progress: a function that is not asynchronous is needed, as no loop awaits it")
        self.best: Attempt[Any] | None = None
        self._budget = budget or Budget()
        self._on_progress = on_progress
        self._options = {**options} if response_format is None else {**options, "response_format": response_format}
        self._attempts: list[Attempt[Any]] = []
        self._lock = threading.Lock()
        self._telling = threading.Lock()
        self._begin = time.monotonic()
        self._requests = self._prompt_tokens = self._tokens = self._reserved = 0
        self._cut = set[int]()  # numbers of the calls whose answers the budget cut off
        self._closed = False

    @property
    def attempts(self) -> list[Attempt[Any]]:
        """Return the attempts that have ended, in the order in which they began."""
        with self._lock:
            return sorted(self._attempts, key=lambda attempt: attempt.number)

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds left, 0 at least; None without a limit."""
        limit = self._budget.seconds
        return None if limit is None else max(0.0, limit - (time.monotonic() - self._begin))

    @property
    def limits_tokens(self) -> bool:
        """Return whether the budget limits the tokens of answers."""
        return self._budget.tokens is not None

    def model_of(self, options: Mapping[str, Any]) -> str | None:
        """Return the model that a call with these options names; None: the client's."""
        named = (self._options | dict(options)).get("model")
        return named if isinstance(named, str) else None

    def begin(self, options: Mapping[str, Any], among: int = 1, context: int | None = None) -> BegunCall:
        """Count a call, and limit its options to the budget. among: number of calls that share the tokens left.

        context: length of the model's context; None: not known. If as many tokens are left, the call has no limit,
        as some servers (SGLang) add the prompt to it and refuse the sum. Raises BudgetSpentError.
        """
        limited = _taken_out(self._options | dict(options))
        names = [name for name in _TOKEN_LIMITS if limited.get(name)]  # if both are given, a server obeys either
        unlimited = None if names else limited
        names = names or ["max_tokens" if "max_tokens" in limited else "max_completion_tokens"]
        choices = limited.get("n") or 1
        seconds = self.seconds_left
        reserved, bound = 0, False
        with self._lock:
            if self._closed or seconds == 0.0:
                raise BudgetSpentError("seconds")
            if self._budget.requests is not None and self._requests >= self._budget.requests:
                raise BudgetSpentError("requests")
            if self._budget.tokens is not None:
                left = (self._budget.tokens - self._tokens - self._reserved) // (among * choices)
                if left < 1:
                    raise BudgetSpentError("tokens")
                others = [limit for limit in (context, *(limited.get(name) for name in names)) if limit]
                bound = all(left < limit for limit in others)
                most = left if context is None else min(left, context)
                limits = {name: min(most, limited.get(name) or most) for name in names}
                reserved = max(limits.values()) * choices
                if unlimited is not None and most == context:
                    unlimited = None
                else:
                    limited = limited | limits
            self._reserved += reserved
            self._requests += 1
            number = self._requests
        return BegunCall(number, limited, reserved, bound, unlimited if reserved else None)

    def end(
        self, call: BegunCall, answer: ChatCompletion | None, *, refused: bool = False, length: bool = False
    ) -> None:
        """Count the tokens of a call's answer; if their number is unknown, all that were reserved for the answer.

        answer: None if it was lost, or does not fit its format. refused: whether the call was refused, so that it took
        no tokens. length: whether the answer was cut off at its longest length.
        """
        usage = answer.usage if answer is not None else None
        with self._lock:
            if call.bound and length:
                self._cut.add(call.number)
            self._reserved -= call.reserved
            if usage is not None and usage.completion_tokens is not None:  # some servers send only a part of `usage`
                self._tokens += usage.completion_tokens
                self._prompt_tokens += usage.prompt_tokens or 0
            elif not refused:
                self._tokens += call.reserved

    def record(self, attempt: Attempt[Any]) -> None:
        """Keep an attempt that has ended, and report it."""
        with self._lock:
            self._attempts.append(attempt)
        if self._on_progress is not None and not self._closed:
            with self._telling:
                self._on_progress(Progress(attempt, self._spent()))

    def was_cut(self, attempt: Attempt[Any]) -> bool:
        """Return whether the budget has cut off the answer of an attempt."""
        return attempt.number in self._cut

    def why_failed(self, attempt: Attempt[Any]) -> Stopped:
        """Return the reason for which a loop ends after a failed attempt: its budget cut it off, or the error."""
        if attempt.reply is None and self.was_cut(attempt):
            return "tokens"
        return "seconds" if self.seconds_left == 0.0 else "error"

    def close(self) -> None:
        """Let no further call begin, not even in threads that outlive their loop."""
        self._closed = True

    def result(self, stopped: Stopped) -> LoopResult[Any]:
        """Return the loop's result."""
        return LoopResult(self.best, tuple(self.attempts), stopped, self._spent())

    def _spent(self) -> Spent:
        with self._lock:
            return Spent(self._requests, self._prompt_tokens, self._tokens, time.monotonic() - self._begin)


def _taken_out(options: dict[str, Any]) -> dict[str, Any]:
    """Return a call's options with the token limits and `n` of ``extra_body``, which win, moved to the top level."""
    extra = options.get("extra_body")
    if not isinstance(extra, Mapping):
        return options
    rest = {name: value for name, value in extra.items() if name not in (*_TOKEN_LIMITS, "n")}
    return options | {name: extra[name] for name in extra.keys() - rest.keys()} | {"extra_body": rest}


def call_limits(options: Mapping[str, Any], connection: Any, seconds: float) -> dict[str, Any]:
    """Return the timeout and the retries of a call that may take ``seconds``. connection: its OpenAI client.

    Raises InvalidInputError for options that the call itself would refuse, as it gets these in their place.
    """
    timeout, retries = options.get("timeout", openai.NOT_GIVEN), options.get("max_retries")
    check_timeout(timeout)
    check_retries(retries)
    if isinstance(timeout, openai.NotGiven | openai.Omit):
        timeout = connection.timeout
    bounded = bounded_timeout(timeout, seconds)
    longest = max(getattr(bounded, name) for name in _PHASES) if isinstance(bounded, openai.Timeout) else bounded
    fitting = max(int((seconds - longest) // (longest + _LONGEST_PAUSE_S)), 0)
    allowed = retries if isinstance(retries, int) else connection.max_retries
    return {"timeout": bounded, "max_retries": min(allowed, fitting)}


def bounded_timeout(timeout: object, seconds: float) -> float | openai.Timeout:
    """Return a call's timeout with no part longer than `seconds`. timeout: as the OpenAI client takes it."""
    seconds = max(seconds, _SHORTEST_TIMEOUT_S)
    if isinstance(timeout, tuple):  # HTTPX takes this form of a Timeout
        timeout = openai.Timeout(timeout)
    if all(hasattr(timeout, name) for name in _PHASES):  # of openai's HTTPX, or of another version that is installed
        parts = {name: getattr(timeout, name) for name in _PHASES}
        return openai.Timeout(**{name: seconds if part is None else min(part, seconds) for name, part in parts.items()})
    return min(timeout, seconds) if isinstance(timeout, int | float) else seconds
