"""Give sessions their loops: refine an answer, take the best of several, call tools, pass work through stages.

Each loop is written once, in `generators`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from agentspec.client.answers.reply import ParsedT, Reply
from agentspec.client.loops.budget import Account, Budget, LoopResult, OnProgress
from agentspec.client.loops.generators import Stage, best_of, pipeline, refine, run_tools
from agentspec.client.loops.steps import run_loop, run_loop_async
from agentspec.client.loops.tools import Tool, ToolBox
from agentspec.client.messages import Content
from agentspec.client.request import ResponseFormat


class Loops:
    """Give a Session its loops, which take the options of chat() besides their own.

    budget: limits of the whole loop. on_progress: function that is called after each attempt.
    The result keeps an error of a call, a critic, a reward, a tool or a stage's prompt; `stopped` is then "error"
    unless the loop could go on. KeyboardInterrupt and errors of on_progress end the loop, and leave the session usable.
    """

    def refine(
        self,
        task: Content,
        critic: Callable[[Reply[ParsedT]], str | None],
        *,
        attempts: int = 4,
        budget: Budget | None = None,
        on_progress: OnProgress | None = None,
        response_format: ResponseFormat[ParsedT] = None,
        **options: Any,
    ) -> LoopResult[ParsedT]:
        """Let the model answer, and answer again with the critic's feedback, until the critic is content.

        critic: returns None or "" if it is content, otherwise the next message to the model. It may be any function,
        such as one that runs tests or asks another session. The best attempt is the one that the critic accepted, else
        the last one with an answer.
        """
        account = Account(budget, on_progress, response_format, options)
        return run_loop(account, refine(self, account, task, critic, attempts))

    def best_of(
        self,
        task: Content,
        n: int,
        reward: Callable[[Reply[ParsedT]], float],
        *,
        at_once: int = 4,
        budget: Budget | None = None,
        on_progress: OnProgress | None = None,
        response_format: ResponseFormat[ParsedT] = None,
        **options: Any,
    ) -> LoopResult[ParsedT]:
        """Let the model answer n times, `at_once` calls at a time, and keep the answer of the highest reward.

        The answers know nothing of each other, but the server drafts each from the others. Only the best becomes part
        of the session. There is a best answer if any answer has a reward; the errors of others are in their attempts.
        """
        account = Account(budget, on_progress, response_format, options)
        return run_loop(account, best_of(self, account, task, n, reward, at_once))

    def run_tools(
        self,
        task: Content | None,
        tools: Sequence[Tool],
        *,
        attempts: int = 16,
        at_once: int = 4,
        budget: Budget | None = None,
        on_progress: OnProgress | None = None,
        response_format: ResponseFormat[ParsedT] = None,
        **options: Any,
    ) -> LoopResult[ParsedT]:
        """Let the model call functions until it answers without a call, or has answered `attempts` times.

        tools: functions; their names, docstrings and annotated parameters describe them to the model. `at_once` of the
        calls in one answer run at a time. The model is told if a tool raises an error or its arguments do not fit. Each
        tool call in the session gets an answer, also if the loop is cancelled. Calls that the session has without an
        answer, as after a kill, are answered as not known, so that no tool runs twice; the model may call again. While
        tools run, the session takes no other call and no message.
        """
        account = Account(budget, on_progress, response_format, options)
        return run_loop(account, run_tools(self, account, task, ToolBox(tools), attempts, at_once))

    def pipeline(
        self,
        task: str,
        stages: Sequence[Stage],
        *,
        budget: Budget | None = None,
        on_progress: OnProgress | None = None,
        **options: Any,
    ) -> LoopResult:
        """Pass the task through stages: each gets the answer of the one before, in a session of its own.

        This session gets the task and the last stage's answer, if all stages were done.
        """
        account = Account(budget, on_progress, None, options)
        return run_loop(account, pipeline(self, account, task, stages))


class AsyncLoops:
    """Give an AsyncSession the loops of `Loops`.

    Critics, rewards, tools and prompts may be asynchronous functions; other functions run in threads. Cancelling the
    task ends a loop, and leaves the session usable.
    """

    async def refine(
        self,
        task: Content,
        critic: Callable[[Reply[ParsedT]], str | Awaitable[str | None] | None],
        *,
        attempts: int = 4,
        budget: Budget | None = None,
        on_progress: OnProgress | None = None,
        response_format: ResponseFormat[ParsedT] = None,
        **options: Any,
    ) -> LoopResult[ParsedT]:
        """Refine an answer until the critic is content, as Session.refine() does."""
        account = Account(budget, on_progress, response_format, options)
        return await run_loop_async(account, refine(self, account, task, critic, attempts))

    async def best_of(
        self,
        task: Content,
        n: int,
        reward: Callable[[Reply[ParsedT]], float | Awaitable[float]],
        *,
        at_once: int = 4,
        budget: Budget | None = None,
        on_progress: OnProgress | None = None,
        response_format: ResponseFormat[ParsedT] = None,
        **options: Any,
    ) -> LoopResult[ParsedT]:
        """Keep the best of n answers, as Session.best_of() does."""
        account = Account(budget, on_progress, response_format, options)
        return await run_loop_async(account, best_of(self, account, task, n, reward, at_once))

    async def run_tools(
        self,
        task: Content | None,
        tools: Sequence[Tool],
        *,
        attempts: int = 16,
        at_once: int = 4,
        budget: Budget | None = None,
        on_progress: OnProgress | None = None,
        response_format: ResponseFormat[ParsedT] = None,
        **options: Any,
    ) -> LoopResult[ParsedT]:
        """Let the model call functions, as Session.run_tools() does."""
        account = Account(budget, on_progress, response_format, options)
        return await run_loop_async(account, run_tools(self, account, task, ToolBox(tools), attempts, at_once))

    async def pipeline(
        self,
        task: str,
        stages: Sequence[Stage],
        *,
        budget: Budget | None = None,
        on_progress: OnProgress | None = None,
        **options: Any,
    ) -> LoopResult:
        """Pass the task through stages, as Session.pipeline() does."""
        account = Account(budget, on_progress, None, options)
        return await run_loop_async(account, pipeline(self, account, task, stages))
