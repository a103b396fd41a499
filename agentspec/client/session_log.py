"""Store a client's messages, so that a later process can resume its sessions.

Reading may block and fails loudly. Writing happens in the background (`outbox`): it costs no call, whatever the store
does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from agentspec.cache.store import Retention, Store, default_store_url, open_store, trim_sessions
from agentspec.client.outbox import NAMESPACE, Outbox, Place, Said, Stored, read_session
from agentspec.errors import StoreError, StoreUnavailableError

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 2.0
RETENTION = Retention(days=365, bytes=2 << 30)
"""Limits of the default store. Beyond them whole sessions are erased, least recently used first."""


class SessionLog:
    """Store nothing, for `store=None`."""

    keeps = False
    """True if the log can restore a session that is no longer in use."""

    def read(self, session: str) -> Stored:
        """Return the session as it is stored. May block. Raises StoreError if it cannot be read."""
        return Stored()

    def append(self, place: Place, said: list[Said]) -> None:
        """Queue the messages of one turn. Never blocks, never raises."""

    def check(self, place: Place) -> None:
        """Look whether another client wrote to the session. May block shortly. Raises SessionConflictError if so."""

    def confirm(self, place: Place) -> None:
        """Wait shortly until the messages are stored. Raises SessionConflictError if another client wrote before."""

    def remove(self, session: str) -> None:
        """Remove the session. Blocks until it is removed. Raises StoreError if that fails."""

    def close(self) -> None:
        """Write the queued messages."""


class StoreLog(SessionLog):
    """Keep messages in a store. Opens the store on first use, and closes it unless the caller opened it."""

    keeps = True

    def __init__(self, store: Store | Callable[[], Store], *, owned: bool = True) -> None:
        self._open = store if callable(store) else None
        self._store = None if callable(store) else store
        self._owned = owned
        self._lock = threading.Lock()
        self._closed = False
        self._outbox = Outbox(self._opened)

    def read(self, session: str) -> Stored:
        # This process may just have queued messages of the session that it now resumes.
        if not self._outbox.settle(session, FLUSH_TIMEOUT_S):
            raise StoreUnavailableError("messages of this process still wait to be written to the store")
        return read_session(self._opened(), session)

    def append(self, place: Place, said: list[Said]) -> None:
        self._outbox.put(place, said)

    def check(self, place: Place) -> None:
        self._outbox.check(place)
        self._outbox.confirm(place)

    def confirm(self, place: Place) -> None:
        self._outbox.confirm(place)

    def remove(self, session: str) -> None:
        with self._outbox.paused(session, FLUSH_TIMEOUT_S):
            self._opened().erase_session(NAMESPACE, session, mark=False)  # no server follows this log

    def close(self) -> None:
        self._outbox.close(FLUSH_TIMEOUT_S)
        with self._lock:
            self._closed = True
            store, self._store = self._store, None
        if store is not None and self._owned:
            store.close()

    def _opened(self) -> Store:
        with self._lock:
            if self._closed:
                raise StoreError("the client is closed")
            if self._store is None and self._open is not None:
                self._store = self._open()
            assert self._store is not None
            return self._store


def open_log(store: str | Store | None) -> SessionLog:
    """Return the log for a client's `store` option.

    A store given by URL is opened now, and may raise StoreURLError or StoreError. The default store, in the user's
    data folder, is opened when the first session needs it, and kept within RETENTION.
    """
    if store is None:
        return SessionLog()
    if store == "auto":
        return StoreLog(_open_default)
    if not isinstance(store, str):
        return StoreLog(store, owned=False)
    return StoreLog(open_store(store))


def _open_default() -> Store:
    store = open_store(default_store_url("sessions.db"))
    threading.Thread(target=_trim, args=(store,), name="agentspec-retention", daemon=True).start()
    return store


def _trim(store: Store) -> None:
    try:
        erased = trim_sessions(store, NAMESPACE, RETENTION)
    except StoreError as error:  # the next client tries again
        logger.debug("agentspec: the session store could not be trimmed: %s", error)
        return
    if erased:
        logger.info("agentspec: erased %d stored sessions that were not used for long", erased)
