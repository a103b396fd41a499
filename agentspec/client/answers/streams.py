"""Iterate over the text of streamed replies: ReplyStream, and AsyncReplyStream for asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from typing import Self, TypeVar

from agentspec.client.answers.reply import ParsedT, Reply
from agentspec.client.base import StreamBase, StreamItem
from agentspec.errors import AgentSpecError

T = TypeVar("T")


class ReplyStream(StreamBase[ParsedT]):
    """Iterate over the text's pieces; afterwards `.reply` has the whole reply.

    The request is sent when iteration starts or `with` is entered. `with`, `close()` or deletion closes a stream that
    is not read to its end; its session stays unchanged. One thread at a time may read or close a stream.
    """

    def __init__(self, items: Generator[StreamItem, None, None]) -> None:
        self._items = items

    def start(self) -> Self:
        """Send the request now, unless it was sent already. Raises the OpenAI client's errors."""
        if not self._started:
            self._started = True
            self._alone(lambda: next(self._items, None))  # returns None if the stream was closed before
        return self

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.start()
        item = self._alone(lambda: next(self._items))
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
        self._alone(self._items.close)

    @staticmethod
    def _alone(step: Callable[[], T]) -> T:
        """Take a step of the generator. Raises AgentSpecError while another thread takes one."""
        try:
            return step()
        except ValueError as error:
            if str(error) != "generator already executing":  # Python's error, before the generator runs
                raise
            raise AgentSpecError(
                "another thread is reading the stream: read and close it in one thread; to stop it from another, set a"
                " flag at which the reading thread leaves its loop"
            ) from None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncReplyStream(StreamBase[ParsedT]):
    """Iterate over the text's pieces as ReplyStream does, with `async for`, `async with` and awaited methods.

    One task at a time may read or close a stream.
    """

    def __init__(self, items: AsyncGenerator[StreamItem, None], release: Callable[[], None]) -> None:
        self._items = items
        self._release = release

    def __del__(self) -> None:  # frees the session now; the event loop closes the connection a little later
        self._release()

    async def start(self) -> Self:
        """Send the request now, unless it was sent already. Raises the OpenAI client's errors."""
        if not self._started:
            self._started = True
            self._refuse_if_read()
            await anext(self._items, None)  # returns None if the stream was closed before
        return self

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        await self.start()
        self._refuse_if_read()
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
        self._refuse_if_read()
        await self._items.aclose()

    def _refuse_if_read(self) -> None:
        """Raise AgentSpecError while another task reads the stream."""
        if getattr(self._items, "ag_running", False):  # typing's AsyncGenerator lacks the attribute
            raise AgentSpecError(
                "another task is reading the stream: read and close it in one task; to stop it from another, cancel()"
                " the reading task"
            )

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.close()
