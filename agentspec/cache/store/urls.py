"""Open the stores that URLs name, find the default URL, and show URLs without their password."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from agentspec.addresses import without_secrets
from agentspec.cache.store.base import Store
from agentspec.cache.store.sqlite.store import MemoryStore, SQLiteStore
from agentspec.errors import StoreUnavailableError, StoreURLError

if TYPE_CHECKING:
    from agentspec.cache.store.redis.client import RedisAddress, RedisForm
    from agentspec.cache.store.redis.store import RedisStore

logger = logging.getLogger(__name__)

FORMS = (
    "sqlite:///relative/path.db, sqlite:////absolute/path.db, sqlite:///~/path.db, "
    "redis://[user:password@]host[:port][/db][?prefix=NAME&shards=N], redis+sentinel://host:port,…/service[/db], "
    "redis+cluster://host:port,…, each also as rediss (TLS), unix:///path/to/socket[?db=N], memory://"
)
"""Supported forms of a store URL, for messages."""

PLACE_DIGITS = 12
"""Hexadecimal digits with which the name of a Redis store's snapshot begins."""
_CERTIFICATES = ("required", "optional", "none")
_TLS_OPTIONS = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs"})
_REDIS: dict[str, RedisForm] = {
    "redis": "server",
    "rediss": "server",
    "unix": "server",
    "redis+sentinel": "sentinel",
    "rediss+sentinel": "sentinel",
    "redis+cluster": "cluster",
    "rediss+cluster": "cluster",
}
_PORTS: dict[RedisForm, int] = {"server": 6379, "sentinel": 26379, "cluster": 6379}
_MOST_SHARDS = 64
_PREFIX = re.compile(r"[A-Za-z0-9._:-]{1,64}")


def default_store_url(name: str) -> str:
    """Return the URL of the SQLite file ``name`` in agentspec's folder of the user's data folder (XDG_DATA_HOME).

    A relative XDG_DATA_HOME is ignored, as the XDG Base Directory Specification says.
    Raises StoreUnavailableError if this user has no home folder, or if the folder's path is not UTF-8.
    """
    base = os.environ.get("XDG_DATA_HOME") or ""
    try:
        folder = Path(base).expanduser()
        if not folder.is_absolute():
            base = "~/.local/share"
            folder = Path(base).expanduser()
    except RuntimeError as error:
        raise StoreUnavailableError(f"{base}: {error} Name a store, or set XDG_DATA_HOME") from None
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise StoreUnavailableError(f"{str(folder)!r}: not UTF-8. Name a store, or set XDG_DATA_HOME") from None
    return f"sqlite:///{folder / 'agentspec' / name}"


def can_write(path: Path) -> bool:
    """Return whether this user may write an SQLite file here, and create it and its folders if they are missing."""
    if os.access(path, os.F_OK) and not os.access(path, os.W_OK):
        return False
    folder = next(folder for folder in path.absolute().parents if os.access(folder, os.F_OK))
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def open_store(url: str, *, memory_bytes: int = 256 << 20, to_write: bool = False, must_exist: bool = False) -> Store:
    """Open the store that ``url`` names. Creates a missing SQLite file and its folders. Does not connect to Redis yet.

    memory_bytes: most memory that a store in memory takes. to_write: refuse an SQLite file that can only be read.
    must_exist: refuse a store in memory and a missing SQLite file, for commands that read what a server has stored.
    Raises StoreURLError, naming the URL without its password and the supported forms; for an SQLite file also
    StoreVersionError, StoreError and StoreUnavailableError.
    """
    if not isinstance(url, str):
        raise StoreURLError(f"store URL: a string expected, got {type(url).__name__}; supported are {FORMS}")
    if is_sqlite(url):
        path = sqlite_path(url)
        if must_exist and not path.exists():
            raise StoreUnavailableError(f"store {path}: no such file; give the URL of the server's store")
        if to_write and os.access(path, os.F_OK) and not can_write(Path(os.path.realpath(path))):
            why = "it or its folder is read-only for this user"
            raise StoreUnavailableError(f"{path}: cannot be written, {why}; name another file")
        return SQLiteStore(path)
    if _scheme_of(url) in _REDIS:
        return open_redis(url)
    if url == "memory://":
        if must_exist:
            raise StoreUnavailableError(
                f"store {url}: no other process can read what a server keeps in memory; start the server with an "
                "SQLite file or a Redis, and give its URL"
            )
        return MemoryStore(memory_bytes)
    raise _refused(url, "unknown kind of store")


def check_layout(store: Store) -> None:
    """Raise StoreError if a Redis has its logs in another number of shards than its URL says.

    Does nothing if the Redis does not answer, because turns can wait until it is back.
    """
    if isinstance(store, SQLiteStore | MemoryStore):
        return
    from agentspec.cache.store.redis.store import RedisStore  # importing redis takes as long as all of the client

    if isinstance(store, RedisStore):
        with suppress(StoreUnavailableError):
            store.check_shards()


def snapshot_path(url: str, namespace: str, number: int) -> Path | None:
    """Return the path for a snapshot of one log: beside an SQLite file, or in the user's data folder for Redis.

    number: the engine's, because several engines of a server may share the store. Returns None for a store in memory,
    and for Redis if this user has no home folder. Raises StoreURLError.
    """
    if url == "memory://":
        return None
    name = f"{namespace}-{number}.snapshot"
    if is_sqlite(url):
        path = Path(os.path.realpath(sqlite_path(url)))  # the same for all links to the file
        return path.with_name(f"{path.name}-{name}")
    address, prefix, _ = _redis_place(url)
    part = (address.form, address.nodes, address.path, address.service, address.database, prefix)
    # a hash of the parts, which are the same however the URL is written
    place = hashlib.blake2b(repr(part).encode(), digest_size=PLACE_DIGITS // 2).hexdigest()
    try:
        return sqlite_path(default_store_url(f"{place}-{name}"))
    except StoreUnavailableError as error:
        logger.warning("agentspec: the suffix indexes are not saved: %s", error)
        return None


def redact(url: str) -> str:
    """Return ``url`` without user, password and query, for messages."""
    if is_sqlite(url):
        return url  # a path, in which @ and ? mean nothing
    return without_secrets(url)


def is_sqlite(url: str) -> bool:
    """Return whether a store URL names an SQLite file."""
    return _scheme_of(url) == "sqlite"


def _scheme_of(url: str) -> str:
    return url.partition(":")[0].lower()


def _refused(url: str, why: str) -> StoreURLError:
    return StoreURLError(f"store URL {redact(url)!r}: {why}; supported are {FORMS}")


def sqlite_path(url: str) -> Path:
    """Return the file that an SQLite URL names. Raises StoreURLError."""
    _, _, path = url.partition(":///")
    if not path or path.endswith("/"):
        raise _refused(url, "no file named; three slashes and a path are needed")
    if path == ":memory:":
        raise _refused(url, "SQLite's in-memory database is not supported; use memory://")
    if "\x00" in path:
        raise _refused(url, "the path holds a NUL character")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise _refused(url, "the path is not UTF-8") from None
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:  # this user has no home folder
        raise _refused(url, str(error)) from None


def open_redis(url: str, *, converting: bool = False) -> RedisStore:
    """Open the Redis store that ``url`` names. converting: as RedisStore takes it. Raises StoreURLError.

    User and password are those of the URL, else AGENTSPEC_REDIS_USERNAME and AGENTSPEC_REDIS_PASSWORD. Sentinels get
    AGENTSPEC_SENTINEL_USERNAME and AGENTSPEC_SENTINEL_PASSWORD.
    """
    from agentspec.cache.store.redis.store import RedisStore  # importing redis takes as long as all of the client

    address, prefix, shards = _redis_place(url)
    return RedisStore(address, prefix=prefix, shards=shards, converting=converting)


def _redis_place(url: str) -> tuple[RedisAddress, str, int]:
    """Return a Redis store's address, its prefix and its number of shards. Raises StoreURLError."""
    from agentspec.cache.store.redis.client import RedisAddress

    scheme = _scheme_of(url)
    if scheme not in _REDIS:
        raise _refused(url, "unknown kind of store")
    _check_characters(url)
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _refused(url, "malformed address") from None
    user, _, place = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    form, options, path = _REDIS[scheme], _redis_options(url, scheme, parts), parts.path.strip("/")
    socket, service, database = None, "", path
    if scheme == "unix":
        if not path or place:
            raise _refused(url, "three slashes and the path of a socket are needed")
        socket, database = unquote(parts.path), options.pop("db", "")
    elif form == "sentinel":
        service, _, database = path.partition("/")
        if not service:
            raise _refused(url, "the name that Sentinel has for the server is needed behind the hosts: /mymaster/0")
    number = _database(url, database or "0", form)
    prefix, shards = options.pop("prefix", "agentspec"), options.pop("shards", "1")
    if not _PREFIX.fullmatch(prefix):
        raise _refused(url, "prefix takes 1 to 64 letters, digits and . _ : -")
    if not (shards.isascii() and shards.isdigit() and 1 <= int(shards) <= _MOST_SHARDS):
        raise _refused(url, f"shards is a number from 1 to {_MOST_SHARDS}")
    address = RedisAddress(
        form=form,
        shown=redact(url),
        nodes=() if scheme == "unix" else _nodes(url, place, _PORTS[form], several=form != "server"),
        path=socket,
        service=unquote(service),
        database=number,
        username=unquote(name) or os.environ.get("AGENTSPEC_REDIS_USERNAME") or None,
        password=unquote(password) or os.environ.get("AGENTSPEC_REDIS_PASSWORD") or None,
        sentinel_username=os.environ.get("AGENTSPEC_SENTINEL_USERNAME") or None,
        sentinel_password=os.environ.get("AGENTSPEC_SENTINEL_PASSWORD") or None,
        tls=options if scheme.startswith("rediss") else None,
    )
    return address, prefix, int(shards)


def _database(url: str, database: str, form: RedisForm) -> int:
    if not (database.isascii() and database.isdigit()):
        raise _refused(url, f"the database is a number, such as 0, not {database!r}")
    if form == "cluster" and int(database) != 0:
        raise _refused(url, "a Cluster has database 0 only")
    return int(database)


def _check_characters(url: str) -> None:
    """Raise StoreURLError if a Redis URL holds characters that must be percent-encoded."""
    try:
        url.encode()
    except UnicodeEncodeError:
        raise _refused(url, "it is not UTF-8; percent-encode other bytes") from None
    if any(mark in url.rpartition("@")[0].partition("//")[2] for mark in "/?#"):
        raise _refused(url, "user and password must be percent-encoded (%2F for /, %3F for ?, %23 for #, %40 for @)")


def _nodes(url: str, places: str, port: int, *, several: bool) -> tuple[tuple[str, int], ...]:
    """Return the hosts and ports of "host:port,host:port"."""
    nodes = []
    for place in places.split(",") if several else [places]:
        try:
            node = urlsplit(f"//{place}")
            host, number = node.hostname, node.port
        except ValueError as error:
            why = "the port is not a number between 0 and 65535" if "ort" in str(error) else "malformed address"
            raise _refused(url, why) from None
        if not host or "," in host:
            raise _refused(url, "one host and no list is needed" if host else "no host named")
        nodes.append((host, port if number is None else number))
    return tuple(nodes)


def _redis_options(url: str, scheme: str, parts: SplitResult) -> dict[str, str]:
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    known = {"prefix", "shards"} | (_TLS_OPTIONS if scheme.startswith("rediss") else set())
    known |= {"db"} if scheme == "unix" else set()
    for name in options:
        if name not in known:
            raise _refused(url, f"unknown option {name!r} after '?', known are {', '.join(sorted(known))}")
    if options.get("ssl_cert_reqs", "required") not in _CERTIFICATES:
        raise _refused(url, f"ssl_cert_reqs is one of {', '.join(_CERTIFICATES)}")
    if "ssl_keyfile" in options and "ssl_certfile" not in options:
        raise _refused(url, "ssl_keyfile needs the certificate of the key, in ssl_certfile")
    return options
