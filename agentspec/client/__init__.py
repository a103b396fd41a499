"""Add lasting sessions and speculation counts to the OpenAI client, for the agent's process."""

from agentspec.client.async_client import AsyncAgentClient, AsyncReplyStream, AsyncSession
from agentspec.client.client import AgentClient, ReplyStream, Session
from agentspec.client.conversation import Gap
from agentspec.client.reply import Reply, Speculation

__all__ = [
    "AgentClient",
    "AsyncAgentClient",
    "AsyncReplyStream",
    "AsyncSession",
    "Gap",
    "Reply",
    "ReplyStream",
    "Session",
    "Speculation",
]
