"""Define the interface of every store, and name the logs in it."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentspec.cache.identifiers import check_ids
from agentspec.errors import ConfigurationError, InvalidInputError

SCHEMA = "agentspec-log-1"
"""Version of the records' meaning. Every namespace contains it, so a new version starts new logs."""

_NAMESPACE = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Entry:
    """Hold one stored record and its place in the log.

    sequence: opaque cursor; within a namespace, string order is log order.
    """

    sequence: str
    session: str
    payload: bytes


class Store(Protocol):
    """Keep append-only logs of records, one for each namespace. Thread-safe.

    Every call may block, so no decode path may make one. Calls raise StoreUnavailableError if a retry may help, else
    StoreError.
    """

    def append(self, namespace: str, entries: Sequence[tuple[str, bytes]]) -> None:
        """Append ``(session, payload)`` pairs in this order, all or none. They are stored when the call returns."""
        ...

    def read(
        self, namespace: str, *, session: str | None = None, after: str | None = None, newest: int | None = None
    ) -> Iterator[Entry]:
        """Yield entries, oldest first, up to the last one stored when the iteration began.

        session: yield only this session's entries. after: yield only entries behind this cursor (an
        ``Entry.sequence``). newest: yield only the last so many of them. Pages keep the memory for a long log small.
        """
        ...

    def sessions(self, namespace: str) -> list[str]:
        """Return the sorted ids of all sessions with entries; "" stands for entries without a session."""
        ...

    def remove_session(self, namespace: str, session: str) -> int:
        """Erase every entry of ``session``. Returns how many there were."""
        ...

    def ping(self) -> None:
        """Check that the store answers. Raises StoreUnavailableError or StoreError if not."""
        ...

    def close(self) -> None:
        """Close files and connections. Later calls raise StoreError."""
        ...


def namespace(model: str, tokenizer: str, tenant: str | None) -> str:
    """Return the name of a log: 40 hexadecimal digits for a model, a tokenizer and the tenant of a server.

    model: a result of ``model_name``. tokenizer: a result of ``tokenizer_fingerprint``, which identifies the
    vocabulary, so that nobody drafts from another tokenizer's tokens. tenant: None differs from every named tenant;
    each record then names its tenant (``TurnRecord.tenant``).

    Raises ConfigurationError for an empty model or tokenizer, InvalidSessionError for an unusable tenant.
    """
    for field, value in (("model", model), ("tokenizer", tokenizer)):
        if not value:
            raise ConfigurationError(f"{field}: must not be empty; it keeps the logs of different models apart")
    check_ids(tenant=tenant)
    return hashlib.blake2b(frame([SCHEMA, model, tokenizer, tenant]), digest_size=20).hexdigest()


def model_name(name: str) -> str:
    """Return a model's hub id, or the absolute path of its folder, so that two spellings of one folder share a log."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def tokenizer_fingerprint(name: str, revision: str | None) -> str:
    """Return a digest of a tokenizer's files where they are local, else its name and revision."""
    folder = Path(name)
    if not folder.is_dir():
        return f"{name}@{revision or 'default'}"
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.name.startswith(("tokenizer", "vocab", "merges", "tekken", "special_tokens", "added_tokens")):
            digest.update(f"{file.name}:{file.stat().st_size}:".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def frame(parts: Sequence[str | None]) -> bytes:
    """Encode ``parts`` unambiguously as bytes: presence, length and UTF-8 of each."""
    framed = bytearray()
    for part in parts:
        if part is None:
            framed += b"\x00"
            continue
        raw = part.encode("utf-8", "surrogatepass")
        framed += b"\x01" + len(raw).to_bytes(8, "big") + raw
    return bytes(framed)


def check_namespace(namespace: str) -> str:
    """Return ``namespace`` if it can be part of a key. Raises InvalidInputError."""
    if not _NAMESPACE.fullmatch(namespace):
        raise InvalidInputError(
            f"namespace: 1 to 128 of letters, digits and . _ : - expected, got {namespace[:140]!r}; "
            "make one with agentspec.cache.store.namespace()"
        )
    return namespace


def check_newest(newest: int | None) -> int | None:
    """Return ``newest`` if it is a count or None. Raises InvalidInputError."""
    if newest is not None and newest < 0:
        raise InvalidInputError(f"newest: a count of at least 0 expected, got {newest}")
    return newest


def bad_cursor(cursor: str) -> InvalidInputError:
    """Return the error for an ``after`` that is not a cursor."""
    return InvalidInputError(f"after: not a cursor of this store: {cursor!r}; pass an Entry.sequence it gave")
