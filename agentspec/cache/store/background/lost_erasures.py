"""Repeat erasures: those that a store has lost, because it went back to an older state, and those with late turns."""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from agentspec.cache.store.background.followed import FollowedLog
from agentspec.cache.store.background.own_erasures import OwnErasures
from agentspec.cache.store.base import Store
from agentspec.errors import StoreUnavailableError

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 60.0  # longest time between two looks at a log
_PART_SECONDS = 5.0  # pause before the next one if a part of the store was away
_FIND_SECONDS = 0.05  # longest time in which another log is looked at, before all are followed again


class LostErasures:
    """Look for the erasures that this process remembers, in each followed log once a minute, and after each failure.

    alone(name, log): context in which an error leaves one log alone. erase_again(tenant, session): erases a session
    here and in the store again; if it raises, it is called again. undone: number of lost erasures. Not thread-safe.
    """

    def __init__(
        self,
        store: Store,
        own: OwnErasures,
        alone: Callable[[str, FollowedLog], AbstractContextManager[None]],
        erase_again: Callable[[str | None, str], None],
    ) -> None:
        self._store, self._own, self._alone, self._erase_again = store, own, alone, erase_again
        self.undone = 0
        self.unsure: set[str] = set()
        """logs yet to be looked at"""
        self.look_at = 0.0
        """when all logs are looked at, and before that those in a part of the store that is away"""

    def suspect(self) -> None:
        """Look at all logs soon, because the store may have gone back."""
        self.look_at = 0.0

    def find(self, logs: Mapping[str, FollowedLog], now: float) -> None:
        """Look at one log, and at more while there is time: the logs are followed meanwhile.

        now: the present time (``time.monotonic``). Raises StoreUnavailableError if the whole store is away.
        """
        if now >= self.look_at:
            self.unsure, self.look_at = set(logs), now + _LOOK_SECONDS
        away = set[str]()  # parts of the store
        for name in self.unsure & logs.keys():
            log, lost, part = logs[name], list[str](), self._store.part(name)
            try:
                with self._alone(name, log):
                    lost = [] if part in away else self._own.undone(name, log.recent_tombstones)
            except StoreUnavailableError:
                if not part:
                    raise
                away.add(part)
                self.look_at = now + _PART_SECONDS
            self.unsure.discard(name)
            if lost:
                log.lost_erasures.update(lost)
                self.undone += len(lost)
                message = "agentspec: the store went back to an older state; %d erasures in log %s are repeated"
                logger.warning(message, len(lost), name)
            if time.monotonic() - now >= _FIND_SECONDS:
                return

    def repeat(self, logs: Mapping[str, FollowedLog]) -> None:
        """Erase the sessions again whose erasure was found to be lost, or with a turn of this process behind it."""
        for name, log in logs.items():
            with self._alone(name, log):
                for session in log.to_erase_again():
                    # Another process may have repeated a lost erasure meanwhile, and the session may be used again.
                    if session in log.late_turns or self._own.undone(name, log.recent_tombstones, session):
                        self._erase_again(log.tenant, session)
                    log.late_turns.discard(session)
                    log.lost_erasures.discard(session)
