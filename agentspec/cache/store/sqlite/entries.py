"""Read and write the entries of an SQLite store: for each record a row in `entries` and its payload in `payloads`."""

import json
import sqlite3
import time

from agentspec.cache.store.base import SLICE_BYTES, SLICE_ENTRIES, NewEntry, Retention, bad_cursor, cursor_number
from agentspec.cache.store.naming import log_family
from agentspec.cache.store.sqlite.file import OVERHEAD, PAGE_SIZE, padded, pragma

Values = tuple[str | int | float, ...]
Query = tuple[str, Values]
"""A part of an SQL query, and its values."""

_LOOKED_AT = 16 * SLICE_ENTRIES
"""Most entries that a slice looks at. It passes over those of owners who are down to their spared bytes."""
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


def set_owner(connection: sqlite3.Connection, namespace: str, owner: str) -> None:
    """Note for whom a log counts when the store is trimmed."""
    is_other = "ON CONFLICT DO UPDATE SET owner = excluded.owner WHERE owner <> excluded.owner"
    connection.execute(f"INSERT INTO owners VALUES (?, ?) {is_other}", (namespace, owner))


def delete(connection: sqlite3.Connection, query: Query) -> int:
    """Delete the entries that the query selects. Return their number."""
    sequences, values = query
    connection.execute(f"DELETE FROM payloads WHERE sequence IN ({sequences})", values)
    return connection.execute(f"DELETE FROM entries WHERE sequence IN ({sequences})", values).rowcount


def trim_slice(connection: sqlite3.Connection, retention: Retention) -> int:
    """Delete a slice of the oldest entries beyond the limits, and note how far logs are trimmed. Return how many."""
    found = _beyond_limits(connection, retention)
    if found:
        connection.executemany("UPDATE logs SET trimmed = max(trimmed, ?) WHERE namespace = ?", found)
        for table in ("payloads", "entries"):
            connection.executemany(f"DELETE FROM {table} WHERE sequence = ?", [(sequence,) for sequence, _ in found])
        of_empty = "SELECT max(trimmed) FROM logs WHERE records = 0"
        connection.execute(f"UPDATE logs SET trimmed = ({of_empty}) WHERE namespace = ''")
        connection.execute("DELETE FROM logs WHERE records = 0 AND namespace <> ''")
    return len(found)


def records_held(connection: sqlite3.Connection) -> int:
    """Return the number of entries in all logs."""
    (records,) = connection.execute("SELECT ifnull(sum(records), 0) FROM logs").fetchone()
    return int(records)


def _tombstones_held(connection: sqlite3.Connection) -> int:
    """Return the number of tombstones in all logs."""
    (tombstones,) = connection.execute("SELECT count(*) FROM entries WHERE erased = 1").fetchone()
    return int(tombstones)


def last_trimmed(connection: sqlite3.Connection, namespace: str) -> int:
    """Return the last sequence that retention may have removed from a log; 0: it removed nothing."""
    query = "SELECT trimmed FROM logs WHERE namespace IN ('', ?) ORDER BY namespace DESC LIMIT 1"
    (sequence,) = connection.execute(query, (namespace,)).fetchone()
    return int(sequence)


def _beyond_limits(connection: sqlite3.Connection, retention: Retention) -> list[tuple[int, str]]:
    """Return sequence and log of a slice of the oldest entries beyond the limits; none if all are within them."""
    if retention.days is not None:
        cutoff = time.time() - retention.days * 86_400
        query = "entries WHERE created < ? ORDER BY created", (cutoff,)
        if too_old := _first(connection, query, SLICE_ENTRIES, 0):
            return too_old
    count = size = 0
    if retention.records is not None:
        count = records_held(connection) - retention.records
        if count > 0:
            count -= min(retention.records, _tombstones_held(connection))
    if retention.bytes is not None:
        size = (pragma(connection, "page_count") - pragma(connection, "freelist_count")) * PAGE_SIZE - retention.bytes
    if count <= 0 and size <= 0:
        return []
    shares = _Shares(connection)
    # Old entries of spared owners pile up, so the search begins at the first entry of one who is not spared.
    first_of_log = "SELECT min(sequence) FROM entries WHERE namespace = value"
    begin = f"SELECT min(({first_of_log})) FROM json_each(?)"
    place = connection.execute(begin, (json.dumps(shares.logs()),)).fetchone()
    query = "entries WHERE sequence >= ? ORDER BY sequence", place
    return _first(connection, query, count, size, shares)


class _Shares:
    """Hold how many bytes each owner of logs has. An owner with less than half of the mean owner's bytes is spared.

    The owner of a log is the one that its entries named, else what its name begins with (`log_family`). Logs of mere
    tombstones have one owner: anybody can make such a log, by erasing nothing under a new salt.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        erased = "SELECT namespace, count(*) AS tombstones FROM entries WHERE erased = 1 GROUP BY namespace"
        query = (
            f"SELECT namespace, bytes, owner, records = tombstones FROM logs LEFT JOIN owners USING (namespace)"
            f" LEFT JOIN ({erased}) USING (namespace) WHERE records > 0"
        )
        self._owners: dict[str, str] = {}  # by log
        self._bytes: dict[str, int] = {}  # by owner
        for namespace, size, noted, is_erased in connection.execute(query):
            owner = self._owners[namespace] = noted or ("" if is_erased else log_family(namespace))
            self._bytes[owner] = self._bytes.get(owner, 0) + size
        owners = len(self._bytes)
        self._spared = sum(self._bytes.values()) / owners / 2 if owners > 1 else 0.0

    def logs(self) -> list[str]:
        """Return the logs that may lose entries."""
        return [namespace for namespace in self._owners if self.may_lose(namespace)]

    def may_lose(self, namespace: str) -> bool:
        """Return whether a log may lose entries."""
        return self._bytes[self._owners[namespace]] >= self._spared

    def take(self, namespace: str, size: int) -> None:
        """Note that a log loses so many bytes."""
        self._bytes[self._owners[namespace]] -= size


def _first(
    connection: sqlite3.Connection, query: Query, count: int, size: int, shares: _Shares | None = None
) -> list[tuple[int, str]]:
    """Return the first entries that the query finds: ``count`` of them, and ``size`` bytes, but a slice at most.

    shares: what the owners of the logs may lose; None: all.
    """
    found: list[tuple[int, str]] = []
    held = 0
    entries, values = query
    rows = connection.execute(f"SELECT sequence, namespace, size FROM {entries} LIMIT ?", (*values, _LOOKED_AT))
    for sequence, namespace, payload in rows:
        if len(found) == SLICE_ENTRIES or held >= SLICE_BYTES or (len(found) >= count and held >= size):
            break
        if shares is not None:
            if not shares.may_lose(namespace):
                continue
            shares.take(namespace, payload + OVERHEAD)
        found.append((sequence, namespace))
        held += payload + OVERHEAD
    return found


def newest_of(connection: sqlite3.Connection, namespace: str, session: str) -> int:
    """Return the sequence of a session's newest entry; 0 if the session has none."""
    query = "SELECT max(sequence) FROM entries WHERE namespace = ? AND session = ? AND erased = 0"
    (newest,) = connection.execute(query, (namespace, session)).fetchone()
    return newest or 0


def cursor_of(sequence: int) -> str:
    """Return the cursor of an entry: its sequence, padded so that string order is numeric order."""
    return f"{sequence:020d}"


def sequence_of(name: str, cursor: str | None) -> int:
    """Return the sequence of a cursor; 0, which is before all entries, for None and "".

    Raises InvalidInputError, naming the argument ``name``, for anything that is not a cursor.
    """
    if not cursor:
        return 0
    sequence = cursor_number(cursor, _SEQUENCES)
    if sequence is None:
        raise bad_cursor(name, cursor)
    return sequence
