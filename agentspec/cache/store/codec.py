"""Records as bytes.

A payload is a msgpack map::

    {"v": 1, "kind": "turn" | "message", "crc": crc32, "meta": bytes, "data": bytes}

``meta`` is itself msgpack (so that the checksum covers exact bytes), ``data`` is raw little-endian int32 token ids, or
the msgpack of a message. The checksum covers version, kind, meta and data with their lengths. Unknown keys of ``meta``
are ignored, so that fields can be added; anything else that changes gets a new version, and readers skip versions and
kinds that they do not know.
"""

import struct
import threading
import zlib
from typing import Any, NoReturn

import msgpack
import numpy as np

from agentspec.cache.identifiers import check_ids, check_session_id
from agentspec.cache.store.records import Int32, MessageRecord, Record, TurnRecord
from agentspec.cache.types import SCOPES, Scope
from agentspec.errors import CorruptRecordError, InvalidInputError, InvalidTokenError, RecordVersionError

VERSION = 1
_TURN = "turn"
_MESSAGE = "message"
_local = threading.local()  # a packer a thread: a new one takes ten times as long as the packing
_KEYS = {"v", "kind", "crc", "meta", "data"}


def encode(record: Record) -> bytes:
    """A record of either kind as bytes. Raises InvalidInputError for one that could not be read back."""
    if record.session:  # empty: a turn of no session
        check_session_id(record.session)
    if isinstance(record, TurnRecord):
        check_ids(group=record.group, tenant=record.tenant)
    return encode_turn(record) if isinstance(record, TurnRecord) else encode_message(record)


def encode_turn(record: TurnRecord) -> bytes:
    """A turn as bytes: 4 a token and about 100.

    Raises InvalidTokenError for arrays that are not one-dimensional int32 or hold negative ids, InvalidInputError for
    a negative ``kept``.
    """
    if record.kept < 0:
        raise InvalidInputError(f"kept: a count of at least 0 expected, got {record.kept}")
    meta: dict[str, Any] = {
        "session": record.session,
        "created": float(record.created),
        "kept": int(record.kept),
        "prompt": len(record.prompt_tail),
    }
    if record.gap:
        meta["gap"] = True
    for name in ("group", "tenant", "scope"):
        if (value := getattr(record, name)) is not None:
            meta[name] = value
    data = _token_bytes(record.prompt_tail, "prompt_tail") + _token_bytes(record.response, "response")
    return _seal(_TURN, meta, data)


def encode_message(record: MessageRecord) -> bytes:
    """A message as bytes. Raises InvalidInputError if the message is not a JSON-able object."""
    meta = {"session": record.session, "created": float(record.created)}
    if not isinstance(record.message, dict):
        raise InvalidInputError(f"message: an object expected, got {type(record.message).__name__}")
    try:
        data = _pack(record.message)
        _unpack(data)  # msgpack packs some things that it refuses to read, such as integer keys
    except Exception as error:
        raise InvalidInputError(f"message: not a JSON-able object: {error}") from error
    return _seal(_MESSAGE, meta, data)


def decode(payload: bytes) -> Record:
    """The record that ``payload`` holds; its arrays are read-only views.

    Raises CorruptRecordError if checksum or framing does not hold, RecordVersionError for a version or kind that this
    release does not know. Nothing else, whatever the bytes.
    """
    try:
        envelope = _unpack(payload)
    except Exception as error:  # msgpack raises a dozen types
        raise CorruptRecordError(f"not a record: {error}") from error
    kind, meta, data = _open(envelope)
    try:
        fields = _unpack(meta)
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
    if kind not in (_TURN, _MESSAGE):
        raise RecordVersionError(f"record kind {kind!r} is not known to this release")
    return kind, meta, data


def _turn(fields: dict[str, Any], data: bytes) -> TurnRecord:
    tokens: Int32 = np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)
    split, kept = fields["prompt"], fields["kept"]
    if not 0 <= split <= len(tokens) or kept < 0 or _lowest(tokens) < 0:
        _corrupt("counts or token ids out of range")
    return TurnRecord(
        session=_text(fields, "session"),
        kept=kept,
        prompt_tail=tokens[:split],
        response=tokens[split:],
        created=float(fields["created"]),
        gap=bool(fields.get("gap", False)),
        group=None if fields.get("group") is None else _text(fields, "group"),
        tenant=None if fields.get("tenant") is None else _text(fields, "tenant"),
        scope=None if fields.get("scope") is None else _scope(fields),
    )


def _message(fields: dict[str, Any], data: bytes) -> MessageRecord:
    message = _unpack(data)
    if not isinstance(message, dict):
        _corrupt("the message is not an object")
    return MessageRecord(_text(fields, "session"), message, float(fields["created"]))


def _seal(kind: str, meta: dict[str, Any], data: bytes) -> bytes:
    packed = _pack(meta)
    crc = _checksum(kind, packed, data)
    return _pack({"v": VERSION, "kind": kind, "crc": crc, "meta": packed, "data": data})


def _checksum(kind: str, meta: bytes, data: bytes) -> int:
    name = kind.encode("utf-8", "surrogatepass")
    head = struct.pack("<BIQQ", VERSION, len(name), len(meta), len(data)) + name
    return zlib.crc32(data, zlib.crc32(meta, zlib.crc32(head)))


def _token_bytes(tokens: Int32, field: str) -> bytes:
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1:
        raise InvalidTokenError(f"{field}: a one-dimensional int32 array expected")
    if _lowest(tokens) < 0:
        raise InvalidTokenError(f"{field}: negative token id {_lowest(tokens)}")
    return tokens.astype("<i4", copy=False).tobytes()


def _lowest(tokens: Int32) -> int:
    return int(np.minimum.reduce(tokens, initial=0))  # half the time of min()


# lone surrogates appear in model output that was cut within a character: they must survive
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


def _scope(fields: dict[str, Any]) -> Scope:
    if fields["scope"] not in SCOPES:
        _corrupt("its scope is not known")
    scope: Scope = fields["scope"]
    return scope


def _corrupt(what: str) -> NoReturn:
    raise CorruptRecordError(f"damaged record: {what}")
