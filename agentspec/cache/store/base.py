"""The small interface behind which every database stands."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentspec.errors import InvalidInputError

_NAMESPACE = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored record with its place in the log."""

    sequence: str
    """Opaque cursor; within a namespace, string order is log order."""
    session: str
    payload: bytes


class Store(Protocol):
    """Append-only token logs, one a namespace. Thread-safe; every call may block, so none belongs on a decode path.

    Raises StoreUnavailableError where trying again later may help, StoreError where it will not.
    """

    def append(self, namespace: str, entries: Sequence[tuple[str, bytes]]) -> None:
        """Add ``(session, payload)`` pairs in this order, all or none; stored when the call returns."""
        ...

    def read(
        self,
        namespace: str,
        *,
        session: str | None = None,
        after: str | None = None,
        newest: int | None = None,
    ) -> Iterator[Entry]:
        """Entries, oldest first, up to what was stored when the iteration began.

        ``session``: only that session's. ``after``: only those behind this cursor (an ``Entry.sequence``).
        ``newest``: of these, only the last so many. Reads in pages, so a long log takes little memory.
        """
        ...

    def sessions(self, namespace: str) -> list[str]:
        """Ids of the sessions with entries, sorted; the empty one, if there, holds entries of no session."""
        ...

    def remove_session(self, namespace: str, session: str) -> int:
        """Erase every entry of ``session``; returns how many there were."""
        ...

    def ping(self) -> None:
        """Return if the store answers; raises StoreUnavailableError or StoreError if not."""
        ...

    def close(self) -> None:
        """Let go of files and connections; later calls raise StoreError."""
        ...


def check_namespace(namespace: str) -> str:
    """``namespace`` if it can be part of a key. Raises InvalidInputError."""
    if not _NAMESPACE.fullmatch(namespace):
        raise InvalidInputError(
            f"namespace: 1 to 128 of letters, digits and . _ : - expected, got {namespace[:140]!r}; "
            "make one with agentspec.cache.store.namespace()"
        )
    return namespace


def check_newest(newest: int | None) -> int | None:
    """``newest`` if it is a count. Raises InvalidInputError."""
    if newest is not None and newest < 0:
        raise InvalidInputError(f"newest: a count of at least 0 expected, got {newest}")
    return newest


def format_cursor(number: int) -> str:
    """A row number as a cursor whose string order is the numeric order."""
    return f"{number:020d}"


def parse_cursor(cursor: str | None) -> int:
    """The row number of ``cursor``; 0, which is before every row, for None. Raises InvalidInputError."""
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdigit()):
        raise InvalidInputError(f"after: not a cursor of this store: {cursor!r}; pass an Entry.sequence it gave")
    return int(cursor)
