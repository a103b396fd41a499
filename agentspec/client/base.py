"""What the clients, sessions and streams of both kinds share: all that waits for nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import openai

from agentspec.cache.store import Store
from agentspec.client.conversation import Conversation, Conversations
from agentspec.client.messages import Content, MessageLike, as_message, tool_message
from agentspec.client.reply import ParsedT, Reply
from agentspec.client.request import Call, RequestBuilder, SessionTags
from agentspec.client.session_log import open_log
from agentspec.errors import AgentSpecError

OpenAIT = TypeVar("OpenAIT", openai.OpenAI, openai.AsyncOpenAI)

StreamItem = str | Reply[Any]
"""What the generators behind the streams yield: "" once the server has answered, the text's pieces, the Reply."""


class ClientBase(Generic[OpenAIT]):
    """The settings and connections of one client."""

    def __init__(
        self, connection: OpenAIT, model: str, store: str | Store | None, session_tags: SessionTags, speculation: bool
    ) -> None:
        self._openai: OpenAIT = connection
        self._requests = RequestBuilder(model, session_tags, speculation)
        self._log = open_log(store)
        self._conversations = Conversations(self._log)
        self._close_log: Callable[[], object] = weakref.finalize(
            self, self._log.close
        )  # also when the interpreter exits

    @property
    def openai(self) -> OpenAIT:
        """The OpenAI client below, for everything that is not chat."""
        return self._openai

    @property
    def model(self) -> str:
        """The model that calls go to unless they name another."""
        return self._requests.model


class SessionBase:
    """The history of one session, and what changes it without calling the model."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    @property
    def id(self) -> str:
        """The id by which any process can go on with the session, and by which the server knows it."""
        return self._conversation.id

    @property
    def group(self) -> str | None:
        """The group that its calls are tagged with: the problem that several sessions answer, if it was named."""
        return self._conversation.group

    def add(self, message: MessageLike) -> None:
        """Append a message, a system message for instance, without calling the model."""
        self._conversation.add([as_message(message)])

    def tool_result(self, tool_call_id: str, content: str) -> None:
        """Append a tool's answer. chat() without content then goes on."""
        self._conversation.add([tool_message(tool_call_id, content)])

    def _call(self, content: Content | None, response_format: Any, options: Mapping[str, Any]) -> Call:
        return Call(self._conversation, content, response_format, options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"


class StreamBase(Generic[ParsedT]):
    """The reply at the end of a stream."""

    _reply: Reply[ParsedT] | None = None
    _started = False

    @property
    def reply(self) -> Reply[ParsedT]:
        """The whole reply, once the stream has been read to its end. Raises AgentSpecError before and after errors."""
        if self._reply is None:
            raise AgentSpecError("reply: the stream was not read to its end; iterate over it, or call until_done()")
        return self._reply
