"""AsyncAgentClient: AgentClient's twin on the OpenAI client's async side."""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from types import TracebackType
from typing import Any, Literal, Self, overload

import openai
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from typing_extensions import Unpack

from agentspec.cache.store import Store
from agentspec.client.accumulate import Accumulator, parse_text
from agentspec.client.async_session import AsyncSession
from agentspec.client.conversation import Conversations, Turn, stateless_turn
from agentspec.client.extension import PROBE_PATH, TIMEOUT_S, Extension, counts_path
from agentspec.client.messages import Content
from agentspec.client.options import AsyncClientOptions, credentials
from agentspec.client.reply import ParsedT, Reply, read_reply
from agentspec.client.request import Call, RequestSettings, SessionTags, checked_id
from agentspec.client.session_log import open_log
from agentspec.client.speculation import Speculation, read_speculation
from agentspec.client.streams import AsyncReplyStream, Item


class AsyncAgentClient:
    """AgentClient for asyncio: the same options and methods; what talks to the server or the store is awaited.

    `session()` and `stream()` are not, because they only prepare: `session = client.session("fix-42")`, then
    `await session.chat(...)`, `async for text in session.stream(...)`.
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
        **options: Unpack[AsyncClientOptions],
    ) -> None:
        self._settings = RequestSettings(model, session_tags, speculation)
        self._openai = openai.AsyncOpenAI(**credentials(base_url, api_key), **options)
        self._extension = Extension()
        self._probe_lock = asyncio.Lock()
        self._log = open_log(store)
        self._conversations = Conversations(self._log)
        self._closing = weakref.finalize(self, self._log.close)  # also when the interpreter exits

    @property
    def openai(self) -> openai.AsyncOpenAI:
        """The OpenAI client below, for everything that is not chat."""
        return self._openai

    @property
    def model(self) -> str:
        """The model that calls go to unless they name another."""
        return self._settings.model

    def session(self, session_id: str | None = None, *, group: str | None = None) -> AsyncSession:
        """As AgentClient.session(); the stored messages are read at the first call, or by `await load()`."""
        return AsyncSession(
            self, self._conversations.get(checked_id(session_id, "session"), checked_id(group, "group"))
        )

    @overload
    async def chat(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        stream: Literal[False] = False,
        response_format: type[ParsedT],
        **options: Any,
    ) -> Reply[ParsedT]: ...
    @overload
    async def chat(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        stream: Literal[False] = False,
        response_format: Mapping[str, object] | None = None,
        **options: Any,
    ) -> Reply: ...
    @overload
    async def chat(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        stream: Literal[True],
        response_format: type[ParsedT],
        **options: Any,
    ) -> AsyncReplyStream[ParsedT]: ...
    @overload
    async def chat(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        stream: Literal[True],
        response_format: Mapping[str, object] | None = None,
        **options: Any,
    ) -> AsyncReplyStream: ...
    async def chat(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        stream: bool = False,
        response_format: Any = None,
        **options: Any,
    ) -> Reply[Any] | AsyncReplyStream[Any]:
        """As AgentClient.chat()."""
        call = Call(checked_id(session, "session"), response_format, options, checked_id(group, "group"))
        turn = nullcontext(stateless_turn(messages))
        return await self._stream(turn, call).start() if stream else await self._chat(turn, call)

    @overload
    def stream(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        response_format: type[ParsedT],
        **options: Any,
    ) -> AsyncReplyStream[ParsedT]: ...
    @overload
    def stream(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        response_format: Mapping[str, object] | None = None,
        **options: Any,
    ) -> AsyncReplyStream: ...
    def stream(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        response_format: Any = None,
        **options: Any,
    ) -> AsyncReplyStream[Any]:
        """As AgentClient.stream()."""
        call = Call(checked_id(session, "session"), response_format, options, checked_id(group, "group"))
        return self._stream(nullcontext(stateless_turn(messages)), call)

    async def close(self) -> None:
        """Write out what is queued for the store, and close the connections."""
        await asyncio.to_thread(self._closing)
        await self._openai.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _chat(self, turn: AbstractContextManager[Turn], call: Call) -> Reply[Any]:
        with turn as current:
            extension = await self._probed(call)
            request = self._settings.build(call, current.messages, extension=extension)
            completions = self._openai.chat.completions
            send: Any = completions.create if call.model_class is None else completions.parse
            raw: ChatCompletion = await send(**request)
            reply = read_reply(raw, session=call.session)
            current.commit(reply.message)
            return dataclasses.replace(reply, speculation=await self._counts(raw.id, extension))

    def _stream(
        self,
        turn: AbstractContextManager[Turn],
        call: Call,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> AsyncReplyStream[Any]:
        return AsyncReplyStream(self._items(turn, call, prepare))

    async def _items(
        self,
        turn: AbstractContextManager[Turn],
        call: Call,
        prepare: Callable[[], Awaitable[None]] | None,
    ) -> AsyncGenerator[Item, None]:
        if prepare is not None:
            await prepare()
        with turn as current:
            extension = await self._probed(call)
            request = self._settings.build(call, current.messages, extension=extension, stream=True)
            answer = Accumulator()
            async with self._chunks(request, call) as chunks:
                yield ""
                async for chunk in chunks:
                    if text := answer.add(chunk):
                        yield text
            raw = answer.completion()
            reply = read_reply(raw, session=call.session, parsed=parse_text(raw, call.model_class))
            current.commit(reply.message)
            yield dataclasses.replace(reply, speculation=await self._counts(raw.id, extension))

    @asynccontextmanager
    async def _chunks(
        self, request: dict[str, Any], call: Call
    ) -> AsyncGenerator[AsyncIterable[ChatCompletionChunk], None]:
        completions: Any = self._openai.chat.completions
        if call.model_class is None:
            async with await completions.create(**request, stream=True) as stream:
                yield stream
        else:
            async with completions.stream(**request) as events:
                yield (event.chunk async for event in events if event.type == "chunk")

    async def _probed(self, call: Call) -> bool:
        if not self._settings.needs_probe(call):
            return False
        if not self._extension.due():  # the lock belongs to the event loop of its first waiters
            return self._extension.present
        async with self._probe_lock:
            if self._extension.due():
                try:
                    self._extension.answered(await self._get(PROBE_PATH))
                except Exception as error:  # no probe may cost the call that it is for
                    self._extension.failed(error)
            return self._extension.present

    async def _counts(self, request_id: str, extension: bool) -> Speculation | None:
        if not (extension and self._settings.speculation):
            return None
        try:
            return read_speculation(await self._get(counts_path(request_id)))
        except Exception:  # the reply is there; its counts are not worth losing it
            return None

    async def _get(self, path: str) -> object:
        return await self._openai.get(path, cast_to=object, options={"timeout": TIMEOUT_S, "max_retries": 0})
