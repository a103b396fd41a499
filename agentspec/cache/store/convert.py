"""Convert stores of older releases: of the first schema, and with one log for all tenants of a server.

A store of the first schema is an SQLite file, or all logs of a Redis server under one prefix.

A turn of the first schema named its parent by a length, and its session by its caller's name. It gets a writer, a
number, its parent's hashes, and keys made with the server's secret. Sessions of callers with API keys cannot be found
under new keys. Turns that these callers shared in a named tenant are kept without their session, and their other turns
are left out.

A server's log was named by the place of its model and by its tenant. It is divided into a log for each tenant.
"""

import filecmp
import hashlib
import os
import re
import shutil
import sqlite3
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from agentspec.cache.core import HASH_BLOCK, context_hashes
from agentspec.cache.store.base import NewEntry, Store, check_namespace
from agentspec.cache.store.codec import decode, encode
from agentspec.cache.store.naming import SCHEMA, LogNames, frame, mac
from agentspec.cache.store.records import MessageRecord, TurnRecord
from agentspec.cache.store.redis.store import RedisStore
from agentspec.cache.store.sqlite.file import APPLICATION_ID, BESIDE, empty_log
from agentspec.cache.store.sqlite.store import SQLiteStore
from agentspec.cache.store.urls import is_sqlite, open_redis, open_store, redact, sqlite_path
from agentspec.cache.types import SCOPES, UInt64Array
from agentspec.errors import (
    AgentSpecError,
    CorruptRecordError,
    RecordError,
    StoreError,
    StoreUnavailableError,
    StoreVersionError,
)

_BATCH = 256
_OWNED = re.compile(r"[0-9a-f]{32}(/.*)?", re.DOTALL)  # a principal's digest, or a name that one owns


@dataclass(slots=True)
class Converted:
    """Count records. converted: written anew. damaged: gone or unreadable. unowned: belong to callers with API keys.

    divided: records, converted or not, that moved to their tenants' logs. kept_as: path of the old file; None: the old
    data are gone.
    """

    converted: int = 0
    damaged: int = 0
    unowned: int = 0
    divided: int = 0
    kept_as: str | None = None


@dataclass(frozen=True, slots=True)
class OldLog:
    """Name the log of a server (``old_log_name``), and the key of its model, under which its turns are kept now."""

    name: str
    model: str


def old_log_name(model: str, tokenizer: str | None, revision: str | None, tenant: str | None) -> str:
    """Return the name of the log that a server with these arguments kept for all of its tenants."""
    folder = Path(tokenizer or model)
    fingerprint = f"{tokenizer or model}@{revision or 'default'}"
    if folder.is_dir():
        digest = hashlib.sha256()
        for file in sorted(folder.iterdir()):
            if file.name.startswith(("tokenizer", "vocab", "merges", "tekken", "special_tokens", "added_tokens")):
                digest.update(f"{file.name}:{file.stat().st_size}:".encode())
                digest.update(file.read_bytes())
        fingerprint = digest.hexdigest()
    place = str(Path(model).resolve()) if Path(model).is_dir() else model
    return hashlib.blake2b(frame([SCHEMA, place, fingerprint, tenant]), digest_size=20).hexdigest()


def convert(url: str, *, secret: str | None = None, tenant: str | None = None, log: OldLog | None = None) -> Converted:
    """Convert the store that ``url`` names. No server may use it meanwhile. Needs 8 bytes of memory for each token.

    secret: AGENTSPEC_SECRET of the server; None: it has none, so the store's own secret is used. tenant: the server's
    named tenant, if any. log: the server's log, which is divided; logs of other servers stay as they are, and can be
    divided later. An SQLite file of the first schema stays beside the new one under the name ``kept_as``. On Redis old
    keys are removed. A conversion that was cut off can be repeated. Retention counts ages from it on.
    Raises StoreURLError, StoreVersionError for a store that needs no conversion, StoreUnavailableError, and StoreError,
    for example if a file of an earlier conversion has the name ``kept_as``.
    """
    try:
        counts = _convert_schema(url, secret, tenant)
    except StoreVersionError:
        if log is None:
            raise
        counts = Converted()
    if log is not None:
        with closing(open_store(url)) as store:
            logs = LogNames(log.model, (store.secret().hex() if secret is None else secret).encode())
            _divide(store, log.name, logs, counts)
        if not (counts.converted or counts.divided):
            raise StoreVersionError(
                f"{redact(url)}: no log of an older release for this model, tokenizer and tenant; name them as the "
                "server did"
            )
    return counts


def _divide(store: Store, old: str, logs: LogNames, counts: Converted) -> None:
    """Move the turns of a server's log to its tenants' logs, session by session, those used last at the end."""
    for usage in sorted(store.sessions(old), key=lambda usage: usage.used):
        batches: dict[str, list[NewEntry]] = {}
        for entry in store.read(old, session=usage.session):
            try:
                record = decode(entry.payload)
            except RecordError:
                counts.damaged += 1
                continue
            if isinstance(record, TurnRecord):
                log = logs.of(record.tenant)
                batches.setdefault(log, []).append(NewEntry(entry.session, entry.payload, record.shared_by))
                counts.divided += 1
                if len(batches[log]) >= _BATCH:
                    store.append(log, batches.pop(log))
        for log, batch in batches.items():
            store.append(log, batch)
        store.erase_session(old, usage.session, mark=False)


def _convert_schema(url: str, secret: str | None, tenant: str | None) -> Converted:
    if is_sqlite(url):
        return _convert_file(sqlite_path(url), secret, tenant)
    if url.startswith("memory:"):
        raise StoreVersionError(f"{url}: memory holds nothing of an older release")
    return _convert_redis(open_redis(url, converting=True), redact(url), secret, tenant)


class _Converter:
    """Convert the records of one namespace and append them to a store, in their order."""

    def __init__(self, store: Store, namespace: str, secret: str | None, tenant: str | None, counts: Converted) -> None:
        self._store, self._namespace, self._tenant, self._counts = store, namespace, tenant, counts
        self._secret = (store.secret().hex() if secret is None else secret).encode()
        self._writer = hashlib.blake2b(namespace.encode(), digest_size=8).hexdigest()
        self._number = 0
        self._chains: dict[str, _Chain] = {}
        self._batch: list[NewEntry] = []

    def add(self, session: str, payload: bytes) -> None:
        self._number += 1
        chain = self._chains.setdefault(session, _Chain())
        try:
            kind, fields, data = _decode(payload)
            if fields["session"] != session:
                raise CorruptRecordError("it belongs to another session")
            record = self._message(fields, data) if kind == "message" else self._turn(fields, data, chain)
            entry = None if record is None else NewEntry(record.session, encode(record), getattr(record, "group", None))
        except (AgentSpecError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            self._counts.damaged += 1
            chain.lose()
            return
        if entry is None:
            self._counts.unowned += 1
            return
        self._counts.converted += 1
        self._batch.append(entry)
        if len(self._batch) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        self._store.append(self._namespace, self._batch)
        self._batch = []

    def _message(self, fields: dict[str, Any], data: bytes) -> MessageRecord:
        return MessageRecord(fields["session"], _unpack(data), float(fields["created"]), fields.get("position"))

    def _turn(self, fields: dict[str, Any], data: bytes, chain: "_Chain") -> TurnRecord | None:
        tokens = np.frombuffer(data, "<i4").astype(np.int32)
        split, scope, tenant = int(fields["prompt"]), fields.get("scope"), fields.get("tenant")
        if not 0 <= split <= len(tokens):
            raise CorruptRecordError("a count is out of range")
        if scope is None:  # before there were scopes, nothing was shared without a named tenant
            scope, tenant = "session" if self._tenant is None else "tenant", self._tenant
        if scope not in SCOPES:
            raise CorruptRecordError("its scope is not known")
        session, group = fields["session"], fields.get("group")
        if fields.get("gap"):
            chain.lose()
        kept, parent, block = chain.link(int(fields["kept"]), tokens) if session else (0, 0, 0)
        if _is_owned(tenant) or (_is_owned(session) and (scope != "tenant" or tenant is None)):
            return None
        if _is_owned(session):  # shared in a named tenant, by a caller that cannot be found again
            session, group, kept, parent, block = "", None, 0, 0, 0
        return TurnRecord(
            writer=self._writer,
            number=self._number,
            session=mac(self._secret, "session", None, session) if session else "",
            kept=kept,
            parent=parent,
            block=block,
            prompt_tail=tokens[:split],
            response=tokens[split:],
            created=float(fields["created"]),
            tenant=tenant,
            group=None if group is None else mac(self._secret, "group", None, group),
            session_name=session or None,
            group_name=group,
            scope=scope,
        )


@dataclass(slots=True)
class _Chain:
    """Follow a session's context, whose beginning may be missing, by the hashes after each of its tokens.

    missing: how many tokens the beginning lacks. base: a number in place of their hash. lost: the context is not known.
    """

    missing: int = 0
    base: int = 0
    lost: bool = False
    hashes: UInt64Array = field(default_factory=lambda: np.empty(0, np.uint64))

    def lose(self) -> None:
        """Forget the context, because a turn is missing."""
        self.lost = True

    def link(self, kept: int, tokens: Any) -> tuple[int, int, int]:
        """Add a turn that repeats ``kept`` tokens. Return ``kept``, their hash, and the hash at their last block."""
        if self.lost or not self.missing <= kept <= self.missing + len(self.hashes):
            self.missing, self.lost, self.hashes = kept, False, np.empty(0, np.uint64)
            self.base = int.from_bytes(os.urandom(8)) | 1 if kept else 0
        parent, block = self._hash_at(kept), self._hash_at(kept // HASH_BLOCK * HASH_BLOCK)
        self.hashes = np.concatenate([self.hashes[: kept - self.missing], context_hashes(tokens, parent, kept)])
        return kept, parent, block

    def _hash_at(self, length: int) -> int:
        at = length - self.missing
        return int(self.hashes[at - 1]) if at > 0 else self.base


def _convert_file(path: Path, secret: str | None, tenant: str | None) -> Converted:
    path = path.resolve()  # so that a link still names the store afterwards
    new, old = path.with_name(f"{path.name}.converting"), path.with_name(f"{path.name}.schema-1")
    counts = Converted(kept_as=str(old))
    if not path.exists():
        raise StoreUnavailableError(f"{path}: no such file; give the URL of the old store")
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, isolation_level=None)) as connection:
            _check_file(connection, path)
            _check_kept(old, path)
            connection.execute("BEGIN IMMEDIATE")  # so that no other process writes or converts meanwhile
            for leftover in (*_files(new), _part(old)):
                leftover.unlink(missing_ok=True)
            try:
                with closing(SQLiteStore(new)) as store:
                    _convert_rows(connection, store, secret, tenant, counts)
                if any(beside.exists() for beside in _files(new)[1:]):  # SQLite could not move its log into it
                    raise StoreUnavailableError(f"{new}: database or disk is full; make room, and convert again")
            except BaseException:
                for leftover in _files(new):
                    leftover.unlink(missing_ok=True)
                raise
            connection.execute("COMMIT")
            if not empty_log(connection):
                raise sqlite3.OperationalError("another process reads it")
        for leftover in _files(path)[1:]:  # the old file's log, which was emptied above
            leftover.unlink(missing_ok=True)
        _keep(path, old)
        new.replace(path)  # at each moment the path names a whole store, so a kill leaves the old one or the new
    except (sqlite3.OperationalError, OSError) as error:
        raise StoreUnavailableError(f"{path}: {error}; stop the servers that use it, and try again") from error
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{path}: {error}") from error
    return counts


def _check_kept(old: Path, path: Path) -> None:
    """Raise StoreError if the old store's new name is taken, unless by this conversion when it was cut off."""
    if old.exists() and not (old.samefile(path) or filecmp.cmp(old, path, shallow=False)):
        raise StoreError(f"{old}: an earlier conversion kept another store here; move it away, and try again")


def _keep(path: Path, old: Path) -> None:
    """Give the old store a second name, by a hard link or, on a file system without these, by a copy."""
    if old.exists() and old.samefile(path):
        return
    try:
        old.hardlink_to(path)
    except OSError:
        shutil.copy2(path, _part(old))
        _part(old).replace(old)


def _part(old: Path) -> Path:
    return old.with_name(f"{old.name}.part")


def _check_file(connection: sqlite3.Connection, path: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise StoreError(f"{path}: not a store of agentspec; name another file")
    if version != 1:
        raise StoreVersionError(f"{path}: schema version {version} needs no conversion")


def _convert_rows(
    connection: sqlite3.Connection, store: Store, secret: str | None, tenant: str | None, counts: Converted
) -> None:
    converters: dict[str, _Converter] = {}
    for namespace, session, payload in connection.execute(
        "SELECT namespace, session, payload FROM entries ORDER BY sequence"
    ):
        if namespace not in converters:
            converters[namespace] = _Converter(store, check_namespace(namespace), secret, tenant, counts)
        converters[namespace].add(session, payload)
    for converter in converters.values():
        converter.flush()


def _files(path: Path) -> list[Path]:
    return [path, *(path.with_name(path.name + suffix) for suffix in BESIDE)]


def _convert_redis(store: RedisStore, shown: str, secret: str | None, tenant: str | None) -> Converted:
    counts = Converted()
    # A name with ":" is another prefix and a log's name: that release named its logs by hexadecimal digits.
    old = re.compile(rf"(\{{{re.escape(store.prefix)}:([A-Za-z0-9._-]{{1,128}})\}}):log(-converted)?")
    with closing(store):
        found = [match for key in store.keys(f"{{{store.prefix}:*}}:log*") if (match := old.fullmatch(key))]
        if not found:
            raise StoreVersionError(f"{shown}: no log of an older release is here")
        for tag, namespace in sorted({match.group(1, 2) for match in found}):
            log, converted = f"{tag}:log", f"{tag}:log-converted"
            if store.command("EXISTS", log):
                if not store.command("EXISTS", converted):
                    _delete(store, store.keys_of(namespace))  # of a conversion that was cut off
                converter = _Converter(store, namespace, secret, tenant, counts)
                for session, payload in _old_entries(store, tag):
                    converter.add(session, payload)
                converter.flush()
                store.command("RENAME", log, converted)  # before an old key is gone, which the next run would miss
            _delete(store, [*store.keys(f"{tag}:s:*"), *store.keys(f"{tag}:w:*")])
            _delete(store, [f"{tag}:sessions", converted])  # this one last, because it shows that there is work to do
    return counts


def _old_entries(store: RedisStore, tag: str) -> Iterator[tuple[str, bytes]]:
    """Yield the session and the payload of each entry; b"" for a payload that is gone."""
    low = "-"
    while rows := store.command("XRANGE", f"{tag}:log", low, "+", "COUNT", _BATCH):
        for number, fields in rows:
            session = fields[b"s"].decode()
            records = store.command("XRANGE", f"{tag}:s:{session}", number, number)
            yield session, records[0][1][b"p"] if records else b""
        low = f"({rows[-1][0].decode()}"


def _delete(store: RedisStore, keys: Iterable[str]) -> None:
    for key in keys:
        store.command("DEL", key)


def _decode(payload: bytes) -> tuple[str, dict[str, Any], bytes]:
    """Return kind, fields and data of a record of version 1. Raises CorruptRecordError, ValueError or TypeError."""
    envelope = _unpack(payload)
    kind, crc, meta, data = (envelope[key] for key in ("kind", "crc", "meta", "data"))
    if envelope["v"] != 1 or kind not in ("turn", "message"):
        raise CorruptRecordError("not a record of version 1")
    head = struct.pack("<BIQQ", 1, len(kind), len(meta), len(data)) + kind.encode()
    if crc != zlib.crc32(data, zlib.crc32(meta, zlib.crc32(head))):
        raise CorruptRecordError("the checksum does not hold")
    fields = _unpack(meta)
    if not isinstance(fields, dict) or not isinstance(fields["session"], str):
        raise CorruptRecordError("its fields cannot be read")
    return kind, fields, data


def _unpack(packed: bytes) -> Any:
    try:
        return msgpack.unpackb(packed, raw=False, strict_map_key=True, unicode_errors="surrogatepass")
    except Exception as error:  # msgpack raises a dozen types
        raise CorruptRecordError(f"not a record: {error}") from error


def _is_owned(name: str | None) -> bool:
    return name is not None and _OWNED.fullmatch(name) is not None
