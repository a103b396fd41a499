"""Take the bodies of imports, and tokenize them in threads of their own, so that chats and exports don't wait.

A caller's imports run one at a time, so that those of others find a thread. The bodies that wait meanwhile are held in
memory, so their bytes are limited, for one caller and for all.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar
from weakref import WeakValueDictionary

from fastapi import HTTPException, Request
from starlette.requests import ClientDisconnect

from agentspec.protocol import MAX_IMPORT_BYTES

T = TypeVar("T")

_THREADS = 4
_BODIES_OF_ONE, _BODIES_OF_ALL = 4, 16
"""How many of the longest bodies may wait at once, of one caller and of all."""


class Imports:
    """Hold the bodies of imports while they are read, and the threads that read them. For one event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "agentspec-imports")
        self._turns: WeakValueDictionary[str | None, asyncio.Lock] = WeakValueDictionary()  # by caller
        self._held = Counter[str | None]()  # bytes of bodies, by caller

    @asynccontextmanager
    async def body_of(self, request: Request, caller: str | None) -> AsyncIterator[bytearray]:
        """Yield the body of a caller's request, which counts as held until the block ends.

        caller: `Identity.caller`, so that salts do not make a caller several.

        Raises HTTPException: 413 once it is longer than MAX_IMPORT_BYTES, 400 where it is cut off, and 429 where too
        many bodies wait already.
        """
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                self._held[caller] += len(part)
                if len(body) > MAX_IMPORT_BYTES:
                    most = f"at most {MAX_IMPORT_BYTES} bytes are taken at once"
                    why = f"body: {most}; each turn or text has to fit into that"
                    how = "`agentspec sessions import` sends the turns of a long export a part at a time"
                    raise HTTPException(status_code=413, detail=f"{why}. {how}")
                self._refuse_if_full(caller)
            yield body
        except ClientDisconnect:  # no caller hears of it, and a traceback in the log would not help
            raise HTTPException(status_code=400, detail="body: the caller left before its end") from None
        finally:
            self._held[caller] -= len(body)
            if not self._held[caller]:
                del self._held[caller]

    async def run(self, caller: str | None, read: Callable[[], T]) -> T:
        """Return the result of ``read``, which runs in one of the threads after the caller's other imports."""
        async with self._turns.setdefault(caller, asyncio.Lock()):
            return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    def _refuse_if_full(self, caller: str | None) -> None:
        """Raise 429 where the caller's bodies, or those of all, take more memory than they may."""
        own = self._held[caller] > _BODIES_OF_ONE * MAX_IMPORT_BYTES
        if own or self._held.total() > _BODIES_OF_ALL * MAX_IMPORT_BYTES:
            whose = "of yours" if own else "of all callers"
            why = f"body: imports {whose} wait that take all the memory for them; try again in a few seconds"
            raise HTTPException(status_code=429, detail=why, headers={"Retry-After": "5"})
