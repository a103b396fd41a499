"""Encode records as bytes, and decode them.

A payload is a msgpack map::

    {"v": 3, "k": "turn" | "message" | "cut" | "erase", "c": crc32, "m": meta, "d": data}

``meta`` is itself a msgpack map, packed, so that the checksum covers exact bytes. Its keys are places in _FIELDS.
Fields with their default are left out. Text of lower-case hexadecimal digits, such as a session's key, is packed as
bytes. The checksum covers version, kind, meta and data with their lengths. Readers ignore unknown keys of ``meta``, so
that fields can be added. Any other change needs a new version. Readers skip versions and kinds that they do not know.

``data`` of a message is its JSON text. ``data`` of a turn is its token ids, prompt tail and response together: the low
16 bits of each as little-endian numbers, then the third byte of each, then the fourth, all as one raw DEFLATE stream.
That takes 1.2 to 1.7 bytes a token, measured on recorded agents. Where the stream would be longer than the token ids as
little-endian int32, ``data`` is those numbers, and the field ``plain`` is true. No stream unpacks to more than
_MOST_RATIO times its length, so decoding takes no more memory than a multiple of the payload, whatever its bytes say.

Version 2 is still read: its keys are spelled out, digits are text, and a turn's data are plain.
"""

import dataclasses
import json
import re
import struct
import threading
import zlib
from typing import Any, NoReturn

import msgpack
import numpy as np

from agentspec.cache.store.records import CutRecord, EraseRecord, MessageRecord, Record, TurnRecord, json_size
from agentspec.cache.types import SCOPES, Int32Array
from agentspec.errors import CorruptRecordError, InvalidInputError, InvalidTokenError, RecordVersionError
from agentspec.identifiers import check_ids, check_session_id

VERSION = 3
_TURN, _MESSAGE, _CUT, _ERASE = "turn", "message", "cut", "erase"
_KEYS = {2: ("kind", "crc", "meta", "data"), 3: ("k", "c", "m", "d")}
# a field's place in this list is its key in meta, so new ones go to the end
_FIELDS = (
    *("session", "created", "position", "writer", "number", "kept", "parent", "block", "prompt", "plain", "scope"),
    *("tenant", "principal", "parent_session", "group", "session_name", "group_name", "weights", "family"),
    "imported",
)
_PLACES = {name: place for place, name in enumerate(_FIELDS)}
_DEFAULTS: dict[str, Any] = {"session": "", "kept": 0, "parent": 0, "block": 0, "scope": "tenant"}
_DEFAULTS |= {"plain": False, "imported": False}
_MOST_RATIO = 32
_LIMITS = {"max_array_len": 64, "max_map_len": 64, "max_ext_len": 0}
_WRITER = re.compile(r"[0-9a-f]{16}")
_DIGITS = re.compile(r"(?:[0-9a-f]{2}){4,}")
_local = threading.local()  # one packer for each thread, because making one takes ten times as long as packing
# text fields of a turn; meta leaves out those that are None
_NAMES = tuple(field.name for field in dataclasses.fields(TurnRecord) if field.default is None)


def encode(record: Record) -> bytes:
    """Return a record as bytes: about 150 for a turn and 1.2 to 1.7 for each token.

    Raises InvalidInputError for a record that could not be read back: its subclass InvalidSessionError for a bad id,
    InvalidTokenError for arrays that are not one-dimensional int32 or hold negative ids.
    """
    check_ids(session=record.session or None)  # a turn may have no session
    meta: dict[str, Any] = {"session": record.session}
    if isinstance(record, EraseRecord):
        return _seal(_ERASE, meta, b"")
    if isinstance(record, MessageRecord | CutRecord) and record.position is not None:
        if record.position < 0:
            raise InvalidInputError(f"position: a count of at least 0 expected, got {record.position}")
        meta["position"] = record.position
    if isinstance(record, CutRecord):
        return _seal(_CUT, meta, b"")
    meta["created"] = float(record.created)
    if isinstance(record, MessageRecord):
        return _seal(_MESSAGE, meta, _message_bytes(record.message))
    names = {name: value for name in _NAMES if (value := getattr(record, name)) is not None}
    check_ids(**names)
    if not _WRITER.fullmatch(record.writer):
        raise InvalidInputError(f"writer: 16 hexadecimal digits expected, got {record.writer!r}")
    if record.scope not in SCOPES:
        raise InvalidInputError(f"scope: one of {', '.join(SCOPES)} expected, got {record.scope!r}")
    for field, lowest in (("number", 1), ("kept", 0), ("parent", 0), ("block", 0)):
        value = int(getattr(record, field))
        if not lowest <= value < 1 << 64:
            raise InvalidInputError(f"{field}: a 64-bit number of at least {lowest} expected, got {value}")
        meta[field] = value
    meta |= {"writer": record.writer, "scope": record.scope, "prompt": len(record.prompt_tail), **names}
    meta["imported"] = record.imported
    _check_tokens(record.prompt_tail, "prompt_tail")
    _check_tokens(record.response, "response")
    meta["plain"], data = _deflated(np.concatenate([record.prompt_tail, record.response]))
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
    version, kind, meta, data = _open(envelope)
    try:
        fields = _named(_unpack(meta)) if version > 2 else _unpack(meta)
        if kind == _TURN:
            return _turn(fields, _inflated(data) if version > 2 and not fields.get("plain") else data)
        if kind == _MESSAGE:
            return _message(fields, data)
        if kind == _CUT:
            return CutRecord(_text(fields, "session"), _number(fields, "position"))
        return EraseRecord(_text(fields, "session"))
    except CorruptRecordError:
        raise
    except Exception as error:
        raise CorruptRecordError(f"{kind} record with unusable fields: {error!r}") from error


def _open(envelope: object) -> tuple[int, str, bytes, bytes]:
    if not isinstance(envelope, dict) or type(envelope.get("v")) is not int:
        _corrupt("no version")
    version = envelope.pop("v")
    if version not in _KEYS:
        raise RecordVersionError(f"record version {version}, this release reads versions 2 and {VERSION}")
    if envelope.keys() != set(_KEYS[version]):
        _corrupt("fields are missing or unknown")
    kind, crc, meta, data = (envelope[key] for key in _KEYS[version])
    if not (isinstance(kind, str) and isinstance(meta, bytes) and isinstance(data, bytes)):
        _corrupt("a field has the wrong type")
    if crc != _checksum(kind, meta, data, version):
        _corrupt("the checksum does not hold")
    if kind not in (_TURN, _MESSAGE, _CUT, _ERASE):
        raise RecordVersionError(f"record kind {kind[:40]!r} is not known to this release")
    return version, kind, meta, data


def _named(fields: object) -> dict[str, Any]:
    """Return the fields of meta by name. Add the defaults that were left out, and make bytes text again."""
    if not isinstance(fields, dict):
        _corrupt("meta is not a map")
    known = {
        _FIELDS[place]: value for place, value in fields.items() if type(place) is int and 0 <= place < len(_FIELDS)
    }
    return _DEFAULTS | {name: value.hex() if isinstance(value, bytes) else value for name, value in known.items()}


def _turn(fields: dict[str, Any], data: bytes | memoryview) -> TurnRecord:
    tokens: Int32Array = np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)
    split = _number(fields, "prompt")
    if split > len(tokens) or _lowest(tokens) < 0:
        _corrupt("counts or token ids out of range")
    writer, scope = _text(fields, "writer"), fields["scope"]
    if not _WRITER.fullmatch(writer) or scope not in SCOPES:
        _corrupt("its writer or scope cannot be")
    return TurnRecord(
        writer=writer,
        number=_number(fields, "number", lowest=1),
        session=_text(fields, "session"),
        kept=_number(fields, "kept"),
        parent=_number(fields, "parent"),
        block=_number(fields, "block"),
        prompt_tail=tokens[:split],
        response=tokens[split:],
        created=float(fields["created"]),
        scope=scope,
        imported=fields.get("imported") is True,
        **{name: _text(fields, name) for name in _NAMES if fields.get(name) is not None},
    )


def _message(fields: dict[str, Any], data: bytes) -> MessageRecord:
    message = json.loads(data)
    if not isinstance(message, dict):
        _corrupt("the message is not an object")
    position = None if fields.get("position") is None else _number(fields, "position")
    return MessageRecord(_text(fields, "session"), message, float(fields["created"]), position)


def _seal(kind: str, meta: dict[str, Any], data: bytes) -> bytes:
    packed = _pack({_PLACES[name]: _shortened(value) for name, value in meta.items() if value != _DEFAULTS.get(name)})
    crc = _checksum(kind, packed, data, VERSION)
    return _pack({"v": VERSION, **dict(zip(_KEYS[VERSION], (kind, crc, packed, data), strict=True))})


def _shortened(value: object) -> object:
    return bytes.fromhex(value) if isinstance(value, str) and _DIGITS.fullmatch(value) else value


def _checksum(kind: str, meta: bytes, data: bytes, version: int) -> int:
    name = kind.encode("utf-8", "surrogatepass")
    head = struct.pack("<BIQQ", version, len(name), len(meta), len(data)) + name
    return zlib.crc32(data, zlib.crc32(meta, zlib.crc32(head)))


def _check_tokens(tokens: Int32Array, field: str) -> None:
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1:
        raise InvalidTokenError(f"{field}: a one-dimensional int32 array expected")
    if _lowest(tokens) < 0:
        raise InvalidTokenError(f"{field}: negative token id {_lowest(tokens)}")


def _deflated(tokens: Int32Array) -> tuple[bool, bytes]:
    """Return token ids, int32 [N], as bytes, and whether these are the plain numbers."""
    numbers = tokens.astype("<i4", copy=False)
    parts = numbers.view(np.uint8).reshape(-1, 4)
    ordered = b"".join(np.ascontiguousarray(part).tobytes() for part in (parts[:, :2], parts[:, 2], parts[:, 3]))
    coded = _deflate(ordered, zlib.Z_DEFAULT_STRATEGY)
    if len(ordered) > _MOST_RATIO * len(coded):  # a repeated token: without matches the stream stays within the ratio
        coded = _deflate(ordered, zlib.Z_HUFFMAN_ONLY)
    return (True, numbers.tobytes()) if len(coded) >= len(ordered) else (False, coded)


def _deflate(given: bytes, strategy: int) -> bytes:
    coder = zlib.compressobj(zlib.Z_DEFAULT_COMPRESSION, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, strategy)
    return coder.compress(given) + coder.flush()


def _inflated(data: bytes) -> memoryview:
    """Return the token ids of a DEFLATE stream as little-endian int32."""
    decoder = zlib.decompressobj(-zlib.MAX_WBITS)
    ordered = np.frombuffer(decoder.decompress(data, _MOST_RATIO * len(data) + 1), np.uint8)
    if not decoder.eof or decoder.unused_data or len(ordered) % 4:
        _corrupt("its tokens cannot be unpacked")
    count = len(ordered) // 4
    parts = np.empty((count, 4), np.uint8)
    parts[:, :2] = ordered[: 2 * count].reshape(count, 2)
    parts[:, 2:] = ordered[2 * count :].reshape(2, count).T
    return parts.reshape(-1).data.toreadonly()


def _message_bytes(message: object) -> bytes:
    if not isinstance(message, dict):
        raise InvalidInputError(f"message: an object expected, got {type(message).__name__}")
    try:
        json_size(message)  # refuses keys that JSON would turn into text
        return json.dumps(message, separators=(",", ":")).encode()  # ASCII: lone surrogates are escaped
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"message: not a JSON object: {error}") from error


def _lowest(tokens: Int32Array) -> int:
    return int(np.minimum.reduce(tokens, initial=0))  # takes half as long as min()


# Names may hold what HTTP headers hold; "surrogatepass" keeps every string that Python can hold.
def _pack(value: object) -> bytes:
    packer = getattr(_local, "packer", None)
    if packer is None:
        packer = _local.packer = msgpack.Packer(use_bin_type=True, unicode_errors="surrogatepass")
    try:
        packed: bytes = packer.pack(value)
    except BaseException:
        _local.packer = None  # the packer may hold half of the value
        raise
    return packed


def _unpack(packed: bytes) -> Any:
    return msgpack.unpackb(packed, raw=False, strict_map_key=False, unicode_errors="surrogatepass", **_LIMITS)


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        _corrupt(f"the {name} is not text")
    return check_session_id(value, name) if value or name != "session" else ""  # a turn may have no session


def _number(fields: dict[str, Any], name: str, lowest: int = 0) -> int:
    value = fields[name]
    if type(value) is not int or value < lowest:
        _corrupt(f"the {name} is not a count")
    return value


def _corrupt(what: str) -> NoReturn:
    raise CorruptRecordError(f"damaged record: {what}")
