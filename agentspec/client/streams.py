"""Streamed replies: iterators of text that end in a Reply."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from types import TracebackType
from typing import Any, Generic, Self

from agentspec.client.reply import ParsedT, Reply
from agentspec.errors import AgentSpecError

Item = str | Reply[Any]
"""What the generators behind the streams yield: "" once the server has answered, the text's pieces, the Reply."""


class _Ending(Generic[ParsedT]):
    _reply: Reply[ParsedT] | None = None
    _started: bool = False

    @property
    def reply(self) -> Reply[ParsedT]:
        """The whole reply, once the stream has been read to its end; AgentSpecError before, or after an error."""
        if self._reply is None:
            raise AgentSpecError("reply: the stream was not read to its end; iterate over it, or call until_done()")
        return self._reply


class ReplyStream(_Ending[ParsedT]):
    """Iterate for the text's pieces; `.reply` has the rest afterwards.

    The request is sent when iteration starts or `with` is entered. A stream that is left early is closed by
    `with`, `close()` or its deletion, and leaves its session as it was.
    """

    def __init__(self, items: Generator[Item, None, None]) -> None:
        self._items = items

    def start(self) -> Self:
        """Send the request now, if it was not sent yet; raises what the OpenAI client raises."""
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
        """Read the rest; returns the reply."""
        for _ in self:
            pass
        return self.reply

    def close(self) -> None:
        """Close the connection; the session is free again."""
        self._items.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncReplyStream(_Ending[ParsedT]):
    """ReplyStream's twin: `async for`, `async with`, and awaited methods."""

    def __init__(self, items: AsyncGenerator[Item, None]) -> None:
        self._items = items

    async def start(self) -> Self:
        """Send the request now, if it was not sent yet; raises what the OpenAI client raises."""
        if not self._started:
            self._started = True
            await anext(self._items, None)
        return self

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        await self.start()
        item = await anext(self._items)
        if isinstance(item, str):
            return item
        self._reply = item
        await self._items.aclose()
        raise StopAsyncIteration

    async def until_done(self) -> Reply[ParsedT]:
        """Read the rest; returns the reply."""
        async for _ in self:
            pass
        return self.reply

    async def close(self) -> None:
        """Close the connection; the session is free again."""
        await self._items.aclose()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
