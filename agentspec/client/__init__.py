"""The agent's process: the OpenAI client with sessions that last and replies that tell of speculation."""

from agentspec.client.async_client import AsyncAgentClient
from agentspec.client.async_session import AsyncSession
from agentspec.client.client import AgentClient
from agentspec.client.reply import Reply
from agentspec.client.session import Session
from agentspec.client.speculation import Speculation
from agentspec.client.streams import AsyncReplyStream, ReplyStream

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
