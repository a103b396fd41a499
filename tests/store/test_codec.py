"""Records as bytes: exact round trips, and no bytes at all that crash or give other tokens."""

import string
import zlib

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache.store import MessageRecord, Record, TurnRecord, decode, encode
from agentspec.cache.store.records import _checksum, _seal
from agentspec.errors import (
    CorruptRecordError,
    InvalidInputError,
    InvalidSessionError,
    InvalidTokenError,
    RecordError,
    RecordVersionError,
)
from tests.store.helpers import tokens, turn

TOKENS = st.lists(st.one_of(st.integers(0, 2**31 - 1), st.sampled_from([0, 2**31 - 1])), max_size=40).map(
    lambda values: np.array(values, dtype=np.int32)
)
SESSIONS = st.text(string.ascii_letters + "äß漢🙂 -_/", min_size=1, max_size=30).filter(str.strip)
TURNS = st.builds(
    TurnRecord,
    SESSIONS,
    st.integers(0, 2**40),
    TOKENS,
    TOKENS,
    st.floats(0, 4e9),
    st.booleans(),
    st.none() | SESSIONS,
)
# with lone surrogates: model output that was cut within a character holds them
TEXT = st.text(st.characters(), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.builds(
    MessageRecord,
    SESSIONS,
    st.dictionaries(TEXT, JSON, max_size=4),
    st.floats(0, 4e9),
    st.none() | st.integers(0, 2**63),
)


@settings(deadline=None)
@given(TURNS)
def test_turns_come_back_equal(record: TurnRecord) -> None:
    back = decode(encode(record))
    assert isinstance(back, TurnRecord)
    assert back == record
    assert back.prompt_tail.dtype == back.response.dtype == np.int32


@settings(deadline=None)
@given(MESSAGES)
def test_messages_come_back_equal(record: MessageRecord) -> None:
    assert decode(encode(record)) == record


@settings(deadline=None)
@given(TURNS | MESSAGES, st.data())
def test_whatever_is_changed_in_the_bytes_is_noticed(record: Record, data: st.DataObject) -> None:
    payload = bytearray(encode(record))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(payload) - 1))
        match data.draw(st.sampled_from(["set", "insert", "delete", "cut", "append"])):
            case "set":
                payload[position] = data.draw(st.integers(0, 255))
            case "insert":
                payload.insert(position, data.draw(st.integers(0, 255)))
            case "delete" if len(payload) > 1:
                del payload[position]
            case "cut" if position:
                del payload[position:]
            case _:
                payload.append(data.draw(st.integers(0, 255)))
    try:
        back = decode(bytes(payload))
    except RecordError:
        return
    assert back == record  # some changes are none: a byte set to what it was


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_record_error(payload: bytes) -> None:
    with pytest.raises(RecordError):
        decode(payload)


def test_every_single_bit_counts() -> None:
    record = turn("s", 7, kept=3)
    payload = encode(record)
    for position in range(len(payload)):
        for bit in range(8):
            changed = bytearray(payload)
            changed[position] ^= 1 << bit
            with pytest.raises(RecordError):
                decode(bytes(changed))


def test_tokens_lie_raw_and_little_endian_in_the_payload() -> None:
    payload = encode(TurnRecord("s", 0, tokens(1), tokens(2**31 - 1), 1.0))
    assert b"\x01\x00\x00\x00\xff\xff\xff\x7f" in payload
    record = TurnRecord("session-1", 0, tokens(), np.arange(500, dtype=np.int32), 1.0)
    assert len(encode(record)) < 4 * 500 + 120


def test_another_version_and_another_kind_are_told_from_damage() -> None:
    envelope = msgpack.unpackb(encode(turn("s", 1)))
    with pytest.raises(RecordVersionError, match="version 2"):
        decode(msgpack.packb({**envelope, "v": 2, "anything": "else"}))
    with pytest.raises(RecordVersionError, match="snapshot"):
        decode(_seal("snapshot", {}, b""))


def test_later_fields_of_meta_are_ignored() -> None:
    meta = {"session": "s", "created": 1.0, "kept": 0, "prompt": 1, "mood": "p1"}
    back = decode(_seal("turn", meta, tokens(4, 5).tobytes()))
    assert back == TurnRecord("s", 0, tokens(4), tokens(5), 1.0)


def test_a_turn_of_before_there_were_groups_is_read_and_one_without_is_written_as_then() -> None:
    old = {"session": "s", "created": 1.0, "kept": 0, "prompt": 1}
    payload = _seal("turn", old, tokens(4, 5).tobytes())
    record = decode(payload)
    assert record == TurnRecord("s", 0, tokens(4), tokens(5), 1.0, group=None)
    assert encode(record) == payload
    assert decode(encode(TurnRecord("s", 0, tokens(4), tokens(5), 1.0, group="p"))) != record


@pytest.mark.parametrize(
    ("change", "data"),
    [
        ({"prompt": 3}, tokens(4, 5).tobytes()),
        ({"prompt": -1}, tokens(4, 5).tobytes()),
        ({"kept": -1}, tokens(4, 5).tobytes()),
        ({"kept": "x"}, tokens(4, 5).tobytes()),
        ({"prompt": 1.0}, tokens(4, 5).tobytes()),
        ({"session": 5}, tokens(4, 5).tobytes()),
        ({"group": 5}, tokens(4, 5).tobytes()),
        ({}, tokens(4, -5).tobytes()),
        ({}, b"abc"),
    ],
)
def test_a_true_checksum_does_not_excuse_senseless_fields(change: dict[str, object], data: bytes) -> None:
    meta = {"session": "s", "created": 1.0, "kept": 0, "prompt": 1, **change}
    with pytest.raises(CorruptRecordError):
        decode(_seal("turn", meta, data))


def test_the_checksum_is_crc32_over_framed_parts() -> None:
    assert _checksum("turn", b"ab", b"c") != _checksum("turn", b"a", b"bc")
    assert _checksum("turn", b"", b"") != zlib.crc32(b"")


@pytest.mark.parametrize(
    ("record", "error", "field"),
    [
        (TurnRecord("s", -1, tokens(), tokens(), 1.0), InvalidInputError, "kept"),
        (TurnRecord("s", 0, tokens(-4), tokens(), 1.0), InvalidTokenError, "prompt_tail"),
        (TurnRecord("s", 0, tokens(), np.array([1.5]), 1.0), InvalidTokenError, "response"),
        (TurnRecord("s", 0, tokens(), tokens(1).reshape(1, 1), 1.0), InvalidTokenError, "response"),
        (TurnRecord("a\nb", 0, tokens(), tokens(1), 1.0), InvalidSessionError, "session"),
        (TurnRecord("s", 0, tokens(), tokens(1), 1.0, group="a\nb"), InvalidSessionError, "group"),
        (MessageRecord("s", {"x": object()}, 1.0), InvalidInputError, "message"),
        (MessageRecord("s", {}, 1.0, position=-1), InvalidInputError, "position"),
        (MessageRecord("s", {1: "x"}, 1.0), InvalidInputError, "message"),  # type: ignore[dict-item]
        (MessageRecord("s", {"x": 2**70}, 1.0), InvalidInputError, "message"),
        (MessageRecord("s", ["x"], 1.0), InvalidInputError, "message"),  # type: ignore[arg-type]
    ],
)
def test_what_could_not_be_read_back_is_not_encoded(record: Record, error: type[Exception], field: str) -> None:
    with pytest.raises(error, match=field):
        encode(record)
