"""Add lasting sessions and speculation counts to the OpenAI client, for the agent's process."""

from agentspec.client.async_client import AsyncAgentClient, AsyncReplyStream, AsyncSession
from agentspec.client.budget import Attempt, Budget, LoopResult, Progress, Spent
from agentspec.client.client import AgentClient, ReplyStream, Session
from agentspec.client.conversation import Gap
from agentspec.client.forecast import Forecast
from agentspec.client.loops import Stage
from agentspec.client.reply import DecodeStep, DraftedToken, Reply, Speculation
from agentspec.client.tools import ToolRun

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
