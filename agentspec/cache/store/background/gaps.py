"""Find the followed logs from which retention removed entries before they were read here."""

import time
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager

from agentspec.cache.store.background.followed import FollowedLog
from agentspec.cache.store.base import Store
from agentspec.errors import StoreUnavailableError


class LogGaps:
    """Forget the tenants of logs that retention cut beyond what was read here, because tombstones may be lost.

    alone(name, log): context in which an error leaves one log alone. forget(name, log): makes the cache forget the
    log's tenant, and returns whether it could: not while requests of the tenant run. Not thread-safe.
    """

    def __init__(
        self,
        store: Store,
        alone: Callable[[str, FollowedLog], AbstractContextManager[None]],
        forget: Callable[[str, FollowedLog], bool],
    ) -> None:
        self._store, self._alone, self._forget = store, alone, forget
        self.unsure: set[str] = set()
        """logs that must not be read before they were looked at"""
        self._gapped: set[str] = set()  # those of them that have a gap, and running requests of their tenants
        self.outdated: frozenset[str | None] = frozenset()
        """tenants of logs that have a gap, to be forgotten as soon as none of their requests runs"""

    def leave(self, logs: Mapping[str, FollowedLog], names: Set[str]) -> bool:
        """Look for gaps in the logs of these names, and in those that had one at the last look.

        Logs in a part of the store that is away stay ``unsure``. Returns whether no gap is left. Raises
        StoreUnavailableError if the whole store is away.
        """
        self.unsure |= names
        gapped, away = set[str](), set[str]()
        for name in (names | self._gapped) & logs.keys():
            part = self._store.part(name)
            if part in away:
                continue
            try:
                with self._alone(name, logs[name]):
                    if self._leave(name, logs[name]):
                        self.unsure.discard(name)
                    else:
                        gapped.add(name)
            except StoreUnavailableError:
                if not part:
                    raise
                away.add(part)
        self._gapped, self.outdated = gapped, frozenset(logs[name].tenant for name in gapped)
        return not gapped

    def _leave(self, name: str, log: FollowedLog) -> bool:
        """Look for a gap in a log. Returns whether there is none any more."""
        history = self._store.history(name, log.tombstones_applied_to)
        if history != "whole":
            end = self._store.newest(name)
            if history == "trimmed":
                if not self._forget(name, log):
                    return False
                log.cursor = log.tombstones_applied_to = end
            elif end < log.tombstones_applied_to:  # an emptied store whose clock is behind begins with lower cursors
                log.cursor = log.tombstones_applied_to = ""
        log.checked_at = time.monotonic()
        return True
