"""The interface of every store, and the names of the logs in it."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentspec.cache.identifiers import check_ids
from agentspec.errors import ConfigurationError, InvalidInputError

SCHEMA = "agentspec-log-1"
"""Part of every namespace: a change of what records mean starts new logs."""

_NAMESPACE = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored record with its place in the log.

    sequence: opaque cursor; within a namespace, string order is log order.
    """

    sequence: str
    session: str
    payload: bytes


class Store(Protocol):
    """Append-only token logs, one a namespace. Thread-safe. Every call may block, so none belongs on a decode path.

    Raises StoreUnavailableError where trying again later may help, StoreError where it will not.
    """

    def append(self, namespace: str, entries: Sequence[tuple[str, bytes]]) -> None:
        """Add ``(session, payload)`` pairs in this order, all or none. They are stored when the call returns."""
        ...

    def read(
        self, namespace: str, *, session: str | None = None, after: str | None = None, newest: int | None = None
    ) -> Iterator[Entry]:
        """Return entries, oldest first, up to what was stored when the iteration began.

        session: only this session's. after: only those behind this cursor (an ``Entry.sequence``). newest: only the
        last so many of these. Reads in pages, so a long log takes little memory.
        """
        ...

    def sessions(self, namespace: str) -> list[str]:
        """Return the ids of the sessions with entries, sorted; "" stands for the entries of no session."""
        ...

    def remove_session(self, namespace: str, session: str) -> int:
        """Erase every entry of ``session``. Returns how many there were."""
        ...

    def ping(self) -> None:
        """Return if the store answers. Raises StoreUnavailableError or StoreError if not."""
        ...

    def close(self) -> None:
        """Close files and connections. Later calls raise StoreError."""
        ...


def namespace(model: str, tokenizer: str, tenant: str | None) -> str:
    """Return the name of a log: 40 hexadecimal digits for a model, a tokenizer and the tenant of a server.

    model: as ``model_name`` gives it. tokenizer: as ``tokenizer_fingerprint`` gives it; it identifies the vocabulary
    itself, so that nobody drafts from tokens of another tokenizer. tenant: None differs from every named tenant; the
    records then say whose they are (``TurnRecord.tenant``).

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
    """Return ``parts`` as bytes that no other sequence gives: presence, length and UTF-8 of each."""
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
    """Return the error for an ``after`` that is no cursor."""
    return InvalidInputError(f"after: not a cursor of this store: {cursor!r}; pass an Entry.sequence it gave")
