"""The store that keeps nothing: for tests, and for a server that must not write."""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from agentspec.cache.store.base import Entry, check_namespace, check_newest, format_cursor, parse_cursor
from agentspec.errors import StoreError

_OVERHEAD = 200  # bytes of an entry beside its payload, roughly


class MemoryStore:
    """A Store in this process's memory; beyond ``max_bytes`` the oldest entries go."""

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._number = 0
        self._entries: OrderedDict[int, tuple[str, Entry]] = OrderedDict()
        # namespace -> session -> numbers (a dict as an ordered set, so that removal of one is cheap)
        self._sessions: dict[str, dict[str, dict[int, None]]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def append(self, namespace: str, entries: Sequence[tuple[str, bytes]]) -> None:
        check_namespace(namespace)
        with self._lock:
            self._check_open()
            for session, payload in entries:
                self._number += 1
                self._entries[self._number] = (namespace, Entry(format_cursor(self._number), session, payload))
                self._sessions.setdefault(namespace, {}).setdefault(session, {})[self._number] = None
                self._bytes += len(payload) + _OVERHEAD
            while self._bytes > self._max_bytes and self._entries:
                self._discard(next(iter(self._entries)))

    def read(
        self,
        namespace: str,
        *,
        session: str | None = None,
        after: str | None = None,
        newest: int | None = None,
    ) -> Iterator[Entry]:
        check_namespace(namespace)
        low, limit = parse_cursor(after), check_newest(newest)
        with self._lock:
            self._check_open()
            if session is not None:
                numbers = list(self._sessions.get(namespace, {}).get(session, {}))
                found = [self._entries[number][1] for number in numbers if number > low]
            else:
                found = [
                    entry for number, (owner, entry) in self._entries.items() if owner == namespace and number > low
                ]
        return iter(found if limit is None else found[len(found) - min(limit, len(found)) :])

    def sessions(self, namespace: str) -> list[str]:
        check_namespace(namespace)
        with self._lock:
            self._check_open()
            return sorted(self._sessions.get(namespace, {}))

    def remove_session(self, namespace: str, session: str) -> int:
        check_namespace(namespace)
        with self._lock:
            self._check_open()
            numbers = list(self._sessions.get(namespace, {}).get(session, {}))
            for number in numbers:
                self._discard(number)
            return len(numbers)

    def ping(self) -> None:
        self._check_open()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._entries.clear()
            self._sessions.clear()
            self._bytes = 0

    def _discard(self, number: int) -> None:
        namespace, entry = self._entries.pop(number)
        self._bytes -= len(entry.payload) + _OVERHEAD
        sessions = self._sessions[namespace]
        del sessions[entry.session][number]
        if not sessions[entry.session]:
            del sessions[entry.session]

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("memory://: the store is closed")
