"""Read and write one shard of a log on Redis: the keys that share a hash tag (store.py describes them)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from agentspec.cache.store.base import Entry, History, NewEntry, SessionUsage, bad_cursor, cursor_number
from agentspec.cache.store.redis import scripts
from agentspec.cache.store.redis.client import LARGE, RedisClient

ENTRY_BYTES = 90
"""Bytes that the server needs for an entry beside its payload, in a log that mixes them, measured on Redis 7."""

WRITER_SECONDS = 3_600
"""Time after which the server forgets the last batch of a writer, in seconds."""

IDLE_SECONDS = 86_400.0
"""Time after which an empty log loses its keys, in seconds. LossWatch forgets older acknowledgements, too."""

_ROWS = 128  # most entries that a read fetches in one go
_ROWS_BYTES = 1 << 20  # about the most bytes that a read fetches in one go
_COSTLIER = 4  # reading an entry of the log takes as long as reading this many tombstones in their hash, about
_RENEWED = 512  # most entries of which one `renew` changes the expiry, in some 2 ms
_LEAST_LEFT_MS = 86_400_000  # what `renew` leaves to payloads that would have expired; retention removes them
_WALKED = 100_000  # about the most elements of groups that the server walks past in one `sweep`, which takes some 10 ms

Id = tuple[int, int]
"""Place of an entry in its log: milliseconds and a count."""
START: Id = (0, 0)
"""Place before all entries."""


class ShardState(NamedTuple):
    """Hold the size of a shard at a time of its server's clock.

    records: its entries. bytes: their payloads, and ENTRY_BYTES for each. oldest: milliseconds of its oldest entry,
    None if it is empty. at: the time, in microseconds. tombstones: how many of the entries are tombstones.
    owner: for whom the shard's log counts, if entries named that just now.
    """

    records: int
    bytes: int
    sessions: int
    oldest: int | None
    at: int
    tombstones: int = 0
    owner: str = ""


class Appended(NamedTuple):
    """Hold the answer to an append.

    first: the first entry's id. before: number of this writer's last batch that the server had, 0 if it knows none.
    born: the first id that the shard ever had, which changes if the server loses everything. state: the shard's new
    state.
    """

    first: Id
    before: int
    born: bytes
    state: ShardState


class Found(NamedTuple):
    """Hold an entry that was read, its id, and whether it is a tombstone."""

    id: Id
    entry: Entry
    is_tombstone: bool = False


class Look(NamedTuple):
    """Hold what a look at a shard found.

    gone: whether it has no keys. doomed: whether entries of erased sessions are left. expiry_ms: time after which all
    payloads expire, 0: never; None: it differs between them, or older code wrote them.
    """

    state: ShardState
    gone: bool
    doomed: bool
    expiry_ms: int | None


class _Reference(NamedTuple):
    """Hold a reference to an entry, from the log or from a group. One from the log may be a tombstone instead."""

    id: Id
    session: str
    size: int
    group: str | None = None
    tombstone: bytes | None = None


class RedisShard:
    """Read and write the keys with one hash tag.

    name: the shard's name in the index of all logs. tag: prefix of its keys. missed(count): called with the number of
    entries that are referred to but gone.
    """

    def __init__(self, client: RedisClient, name: str, tag: str, channel: str, missed: Callable[[int], None]) -> None:
        self.name, self.tag = name, tag
        self._client, self._channel, self._missed = client, channel, missed

    def append(
        self,
        writer: str,
        number: int,
        entries: Sequence[NewEntry],
        expiry_ms: int,
        expected: str | None = None,
        newest: bytes = b"*",
    ) -> Appended | None:
        """Append entries as a writer's batch of this number. Returns None if the ``expected`` session has changed.

        expiry_ms: time after which sessions and groups expire, 0: never. expected: session whose newest entry must have
        the id ``newest``.
        """
        arguments: list[str | bytes | int] = [self.tag, writer, number, WRITER_SECONDS * 1000, expiry_ms, ENTRY_BYTES]
        arguments += [self._channel, expected or "", newest]
        for session, payload, group, *_ in entries:
            arguments += (session, payload, 0 if group is None else 1, group or "")
        size = sum(len(entry.payload) for entry in entries)
        first, before, born, state = self._run(scripts.APPEND, arguments, size)
        return Appended(parsed(first), int(before or 0), born, _state(state)) if first else None

    def has(self, number: Id) -> bool:
        """Return whether the log has an entry with this id."""
        return bool(self._client.command("XRANGE", f"{self.tag}log", wire(number), wire(number)))

    def erase(self, session: str, tombstone: bytes) -> tuple[int, Id | None]:
        """Erase a session. Returns how many entries it had, and the id of its tombstone. tombstone: b"" for none."""
        removed, marked = self._run(scripts.ERASE, [self.tag, session, tombstone, ENTRY_BYTES, self._channel])
        while self.sweep():
            pass
        return int(removed), parsed(marked) if marked else None

    def sweep(self) -> int:
        """Remove a page of the entries that erased sessions left. Returns how many it removed; 0: none is left."""
        return int(self._run(scripts.SWEEP, [self.tag, _ROWS, _WALKED], LARGE + 1))  # of which size is not known

    def look(self) -> Look:
        """Look at the shard. Removes the keys of one that has been empty for IDLE_SECONDS."""
        state, gone, doomed, expiry = self._run(scripts.STATE, [self.tag, int(IDLE_SECONDS * 1000)])
        return Look(_state(state), bool(gone), bool(doomed), int(expiry) if expiry else None)

    def renew(self, expiry_ms: int, after: Id) -> Id | None:
        """Let the payloads of a page of entries behind ``after`` expire so long after they were stored; 0: never.

        Returns the id behind which the next page begins; None: there is none.
        """
        last = self._run(scripts.RENEW, [self.tag, expiry_ms, wire(after), _RENEWED, _LEAST_LEFT_MS])
        return parsed(last) if last else None

    def trim(self, entries: int, size: int, until: int | None) -> tuple[int, int, ShardState]:
        """Remove the oldest entries, up to these limits. Returns their number and bytes, and the shard's new state.

        until: milliseconds of the last entry to remove; None: any.
        """
        last = "+" if until is None else until
        count, removed, state = self._run(scripts.TRIM, [self.tag, ENTRY_BYTES, entries, size, last], size)
        return int(count), int(removed), _state(state)

    def sessions(self) -> dict[str, SessionUsage]:
        """Return the usage of each session, by its key."""
        found = {}
        for name, held in self._client.hash_items(f"{self.tag}sessions"):
            records, size, used = map(int, held.split())
            session = name.decode()
            found[session] = SessionUsage(session, records, size - records * ENTRY_BYTES, used / 1000)
        return found

    def tombstones(self, low: Id) -> dict[str, Id]:
        """Return the tombstones behind ``low`` by their sessions.

        Where there are many, the call reads the log behind ``low`` first, and goes back to all tombstones if the log is
        longer, or may have been evicted.
        """
        key, found = f"{self.tag}tombstones", dict[str, Id]()
        held, rows = self._client.commands([("HLEN", key), self._oldest()])
        most = held // _COSTLIER
        if rows and parsed(rows[0][0]) <= low and most >= _ROWS:
            for read, one in enumerate(self._log(low, None)):
                if read >= most:
                    break
                if one.tombstone is not None:
                    found[one.session] = one.id
            else:
                return found
        for session, number in self._client.hash_items(key):
            if (at := parsed(number)) > low:
                found[session.decode()] = at
        return found

    def undone_erasures(self, marks: Mapping[str, Id]) -> list[str]:
        """Return the sessions whose erasure the shard lacks, as ``Store.undone_erasures``. marks: their tombstones."""
        names = list(marks)
        found, held, oldest = self._client.commands(
            [
                ("HMGET", f"{self.tag}tombstones", *names),
                ("HMGET", f"{self.tag}sessions", *names),
                self._oldest(),
            ]
        )
        # Behind the tombstone only newer entries are left. Retention removes it after all that is older.
        begin = parsed(oldest[0][0]) if oldest else None
        undone = []
        for session, tombstone, usage in zip(names, found, held, strict=True):
            if tombstone is not None and parsed(tombstone) >= marks[session]:
                continue
            if usage is not None:
                key, size = f"{self.tag}s:{session}", int(usage.split()[1])
                first = self._client.run(scripts.BOUNDS, [key], [wire(START), -1], size=size)
                if first and parsed(first[0]) < marks[session]:
                    undone.append(session)
            elif begin is not None and begin < marks[session]:
                undone.append(session)
        return undone

    def last(self) -> Id:
        """Return the id of the newest entry that was ever appended."""
        last = self._client.command("HGET", f"{self.tag}usage", "last")
        return parsed(last) if last else START

    def history(self, low: Id) -> History:
        """Return how much the shard still has of all that came behind ``low``. "lost" if the shard began later."""
        # In this order: an entry that comes between the two answers must not look like the oldest that retention left.
        noted = ("HMGET", f"{self.tag}usage", "born", "last", "trimmed")
        asked = [noted, self._oldest(), ("EXISTS", f"{self.tag}log")]
        (began, ended, trimmed), rows, exists = self._client.commands(asked)
        born, last = (parsed(each) if each else START for each in (began, ended))
        if low == last:
            return "whole"
        if low != START and not born <= low < last:
            return "lost"
        if trimmed is not None and exists:  # otherwise the server has evicted the log
            return "whole" if parsed(trimmed) <= low else "trimmed"
        # Older code wrote the log, and did not note what retention removed.
        return "whole" if rows and parsed(rows[0][0]) <= max(low, born) else "trimmed"

    def session(self, session: str, low: Id, newest: int | None) -> Iterator[Found]:
        """Yield a session's entries behind ``low``, up to the present end. newest: how many, the last ones."""
        rows_at_once, size, held = _ROWS, 0, self._client.command("HGET", f"{self.tag}sessions", session)
        if held is not None:  # smaller pages for large entries, so that none takes longer than the timeout
            records, size, _ = map(int, held.split())
            rows_at_once = max(1, min(_ROWS, _ROWS_BYTES * records // max(1, size)))
        found = False
        for element in self._elements(f"{self.tag}s:{session}", low, newest, rows_at_once, size):
            found = True
            number, _, payload = element.partition(b" ")
            yield Found(parsed(number), Entry(cursor(parsed(number)), session, payload))
        lacks_all = held is not None and not found and low == START and newest != 0
        if lacks_all and self._client.command("HGET", f"{self.tag}sessions", session) == held:
            self._missed(records)  # it was not erased or trimmed meanwhile

    def referenced(self, group: str | None, low: Id, newest: int | None) -> Iterator[Found]:
        """Yield the entries of a group, or of the log, as ``session`` does. Tombstones do not count in ``newest``."""
        references = self._log(low, newest) if group is None else self._group(group, low, newest)
        page: list[_Reference] = []
        size = 0
        for reference in references:
            page.append(reference)
            size += reference.size
            if size >= _ROWS_BYTES or len(page) >= _ROWS:
                yield from self._gathered(page)
                page, size = [], 0
        yield from self._gathered(page)

    def _gathered(self, references: Sequence[_Reference]) -> Iterator[Found]:
        ids: dict[str, list[bytes]] = {}
        for one in references:
            if one.tombstone is None:
                ids.setdefault(one.session, []).append(wire(one.id))
        payloads: dict[Id, bytes] = {}
        if ids:
            keys = [f"{self.tag}s:{session}" for session in ids]
            arguments: list[bytes | int] = []
            for wanted in ids.values():
                arguments += (len(wanted), *wanted)
            size = sum(one.size for one in references)
            found: list[bytes] = self._client.run(scripts.GATHER, keys, arguments, size=size)
            payloads = {parsed(number): payload for number, _, payload in (row.partition(b" ") for row in found)}
        lost = [one for one in references if one.tombstone is None and one.id not in payloads]
        if lost:
            self._missed(self._count_evicted(lost))
        for one in references:
            payload = payloads.get(one.id) if one.tombstone is None else one.tombstone
            if payload is not None:
                entry = Entry(cursor(one.id), one.session, payload, one.group)
                yield Found(one.id, entry, one.tombstone is not None)

    def _count_evicted(self, references: Sequence[_Reference]) -> int:
        """Return how many entries without a payload were evicted, rather than erased or trimmed meanwhile."""
        log = f"{self.tag}log"
        marks, has_log, *rows = self._client.commands(
            [
                ("HMGET", f"{self.tag}tombstones", *(one.session for one in references)),
                ("EXISTS", log),  # it may have been evicted, too
                *(("XRANGE", log, wire(one.id), wire(one.id)) for one in references),
            ]
        )
        return sum(
            (mark is None or parsed(mark) < one.id) and bool(row or not has_log)
            for one, mark, row in zip(references, marks, rows, strict=True)
        )

    def _log(self, low: Id, newest: int | None) -> Iterator[_Reference]:
        key, start = f"{self.tag}log", b"(" + wire(low)
        last = self._client.command("XREVRANGE", key, "+", start, "COUNT", 1)
        if not last or newest == 0:
            return
        high, left = last[0][0], newest
        if left is not None:
            at = high
            while left:
                rows = self._client.command("XREVRANGE", key, at, start, "COUNT", _ROWS)
                for number, fields in rows:
                    left -= b"t" not in fields
                    if not left:
                        start = number
                        break
                if len(rows) < _ROWS:
                    break
                at = b"(" + rows[-1][0]
        while rows := self._client.command("XRANGE", key, start, high, "COUNT", _ROWS):
            for number, fields in rows:
                group, session = fields.get(b"g"), fields[b"s"].decode()
                shown = None if group is None else group.decode()
                yield _Reference(parsed(number), session, int(fields.get(b"b", 0)), shown, fields.get(b"t"))
            if len(rows) < _ROWS:
                return
            start = b"(" + rows[-1][0]

    def _group(self, group: str, low: Id, newest: int | None) -> Iterator[_Reference]:
        for element in self._elements(f"{self.tag}g:{group}", low, newest, _ROWS):
            number, size, session = element.split(b" ", 2)
            yield _Reference(parsed(number), session.decode(), int(size), group)

    def _elements(self, key: str, low: Id, newest: int | None, rows_at_once: int, size: int = 0) -> Iterator[bytes]:
        """Yield a list's elements behind ``low``, up to the present end. newest: how many, the last ones. size: bytes
        of all.
        """
        bounds = self._client.run(
            scripts.BOUNDS, [key], [wire(_next(low)), -1 if newest is None else newest], size=size
        )
        if not bounds:
            return
        at, high = map(parsed, bounds)
        while at <= high:
            rows: list[bytes] = self._client.run(scripts.RANGE, [key], [wire(at), rows_at_once], size=size)
            for row in rows:
                at = parsed(row.partition(b" ")[0])
                if at > high:
                    return
                yield row
            if len(rows) < rows_at_once:
                return
            at = _next(at)

    def _oldest(self) -> tuple[str | int, ...]:
        """Return the command that reads the log's oldest entry."""
        return "XRANGE", f"{self.tag}log", "-", "+", "COUNT", 1

    def _run(self, script: str, arguments: Sequence[str | bytes | int], size: int = 0) -> Any:
        return self._client.run(script, [f"{self.tag}log"], arguments, size=size)


def parsed(number: bytes) -> Id:
    """Read an id in the server's form, milliseconds-count."""
    milliseconds, _, count = number.partition(b"-")
    return int(milliseconds), int(count)


def wire(number: Id) -> bytes:
    """Return an id in the server's form, milliseconds-count."""
    return b"%d-%d" % number


def cursor(number: Id) -> str:
    """Return an id as a cursor, whose string order is the log's."""
    return f"{number[0]:020d}-{number[1]:020d}"


def id_of(name: str, cursor: str) -> Id:
    """Return the id in a cursor, behind which a shard may be named. Raises InvalidInputError, naming the argument."""
    number, _, shard = cursor.partition(".")
    first, _, second = number.partition("-")
    milliseconds, count = (cursor_number(part, 2**64) for part in (first, second))
    if milliseconds is None or count is None or not shard.isascii():
        raise bad_cursor(name, cursor)
    return milliseconds, count


def _state(answer: Sequence[bytes | int]) -> ShardState:
    records, size, sessions, oldest, at, tombstones = answer
    return ShardState(
        max(0, int(records)),
        max(0, int(size)),
        int(sessions),
        oldest=int(oldest) if oldest else None,
        at=int(at),
        tombstones=int(tombstones),
    )


def _next(number: Id) -> Id:
    return number[0], number[1] + 1
