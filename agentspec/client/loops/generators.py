"""Define the loops as generators of steps (`steps`), once for both threads and asyncio.

An error or interrupt that ends a loop early closes its generator, which frees the session.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import openai
from openai.types.chat import ChatCompletionMessageToolCallUnion

from agentspec.client.answers.reply import Reply
from agentspec.client.connection import wants_too_much
from agentspec.client.history.reservation import Reservation
from agentspec.client.history.tool_calls import CANCELLED
from agentspec.client.loops.budget import (
    Account,
    Attempt,
    BudgetSpentError,
    Stopped,
    call_limits,
    check_function,
    check_loop_options,
)
from agentspec.client.loops.steps import Apply, Steps, Together, check_count
from agentspec.client.loops.tools import ToolBox, ToolRun, answer_text, named
from agentspec.client.messages import Content, as_messages, check_text, encodable, shown
from agentspec.client.request import KEEP_FOR, MODELS_PATH, RequestBuilder
from agentspec.errors import AgentSpecError, InvalidInputError, SessionBusyError


@dataclass(frozen=True, slots=True)
class Stage:
    """Describe one stage of a pipeline: a sub-agent with a session of its own.

    name: name of its attempts.
    prompt: text that is put before the stage's input, or a function that makes the message from the input.
    system: the stage's system message.
    critic, attempts: refine the stage's answer, as `Session.refine` does.
    options: options of its calls, which win over the pipeline's.

    Raises InvalidInputError for fields that cannot be used.
    """

    name: str
    prompt: str | Callable[[str], Content | Awaitable[Content]]
    system: str | None = None
    critic: Callable[[Reply[Any]], Any] | None = None
    attempts: int = 4
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidInputError(f"name: a text is needed, not {shown(self.name)}")
        if self.system is not None and not isinstance(self.system, str):
            raise InvalidInputError(f"system: a text or None is needed, not {shown(self.system)}")
        if not isinstance(self.prompt, str) and not callable(self.prompt):
            raise InvalidInputError(
                f"prompt: a text, or a function that makes a message, is needed, not {self.prompt!r}"
            )
        for name in ("system", "prompt"):
            if isinstance(text := getattr(self, name), str):
                check_text(name, text)
        check_function("critic", self.critic)
        check_count("attempts", self.attempts)
        if not isinstance(self.options, Mapping):
            raise InvalidInputError(f"options: a dict is needed, not {shown(self.options)}")
        check_loop_options(self.options)

    def content(self, given: str) -> Content | Awaitable[Content]:
        """Return the stage's message for this input."""
        return f"{self.prompt}\n\n{given}" if isinstance(self.prompt, str) else self.prompt(given)


def refine(
    session: Any,
    account: Account,
    task: Content,
    critic: Any,
    attempts: int,
    stage: str | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Steps[Stopped]:
    """Refine an answer. Returns why the loop ended. stage: name of a pipeline's stage, whose answer needs a text."""
    check_count("attempts", attempts)
    check_function("critic", critic)
    content = task
    for number in range(1, attempts + 1):
        attempt = yield from _ask(account, session, content, stage or f"attempt {number}", options)
        if critic is not None:
            attempt = yield from _judge(account, attempt, critic, "feedback", _feedback)
        if stage is not None and not attempt.feedback:
            attempt = _with_text(attempt, stage)
        account.record(attempt)
        if attempt.reply is not None and (attempt.error is None or stage is None):
            account.best = attempt  # its critic may have failed
        if attempt.error is not None:
            return account.why_failed(attempt)
        if critic is None and account.was_cut(attempt):
            return "tokens"
        if not attempt.feedback:
            return "done"
        content = attempt.feedback
    return "attempts"


def best_of(session: Any, account: Account, task: Content, n: int, reward: Any, at_once: int) -> Steps[Stopped]:
    """Add the best of n answers to the session. Returns why the loop ended."""
    check_count("n", n)
    check_count("at_once", at_once)
    if not callable(reward):
        raise InvalidInputError(f"reward: a function is needed, not {shown(reward)}")
    yield Apply(session.load)
    with session._conversation.turn(as_messages(task)) as turn:
        yield Apply(session._check)
        short: list[Stopped] = []

        def candidate(number: int) -> Steps[None]:
            name = session._conversation.new_helper()
            tags = {"session": name, "parent": session.id, "group": session.group or session.id}
            try:
                attempt = yield from _ask(
                    account, session, turn.messages, f"answer {number}", tags, session._client.chat, n + 1 - number
                )
            except BudgetSpentError as error:
                short.append(error.what)
            else:
                account.record((yield from _judge(account, attempt, reward, "score", _score)))

        # Before the calls, so that none of them has to ask for it, and they keep their order.
        yield from _context(account, session, {})
        yield Together([candidate(number + 1) for number in range(n)], at_once)
        scored = [attempt for attempt in account.attempts if attempt.score is not None]
        if not scored:
            return short[0] if short else account.why_failed(account.attempts[-1])
        account.best = max(scored, key=lambda attempt: (attempt.score, -attempt.number))
        assert account.best.reply is not None
        with session._conversation.undone_if_interrupted():
            turn.commit(account.best.reply.message)
            yield Apply(session._confirm)
    return short[0] if short else "tokens" if account.was_cut(account.best) else "done"


def run_tools(
    session: Any, account: Account, task: Content | None, box: ToolBox, attempts: int, at_once: int
) -> Steps[Stopped]:
    """Answer the model's tool calls until it makes none. Returns why the loop ended."""
    check_count("attempts", attempts)
    check_count("at_once", at_once)
    reservation = Reservation(tools_run=True)
    content, options = task, {"tools": box.described(), KEEP_FOR: reservation}
    for number in range(1, attempts + 1):
        runs: dict[int, ToolRun] = {}
        try:
            attempt = yield from _ask(account, session, content, f"answer {number}", options)
            calls = attempt.reply.tool_calls if attempt.reply is not None else ()
            if calls:
                yield Together(
                    [_call_tool(account, box, runs, index, call) for index, call in enumerate(calls)], at_once
                )
                attempt = replace(attempt, tools=tuple(runs[index] for index in range(len(calls))))
        finally:  # the API refuses a history with unanswered calls, which a reply that was lost may have left, too
            try:
                _answer_calls(session, reservation, runs)
            except BaseException:  # Ctrl-C in between must not leave them, either
                _answer_calls(session, reservation, runs)
                raise
        account.record(attempt)
        if attempt.error is not None:
            return account.why_failed(attempt)
        account.best = attempt
        if not calls:
            return "tokens" if account.was_cut(attempt) else "done"
        content = None
    return "attempts"


def pipeline(session: Any, account: Account, task: str, stages: Sequence[Stage]) -> Steps[Stopped]:
    """Pass the task through the stages. Returns why the loop ended."""
    if not isinstance(stages, Sequence) or not stages or not all(isinstance(stage, Stage) for stage in stages):
        raise InvalidInputError(f"stages: a list of Stage, one at least, is needed, not {shown(stages)}")
    if not isinstance(task, str):
        raise InvalidInputError(
            f"task: a text is needed, which is put behind the first stage's prompt, not {shown(task)};"
            " Stage(prompt=…) may be a function that makes a message of other kinds"
        )
    yield Apply(session.load)
    with session._conversation.turn(as_messages(task)) as turn:
        yield Apply(session._check)
        text = task
        for stage in stages:
            account.best = None
            child = _child(session)
            if stage.system is not None:
                child.add({"role": "system", "content": stage.system})
            attempts = stage.attempts if stage.critic is not None else 1
            try:
                content = _message("prompt", (yield Apply(stage.content, (text,), seconds=account.seconds_left)))
            except Exception as error:  # the caller's function may raise anything; the stages so far must not be lost
                attempt: Attempt[Any] = Attempt(stage.name, len(account.attempts) + 1, error=error)
                account.record(attempt)
                return account.why_failed(attempt)
            stopped = yield from refine(child, account, content, stage.critic, attempts, stage.name, stage.options)
            if stopped != "done" or account.best is None:
                return stopped
            text = account.best.reply.text
        with session._conversation.undone_if_interrupted():
            turn.commit({"role": "assistant", "content": text})
            yield Apply(session._confirm)
    return "done"


def _ask(
    account: Account,
    session: Any,
    content: Content | None,
    name: str,
    options: Mapping[str, Any],
    chat: Any = None,
    among: int = 1,
) -> Steps[Attempt[Any]]:
    """Call the model. Returns the attempt, with the call's error if it failed.

    chat: method that makes the call; None: the session's own. among: number of calls that share the budget's tokens.
    Raises BudgetSpentError before the call, and InvalidInputError and SessionBusyError for wrong use.
    """
    context = yield from _context(account, session, options)
    begin, answer, refused, length = time.monotonic(), None, False, False
    call = account.begin(options, among, context)
    try:
        try:
            reply = yield from _chat(account, session._client.openai, chat or session.chat, content, call.options)
        except openai.APIStatusError as error:
            if call.unlimited is None or not wants_too_much(error):
                raise
            # The server allows less than the limit that it refused, so the answer holds the budget without one.
            call = call._replace(options=call.unlimited, bound=False)
            reply = yield from _chat(account, session._client.openai, chat or session.chat, content, call.options)
        answer, length = reply.raw, reply.finish_reason == "length"
        return Attempt(name, call.number, reply, seconds=time.monotonic() - begin)
    except (InvalidInputError, SessionBusyError):
        refused = True
        raise
    except Exception as error:  # the call may fail in any way; the other attempts must not be lost
        if isinstance(error, openai.LengthFinishReasonError):
            answer, length = error.completion, True
        refused = isinstance(error, openai.APIStatusError) and not _may_have_answered(error.status_code)
        return Attempt(name, call.number, error=error, seconds=time.monotonic() - begin)
    finally:
        account.end(call, answer, refused=refused, length=length)


def _may_have_answered(status: int) -> bool:
    """Return whether the model may have generated an answer in whose place a gateway has sent this status."""
    return status >= 500 or status == 408


def _child(session: Any) -> Any:
    """Return a session that this one starts, which is not stored, as no later call is to name it."""
    conversation = session._client._conversations.unkept(session._conversation.new_helper(), None, session.id)
    return type(session)(session._client, conversation)


def _context(account: Account, session: Any, options: Mapping[str, Any]) -> Steps[int | None]:
    """Return the length of the context of the model that a call with these options asks, if the budget needs it."""
    if not account.limits_tokens:
        return None
    requests: RequestBuilder = session._client._requests
    model = account.model_of(options) or requests.model
    if model not in requests.contexts:
        return requests.learn_context(model, (yield from session._client._ask(MODELS_PATH)))
    return requests.contexts[model]


def _chat(
    account: Account, connection: Any, chat: Any, content: Content | None, options: Mapping[str, Any]
) -> Steps[Any]:
    """Make one call. Returns the reply."""
    seconds = account.seconds_left
    limits = {} if seconds is None else call_limits(options, connection, seconds)
    return (yield Apply(chat, (content,), {**options, **limits}, seconds))


def _judge(
    account: Account, attempt: Attempt[Any], judge: Any, name: str, read: Callable[[Any], Any]
) -> Steps[Attempt[Any]]:
    """Return the attempt with the verdict of `judge` in the field `name`, or with the error that `judge` raised.

    read: function that makes the field's value from the result of `judge`.
    """
    if attempt.error is not None:
        return attempt
    begin = time.monotonic()
    try:
        found = {name: read((yield Apply(judge, (attempt.reply,), seconds=account.seconds_left)))}
    except Exception as error:  # the caller's function may raise anything; the attempts so far must not be lost
        found = {"error": error}
    return replace(attempt, seconds=attempt.seconds + time.monotonic() - begin, **found)


def _with_text(attempt: Attempt[Any], stage: str) -> Attempt[Any]:
    """Return the attempt, with an error if its answer has no text, as a refusal has none."""
    if attempt.reply is None or attempt.error is not None or attempt.reply.text.strip():
        return attempt
    refusal = attempt.reply.message.get("refusal")
    why = f"the model refused: {refusal}" if refusal else "the answer has no text to pass on"
    return replace(attempt, error=AgentSpecError(f"stage {stage!r}: {why}"))


def _feedback(found: Any) -> Any:
    """Return a critic's objection; None if it has none. Raises InvalidInputError if it cannot be a message."""
    return _message("critic", found, "or None if the answer is good, ") if found else None


def _message(name: str, found: Any, otherwise: str = "") -> Any:
    """Return the message that a caller's function returned. Raises InvalidInputError if it is not one."""
    if isinstance(found, str):
        check_text(name, found)
    try:
        as_messages(found)
    except InvalidInputError:
        raise InvalidInputError(
            f"{name}: the next message to the model is needed, {otherwise}not {shown(found)}"
        ) from None
    return found


def _score(found: Any) -> float | None:
    """Return a reward as a number; None if it is None. Raises InvalidInputError for any other value."""
    try:
        score = None if found is None else float(found)
    except (TypeError, ValueError):
        raise InvalidInputError(f"reward: a number, or None for no reward, is needed, not {shown(found)}") from None
    if score is not None and math.isnan(score):
        raise InvalidInputError("reward: nan is neither higher nor lower than another reward; return a number")
    return score


def _said(error: Exception) -> str:
    """Return what an error says; nothing for one of a class whose text cannot be made."""
    try:
        return str(error)
    except Exception:
        return ""


def _answer_calls(session: Any, reservation: Reservation, runs: Mapping[int, ToolRun]) -> None:
    """Add the tools' answers to the session, if the model called any tool."""
    answers = {index: run.answer for index, run in list(runs.items())}
    session._conversation.answer_calls(reservation, answers, CANCELLED)


def _call_tool(
    account: Account, box: ToolBox, runs: dict[int, ToolRun], index: int, call: ChatCompletionMessageToolCallUnion
) -> Steps[None]:
    """Run one tool call, and put its answer or its error into `runs`."""
    failed = None
    try:
        answer = answer_text((yield Apply(box.prepare(call), seconds=account.seconds_left)))
    except Exception as error:  # the model hears of it, and may try again
        answer, failed = encodable(f"error: {type(error).__name__}: {_said(error)}"), error
    runs[index] = ToolRun(call.id, *named(call), answer, failed)
