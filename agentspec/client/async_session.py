"""AsyncSession: one conversation of an AsyncAgentClient."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from agentspec.client.conversation import Conversation
from agentspec.client.messages import Content, MessageLike, as_message, tool_message
from agentspec.client.reply import ParsedT, Reply
from agentspec.client.request import Call
from agentspec.client.streams import AsyncReplyStream
from agentspec.errors import AgentSpecError

if TYPE_CHECKING:
    from agentspec.client.async_client import AsyncAgentClient


class AsyncSession:
    """Session's twin. Stored messages are read by the first awaited call, or by `await load()`."""

    def __init__(self, client: AsyncAgentClient, conversation: Conversation) -> None:
        self._client = client
        self._conversation = conversation

    @property
    def id(self) -> str:
        """The id by which any process can go on with the session, and by which the server knows it."""
        return self._conversation.id

    @property
    def group(self) -> str | None:
        """The group that its calls are tagged with: the problem that several sessions answer, if it was named."""
        return self._conversation.group

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The history, oldest first; a copy. AgentSpecError while the store has not been read."""
        if not self._conversation.loaded:
            raise AgentSpecError(f"messages: session {self.id!r} is not read yet; `await session.load()` first")
        return self._conversation.messages()

    async def load(self) -> None:
        """Read the stored messages now; else done by the first call."""
        if not self._conversation.loaded:
            await asyncio.to_thread(self._conversation.load)

    @overload
    async def chat(
        self,
        content: Content | None = None,
        *,
        stream: Literal[False] = False,
        response_format: type[ParsedT],
        **options: Any,
    ) -> Reply[ParsedT]: ...
    @overload
    async def chat(
        self,
        content: Content | None = None,
        *,
        stream: Literal[False] = False,
        response_format: Mapping[str, object] | None = None,
        **options: Any,
    ) -> Reply: ...
    @overload
    async def chat(
        self,
        content: Content | None = None,
        *,
        stream: Literal[True],
        response_format: type[ParsedT],
        **options: Any,
    ) -> AsyncReplyStream[ParsedT]: ...
    @overload
    async def chat(
        self,
        content: Content | None = None,
        *,
        stream: Literal[True],
        response_format: Mapping[str, object] | None = None,
        **options: Any,
    ) -> AsyncReplyStream: ...
    async def chat(
        self,
        content: Content | None = None,
        *,
        stream: bool = False,
        response_format: Any = None,
        **options: Any,
    ) -> Reply[Any] | AsyncReplyStream[Any]:
        """As Session.chat()."""
        call = Call(self.id, response_format, options, self.group)
        await self.load()
        turn = self._conversation.turn(content)
        if stream:
            return await self._client._stream(turn, call).start()
        return await self._client._chat(turn, call)

    @overload
    def stream(
        self, content: Content | None = None, *, response_format: type[ParsedT], **options: Any
    ) -> AsyncReplyStream[ParsedT]: ...
    @overload
    def stream(
        self,
        content: Content | None = None,
        *,
        response_format: Mapping[str, object] | None = None,
        **options: Any,
    ) -> AsyncReplyStream: ...
    def stream(
        self, content: Content | None = None, *, response_format: Any = None, **options: Any
    ) -> AsyncReplyStream[Any]:
        """As Session.stream()."""
        call = Call(self.id, response_format, options, self.group)
        return self._client._stream(self._conversation.turn(content), call, prepare=self.load)

    def add(self, message: MessageLike) -> None:
        """Append a message, a system message for instance, without calling the model."""
        self._conversation.add([as_message(message)])

    def tool_result(self, tool_call_id: str, content: str) -> None:
        """Append a tool's answer; chat() without content then goes on."""
        self._conversation.add([tool_message(tool_call_id, content)])

    async def clear(self) -> None:
        """As Session.clear()."""
        await asyncio.to_thread(self._conversation.clear)

    async def fork(self, new_id: str | None = None) -> AsyncSession:
        """As Session.fork()."""
        await self.load()
        other = self._client.session(new_id, group=self.group)
        await other.load()
        self._conversation.copy_to(other._conversation)
        return other

    def __repr__(self) -> str:
        return f"AsyncSession({self.id!r})"
