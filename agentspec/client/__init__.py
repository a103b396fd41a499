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

_NAMES = {
    "answers.reply": ("DecodeStep", "DraftedToken", "Reply", "Speculation"),
    "answers.streams": ("AsyncReplyStream", "ReplyStream"),
    "async_client": ("AsyncAgentClient", "AsyncSession"),
    "client": ("AgentClient", "Session"),
    "forecast": ("Forecast",),
    "history.conversation": ("Gap",),
    "loops.budget": ("Attempt", "Budget", "LoopResult", "Progress", "Spent"),
    "loops.generators": ("Stage",),
    "loops.tools": ("ToolRun",),
}
"""The public names of each module. Type checkers read the imports above and `__all__` instead."""


def __getattr__(name: str) -> object:
    for module, names in _NAMES.items():
        if name in names:
            value: object = getattr(import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
