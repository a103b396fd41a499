"""Add lasting sessions and speculation counts to the OpenAI client, for the agent's process.

The names here are the public ones. Each is imported when it is first used, so that a program loads only the modules
that it needs: forecasts load numpy, for example.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentspec.client.answers.reply import Reply, Speculation
    from agentspec.client.answers.streams import AsyncReplyStream, ReplyStream
    from agentspec.client.async_client import AsyncAgentClient, AsyncSession
    from agentspec.client.client import AgentClient, Session
    from agentspec.client.forecast import Forecast
    from agentspec.client.history.conversation import Gap
    from agentspec.client.loops.budget import Attempt, Budget, LoopResult, Progress, Spent
    from agentspec.client.loops.generators import Stage
    from agentspec.client.loops.tools import ToolRun
    from agentspec.draft_figures import DecodeStep, DraftedToken

__all__ = [
    "AgentClient",
    "AsyncAgentClient",
    "AsyncReplyStream",
    "AsyncSession",
    "Attempt",
    "Budget",
    "DecodeStep",
    "DraftedToken",
    "Forecast",
    "Gap",
    "LoopResult",
    "Progress",
    "Reply",
    "ReplyStream",
    "Session",
    "Speculation",
    "Spent",
    "Stage",
    "ToolRun",
]

_MODULES = {
    "AgentClient": "client",
    "AsyncAgentClient": "async_client",
    "AsyncReplyStream": "answers.streams",
    "AsyncSession": "async_client",
    "Attempt": "loops.budget",
    "Budget": "loops.budget",
    "DecodeStep": "answers.reply",
    "DraftedToken": "answers.reply",
    "Forecast": "forecast",
    "Gap": "history.conversation",
    "LoopResult": "loops.budget",
    "Progress": "loops.budget",
    "Reply": "answers.reply",
    "ReplyStream": "answers.streams",
    "Session": "client",
    "Speculation": "answers.reply",
    "Spent": "loops.budget",
    "Stage": "loops.generators",
    "ToolRun": "loops.tools",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
