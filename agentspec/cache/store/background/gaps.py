"""Find the followed logs from which retention removed entries before they were read here."""

import time
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager

from agentspec.cache.store.background.followed import FollowedLog
from agentspec.cache.store.base import Store
from agentspec.errors import StoreUnavailableError

_PART_SECONDS = 5.0  # pause before logs in a part of the store that was away are looked at again


class LogGaps:
    """Forget the tenants of logs that retention cut beyond what was read here, because tombstones may be lost.

    alone(name, log): context in which an error leaves one log alone. forget(name, log): makes the cache forget the
    log's tenant, and returns whether it could: not while requests of the tenant run. look_ahead(name, log): applies the
    log's tombstones, and returns the end up to which it did. Not thread-safe.
    """

    def __init__(
        self,
        store: Store,
        alone: Callable[[str, FollowedLog], AbstractContextManager[None]],
        forget: Callable[[str, FollowedLog], bool],
        look_ahead: Callable[[str, FollowedLog], str],
    ) -> None:
        self._store, self._alone, self._forget, self._look_ahead = store, alone, forget, look_ahead
        self.unsure: set[str] = set()
        """logs that must not be read before they were looked at"""
        self._away: set[str] = set()  # parts of the store that were away at the last look
        self._retry_at = 0.0  # when these are asked again (`time.monotonic`)
        self._gapped: set[str] = set()  # those unsure logs that had a gap, and running requests of their tenants
        self.outdated: frozenset[str | None] = frozenset()
        """tenants of logs that have a gap, to be forgotten as soon as none of their requests runs"""

    def leave(self, logs: Mapping[str, FollowedLog], names: Set[str]) -> bool:
        """Look for gaps in the logs of these names, and in those that are unsure since an earlier call.

        Logs in a part of the store that is away stay ``unsure``, and are looked at again a few seconds later. Returns
        whether no log that could be looked at has a gap. Raises StoreUnavailableError if the whole store is away.
        """
        self.unsure |= names
        self._away -= {self._store.part(name) for name in names}
        if time.monotonic() >= self._retry_at:
            self._away.clear()
        gapped = set[str]()
        for name in self.unsure & logs.keys():
            part = self._store.part(name)
            if part in self._away:
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
                self._away.add(part)
                self._retry_at = time.monotonic() + _PART_SECONDS
        self._gapped = gapped | (self._gapped & self.unsure & logs.keys())  # the latter could not be looked at
        self.outdated = frozenset(logs[name].tenant for name in self._gapped)
        return not gapped

    def _leave(self, name: str, log: FollowedLog) -> bool:
        """Look for a gap in a log. Returns whether there is none any more."""
        history = self._store.history(name, log.tombstones_applied_to)
        if history == "trimmed":
            forgotten = self._forget(name, log)
            end = self._look_ahead(name, log)  # also if the tenant stays for now: its erased turns must not be written
            if not forgotten:
                return False  # and remember no new place: what is here may be older than a lost tombstone
            log.tombstones_applied_to = end  # the entries left are read, as turns of this process may be late
        elif history == "lost" and self._store.newest(name) < log.tombstones_applied_to:
            log.cursor = log.tombstones_applied_to = ""  # the store was emptied, and its clock is behind
        log.checked_at = time.monotonic()
        return True
