"""Session: one conversation of an AgentClient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from agentspec.client.conversation import Conversation
from agentspec.client.messages import Content, MessageLike, as_message, tool_message
from agentspec.client.reply import ParsedT, Reply
from agentspec.client.request import Call
from agentspec.client.streams import ReplyStream

if TYPE_CHECKING:
    from agentspec.client.client import AgentClient


class Session:
    """A conversation that is kept under its id: each call sends all of it, each reply is added to it.

    Made by `AgentClient.session()`. A call that fails leaves the history as it was, so it can simply be made
    again. One call at a time: a second one meanwhile raises SessionBusyError; `fork()` goes two ways at once.
    """

    def __init__(self, client: AgentClient, conversation: Conversation) -> None:
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
        """The history, oldest first; a copy."""
        self.load()
        return self._conversation.messages()

    def load(self) -> None:
        """Read the stored messages now; else done when they are first needed."""
        self._conversation.load()

    @overload
    def chat(
        self,
        content: Content | None = None,
        *,
        stream: Literal[False] = False,
        response_format: type[ParsedT],
        **options: Any,
    ) -> Reply[ParsedT]: ...
    @overload
    def chat(
        self,
        content: Content | None = None,
        *,
        stream: Literal[False] = False,
        response_format: Mapping[str, object] | None = None,
        **options: Any,
    ) -> Reply: ...
    @overload
    def chat(
        self,
        content: Content | None = None,
        *,
        stream: Literal[True],
        response_format: type[ParsedT],
        **options: Any,
    ) -> ReplyStream[ParsedT]: ...
    @overload
    def chat(
        self,
        content: Content | None = None,
        *,
        stream: Literal[True],
        response_format: Mapping[str, object] | None = None,
        **options: Any,
    ) -> ReplyStream: ...
    def chat(
        self,
        content: Content | None = None,
        *,
        stream: bool = False,
        response_format: Any = None,
        **options: Any,
    ) -> Reply[Any] | ReplyStream[Any]:
        """Send the history and `content` (a string is a user message; None: the history as it is).

        `response_format`: a pydantic model (then `reply.parsed` is an instance) or what the API takes.
        `options`: any option of `chat.completions.create`, tools included.
        """
        call = Call(self.id, response_format, options, self.group)
        self.load()
        turn = self._conversation.turn(content)
        if stream:
            return self._client._stream(turn, call).start()
        return self._client._chat(turn, call)

    @overload
    def stream(
        self, content: Content | None = None, *, response_format: type[ParsedT], **options: Any
    ) -> ReplyStream[ParsedT]: ...
    @overload
    def stream(
        self,
        content: Content | None = None,
        *,
        response_format: Mapping[str, object] | None = None,
        **options: Any,
    ) -> ReplyStream: ...
    def stream(
        self, content: Content | None = None, *, response_format: Any = None, **options: Any
    ) -> ReplyStream[Any]:
        """chat() as an iterator of text; the request is sent when iteration starts."""
        self.load()
        call = Call(self.id, response_format, options, self.group)
        return self._client._stream(self._conversation.turn(content), call)

    def add(self, message: MessageLike) -> None:
        """Append a message, a system message for instance, without calling the model."""
        self._conversation.add([as_message(message)])

    def tool_result(self, tool_call_id: str, content: str) -> None:
        """Append a tool's answer; chat() without content then goes on."""
        self._conversation.add([tool_message(tool_call_id, content)])

    def clear(self) -> None:
        """Forget all messages, in the store and here; on a StoreError nothing is forgotten."""
        self._conversation.clear()

    def fork(self, new_id: str | None = None) -> Session:
        """A new session that starts with a copy of this one's messages.

        Raises InvalidSessionError when a session `new_id` has messages already.
        """
        self.load()
        other = self._client.session(new_id, group=self.group)
        other.load()
        self._conversation.copy_to(other._conversation)
        return other

    def __repr__(self) -> str:
        return f"Session({self.id!r})"
