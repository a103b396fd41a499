"""Store a client's messages, so that a later process can resume its sessions.

Reading may block, and raises the store's errors. Writing happens in the background (`outbox`), so a store that is slow
or away costs no call.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from agentspec.cache.store import Retention, Store, default_store_url, open_store, trim_sessions
from agentspec.client.history.outbox import NAMESPACE, Outbox, read_session
from agentspec.client.history.session_log import ClientView, Said, SessionLog, Stored
from agentspec.errors import StoreError, StoreUnavailableError

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 2.0
ROOM_TIMEOUT_S = 30.0
RETENTION = Retention(days=365, bytes=2 << 30)
"""Limits of the default store. Beyond them whole sessions are erased, least recently used first."""
_TRIM_PAUSE_S = 3_600.0  # between two looks at the limits


class StoreLog(SessionLog):
    """Keep messages in a store. Opens the store on first use, and closes it unless the caller opened it.

    trimmed: whether to keep the store within RETENTION while it is used.
    """

    keeps = True

    def __init__(self, store: Store | Callable[[], Store], *, owned: bool = True, trimmed: bool = False) -> None:
        self._open = store if callable(store) else None
        self._store = None if callable(store) else store
        self._owned = owned
        self._trim_at = 0.0 if trimmed else math.inf  # monotonic seconds
        self._lock = threading.Lock()
        self._closed = False
        self._outbox = Outbox(self._opened)

    @classmethod
    def of(cls, store: str | Store) -> StoreLog:
        """Return the log for a store, a URL or "auto". Raises StoreURLError and StoreError for a URL."""
        if not isinstance(store, str):
            return cls(store, owned=False)
        return cls(_open_default, trimmed=True) if store == "auto" else cls(open_store(store))

    def read(self, session: str) -> Stored:
        # This process may have queued messages of the session just before it resumes it.
        if not self._outbox.settle(session, FLUSH_TIMEOUT_S):
            raise StoreUnavailableError("messages of this process still wait to be written to the store")
        return read_session(self._opened(), session)

    def append(self, view: ClientView, said: list[Said], cut: int | None = None) -> None:
        self._outbox.put(view, said, cut)

    def rewrite(self, view: ClientView, position: int, said: list[Said]) -> None:
        self._outbox.put_now(view, said, position, FLUSH_TIMEOUT_S)

    def check(self, view: ClientView) -> None:
        self._outbox.check(view)
        self._outbox.confirm(view)

    def confirm(self, view: ClientView) -> None:
        self._outbox.confirm(view)

    def wait_for_room(self) -> None:
        self._outbox.wait_for_room(ROOM_TIMEOUT_S)

    def remove(self, session: str) -> None:
        with self._outbox.paused(session, FLUSH_TIMEOUT_S):
            until = time.monotonic() + FLUSH_TIMEOUT_S
            while not self._erase_once(session):
                if time.monotonic() > until:
                    raise StoreUnavailableError(
                        f"session {session!r}: erased, but another process still reads the old pages of the store; call"
                        " clear() again when that process has ended"
                    )
                time.sleep(0.1)

    def _erase_once(self, session: str) -> bool:
        """Erase a session, and return whether nothing of it is left. Raises StoreError, which names the session."""
        try:
            # No server follows this log, so no tombstone is needed.
            return self._opened().erase_session(NAMESPACE, session, mark=False).complete
        except StoreError as error:
            why = str(error).rstrip(".")
            raise type(error)(
                f"session {session!r}: not erased from this client's store: {why}; call clear() again when it answers"
            ) from error

    def close(self) -> None:
        if self._outbox.is_this_thread():  # it has collected a client that nobody closed, and is still to write
            threading.Thread(target=self.close, name="agentspec-close").start()
            return
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
            if (now := time.monotonic()) >= self._trim_at:
                self._trim_at = now + _TRIM_PAUSE_S
                with suppress(RuntimeError):  # no thread can be started now, or at the interpreter's end
                    threading.Thread(target=_trim, args=(self._store,), name="agentspec-retention", daemon=True).start()
            return self._store


def _open_default() -> Store:
    try:
        return open_store(default_store_url("sessions.db"))
    except StoreError as error:
        raise type(error)(
            f"{error}; store=None keeps sessions in memory only, store= or XDG_DATA_HOME names another place"
        ) from error


def _trim(store: Store) -> None:
    try:
        erased = trim_sessions(store, NAMESPACE, RETENTION)
    except StoreError as error:  # the next attempt may succeed
        logger.debug("agentspec: the session store could not be trimmed: %s", error)
        return
    if erased:
        logger.info("agentspec: erased %d stored sessions that were not used for long", erased)
