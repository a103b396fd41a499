"""Store records on a Redis server that several replicas share.

All keys of a namespace have one hash tag, so that a cluster keeps them on one node::

    {prefix:namespace}:2:log         stream, one reference an entry: s = session, b = bytes, g = group; t = tombstone
    {prefix:namespace}:2:s:SESSION   stream, one record an entry: p = payload; ids as in the log
    {prefix:namespace}:2:g:GROUP     stream of references as in the log
    {prefix:namespace}:2:sessions    hash, session: "entries bytes last-milliseconds"
    {prefix:namespace}:2:usage       hash: records, bytes, last = id of the newest entry
    {prefix:namespace}:2:tombstones  hash, session: id of its tombstone
    {prefix:namespace}:2:d:ID        what is left of an erased session; all of these are in the set :2:doomed
    {prefix:namespace}:2:w:WRITER    number and first id of the last batch that this writer has appended; expires
    prefix:namespaces, prefix:secret the set of namespaces; the store's secret

Other replicas follow the log's order. Each session's payloads lie in a key of their own, so that erasing a session
frees its memory. The server's append-only file holds it until the server rewrites that (BGREWRITEAOF). One script does
an append, so it is atomic. The script recognises a batch that is sent again because its answer was lost. The server's
settings decide how durable a record is (``appendonly yes`` survives its kill -9) and whether it evicts keys. It should
not (``maxmemory-policy noeviction``): what it evicts is lost, and sizes are wrong.
"""

import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError, ResponseError
from redis.retry import Retry

from agentspec.cache.store import redis_scripts
from agentspec.cache.store.base import (
    Entry,
    Erasure,
    NewEntry,
    Retention,
    SessionUsage,
    Trimmed,
    Usage,
    bad_cursor,
    check_namespace,
    check_read,
    conflict,
    expected_session,
)
from agentspec.cache.store.records import EraseRecord, encode
from agentspec.errors import StoreError, StoreUnavailableError, StoreVersionError

SOCKET_TIMEOUT = 0.25
"""Timeout of connecting and of reading, in seconds."""

_ROWS = 128  # most entries, and
_ROWS_BYTES = 1 << 20  # about the most bytes, that a read takes at once
_SLICE_ENTRIES = 256
_SLICE_BYTES = 1 << 20
_ENTRY_BYTES = 160  # measured on Redis 7: what the server needs for an entry beside its payload,
_SESSION_BYTES = 1_500  # and for a session beside its entries
_WRITER_EXPIRY_MS = 3_600_000
_POLL_SECONDS = 0.02  # between two looks at whether anybody wrote
_EXPIRY_DAYS = 1.0  # keys expire so long after the retention's age, in case nobody is left to trim them

# errors that pass by themselves or that the operator can repair, with a correct URL
_PASSING = ("OOM", "READONLY", "MISCONF", "LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS")

_Row = tuple[bytes, dict[bytes, bytes]]


class RedisStore:
    """Implement Store on a Redis server. The first call connects, so the server may start later.

    url: a URL for redis-py. shown: the URL as errors show it. secret: the password, removed from every message.
    converting: whether to write beside a log of an older release, which is refused otherwise.
    """

    def __init__(
        self,
        url: str,
        *,
        shown: str,
        secret: str | None = None,
        prefix: str = "agentspec",
        converting: bool = False,
        **options: Any,
    ) -> None:
        self._shown = shown
        self._secret = secret
        self.prefix = prefix
        self._converting = converting
        self._client = redis.Redis.from_url(
            url,
            socket_timeout=SOCKET_TIMEOUT,
            socket_connect_timeout=SOCKET_TIMEOUT,
            # Try once more: pooled connections die with a restarted server, and a server can be slow once. That is
            # safe, because reads and removals can be repeated and appends are numbered.
            retry=Retry(ExponentialBackoff(cap=0.05, base=0.01), 1, (redis.ConnectionError, redis.TimeoutError)),
            **options,
        )
        self._execute: Callable[..., Any] = self._client.execute_command
        self._append = self._client.register_script(redis_scripts.APPEND)
        self._erase = self._client.register_script(redis_scripts.ERASE)
        self._sweep = self._client.register_script(redis_scripts.SWEEP)
        self._trim = self._client.register_script(redis_scripts.TRIM)
        self._gather = self._client.register_script(redis_scripts.GATHER)
        self._writer = uuid.uuid4().hex
        self._number = 0
        self._append_lock = threading.Lock()
        self._unsure: tuple[str, list[NewEntry], str | None] | None = None
        self._known: set[str] = set()  # namespaces that hold no log of an older release
        self._expiry_ms = 0
        self._closed = False

    def append(self, namespace: str, entries: Sequence[NewEntry], *, expect: str | None = None) -> list[str]:
        tag, batch = self._tag(namespace), list(entries)
        expected = None if expect is None else expected_session(batch)
        newest = b"*" if expect is None else _stream_id("expect", expect)
        if not batch:
            return []
        arguments: list[int | str | bytes] = []
        for session, payload, group in batch:
            arguments += (session, payload, 0 if group is None else 1, group or "")
        with self._append_lock:
            # A batch whose answer was lost keeps its number, so that the server recognises it.
            if self._unsure != (namespace, batch, expect):
                self._number += 1
            self._unsure = (namespace, batch, expect)
            head = (tag, self._writer, self._number, _WRITER_EXPIRY_MS, self._expiry_ms, _ENTRY_BYTES)
            self._check_log(namespace)
            with self._store_errors():
                first: bytes = self._append(args=[*head, expected or "", newest, *arguments], keys=[tag + "log"])
            self._unsure = None
        if not first:
            raise conflict(expected or "")
        milliseconds, _, count = first.partition(b"-")
        return [_cursor(b"%s-%d" % (milliseconds, int(count) + index)) for index in range(len(batch))]

    def read(
        self,
        namespace: str,
        *,
        session: str | None = None,
        group: str | None = None,
        after: str | None = None,
        newest: int | None = None,
    ) -> Iterator[Entry]:
        check_read(session, group, newest)
        tag = self._tag(namespace)
        low = b"(" + _stream_id("after", after) if after else b"-"
        key = f"{tag}log" if session is None and group is None else f"{tag}g:{group}"
        return self._pages(namespace, tag, key if session is None else f"{tag}s:{session}", session, low, newest)

    def sessions(self, namespace: str) -> list[SessionUsage]:
        tag = self._tag(namespace)
        self._check_log(namespace)
        found = []
        with self._store_errors():
            for session, held in self._client.hscan_iter(f"{tag}sessions", count=1000):
                records, size, used = map(int, held.split())
                size -= records * _ENTRY_BYTES
                found.append(SessionUsage(session.decode(), records, size, used / 1000))
        return sorted(set(found), key=lambda usage: usage.session)  # a scan may show an entry twice

    def newest(self, namespace: str) -> str:
        last = self.command("XREVRANGE", f"{self._tag(namespace)}log", "+", "-", "COUNT", 1)
        return _cursor(last[0][0]) if last else ""

    def wait(self, cursors: Mapping[str, str], timeout: float) -> list[str]:
        deadline = time.monotonic() + timeout
        places = {name: b"(" + _stream_id("cursors", at) if at else b"-" for name, at in cursors.items()}
        while True:
            found = [
                name
                for name, low in places.items()
                if self.command("XRANGE", f"{self._tag(name)}log", low, "+", "COUNT", 1)
            ]
            if found or (left := deadline - time.monotonic()) <= 0:
                return found
            time.sleep(min(left, _POLL_SECONDS))

    def tombstones(self, namespace: str, *, after: str | None = None) -> dict[str, str]:
        low = _cursor(_stream_id("after", after)) if after else ""
        found: dict[bytes, bytes] = self.command("HGETALL", f"{self._tag(namespace)}tombstones")
        marked = sorted((_cursor(number), session.decode()) for session, number in found.items())
        return {session: number for number, session in marked if number > low}

    def namespaces(self, prefix: str = "") -> list[str]:
        return [name for name in self._namespaces() if name.startswith(prefix)]

    def erase_session(self, namespace: str, session: str, *, mark: bool = True) -> Erasure:
        tag = self._tag(namespace)
        self._check_log(namespace)
        tombstone = encode(EraseRecord(session)) if mark else b""
        with self._store_errors():
            removed, marked = self._erase(keys=[tag + "log"], args=[tag, session, tombstone, _ENTRY_BYTES])
            while self._sweep(keys=[tag + "log"], args=[tag, _ROWS]):
                pass
        return Erasure(int(removed), True, _cursor(marked) if marked else None)

    def secret(self) -> bytes:
        key = f"{self.prefix}:secret"
        with self._store_errors():
            self._execute("SET", key, secrets.token_bytes(32), "NX")
            secret: bytes = self._execute("GET", key)
        return secret

    def usage(self) -> Usage:
        held = [self._usage(namespace) for namespace in self._namespaces()]
        return Usage(sum(usage.records for usage in held), sum(usage.bytes for usage in held))

    def trim(self, retention: Retention) -> Trimmed:
        days, namespaces = retention.days, self._namespaces()
        self._expiry_ms = 0 if days is None else int((days + _EXPIRY_DAYS) * 86_400_000)
        with self._store_errors():
            for namespace in namespaces:
                if self._sweep(keys=[self._tag(namespace) + "log"], args=[self._tag(namespace), _ROWS]):
                    return Trimmed(0, True)  # whoever erased a session did not live to end it
        if days is not None:
            seconds, microseconds = map(int, self.command("TIME"))
            cutoff = max(0, int((seconds - days * 86_400) * 1000) + microseconds // 1000)
            for namespace in namespaces:
                if removed := self._trim_slice(namespace, _SLICE_ENTRIES, _SLICE_BYTES, str(cutoff)):
                    return Trimmed(removed, True)
        held = self.usage()
        count = 0 if retention.records is None else held.records - retention.records
        size = 0 if retention.bytes is None else held.bytes - retention.bytes
        oldest = self._oldest(namespaces) if count > 0 or size > 0 else None
        if oldest is None:
            return Trimmed(0, False)
        entries = min(count, _SLICE_ENTRIES) if size <= 0 else _SLICE_ENTRIES
        most = min(size, _SLICE_BYTES) if count <= 0 else _SLICE_BYTES
        return Trimmed(self._trim_slice(oldest, entries, most, "+"), True)

    def ping(self) -> None:
        self.command("PING")

    def close(self) -> None:
        self._closed = True
        self._client.close()

    def _namespaces(self) -> list[str]:
        return sorted(member.decode() for member in self.command("SMEMBERS", f"{self.prefix}:namespaces"))

    def _usage(self, namespace: str) -> Usage:
        tag = self._tag(namespace)
        records, size = self.command("HMGET", f"{tag}usage", "records", "bytes")
        sessions: int = self.command("HLEN", f"{tag}sessions")
        return Usage(max(0, int(records or 0)), max(0, int(size or 0)) + sessions * _SESSION_BYTES)

    def _oldest(self, namespaces: Sequence[str]) -> str | None:
        """Return the namespace with the oldest entry."""
        first = [(self.command("XRANGE", f"{self._tag(name)}log", "-", "+", "COUNT", 1), name) for name in namespaces]
        return min(((_cursor(rows[0][0]), name) for rows, name in first if rows), default=(None, None))[1]

    def _trim_slice(self, namespace: str, entries: int, size: int, until: str) -> int:
        tag = self._tag(namespace)
        with self._store_errors():
            count, _ = self._trim(keys=[tag + "log"], args=[tag, _ENTRY_BYTES, entries, size, until])
        return int(count)

    def _pages(
        self, namespace: str, tag: str, key: str, session: str | None, low: bytes, newest: int | None
    ) -> Iterator[Entry]:
        self._check_log(namespace)
        last = self.command("XREVRANGE", key, "+", low, "COUNT", 1)
        if not last or newest == 0:
            return
        high = last[0][0]
        rows_at_once = _ROWS if session is None else self._rows_at_once(tag, session)
        if newest is not None:
            low = self._start_of(newest, key, high, low, rows_at_once)
        while True:
            rows: list[_Row] = self.command("XRANGE", key, low, high, "COUNT", rows_at_once)
            if session is None:
                yield from self._follow(tag, rows)
            else:
                for number, fields in rows:
                    yield Entry(_cursor(number), session, fields[b"p"])
            if len(rows) < rows_at_once:
                return
            low = b"(" + rows[-1][0]

    def _rows_at_once(self, tag: str, session: str) -> int:
        """Return how many of a session's entries hold about _ROWS_BYTES, so that no page outlasts the timeout."""
        held = self.command("HGET", f"{tag}sessions", session)
        if held is None:
            return _ROWS
        records, size, _ = map(int, held.split())
        return max(1, min(_ROWS, _ROWS_BYTES * records // max(1, size)))

    def _follow(self, tag: str, references: list[_Row]) -> Iterator[Entry]:
        """Read the records that a page of a log or group refers to, about _ROWS_BYTES at once."""
        start = size = 0
        for index, (_, fields) in enumerate(references):
            size += int(fields.get(b"b", 0))
            if size >= _ROWS_BYTES or index == len(references) - 1:
                yield from self._gathered(tag, references[start : index + 1])
                start, size = index + 1, 0

    def _gathered(self, tag: str, references: list[_Row]) -> Iterator[Entry]:
        spans: dict[bytes, list[bytes]] = {}
        for number, fields in references:
            if b"t" not in fields:
                spans.setdefault(fields[b"s"], []).append(number)
        payloads: dict[bytes, bytes] = {}
        if spans:
            keys = [f"{tag}s:{session.decode()}" for session in spans]
            bounds = [number for numbers in spans.values() for number in (numbers[0], numbers[-1])]
            with self._store_errors():
                found: list[bytes] = self._gather(keys=keys, args=bounds)
            payloads = dict(zip(found[::2], found[1::2], strict=True))
        for number, fields in references:
            payload = fields[b"t"] if b"t" in fields else payloads.get(number)
            if payload is not None:  # otherwise the session was erased or has expired
                group = fields.get(b"g")
                yield Entry(_cursor(number), fields[b"s"].decode(), payload, None if group is None else group.decode())

    def _start_of(self, newest: int, key: str, high: bytes, low: bytes, rows_at_once: int) -> bytes:
        """Return the id of the ``newest``-th entry from the end, or ``low`` if there are fewer."""
        left = newest
        while True:
            rows = self.command("XREVRANGE", key, high, low, "COUNT", min(left, rows_at_once))
            if len(rows) < min(left, rows_at_once):
                return low
            left -= len(rows)
            if left == 0:
                number: bytes = rows[-1][0]
                return number
            high = b"(" + rows[-1][0]

    def _check_log(self, namespace: str) -> None:
        """Enter the namespace in the list of all. Raises StoreVersionError if an older release has written its log."""
        if namespace in self._known:
            return
        if not self._converting and self.command("EXISTS", f"{{{self.prefix}:{namespace}}}:log"):
            raise StoreVersionError(
                f"{self._shown}: an older release wrote the log {namespace} here;"
                f" convert it with: agentspec sessions convert {self._shown}"
            )
        self.command("SADD", f"{self.prefix}:namespaces", namespace)
        self._known.add(namespace)

    def command(self, *command: str | bytes | int) -> Any:
        """Send one command to the server, and return its answer."""
        with self._store_errors():
            return self._execute(*command)

    def _tag(self, namespace: str) -> str:
        return f"{{{self.prefix}:{check_namespace(namespace)}}}:2:"

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Raise redis-py's errors as store errors without the password, because servers quote commands they reject."""
        if self._closed:
            raise StoreError(f"{self._shown}: the store is closed")
        try:
            yield
        except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
            raise StoreError(f"{self._explain(error)}; check user and password in the store URL") from None
        except ResponseError as error:
            passing = str(error).startswith(_PASSING) or type(error).__name__ in ("OutOfMemoryError", "ReadOnlyError")
            raise (StoreUnavailableError if passing else StoreError)(self._explain(error)) from None
        except (RedisError, OSError) as error:
            raise StoreUnavailableError(self._explain(error)) from None

    def _explain(self, error: Exception) -> str:
        text = " ".join(islice(str(error).split(), 60))
        return f"{self._shown}: {text.replace(self._secret, '***') if self._secret else text}"


def _cursor(number: bytes) -> str:
    """Return a stream id, ``milliseconds-count``, as a cursor whose string order is the log's."""
    milliseconds, _, count = number.partition(b"-")
    return f"{int(milliseconds):020d}-{int(count):020d}"


def _stream_id(name: str, cursor: str) -> bytes:
    """Return the stream id of a cursor, and nothing for none. Raises InvalidInputError, naming the argument."""
    if not cursor:
        return b""
    milliseconds, _, count = cursor.partition("-")
    if not (cursor.isascii() and milliseconds.isdigit() and count.isdigit()):
        raise bad_cursor(name, cursor)
    return b"%d-%d" % (int(milliseconds), int(count))
