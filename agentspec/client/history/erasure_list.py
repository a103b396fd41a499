"""Remember the other sessions that a server has to erase with a session."""

from __future__ import annotations

import threading
from typing import NamedTuple

_MAX_SESSIONS = 10_000
_MAX_NAMES = 1_000  # salts of a session, and helpers


class ToErase(NamedTuple):
    """Hold what has to be erased with a session: its salts, and its helper sessions with theirs."""

    salts: list[str]
    helpers: list[str]


class ErasureList:
    """Hold the cache salts and helper sessions of a client's sessions by session id. Thread-safe.

    A salt makes another session on the server. Helpers are the sessions that a session's loops use. They are remembered
    longer than the Session object lives, because a later one may clear the session: for the latest 10,000 sessions that
    have any, and of each the latest 1,000 salts and the latest 1,000 helpers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._salts: dict[str, dict[str, None]] = {}
        self._helpers: dict[str, dict[str, None]] = {}

    def salts(self, session: str) -> list[str]:
        """Return the salts that calls of the session have sent, oldest first."""
        with self._lock:
            return list(self._salts.get(session, ()))

    def helpers(self, session: str) -> list[str]:
        """Return the ids of the sessions that the session's loops have used, oldest first."""
        with self._lock:
            return list(self._helpers.get(session, ()))

    def add_salt(self, session: str, salt: str) -> None:
        """Note a salt that a call of the session sends."""
        self._add(self._salts, session, salt)

    def add_helper(self, session: str, helper: str) -> None:
        """Note a session that a loop of the session uses."""
        self._add(self._helpers, session, helper)

    def remove(self, session: str, erased: ToErase) -> None:
        """Forget what was erased with a session, so that it is not erased again."""
        with self._lock:
            for helper in erased.helpers:
                self._salts.pop(helper, None)
            for names_of, names in ((self._salts, erased.salts), (self._helpers, erased.helpers)):
                held = names_of.pop(session, {})
                for name in names:
                    held.pop(name, None)
                if held:
                    names_of[session] = held

    def _add(self, names_of: dict[str, dict[str, None]], session: str, name: str) -> None:
        with self._lock:
            names = names_of[session] = names_of.pop(session, {})  # now the latest
            names.pop(name, None)
            names[name] = None
            if len(names) > _MAX_NAMES:
                del names[next(iter(names))]
            if len(names_of) > _MAX_SESSIONS:
                del names_of[next(iter(names_of))]
