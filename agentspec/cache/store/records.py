"""Encode and decode stored records: turns on the server's side, messages on the client's.

A payload is a msgpack map::

    {"v": 1, "kind": "turn" | "message" | "erase", "crc": crc32, "meta": bytes, "data": bytes}

``meta`` is itself msgpack, so that the checksum covers exact bytes. ``data`` is little-endian int32 token ids, or the
msgpack of a message. The checksum covers version, kind, meta and data with their lengths. Readers ignore unknown keys
of ``meta``, so that fields can be added. Any other change needs a new version. Readers skip versions and kinds that
they do not know.
"""

import struct
import threading
import zlib
from dataclasses import dataclass
from typing import Any, NoReturn

import msgpack
import numpy as np

from agentspec.cache.identifiers import check_ids
from agentspec.cache.types import SCOPES, Int32Array, Scope
from agentspec.errors import CorruptRecordError, InvalidInputError, InvalidTokenError, RecordVersionError

VERSION = 1
_TURN = "turn"
_MESSAGE = "message"
_ERASE = "erase"
_KEYS = {"v", "kind", "crc", "meta", "data"}
_OPTIONAL = ("group", "tenant", "scope")  # meta omits these fields of a turn if they are None
_OVERHEAD = 256  # approximate bytes of a record in memory without its tokens or message
_local = threading.local()  # one packer for each thread, because making one takes ten times as long as packing


@dataclass(frozen=True, slots=True, eq=False)
class TurnRecord:
    """Hold the new tokens of one finished turn of a session.

    The turn's prompt is ``previous_context[:kept] + prompt_tail``. The previous context is prompt and response of the
    session's previous turn. The arrays must not change once the record is queued.

    session: "" for a turn without a session, stored for its tenant's global index.
    kept: tokens at the start of the session's previous context that this prompt repeats.
    prompt_tail, response: token ids, int32 [P] and [N].
    created: seconds since the epoch.
    gap: the turn just before this one was lost, so ``kept`` refers to a context that is not in the log.
    group: the group whose sessions draft from each other's responses.
    tenant: the tenant that shares the turn. None is a tenant too: requests without API key, cache salt and adapter.
    scope: what the request drafted from. None: unknown, because the record is older than scopes.
    """

    session: str
    kept: int
    prompt_tail: Int32Array
    response: Int32Array
    created: float
    gap: bool = False
    group: str | None = None
    tenant: str | None = None
    scope: Scope | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TurnRecord):
            return NotImplemented
        return (
            (self.session, self.group, self.tenant, self.scope, self.kept, self.created, self.gap)
            == (other.session, other.group, other.tenant, other.scope, other.kept, other.created, other.gap)
            and np.array_equal(self.prompt_tail, other.prompt_tail)
            and np.array_equal(self.response, other.response)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays inside

    @property
    def size(self) -> int:
        """Bytes that the record takes in memory, roughly."""
        return _OVERHEAD + self.prompt_tail.nbytes + self.response.nbytes


@dataclass(frozen=True, slots=True)
class MessageRecord:
    """Hold one message of a session as the client saw it.

    message: a JSON-able object. created: seconds since the epoch. position: number of the session's messages before
    it, lost ones included, so that readers see what is missing; None: an older release wrote the record.
    """

    session: str
    message: dict[str, Any]
    created: float
    position: int | None = None

    @property
    def size(self) -> int:
        """Bytes that the record takes in memory, roughly."""
        return _OVERHEAD + _packed_size(self.message)


@dataclass(frozen=True, slots=True)
class EraseRecord:
    """Mark that a session was erased. session: its key in the store; its name is nowhere."""

    session: str

    @property
    def size(self) -> int:
        """Bytes that the record takes in memory, roughly."""
        return _OVERHEAD


Record = TurnRecord | MessageRecord | EraseRecord


def encode(record: Record) -> bytes:
    """Return a record as bytes: about 100 for a turn and 4 for each token.

    Raises InvalidInputError for what could not be read back: InvalidSessionError for an id, InvalidTokenError for
    arrays that are not one-dimensional int32 or hold negative ids.
    """
    check_ids(session=record.session or None)  # a turn may have no session
    meta: dict[str, Any] = {"session": record.session}
    if isinstance(record, EraseRecord):
        return _seal(_ERASE, meta, b"")
    meta["created"] = float(record.created)
    if isinstance(record, MessageRecord):
        if record.position is not None:
            if record.position < 0:
                raise InvalidInputError(f"position: a count of at least 0 expected, got {record.position}")
            meta["position"] = record.position
        return _seal(_MESSAGE, meta, _message_bytes(record.message))
    check_ids(group=record.group, tenant=record.tenant)
    if record.kept < 0:
        raise InvalidInputError(f"kept: a count of at least 0 expected, got {record.kept}")
    meta |= {"kept": int(record.kept), "prompt": len(record.prompt_tail)}
    if record.gap:
        meta["gap"] = True
    meta |= {name: value for name in _OPTIONAL if (value := getattr(record, name)) is not None}
    data = _token_bytes(record.prompt_tail, "prompt_tail") + _token_bytes(record.response, "response")
    return _seal(_TURN, meta, data)


def decode(payload: bytes) -> Record:
    """Return the record in ``payload``; its arrays are read-only views.

    Raises CorruptRecordError if checksum or framing is wrong, and RecordVersionError for a version or kind that this
    release does not know. It raises no other error, whatever the bytes.
    """
    try:
        envelope = _unpack(payload)
    except Exception as error:  # msgpack raises a dozen types
        raise CorruptRecordError(f"not a record: {error}") from error
    kind, meta, data = _open(envelope)
    try:
        fields = _unpack(meta)
        if kind == _ERASE:
            return EraseRecord(_text(fields, "session"))
        return _turn(fields, data) if kind == _TURN else _message(fields, data)
    except CorruptRecordError:
        raise
    except Exception as error:
        raise CorruptRecordError(f"{kind} record with unusable fields: {error!r}") from error


def _open(envelope: object) -> tuple[str, bytes, bytes]:
    if not isinstance(envelope, dict) or type(envelope.get("v")) is not int:
        _corrupt("no version")
    if envelope["v"] != VERSION:
        raise RecordVersionError(f"record version {envelope['v']}, this release reads version {VERSION}")
    if envelope.keys() != _KEYS:
        _corrupt("fields are missing or unknown")
    kind, crc, meta, data = (envelope[key] for key in ("kind", "crc", "meta", "data"))
    if not (isinstance(kind, str) and isinstance(meta, bytes) and isinstance(data, bytes)):
        _corrupt("a field has the wrong type")
    if crc != _checksum(kind, meta, data):
        _corrupt("the checksum does not hold")
    if kind not in (_TURN, _MESSAGE, _ERASE):
        raise RecordVersionError(f"record kind {kind!r} is not known to this release")
    return kind, meta, data


def _turn(fields: dict[str, Any], data: bytes) -> TurnRecord:
    tokens: Int32Array = np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)
    split, kept, scope = fields["prompt"], fields["kept"], fields.get("scope")
    if not 0 <= split <= len(tokens) or kept < 0 or _lowest(tokens) < 0:
        _corrupt("counts or token ids out of range")
    if scope is not None and scope not in SCOPES:
        _corrupt("its scope is not known")
    return TurnRecord(
        session=_text(fields, "session"),
        kept=kept,
        prompt_tail=tokens[:split],
        response=tokens[split:],
        created=float(fields["created"]),
        gap=bool(fields.get("gap", False)),
        group=None if fields.get("group") is None else _text(fields, "group"),
        tenant=None if fields.get("tenant") is None else _text(fields, "tenant"),
        scope=scope,
    )


def _message(fields: dict[str, Any], data: bytes) -> MessageRecord:
    message = _unpack(data)
    if not isinstance(message, dict):
        _corrupt("the message is not an object")
    position = fields.get("position")
    if position is not None and (type(position) is not int or position < 0):
        _corrupt("its position is not a count")
    return MessageRecord(_text(fields, "session"), message, float(fields["created"]), position)


def _seal(kind: str, meta: dict[str, Any], data: bytes) -> bytes:
    packed = _pack(meta)
    crc = _checksum(kind, packed, data)
    return _pack({"v": VERSION, "kind": kind, "crc": crc, "meta": packed, "data": data})


def _checksum(kind: str, meta: bytes, data: bytes) -> int:
    name = kind.encode("utf-8", "surrogatepass")
    head = struct.pack("<BIQQ", VERSION, len(name), len(meta), len(data)) + name
    return zlib.crc32(data, zlib.crc32(meta, zlib.crc32(head)))


def _token_bytes(tokens: Int32Array, field: str) -> bytes:
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1:
        raise InvalidTokenError(f"{field}: a one-dimensional int32 array expected")
    if _lowest(tokens) < 0:
        raise InvalidTokenError(f"{field}: negative token id {_lowest(tokens)}")
    return tokens.astype("<i4", copy=False).tobytes()


def _message_bytes(message: object) -> bytes:
    if not isinstance(message, dict):
        raise InvalidInputError(f"message: an object expected, got {type(message).__name__}")
    try:
        data = _pack(message)
        _unpack(data)  # msgpack packs some values that it refuses to read, such as integer keys
    except Exception as error:
        raise InvalidInputError(f"message: not a JSON-able object: {error}") from error
    return data


def _lowest(tokens: Int32Array) -> int:
    return int(np.minimum.reduce(tokens, initial=0))  # takes half as long as min()


# Model output that was cut within a character holds lone surrogates, which must be kept.
def _pack(value: object) -> bytes:
    packer = getattr(_local, "packer", None)
    if packer is None:
        packer = _local.packer = msgpack.Packer(use_bin_type=True, unicode_errors="surrogatepass")
    try:
        packed: bytes = packer.pack(value)
    except BaseException:
        _local.packer = None  # it may hold half of the value
        raise
    return packed


def _unpack(packed: bytes) -> Any:
    return msgpack.unpackb(packed, raw=False, strict_map_key=True, unicode_errors="surrogatepass")


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        _corrupt(f"the {name} is not text")
    return value


def _corrupt(what: str) -> NoReturn:
    raise CorruptRecordError(f"damaged record: {what}")


def _packed_size(value: Any) -> int:
    """Estimate the bytes of a JSON-able value when packed."""
    if isinstance(value, str):
        return 5 + len(value)
    if isinstance(value, dict):
        return 5 + sum(_packed_size(key) + _packed_size(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return 5 + sum(map(_packed_size, value))
    return 9
