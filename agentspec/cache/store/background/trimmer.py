"""Keep a store within its retention's limits, for the writer's thread."""

import logging
import time

from agentspec.cache.store.base import Retention, Store

logger = logging.getLogger(__name__)

_SECONDS = 60.0  # between two looks at whether the store exceeds its limits
_SHARE = 0.02  # share of the limit in bytes; once so much was appended, the next look is due at once


class Trimmer:
    """Remove what exceeds the limits of a store, a slice at a time. Use it from one thread; any may read its counts.

    retention: the limits; None: never trim. removed: entries that were removed. failed: attempts that failed.
    """

    def __init__(self, store: Store, retention: Retention | None) -> None:
        self.removed = self.failed = 0
        self._store, self._retention = store, retention
        self._at = time.monotonic()  # when to look next
        self._written = 0  # bytes appended since the last look
        self._failing = False  # whether the latest attempt failed

    def wait(self) -> float | None:
        """Return in how many seconds to look at the store next; None: never."""
        return None if self._retention is None else max(0.0, self._at - time.monotonic())

    def note_written(self, size: int) -> None:
        """Note that ``size`` bytes were appended."""
        self._written += size

    def trim_if_due(self) -> None:
        """Remove one slice if a look is due. Never raises."""
        if self._retention is None:
            return
        limit = self._retention.bytes
        if (limit is None or self._written <= _SHARE * limit) and self._at > time.monotonic():
            return
        self._at = time.monotonic() + _SECONDS
        self._written = 0
        try:
            removed, more = self._store.trim(self._retention)
        except Exception as error:  # a store may raise anything, and the thread must survive it
            self.failed += 1
            if not self._failing:
                logger.warning("agentspec: the store could not be trimmed: %s; further failures are counted", error)
            self._failing = True
            return
        self._failing = False
        self.removed += removed
        if more:
            self._at = 0.0  # at once, after the records that were queued meanwhile
