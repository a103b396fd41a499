"""AgentClient, Session and ReplyStream: the OpenAI client, with sessions."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Generator, Iterator
from typing import Any, Literal, Self, overload

import openai
from typing_extensions import Unpack

from agentspec.cache.store import Store
from agentspec.client.base import ClientBase, SessionBase, StreamBase, StreamItem
from agentspec.client.conversation import Conversation, unkept_conversation
from agentspec.client.messages import Content
from agentspec.client.reply import ParsedT, Reply, StreamedAnswer, read_reply, read_speculation
from agentspec.client.request import (
    PROBE_PATH,
    TIMEOUT_S,
    Call,
    ClientOptions,
    ResponseFormat,
    SessionTags,
    credentials,
)


class AgentClient(ClientBase[openai.OpenAI]):
    """Chats with any OpenAI-compatible server, in sessions that are kept and that the server can draft from.

    base_url, api_key: as the OpenAI client takes them; for a `base_url` of one's own no key is needed.
    model: the served model's name; a call can take another with `model=`.
    store: where sessions are kept: "auto" (a SQLite file in the user's data folder), a URL
        (`sqlite:///…`, `redis://…`, `memory://`), a store object, or None for this client's memory only.
    session_tags: how calls tell the server their session. "auto": the header X-Session-ID, and the body's
        `session_id` and `vllm_xargs.session_id` where the server has the extension; "header" and "body": only
        that, whatever the server; "off": not at all. A group has no header: it goes with the body's tags only.
    speculation: whether `reply.speculation` is filled; takes one small request more where the extension is.
    options: every other option of the OpenAI client (timeout, max_retries, http_client, ...).

    Raises ConfigurationError for an option that cannot work, StoreError when a store given by URL cannot be
    opened. Errors of the server reach the caller as the OpenAI client raises them. Threads may share a client.
    One session takes one call at a time.
    """

    def __init__(
        self,
        *,
        model: str,
        base_url: str | None = None,
        api_key: str | None = None,
        store: str | Store | None = "auto",
        session_tags: SessionTags = "auto",
        speculation: bool = True,
        **options: Unpack[ClientOptions],
    ) -> None:
        connection = openai.OpenAI(**credentials(base_url, api_key), **options)
        super().__init__(connection, model, store, session_tags, speculation)
        self._probe_lock = threading.Lock()

    def session(self, session_id: str | None = None, *, group: str | None = None) -> Session:
        """Return the session with this id, with the messages that the store has of it; without an id, a new one.

        group: what several sessions answer, an RL problem for instance; they draft from each other's answers first.
        It is not stored: name it again in another process.
        Sessions of one id and client share their messages and their group. Raises InvalidSessionError for an id
        that is empty, longer than 256 characters or has control characters.
        """
        return Session(self, self._conversations.get(session_id, group))

    @overload
    def chat(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        stream: Literal[False] = False,
        response_format: ResponseFormat[ParsedT] = None,
        **options: Any,
    ) -> Reply[ParsedT]: ...
    @overload
    def chat(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        stream: Literal[True],
        response_format: ResponseFormat[ParsedT] = None,
        **options: Any,
    ) -> ReplyStream[ParsedT]: ...
    def chat(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        stream: bool = False,
        response_format: Any = None,
        **options: Any,
    ) -> Reply[Any] | ReplyStream[Any]:
        """Make one call whose messages the caller gives wholly; a string is one user message.

        session, group: only tag the call: nothing is added to that session's kept messages.
        Everything else is as in `Session.chat`.
        """
        unkept = Session(self, unkept_conversation(session, group))
        if stream:
            return unkept.chat(messages, stream=True, response_format=response_format, **options)
        reply: Reply[Any] = unkept.chat(messages, response_format=response_format, **options)
        return reply

    def stream(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        response_format: ResponseFormat[ParsedT] = None,
        **options: Any,
    ) -> ReplyStream[ParsedT]:
        """Make the call of chat() as an iterator of text. The request is sent when iteration starts."""
        unkept = Session(self, unkept_conversation(session, group))
        return unkept.stream(messages, response_format=response_format, **options)

    def close(self) -> None:
        """Write out what is queued for the store, and close the connections."""
        self._close_log()
        self._openai.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _probe(self, call: Call) -> None:
        if self._requests.needs_probe(call):
            with self._probe_lock:
                if self._requests.needs_probe(call):
                    self._requests.learn(self._ask(PROBE_PATH))

    def _with_counts(self, reply: Reply[Any]) -> Reply[Any]:
        path = self._requests.counts_path(reply)
        return dataclasses.replace(reply, speculation=read_speculation(self._ask(path))) if path else reply

    def _ask(self, path: str) -> object:
        """Ask the extension. Returns errors too: no question may cost the call that it is for."""
        try:
            return self._openai.get(path, cast_to=object, options={"timeout": TIMEOUT_S, "max_retries": 0})
        except Exception as error:
            return error


class Session(SessionBase):
    """A conversation that is kept under its id: each call sends all of it, each reply is added to it.

    Made by `AgentClient.session()`. A call that fails leaves the history as it was, so it can simply be made
    again. One call at a time: a second one meanwhile raises SessionBusyError. `fork()` goes two ways at once.
    """

    def __init__(self, client: AgentClient, conversation: Conversation) -> None:
        super().__init__(conversation)
        self._client = client

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The history, oldest first; a copy."""
        self.load()
        return self._conversation.messages()

    def load(self) -> None:
        """Read the stored messages now; otherwise the first use does."""
        self._conversation.load()

    @overload
    def chat(
        self,
        content: Content | None = None,
        *,
        stream: Literal[False] = False,
        response_format: ResponseFormat[ParsedT] = None,
        **options: Any,
    ) -> Reply[ParsedT]: ...
    @overload
    def chat(
        self,
        content: Content | None = None,
        *,
        stream: Literal[True],
        response_format: ResponseFormat[ParsedT] = None,
        **options: Any,
    ) -> ReplyStream[ParsedT]: ...
    def chat(
        self, content: Content | None = None, *, stream: bool = False, response_format: Any = None, **options: Any
    ) -> Reply[Any] | ReplyStream[Any]:
        """Send the history and `content` (a string is a user message; None: the history as it is).

        stream: return an iterator of text, whose request has been sent.
        response_format: a pydantic model (then `reply.parsed` is an instance) or what the API takes.
        options: any option of `chat.completions.create`, tools included.
        """
        if stream:
            return self.stream(content, response_format=response_format, **options).start()
        call = self._call(content, response_format, options)
        self.load()
        with call.turn as turn:
            self._client._probe(call)
            completions = self._client.openai.chat.completions
            send: Any = completions.create if call.model_class is None else completions.parse
            raw = send(**self._client._requests.build(call, turn.messages))
            reply = read_reply(raw, call.session, call.model_class)
            turn.commit(reply.message)
            return self._client._with_counts(reply)

    def stream(
        self, content: Content | None = None, *, response_format: ResponseFormat[ParsedT] = None, **options: Any
    ) -> ReplyStream[ParsedT]:
        """Make the call of chat() as an iterator of text. The request is sent when iteration starts."""
        return ReplyStream(self._items(self._call(content, response_format, options)))

    def clear(self) -> None:
        """Forget all messages, here and in the client's store. On a StoreError nothing is forgotten."""
        self._conversation.clear()

    def fork(self, new_id: str | None = None) -> Session:
        """Return a new session that starts with a copy of this one's messages.

        Raises InvalidSessionError when a session `new_id` has messages already.
        """
        self.load()
        other = self._client.session(new_id, group=self.group)
        other.load()
        self._conversation.copy_to(other._conversation)
        return other

    def _items(self, call: Call) -> Generator[StreamItem, None, None]:
        self.load()
        with call.turn as turn:
            self._client._probe(call)
            request = self._client._requests.build(call, turn.messages, stream=True)
            completions: Any = self._client.openai.chat.completions
            opened = completions.stream(**request) if call.model_class else completions.create(**request, stream=True)
            answer = StreamedAnswer()
            with opened as events:
                yield ""
                for event in events:
                    if text := answer.add(event):
                        yield text
            reply = read_reply(answer.completion(), call.session, call.model_class)
            turn.commit(reply.message)
            yield self._client._with_counts(reply)


class ReplyStream(StreamBase[ParsedT]):
    """Iterates over the text's pieces; `.reply` has the rest afterwards.

    The request is sent when iteration starts or `with` is entered. A stream that is left early is closed by
    `with`, `close()` or its deletion, and leaves its session as it was.
    """

    def __init__(self, items: Generator[StreamItem, None, None]) -> None:
        self._items = items

    def start(self) -> Self:
        """Send the request now, if it was not sent yet. Raises what the OpenAI client raises."""
        if not self._started:
            self._started = True
            next(self._items, None)  # exhausted if it was closed before
        return self

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.start()
        item = next(self._items)
        if isinstance(item, str):
            return item
        self._reply = item
        self._items.close()
        raise StopIteration

    def until_done(self) -> Reply[ParsedT]:
        """Read the rest. Returns the reply."""
        for _ in self:
            pass
        return self.reply

    def close(self) -> None:
        """Close the connection. The session is free again."""
        self._items.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()
