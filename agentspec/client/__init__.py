"""The agent's process: the OpenAI client with sessions that last and replies that tell of speculation."""

from agentspec.client.async_client import AsyncAgentClient, AsyncReplyStream, AsyncSession
from agentspec.client.client import AgentClient, ReplyStream, Session
from agentspec.client.reply import Reply, Speculation

__all__ = [
    "AgentClient",
    "AsyncAgentClient",
    "AsyncReplyStream",
    "AsyncSession",
    "Reply",
    "ReplyStream",
    "Session",
    "Speculation",
]
