"""Provide AgentClient and Session of client.py for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import openai
from typing_extensions import Unpack

from agentspec.client.agents_session import AgentsSession
from agentspec.client.answers.reply import ParsedT, Reply, Speculation, read_speculation
from agentspec.client.answers.streamed_answer import StreamedAnswer
from agentspec.client.answers.streams import AsyncReplyStream
from agentspec.client.base import ClientBase, SessionBase, StreamItem
from agentspec.client.connection import AsyncClientOptions, connect, remedies_noted
from agentspec.client.history.conversation import Conversation, Gap, OnUnavailable, Turn
from agentspec.client.history.store_threads import StoreThreads
from agentspec.client.loops.session_loops import AsyncLoops
from agentspec.client.loops.steps import run_steps_async
from agentspec.client.messages import Content
from agentspec.client.option_checks import options_named
from agentspec.client.priming import Priming
from agentspec.client.request import PROBE_PATH, Call, ResponseFormat, Speculating
from agentspec.client.session_naming import SessionTags
from agentspec.errors import AgentSpecError

if TYPE_CHECKING:
    from agentspec.cache.store import Store
    from agentspec.client.forecast import Forecast, Tokenize

T = TypeVar("T")


class AsyncAgentClient(ClientBase[openai.AsyncOpenAI]):
    """Chat as AgentClient does, with asyncio: await each method that talks to the server or the store.

    `session()` and `stream()` are not awaited, because they only prepare: `session = client.session("fix-42")`, then
    `await session.chat(...)` or `async for text in session.stream(...)`. A client belongs to the event loop that uses
    it first, so each `asyncio.run()` makes its own.
    """

    def __init__(
        self,
        *,
        model: str,
        base_url: str | None = None,
        api_key: str | None = None,
        store: str | Store | None = "auto",
        session_tags: SessionTags = "auto",
        speculation: Speculating = True,
        record: str | Path | None = None,
        tokenizer: str | Tokenize | None = None,
        thoughts: bool = True,
        **options: Unpack[AsyncClientOptions],
    ) -> None:
        connection = connect(openai.AsyncOpenAI, base_url, api_key, options)
        self._threads = StoreThreads()
        super().__init__(connection, model, store, session_tags, speculation, record, tokenizer, thoughts)
        self._probe_lock = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None  # the event loop that used the client first

    def session(
        self,
        session_id: str | None = None,
        *,
        group: str | None = None,
        parent: str | None = None,
        on_unavailable: OnUnavailable = "raise",
    ) -> AsyncSession:
        """Return the session, as AgentClient.session() does. `await load()` or the first call reads the store."""
        return AsyncSession(self, self._conversations.get(session_id, group, parent), on_unavailable)

    async def chat(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        parent: str | None = None,
        response_format: ResponseFormat[ParsedT] = None,
        **options: Any,
    ) -> Reply[ParsedT]:
        """Make one call, as AgentClient.chat() does."""
        unkept = AsyncSession(self, self._conversations.unkept(session, group, parent))
        return await unkept.chat(messages, response_format=response_format, **options)

    def stream(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        parent: str | None = None,
        response_format: ResponseFormat[ParsedT] = None,
        **options: Any,
    ) -> AsyncReplyStream[ParsedT]:
        """Return the text of one call as an iterator, as AgentClient.stream() does."""
        unkept = AsyncSession(self, self._conversations.unkept(session, group, parent))
        return unkept.stream(messages, response_format=response_format, **options)

    async def speculation(self, reply: Reply[Any]) -> Speculation | None:
        """Return what was drafted and accepted for a reply; None if the server does not know.

        Servers with the extension send these counts with the reply unless the client's `speculation` is False. If the
        reply has none, this asks the server.
        """
        if reply.speculation is None:
            self._refuse_if_unusable()
            self._refuse_in_another_loop()
        if reply.speculation is not None or (path := self._requests.counts_path(reply)) is None:
            return reply.speculation
        return read_speculation(await run_steps_async(self._ask(path)))

    async def close(self) -> None:
        """Write queued messages to the store, and close the connections."""
        self._closed = True
        async with AsyncExitStack() as rest:  # closed even if the store's own close raises
            rest.push_async_callback(self._openai.close)
            if self._record is not None:
                rest.callback(self._record.close)
            rest.callback(self._threads.close)
            await self._threads.run(self._close_log)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _refuse_in_another_loop(self) -> None:
        """Note the event loop that uses the client, as connections belong to it. Raises AgentSpecError in another."""
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise AgentSpecError(
                "the client belongs to another event loop, as its connections do: make a client in each asyncio.run()"
            )

    async def _probe(self, call: Call) -> None:
        if self._requests.needs_probe(call):
            async with self._probe_lock:
                if self._requests.needs_probe(call):
                    self._requests.learn(await run_steps_async(self._ask(PROBE_PATH)))


class AsyncSession(SessionBase, AsyncLoops, AgentsSession):
    """Keep a conversation under its id, as Session does, for an AsyncAgentClient.

    It is a session for openai-agents, too: `Runner.run(agent, text, session=session)`.
    """

    _client: AsyncAgentClient

    def __init__(
        self, client: AsyncAgentClient, conversation: Conversation, on_unavailable: OnUnavailable = "raise"
    ) -> None:
        super().__init__(conversation, on_unavailable)
        self._client = client

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return a copy of the history, oldest first. Raises AgentSpecError until the store has been read."""
        self._refuse_if_unread("messages")
        return self._conversation.messages()

    @property
    def gaps(self) -> list[Gap]:
        """Return where messages are lost, as Session.gaps does. Raises AgentSpecError until the store has been read."""
        self._refuse_if_unread("gaps")
        return self._conversation.gaps()

    async def load(self) -> None:
        """Read the stored messages now instead of at the first use."""
        self._refuse_if_unreadable()
        self._client._refuse_in_another_loop()
        if not self._conversation.loaded:
            await self._wait(self._conversation.load, self._on_unavailable)

    async def chat(
        self, content: Content | None = None, *, response_format: ResponseFormat[ParsedT] = None, **options: Any
    ) -> Reply[ParsedT]:
        """Send the history and `content`, as Session.chat() does."""
        call = self._call(content, response_format, options)
        await self.load()
        with call.turn as turn:
            await self._check()
            await self._client._probe(call)
            await run_steps_async(self._client._prime_resumed(self._conversation, call))
            completions = self._client._connection(call).chat.completions
            send: Any = completions.create if call.model_class is None else completions.parse
            request = await self._request(call, turn)
            with options_named(request), remedies_noted(self._client.openai):
                raw = await send(**request)
            with self._conversation.undone_if_interrupted():
                reply = self._client._finish_call(call, turn, raw)
                await self._confirm()
            return reply

    def stream(
        self, content: Content | None = None, *, response_format: ResponseFormat[ParsedT] = None, **options: Any
    ) -> AsyncReplyStream[ParsedT]:
        """Return the text of the call as an iterator, as Session.stream() does."""
        call = self._call(content, response_format, options)
        return AsyncReplyStream(self._items(call), lambda: self._conversation.release(call.reservation))

    async def reload(self) -> None:
        """Read the stored messages again, as Session.reload() does."""
        self._client._refuse_if_unusable()
        await self._wait_to_end(self._conversation.reload)

    async def clear(self, *, cache_salts: Sequence[str] = ()) -> None:
        """Erase all messages, as Session.clear() does."""
        self._client._refuse_if_unusable()
        self._client._refuse_in_another_loop()
        with self._conversation.reserved():
            erased = self._conversation.to_erase()
            with remedies_noted(self._client.openai):
                await run_steps_async(self._client._erase(self._conversation, cache_salts))
            await self._wait_to_end(self._forget, erased)

    async def prime(self, texts: Sequence[str | Path] | None = None, *, cache_salt: str | None = None) -> int:
        """Let the server draft from texts, or from this session's history, as Session.prime() does."""
        self._client._refuse_if_unusable()
        await self.load()
        await run_steps_async(self._client._probe_sessions())
        requests: list[Priming] = await self._wait(list, self._priming(texts, cache_salt))
        with remedies_noted(self._client.openai):
            return await run_steps_async(self._client._prime(self.id, requests))

    async def forecast(self) -> Forecast:
        """Return what speculation would bring on this session, as Session.forecast() does, in a thread."""
        await self.load()
        return await asyncio.to_thread(self._client._forecast, self._conversation)

    async def fork(self, new_id: str | None = None, *, at: int | None = None) -> AsyncSession:
        """Return a new session with a copy of the messages, as Session.fork() does."""
        await self.load()
        other = self._client.session(new_id)
        await other.load()
        await self._wait_to_end(self._conversation.copy_to, other._conversation, at)
        return other

    def child(self, new_id: str | None = None, *, group: str | None = None) -> AsyncSession:
        """Return a session that this one starts, as Session.child() does."""
        return self._client.session(new_id, group=group, parent=self.id)

    @property
    def openai(self) -> openai.AsyncOpenAI:
        """Return an OpenAI client whose requests carry this session's id, as Session.openai does."""
        self._client._refuse_if_unusable()
        return self._client.openai.with_options(default_headers=self._client._requests.headers(self._conversation))

    def _refuse_if_unread(self, what: str) -> None:
        if not self._conversation.loaded:
            raise AgentSpecError(f"{what}: session {self.id!r} is not read yet; `await session.load()` first")

    async def _wait(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call a blocking function in one of the client's own threads."""
        return await self._client._threads.run(function, *arguments, **options)

    async def _wait_to_end(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a blocking function that changes the session. If the task is cancelled, wait for its end first."""
        return await self._client._threads.run_to_end(function, *arguments)

    async def _check(self) -> None:
        await self._wait(self._conversation.check)

    async def _confirm(self) -> None:
        await self._wait(self._conversation.confirm)

    async def _request(self, call: Call, turn: Turn, *, stream: bool = False) -> dict[str, Any]:
        """Return the arguments of the OpenAI client's call. A prediction takes long, so a thread makes it."""
        if call.predict:
            return await self._wait(self._client._requests.build, call, turn.messages, stream=stream)
        return self._client._requests.build(call, turn.messages, stream=stream)

    async def _items(self, call: Call) -> AsyncGenerator[StreamItem, None]:
        await self.load()
        with call.turn as turn:
            await self._check()
            await self._client._probe(call)
            await run_steps_async(self._client._prime_resumed(self._conversation, call))
            request = await self._request(call, turn, stream=True)
            completions: Any = self._client._connection(call).chat.completions
            answer = StreamedAnswer()
            with options_named(request), remedies_noted(self._client.openai):
                opened = (
                    completions.stream(**request)
                    if call.model_class
                    else await completions.create(**request, stream=True)
                )
                async with opened as events:
                    yield ""
                    async for event in events:
                        if text := answer.add(event):
                            yield text
            with self._conversation.undone_if_interrupted():
                reply = self._client._finish_call(call, turn, answer.completion())
                await self._confirm()
            yield reply
