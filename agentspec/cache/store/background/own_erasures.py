"""Erase sessions from the store, and tell this process's tombstones from those of other processes."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

from agentspec.cache.store.base import Erasure, Store, entry_name

_MAX_TOMBSTONES = 4096  # most tombstones that are remembered


class OwnErasures:
    """Erase sessions from the store, and remember the tombstones of these erasures and the sessions being erased.

    A session has left this process before it is erased from the store, so its tombstone must not be applied here. But
    records of it may have been read before and still wait to be delivered. `may_be_older` says which ones to drop.

    follows(log): returns whether a log is followed. Any thread may make any call.
    """

    def __init__(self, store: Store, follows: Callable[[str], bool]) -> None:
        self._store = store
        self._follows = follows
        self._tombstones: OrderedDict[str, tuple[str, str]] = OrderedDict()  # log and session, by their entries' names
        self._sessions: dict[tuple[str, str], bool] = {}  # by log and session: whether it was erased from the store
        self._running: Counter[tuple[str, str]] = Counter()  # erasures under way; a session may have several at once
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
                self._note(erasure.tombstone, log, session)
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

        The follower may read a tombstone before ``erase_session`` returns. The call waits for that, up to ``seconds``.
        """
        name = entry_name(tombstone)
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or name in self._tombstones or (log, session) not in self._running, seconds
            )
            return name in self._tombstones

    def undone(self, log: str, read: Mapping[str, str], session: str | None = None) -> list[str]:
        """Return the sessions whose erasure the store has lost, of those erased here and those in ``read``.

        read: tombstones of the log by their entries' names, with their sessions. session: ask for this one alone.
        """
        with self._changed:
            own = {name: erased for name, (of, erased) in self._tombstones.items() if of == log}
        newest = {of: name for name, of in sorted({**read, **own}.items()) if session in (of, None)}
        return self._store.undone_erasures(log, newest) if newest else []

    def note_tombstone_read(self, log: str, session: str) -> None:
        """Note that the session's tombstone was read: records of it that are read from now on are newer."""
        with self._changed:
            if (log, session) not in self._running:  # or they may be older than the erasure that runs
                self._sessions.pop((log, session), None)

    def note_read_begun(self, log: str) -> None:
        """Note that a read of a log begins: it finds no records of sessions that were erased before."""
        with self._changed:
            self._sessions = {what: done for what, done in self._sessions.items() if what[0] != log or not done}

    def close(self) -> None:
        """End all waits in `wrote`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _note(self, tombstone: str, log: str, session: str) -> None:
        with self._changed:
            self._tombstones[entry_name(tombstone)] = log, session
            if len(self._tombstones) > _MAX_TOMBSTONES:
                self._tombstones.popitem(last=False)
