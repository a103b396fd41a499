"""Add lasting sessions and speculation counts to the OpenAI client, for the agent's process.

The names here are the public ones. Each is imported when it is first used, so that a program loads only the modules
that it needs: forecasts load numpy, for example.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentspec.client.async_client import AsyncAgentClient, AsyncSession
    from agentspec.client.budget import Attempt, Budget, LoopResult, Progress, Spent
    from agentspec.client.client import AgentClient, Session
    from agentspec.client.conversation import Gap
    from agentspec.client.forecast import Forecast
    from agentspec.client.loop_generators import Stage
    from agentspec.client.reply import Reply, Speculation
    from agentspec.client.streams import AsyncReplyStream, ReplyStream
    from agentspec.client.tools import ToolRun
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
    "AsyncReplyStream": "streams",
    "AsyncSession": "async_client",
    "Attempt": "budget",
    "Budget": "budget",
    "DecodeStep": "reply",
    "DraftedToken": "reply",
    "Forecast": "forecast",
    "Gap": "conversation",
    "LoopResult": "budget",
    "Progress": "budget",
    "Reply": "reply",
    "ReplyStream": "streams",
    "Session": "client",
    "Speculation": "reply",
    "Spent": "budget",
    "Stage": "loop_generators",
    "ToolRun": "tools",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
