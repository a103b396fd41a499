"""Store a client's messages, so that a later process can resume its sessions.

Messages do not depend on the model that wrote them, so one namespace serves every server and model. The store's
background writer writes them. If the store fails, messages are not stored: the failure is logged once, and calls go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from agentspec.cache.store import (
    BackgroundWriter,
    MessageRecord,
    RecordReader,
    Store,
    default_store_url,
    namespace,
    open_store,
)
from agentspec.errors import StoreUnavailableError

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 2.0
NAMESPACE = namespace(model="client-messages", tokenizer="text", tenant=None)


class SessionLog:
    """Store nothing, for `store=None`."""

    keeps = False
    """True if the log can restore a session that is no longer in use."""

    def read(self, session: str) -> list[dict[str, Any]] | None:
        """Return the session's messages, oldest first; None if they could not be read. May block."""
        return []

    def append(self, session: str, messages: Sequence[dict[str, Any]]) -> None:
        """Store these messages. Never blocks, never raises."""

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
        self._writer: BackgroundWriter | None = None
        self._broken = False

    def read(self, session: str) -> list[dict[str, Any]] | None:
        opened = self._opened()
        if opened is None:
            return None
        store, writer = opened
        writer.flush(FLUSH_TIMEOUT_S)  # this process may just have queued the session that it now resumes
        try:
            records = [record for _, record in RecordReader().read(store, NAMESPACE, session=session)]
        except Exception as error:
            logger.warning("agentspec: session %r could not be read and is in memory only here: %s", session, error)
            return None
        return [record.message for record in records if isinstance(record, MessageRecord)]

    def append(self, session: str, messages: Sequence[dict[str, Any]]) -> None:
        opened = self._opened()
        if opened is not None:
            for message in messages:
                opened[1].put(MessageRecord(session, message, time.time()))

    def remove(self, session: str) -> None:
        opened = self._opened()
        if opened is not None:
            store, writer = opened
            if not writer.flush(FLUSH_TIMEOUT_S):  # messages still queued would come back after the removal
                raise StoreUnavailableError(f"session {session!r}: the store does not answer; try again later")
            store.remove_session(NAMESPACE, session)

    def close(self) -> None:
        with self._lock:
            store, writer = self._store, self._writer
            self._store = self._writer = None
            self._broken = True
        if writer is not None:
            writer.close(FLUSH_TIMEOUT_S)
        if store is not None and self._owned:
            store.close()

    def _opened(self) -> tuple[Store, BackgroundWriter] | None:
        with self._lock:
            if self._writer is None and not self._broken:
                try:
                    if self._store is None and self._open is not None:
                        self._store = self._open()
                    if self._store is not None:
                        self._writer = BackgroundWriter(self._store, NAMESPACE)
                except Exception as error:
                    self._broken = True
                    logger.warning(
                        "agentspec: the session store cannot be opened, sessions are in memory only: %s", error
                    )
            if self._store is None or self._writer is None:
                return None
            return self._store, self._writer


def open_log(store: str | Store | None) -> SessionLog:
    """Return the log for a client's `store` option.

    A store given by URL is opened now, and may raise StoreURLError or StoreError. The default store, in the user's
    data folder, is opened when the first session needs it.
    """
    if store is None:
        return SessionLog()
    if store == "auto":
        return StoreLog(lambda: open_store(default_store_url("sessions.db")))
    if not isinstance(store, str):
        return StoreLog(store, owned=False)
    return StoreLog(open_store(store))
