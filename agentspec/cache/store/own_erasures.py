"""Erase sessions from logs that this process follows, so that it does not take the tombstones for those of others."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable

from agentspec.cache.store.base import Erasure, Store, entry_name

_MAX_TOMBSTONES = 4096  # that are remembered


class OwnErasures:
    """Erase sessions from the store, and know the tombstones of that, and which sessions are being erased.

    A session has left this process before it is erased from the store, so its tombstone is not to be applied here. But
    records of it may have been read before, and wait to be delivered: they are dropped, until the log is read again.

    follows: returns whether a log is followed. Any thread may make all calls.
    """

    def __init__(self, store: Store, follows: Callable[[str], bool]) -> None:
        self._store = store
        self._follows = follows
        self._tombstones: OrderedDict[str, None] = OrderedDict()  # names of their entries
        self._sessions: dict[tuple[str, str], bool] = {}  # by log; true: erased from the store
        self._running: Counter[tuple[str, str]] = Counter()  # erasures; a session may have several at once
        self._closed = False
        self._changed = threading.Condition(threading.Lock())  # never held during a call to the store

    def erase_session(self, log: str, session: str) -> Erasure:
        """Erase a session from a log. Raises as the store's ``erase_session`` does."""
        with self._changed:
            self._sessions[log, session] = False
            self._running[log, session] += 1
        try:
            erasure = self._store.erase_session(log, session)
            if erasure.tombstone is not None:
                self._note(erasure.tombstone)
        finally:
            with self._changed:
                self._running -= Counter([(log, session)])
                if (log, session) not in self._running:
                    if not self._follows(log):
                        self._sessions.pop((log, session), None)
                    else:
                        self._sessions[log, session] = True
                self._changed.notify_all()
        return erasure

    def may_be_older(self, log: str, session: str) -> bool:
        """Return whether records read of a session may be older than its erasure by this process."""
        return (log, session) in self._sessions

    def wrote(self, log: str, session: str, tombstone: str, seconds: float) -> bool:
        """Return whether a tombstone is this process's. tombstone: its cursor.

        It may be read before ``erase_session`` knows it, so this waits for that, at most so many seconds.
        """
        name = entry_name(tombstone)
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or name in self._tombstones or (log, session) not in self._running, seconds
            )
            return name in self._tombstones

    def note_tombstone_read(self, log: str, session: str) -> None:
        """Note that a session's records that are read from now on came after its erasure."""
        with self._changed:
            if (log, session) not in self._running:  # or they may be older than the erasure that runs
                self._sessions.pop((log, session), None)

    def note_read_begun(self, log: str) -> None:
        """Note that a log is read from now on: no entry holds what was erased from it before."""
        with self._changed:
            self._sessions = {what: done for what, done in self._sessions.items() if what[0] != log or not done}

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _note(self, tombstone: str) -> None:
        with self._changed:
            self._tombstones[entry_name(tombstone)] = None
            if len(self._tombstones) > _MAX_TOMBSTONES:
                self._tombstones.popitem(last=False)
