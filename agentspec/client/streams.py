"""Iterate over the text of streamed replies: ReplyStream, and AsyncReplyStream for asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from typing import Self

from agentspec.client.base import StreamBase, StreamItem
from agentspec.client.reply import ParsedT, Reply


class ReplyStream(StreamBase[ParsedT]):
    """Iterate over the text's pieces; afterwards `.reply` has the whole reply.

    The request is sent when iteration starts or `with` is entered. `with`, `close()` or deletion closes a stream that
    is not read to its end; its session stays unchanged.
    """

    def __init__(self, items: Generator[StreamItem, None, None]) -> None:
        self._items = items

    def start(self) -> Self:
        """Send the request now, unless it was sent already. Raises the OpenAI client's errors."""
        if not self._started:
            self._started = True
            next(self._items, None)  # returns None if the stream was closed before
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
        """Read the rest of the stream, and return the reply."""
        for _ in self:
            pass
        return self.reply

    def close(self) -> None:
        """Close the connection, and free the session for its next call."""
        self._items.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncReplyStream(StreamBase[ParsedT]):
    """Iterate over the text's pieces as ReplyStream does, with `async for`, `async with` and awaited methods."""

    def __init__(self, items: AsyncGenerator[StreamItem, None], release: Callable[[], None]) -> None:
        self._items = items
        self._release = release

    def __del__(self) -> None:  # frees the session now; the event loop closes the connection a little later
        self._release()

    async def start(self) -> Self:
        """Send the request now, unless it was sent already. Raises the OpenAI client's errors."""
        if not self._started:
            self._started = True
            await anext(self._items, None)  # returns None if the stream was closed before
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
        """Read the rest of the stream, and return the reply."""
        async for _ in self:
            pass
        return self.reply

    async def close(self) -> None:
        """Close the connection, and free the session for its next call."""
        await self._items.aclose()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.close()
