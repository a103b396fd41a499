"""Define the interface of every store."""

import dataclasses
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from agentspec.errors import InvalidInputError, SessionConflictError

NEW_SESSION = ""
"""Value of ``expect`` for an append to a session that must have no entries yet."""

QUEUE_BYTES = 64 << 20
"""Default limit of the records that wait between a store and the program, in bytes of memory."""

SLICE_ENTRIES, SLICE_BYTES = 256, 1 << 20
"""Most entries, and about the most payload bytes, that one slice of trimming removes, so that appends do not wait
long."""

History = Literal["whole", "trimmed", "lost"]
"""How much a log still has of the entries behind a cursor. "whole": all of them. "trimmed": retention removed some.
"lost": the store was emptied or replaced."""

_NAMESPACE = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_CURSOR_DIGITS = 20


class NewEntry(NamedTuple):
    """Hold one record to append: the keys of its session and group, and its bytes. session "": no session.

    name: the record's name in the warning about lost records. owner: for whom its log counts when the store is trimmed;
    "": for the tenant in the log's name, or whom an earlier entry named.
    """

    session: str
    payload: bytes
    group: str | None = None
    name: str = ""
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """Hold one stored record and its place in the log.

    sequence: opaque cursor; in one read, string order is log order. In a log of several shards, an entry that is
    appended later can have a lower cursor. A read or wait behind a cursor finds it nevertheless.
    """

    sequence: str
    session: str
    payload: bytes
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Erasure:
    """Hold the result of erasing a session.

    records: entries erased. complete: whether no byte of them is left in the database (apart from Redis's own files).
    It is False while another process still reads the old state; erase again to ask again. tombstone: cursor of the
    session's tombstone, None if there is none.
    """

    records: int
    complete: bool
    tombstone: str | None = dataclasses.field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class SessionUsage:
    """Hold a session's key, its number of entries, their bytes, and when the newest was appended (epoch seconds)."""

    session: str
    records: int
    bytes: int
    used: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Hold the size of a whole store: its entries, and the bytes that it takes on disk or in memory."""

    records: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Losses:
    """Count what a store has lost, as far as this process noticed.

    lost: records that the store had acknowledged to this process and no longer has. missing: entries that the store
    still refers to, but that a read did not find.
    """

    lost: int = 0
    missing: int = 0


@dataclass(frozen=True, slots=True)
class Retention:
    """Limit a store by age in days, by size in bytes and by number of entries. None: no limit.

    records: tombstones count only as far as they outnumber it.
    """

    days: float | None = None
    bytes: int | None = None
    records: int | None = None


class Trimmed(NamedTuple):
    """Hold the result of one slice of trimming: entries removed, and whether more remains to be done."""

    records: int
    more: bool


class Store(Protocol):
    """Keep append-only logs of records, one for each namespace. Thread-safe.

    Every call may block, so no decode path may make one. Calls raise StoreUnavailableError if a retry may help,
    otherwise StoreError, and InvalidInputError for a bad argument.
    """

    @property
    def shared(self) -> bool:
        """Return whether other processes may write to the store, so that its logs are worth following."""
        ...

    @property
    def held_bytes(self) -> int:
        """Return the memory of this process that the records take, in bytes; 0 if they lie on disk or in Redis."""
        ...

    def part(self, namespace: str) -> str:
        """Return the name of the part of the store that holds a log, "" if the store has no parts.

        Parts fail independently of each other. The call answers from what this process knows, without asking the store.
        """
        ...

    def append(self, namespace: str, entries: Sequence[NewEntry], *, expect: str | None = None) -> list[str]:
        """Append entries in this order, all or none, and return their sequences. They are stored when it returns.

        expect: the sequence of the newest entry of the session that all entries belong to, or NEW_SESSION. If the
        session's newest entry is another one, nothing is appended and SessionConflictError is raised.
        """
        ...

    def read(
        self,
        namespace: str,
        *,
        session: str | None = None,
        group: str | None = None,
        after: str | None = None,
        newest: int | None = None,
    ) -> Iterator[Entry]:
        """Yield entries, oldest first, up to the last one stored when the iteration began.

        session, group: yield only the entries of this session or of this group (give at most one). A whole log also
        yields the tombstones of erased sessions (EraseRecord). after: yield only entries behind this cursor (an
        ``Entry.sequence``). newest: yield only this many of them, the last ones; tombstones between these do not count.
        Pages keep the memory for a long log small.
        """
        ...

    def sessions(self, namespace: str) -> list[SessionUsage]:
        """Return the usage of each session, sorted by key; the key "" stands for entries without a session."""
        ...

    def newest(self, namespace: str) -> str:
        """Return the cursor of a log's end, behind which it has no entry.

        A new log's is "", which is before all entries. If retention has removed the newest entry, the cursor is
        that entry's or a later one.
        """
        ...

    def wait(self, cursors: Mapping[str, str], timeout: float) -> list[str]:
        """Return the logs that have entries behind their cursor. If none has any, wait until one gets some.

        cursors: by namespace, a result of ``newest`` or an ``Entry.sequence`` of that log. Returns an empty list after
        ``timeout`` seconds. Another process's append ends the wait within some 10 ms.
        """
        ...

    def tombstones(self, namespace: str, *, after: str | None = None) -> dict[str, str]:
        """Return the cursors of the tombstones in the log by their session's key, in the order of the erasures.

        after: only those with a tombstone behind this cursor. A session that was used again after its erasure still
        has its tombstone.
        """
        ...

    def history(self, namespace: str, after: str) -> History:
        """Return how much the log still has of the entries behind a cursor. If "whole", it tells of every erasure."""
        ...

    def undone_erasures(self, namespace: str, erased: Mapping[str, str]) -> list[str]:
        """Return the sessions whose erasure a log has lost, because the store went back to an older state.

        erased: by the session's key, the name of its tombstone (`entry_name`). The log has lost the erasure if it has
        entries of the session from before it, or none of it and not the tombstone either, although it has older ones.
        """
        ...

    def namespaces(self, prefix: str = "", *, session: str | None = None) -> list[str]:
        """Return the names of the logs that begin with ``prefix``, sorted. A log without entries may be missing.

        session: only those that hold entries of this session.
        """
        ...

    def erase_session(self, namespace: str, session: str, *, mark: bool = True) -> Erasure:
        """Erase every entry of a session and append a tombstone to the log, in one transaction.

        mark: whether to append the tombstone, which replaces an older one. A session without entries gets one, too,
        because it may have running requests in other processes. Erasing a session again tries to complete the first
        erasure.
        """
        ...

    def secret(self) -> bytes:
        """Return the store's secret, 32 bytes. The first call on a new store makes it; all processes get the same."""
        ...

    def keep_secret(self, secret: bytes) -> None:
        """Restore this secret, which this process uses, if the store loses its own."""
        ...

    def swap_secret_id(self, secret_id: str) -> str | None:
        """Keep the id of the secret under which its servers name what they store, and return the one kept before.

        None: there was none, as in a new store.
        """
        ...

    def usage(self) -> Usage:
        """Return the records and bytes of all namespaces together."""
        ...

    def trim(self, retention: Retention) -> Trimmed:
        """Remove one slice of the oldest entries beyond the limits, of all namespaces together, and free their space.

        Limits in bytes and records take entries only from owners whose namespaces hold at least half of the mean
        owner's bytes. The owner is the one that entries named, else the tenant in the namespace (`log_family`). A slice
        is SLICE_ENTRIES or about SLICE_BYTES at most. Call it again while it says that there is more.
        """
        ...

    def losses(self) -> Losses:
        """Return the losses that this process has noticed, without asking the store."""
        ...

    def ping(self) -> None:
        """Check that the store answers. Raises StoreUnavailableError or StoreError if not."""
        ...

    def close(self) -> None:
        """Close files and connections. Later calls raise StoreError."""
        ...


def trim_sessions(store: Store, namespace: str, retention: Retention) -> int:
    """Erase whole sessions, least recently used first, until the rest is within the limits. Return their number.

    A session that is used while others are erased stays, but not what another process appends to a session just as that
    one is erased. The store's own ``trim`` would cut off the beginning of a long session. Here only payloads count as
    bytes.
    """
    end = store.newest(namespace)
    held = sorted(store.sessions(namespace), key=lambda usage: usage.used)
    records, size = sum(usage.records for usage in held), sum(usage.bytes for usage in held)
    erased = 0
    for usage in held:
        too_old = retention.days is not None and usage.used < time.time() - retention.days * 86_400
        too_many = retention.records is not None and records > retention.records
        too_large = retention.bytes is not None and size > retention.bytes
        if not (too_old or too_many or too_large):
            break
        if any(store.read(namespace, session=usage.session, after=end, newest=1)):
            continue  # it was used since: erasing takes long
        store.erase_session(namespace, usage.session, mark=False)
        records, size, erased = records - usage.records, size - usage.bytes, erased + 1
    while erased and store.trim(Retention()).more:  # return the space
        pass
    return erased


def entry_name(cursor: str) -> str:
    """Return the part of a cursor that names its entry. The rest says how far the other shards of a log were read."""
    return cursor.partition("@")[0]


def check_namespace(namespace: str) -> str:
    """Return ``namespace`` if it can be part of a key. Raises InvalidInputError."""
    if not _NAMESPACE.fullmatch(namespace):
        raise InvalidInputError(
            f"namespace: 1 to 128 of letters, digits and . _ : - expected, got {namespace[:140]!r}; "
            "make one with agentspec.cache.store.LogNames"
        )
    return namespace


def check_read(session: str | None, group: str | None, newest: int | None) -> None:
    """Raise InvalidInputError if a read names both a session and a group, or a negative number of entries."""
    if session is not None and group is not None:
        raise InvalidInputError("session, group: give one of them, or none to read the whole log")
    if newest is not None and newest < 0:
        raise InvalidInputError(f"newest: a count of at least 0 expected, got {newest}")


def expected_session(entries: Sequence[NewEntry]) -> str:
    """Return the session of a conditional append. Raises InvalidInputError unless all entries belong to one."""
    sessions = {entry.session for entry in entries}
    if len(sessions) != 1:
        raise InvalidInputError(f"expect: needs entries of one session, got {len(sessions)}; append them one by one")
    return sessions.pop()


def conflict(session: str) -> SessionConflictError:
    """Return the error for a conditional append to a session that another writer has changed."""
    return SessionConflictError(
        f"session {session!r}: somebody else has changed it since it was read; read it again, or fork it"
    )


def cursor_number(text: str, limit: int) -> int | None:
    """Read a cursor, or a part of one, as a number. Return None if it is no number below ``limit``."""
    is_number = text.isascii() and text.isdigit() and len(text) <= _CURSOR_DIGITS  # int() refuses thousands of digits
    return int(text) if is_number and int(text) < limit else None


def bad_cursor(name: str, cursor: str) -> InvalidInputError:
    """Return the error for an argument ``name`` that is not a cursor."""
    return InvalidInputError(f"{name}: not a cursor of this store: {cursor!r}; pass an Entry.sequence it gave")
