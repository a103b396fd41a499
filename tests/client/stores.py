"""Provide a store that fails, or takes its time, when told to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from agentspec.cache.store import Entry, Erasure, MemoryStore
from agentspec.errors import StoreUnavailableError


class FailingStore(MemoryStore):
    """Fail in the methods named in `failing`. delay: seconds that each call takes."""

    def __init__(self, *failing: str) -> None:
        super().__init__()
        self.failing = set(failing)
        self.delay = 0.0

    def _may(self, what: str) -> None:
        time.sleep(self.delay)
        if what in self.failing:
            raise StoreUnavailableError(f"{what}: away")

    def append(self, *args: Any, **options: Any) -> Any:
        self._may("append")
        return super().append(*args, **options)

    def read(self, *args: Any, **options: Any) -> Iterator[Entry]:
        self._may("read")
        return super().read(*args, **options)

    def erase_session(self, *args: Any, **options: Any) -> Erasure:
        self._may("remove")
        return super().erase_session(*args, **options)
