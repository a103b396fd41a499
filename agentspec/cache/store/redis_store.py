"""Store records on a Redis server that several replicas share.

All keys of a namespace have one hash tag, so that a cluster keeps them on one node::

    {prefix:namespace}:log          stream, one reference an entry: s = session
    {prefix:namespace}:s:SESSION    stream, one record an entry: p = payload; ids as in the log
    {prefix:namespace}:sessions     set of session ids
    {prefix:namespace}:w:WRITER     number of the last batch that this writer has appended; expires

Other replicas follow the log's order. Each session's payloads lie in a key of their own, so that removing a session
frees its memory. One script does an append, so it is atomic. The script recognises a batch that is sent again because
its answer was lost. The server's settings decide how durable a record is (``appendonly yes`` survives its kill -9).
"""

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError, ResponseError
from redis.retry import Retry

from agentspec.cache.store.base import Entry, bad_cursor, check_namespace, check_newest
from agentspec.errors import StoreError, StoreUnavailableError

SOCKET_TIMEOUT = 0.25
"""Timeout of connecting and of reading, in seconds."""
_PAGE = 128
_WRITER_EXPIRY_MS = 3_600_000

# KEYS: log, sessions, writer, one stream a session; ARGV: batch, expiry, then (index into KEYS, session, payload)...
_APPEND = """
if redis.call('GET', KEYS[3]) == ARGV[1] then return 0 end
for i = 3, #ARGV, 3 do
  local id = redis.call('XADD', KEYS[1], '*', 's', ARGV[i + 1])
  redis.call('XADD', KEYS[tonumber(ARGV[i])], id, 'p', ARGV[i + 2])
  redis.call('SADD', KEYS[2], ARGV[i + 1])
end
redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[2])
return 1
"""

# KEYS: log, sessions, the session's stream; ARGV: session, page. Each call handles one page, so that it stays short.
_REMOVE = """
local page = redis.call('XRANGE', KEYS[3], '-', '+', 'COUNT', ARGV[2])
for _, entry in ipairs(page) do
  redis.call('XDEL', KEYS[1], entry[1])
  redis.call('XDEL', KEYS[3], entry[1])
end
if #page == 0 then
  redis.call('DEL', KEYS[3])
  redis.call('SREM', KEYS[2], ARGV[1])
end
return #page
"""

# KEYS: one stream for each session; ARGV: first and last id for each. Returns [id, payload, id, payload, ...].
_GATHER = """
local found = {}
for i, key in ipairs(KEYS) do
  for _, entry in ipairs(redis.call('XRANGE', key, ARGV[2 * i - 1], ARGV[2 * i])) do
    found[#found + 1] = entry[1]
    found[#found + 1] = entry[2][2]
  end
end
return found
"""

# errors that pass by themselves or that the operator can repair, with a correct URL
_PASSING = ("OOM", "READONLY", "MISCONF", "LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS")

_Row = tuple[bytes, dict[bytes, bytes]]


class RedisStore:
    """Implement Store on a Redis server. The first call connects, so the server may start later.

    url: a URL for redis-py. shown: the URL as errors show it. secret: the password, removed from every message.
    """

    def __init__(
        self, url: str, *, shown: str, secret: str | None = None, prefix: str = "agentspec", **options: Any
    ) -> None:
        self._shown = shown
        self._secret = secret
        self._prefix = prefix
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
        self._append = self._client.register_script(_APPEND)
        self._gather = self._client.register_script(_GATHER)
        self._remove = self._client.register_script(_REMOVE)
        self._writer = uuid.uuid4().hex
        self._number = 0
        self._append_lock = threading.Lock()
        self._unsure: tuple[str, list[tuple[str, bytes]]] | None = None
        self._closed = False

    def append(self, namespace: str, entries: Sequence[tuple[str, bytes]]) -> None:
        tag = self._tag(namespace)
        batch = list(entries)
        if not batch:
            return
        keys = [f"{tag}:log", f"{tag}:sessions", f"{tag}:w:{self._writer}"]
        places: dict[str, int] = {}
        arguments: list[int | str | bytes] = []
        for session, payload in batch:
            if session not in places:
                keys.append(f"{tag}:s:{session}")
                places[session] = len(keys)
            arguments += (places[session], session, payload)
        with self._append_lock:
            # A batch whose answer was lost keeps its number, so that the server recognises it.
            if self._unsure != (namespace, batch):
                self._number += 1
            self._unsure = (namespace, batch)
            with self._store_errors():
                self._append(keys=keys, args=[self._number, _WRITER_EXPIRY_MS, *arguments])
            self._unsure = None

    def read(
        self, namespace: str, *, session: str | None = None, after: str | None = None, newest: int | None = None
    ) -> Iterator[Entry]:
        return self._pages(self._tag(namespace), session, _behind(after), check_newest(newest))

    def sessions(self, namespace: str) -> list[str]:
        tag = self._tag(namespace)
        with self._store_errors():
            members: set[bytes] = self._execute("SMEMBERS", f"{tag}:sessions")
        return sorted(member.decode() for member in members)

    def remove_session(self, namespace: str, session: str) -> int:
        tag = self._tag(namespace)
        keys = [f"{tag}:log", f"{tag}:sessions", f"{tag}:s:{session}"]
        removed = 0
        while True:
            with self._store_errors():
                page = int(self._remove(keys=keys, args=[session, _PAGE]))
            if page == 0:
                return removed
            removed += page

    def ping(self) -> None:
        with self._store_errors():
            self._execute("PING")

    def close(self) -> None:
        self._closed = True
        self._client.close()

    def _pages(self, tag: str, session: str | None, low: bytes, newest: int | None) -> Iterator[Entry]:
        key = f"{tag}:log" if session is None else f"{tag}:s:{session}"
        last = self._command("XREVRANGE", key, "+", low, "COUNT", 1)
        if not last or newest == 0:
            return
        high = last[0][0]
        if newest is not None:
            low = self._start_of(newest, key, high, low)
        while True:
            rows = self._command("XRANGE", key, low, high, "COUNT", _PAGE)
            if session is None:
                yield from self._follow(tag, rows)
            else:
                for number, fields in rows:
                    yield Entry(_cursor(number), session, fields[b"p"])
            if len(rows) < _PAGE:
                return
            low = b"(" + rows[-1][0]

    def _follow(self, tag: str, references: list[_Row]) -> Iterator[Entry]:
        """Read the records that a page of the log refers to, in one call: one range for each session."""
        spans: dict[bytes, list[bytes]] = {}
        for number, fields in references:
            spans.setdefault(fields[b"s"], []).append(number)
        if not spans:
            return
        keys = [f"{tag}:s:{session.decode()}" for session in spans]
        bounds = [number for numbers in spans.values() for number in (numbers[0], numbers[-1])]
        with self._store_errors():
            found: list[bytes] = self._gather(keys=keys, args=bounds)
        payloads = dict(zip(found[::2], found[1::2], strict=True))
        for number, fields in references:
            if number in payloads:  # otherwise the session was removed or has expired
                yield Entry(_cursor(number), fields[b"s"].decode(), payloads[number])

    def _start_of(self, newest: int, key: str, high: bytes, low: bytes) -> bytes:
        """Return the id of the ``newest``-th entry from the end, or ``low`` if there are fewer."""
        left = newest
        while True:
            rows = self._command("XREVRANGE", key, high, low, "COUNT", min(left, _PAGE))
            if len(rows) < min(left, _PAGE):
                return low
            left -= len(rows)
            if left == 0:
                return rows[-1][0]
            high = b"(" + rows[-1][0]

    def _command(self, *command: str | bytes | int) -> list[_Row]:
        with self._store_errors():
            rows: list[_Row] = self._execute(*command)
            return rows

    def _tag(self, namespace: str) -> str:
        return f"{{{self._prefix}:{check_namespace(namespace)}}}"

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


def _behind(cursor: str | None) -> bytes:
    """Return the start of the range behind ``cursor``, for XRANGE."""
    if cursor is None:
        return b"-"
    milliseconds, _, count = cursor.partition("-")
    if not (cursor.isascii() and milliseconds.isdigit() and count.isdigit()):
        raise bad_cursor(cursor)
    return b"(%d-%d" % (int(milliseconds), int(count))
