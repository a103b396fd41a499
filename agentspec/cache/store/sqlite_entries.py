"""Read and write the entries of an SQLite store: for each record a row in `entries` and its payload in `payloads`."""

import sqlite3
import time

from agentspec.cache.store.base import SLICE_BYTES, SLICE_ENTRIES, NewEntry, Retention, bad_cursor, cursor_number
from agentspec.cache.store.sqlite_file import OVERFLOW, PAGE_SIZE, padded, pragma

Query = tuple[str, tuple[str | int | float, ...]]
"""An SQL query that selects sequences, and its values."""

_SEQUENCES = 2**63
"""One more than SQLite's largest integer."""


def insert(
    connection: sqlite3.Connection, namespace: str, entry: NewEntry, created: float, *, erased: bool = False
) -> int:
    """Insert an entry and return its sequence. created: seconds since the epoch. erased: the entry is a tombstone."""
    sequence = connection.execute(
        "INSERT INTO entries (namespace, session, grouped, created, erased, size) VALUES (?, ?, ?, ?, ?, ?)",
        (namespace, entry.session, entry.group, created, erased, len(entry.payload)),
    ).lastrowid
    assert sequence is not None
    connection.execute("INSERT INTO payloads VALUES (?, ?)", (sequence, padded(entry.payload)))
    return sequence


def delete(connection: sqlite3.Connection, query: Query) -> int:
    """Delete the entries that the query selects. Return their number."""
    sequences, values = query
    connection.execute(f"DELETE FROM payloads WHERE sequence IN ({sequences})", values)
    return connection.execute(f"DELETE FROM entries WHERE sequence IN ({sequences})", values).rowcount


def beyond_limits(connection: sqlite3.Connection, retention: Retention) -> Query | None:
    """Return a query for a slice of the oldest entries beyond the limits; None if all entries are within them."""
    if retention.days is not None:
        too_old, cutoff = "entries WHERE created < ? ORDER BY created", time.time() - retention.days * 86_400
        if count := _first_within(connection, SLICE_BYTES, too_old, cutoff):
            return f"SELECT sequence FROM {too_old} LIMIT ?", (cutoff, count)
    count = size = 0
    if retention.records is not None:
        (held,) = connection.execute("SELECT count(*) FROM entries").fetchone()
        count = held - retention.records
    if retention.bytes is not None:
        size = (pragma(connection, "page_count") - pragma(connection, "freelist_count")) * PAGE_SIZE - retention.bytes
    if count <= 0 and size <= 0:
        return None
    oldest = "entries ORDER BY sequence"
    count = max(count, _first_within(connection, size, oldest))
    count = min(count, _first_within(connection, SLICE_BYTES, oldest))
    return (f"SELECT sequence FROM {oldest} LIMIT ?", (count,)) if count > 0 else None


def _first_within(connection: sqlite3.Connection, size: int, entries: str, *values: float) -> int:
    """Return how many of these entries, the first ones, hold about ``size`` bytes; at most as many as a slice has."""
    count = 0
    for (held,) in connection.execute(f"SELECT size FROM {entries} LIMIT ?", (*values, SLICE_ENTRIES)):
        if size <= 0:
            break
        count += 1
        size -= held + OVERFLOW // 2
    return count


def newest_of(connection: sqlite3.Connection, namespace: str, session: str) -> int:
    """Return the sequence of a session's newest entry; 0 if the session has none."""
    query = "SELECT max(sequence) FROM entries WHERE namespace = ? AND session = ? AND erased = 0"
    (newest,) = connection.execute(query, (namespace, session)).fetchone()
    return newest or 0


def cursor_of(sequence: int) -> str:
    """Return the cursor of an entry: its sequence, padded so that string order is numeric order."""
    return f"{sequence:020d}"


def sequence_of(name: str, cursor: str | None) -> int:
    """Return the sequence of a cursor; 0, which is before all entries, for none.

    Raises InvalidInputError, naming the argument ``name``, for anything that is not a cursor.
    """
    if not cursor:
        return 0
    sequence = cursor_number(cursor, _SEQUENCES)
    if sequence is None:
        raise bad_cursor(name, cursor)
    return sequence
