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
        self._retry_at: dict[str, float] = {}  # by part of the store that was away (`time.monotonic`)
        self._ahead: dict[str, str] = {}  # by log with a gap: the end up to which its tombstones were applied
        self._gapped: set[str] = set()  # those unsure logs that had a gap, and running requests of their tenants
        self.outdated: frozenset[str | None] = frozenset()
        """tenants of logs that have a gap, to be forgotten as soon as none of their requests runs"""

    def leave(self, logs: Mapping[str, FollowedLog], names: Set[str], found: Set[str] = frozenset()) -> bool:
        """Look for gaps in the logs of these names, and in those that are unsure since an earlier call.

        Logs in a part of the store that is away stay ``unsure``, and are looked at again a few seconds later, or at
        once if an entry was ``found`` there. Returns whether no log that could be looked at has a gap. Raises
        StoreUnavailableError if the whole store is away.
        """
        self.unsure |= names
        for name in found:
            self._retry_at.pop(self._store.part(name), None)
        now, gapped = time.monotonic(), set[str]()
        for name in self.unsure & logs.keys():
            part = self._store.part(name)
            if self._retry_at.get(part, now) > now:
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
                self._retry_at[part] = now + _PART_SECONDS
        self._gapped = gapped | (self._gapped & self.unsure & logs.keys())  # the latter could not be looked at
        self.outdated = frozenset(logs[name].tenant for name in self._gapped)
        return not gapped

    def drop(self, name: str) -> None:
        """Forget what is known of a log, because its tenant was forgotten."""
        self.unsure.discard(name)
        self._ahead.pop(name, None)

    def _leave(self, name: str, log: FollowedLog) -> bool:
        """Look for a gap in a log. Returns whether there is none any more."""
        history = self._store.history(name, log.tombstones_applied_to)
        if history == "trimmed":
            if not self._forget(name, log):
                if self._store.newest(name) != self._ahead.get(name):  # erased turns must not be written meanwhile
                    self._ahead[name] = self._look_ahead(name, log)
                return False  # and remember no new place: what is here may be older than a lost tombstone
            # The entries left are read, as turns of this process may be late.
            log.tombstones_applied_to = self._look_ahead(name, log)
            self._ahead.pop(name, None)
        elif history == "lost":
            if self._store.newest(name) < log.tombstones_applied_to:  # the store was emptied, and its clock is behind
                log.cursor = log.tombstones_applied_to = ""
            self._look_ahead(name, log)  # the server may have evicted the log alone
        log.checked_at = time.monotonic()
        return True
