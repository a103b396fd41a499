"""Test records as bytes: exact round trips, and no bytes that crash, take much memory or give other tokens."""

import json
import string
import tracemalloc
import zlib
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache import SCOPES, Scope
from agentspec.cache.store import CutRecord, EraseRecord, MessageRecord, Record, TurnRecord, decode, encode
from agentspec.cache.store.codec import _MOST_RATIO, _checksum, _deflate, _seal
from agentspec.errors import (
    CorruptRecordError,
    InvalidInputError,
    InvalidSessionError,
    InvalidTokenError,
    RecordError,
    RecordVersionError,
)
from tests.store.fuzz import fuzz
from tests.store.helpers import WRITER, seal_2, tokens, turn, version_2

TOKENS = st.lists(st.one_of(st.integers(0, 2**31 - 1), st.sampled_from([0, 2**31 - 1])), max_size=40).map(
    lambda values: np.array(values, dtype=np.int32)
)
NAMES = st.text(string.ascii_letters + "äß漢🙂 -_/", min_size=1, max_size=30).filter(str.strip)
WORDS = st.integers(0, 2**64 - 1)
TURNS = st.builds(
    TurnRecord,
    writer=st.text("0123456789abcdef", min_size=16, max_size=16),
    number=st.integers(1, 2**64 - 1),
    session=NAMES | st.just(""),
    kept=WORDS,
    parent=WORDS,
    block=WORDS,
    prompt_tail=TOKENS,
    response=TOKENS,
    created=st.floats(0, 4e9),
    tenant=st.none() | NAMES,
    principal=st.none() | NAMES,
    parent_session=st.none() | NAMES,
    group=st.none() | NAMES,
    session_name=st.none() | NAMES,
    group_name=st.none() | NAMES,
    scope=st.sampled_from(SCOPES),
    weights=st.none() | NAMES,
)
# Text has lone surrogates, as model output that was cut within a character has.
TEXT = st.text(st.characters(), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.builds(
    MessageRecord, NAMES, st.dictionaries(TEXT, JSON, max_size=4), st.floats(0, 4e9), st.none() | st.integers(0, 2**40)
)
CUTS = st.builds(CutRecord, NAMES, st.integers(0, 2**40))
RECORDS = TURNS | MESSAGES | CUTS | st.builds(EraseRecord, NAMES)
META: dict[str, Any] = {
    "writer": WRITER,
    "number": 1,
    "session": "s",
    "created": 1.0,
    "kept": 0,
    "parent": 0,
    "block": 0,
    "scope": "tenant",
    "prompt": 1,
}
PLAIN = {"plain": True}


@settings(deadline=None)
@given(RECORDS)
def test_records_come_back_equal(record: Record) -> None:
    back = decode(encode(record))
    assert back == record
    assert type(back) is type(record)
    if isinstance(back, TurnRecord) and isinstance(record, TurnRecord):
        assert back.prompt_tail.dtype == back.response.dtype == np.int32
        assert np.array_equal(back.prompt_tail, record.prompt_tail)
        assert (back.writer, back.number, back.parent) == (record.writer, record.number, record.parent)


@settings(deadline=None)
@given(RECORDS, st.data())
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
    assert back == record  # a change may set a byte to what it was


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_record_error(payload: bytes) -> None:
    with pytest.raises(RecordError):
        decode(payload)


@settings(deadline=None)
@given(TURNS)
def test_turns_of_version_2_are_read(record: TurnRecord) -> None:
    assert decode(version_2(record)) == record


def test_fuzzed_records_never_crash_behind_recomputed_checksums_either() -> None:
    counts = fuzz(120_000, seed=1)
    assert sum(counts.values()) == 120_000
    assert counts["decoded"] > 5_000  # many mutations give a valid record,
    assert counts["CorruptRecordError"] > 50_000  # and most don't


def test_every_single_bit_counts() -> None:
    payload = encode(turn("s", 7))
    for position in range(len(payload)):
        for bit in range(8):
            changed = bytearray(payload)
            changed[position] ^= 1 << bit
            with pytest.raises(RecordError):
                decode(bytes(changed))


@pytest.mark.parametrize(
    "nested", [b"\xdd\x00\x0f\x00\x00", b"\xdf\x00\x0f\x00\x00", b"\x91", b"\xc9\x7f\xff\xff\xff\x00"]
)
def test_lengths_that_lie_take_no_memory(nested: bytes) -> None:
    """Each header claims a million values, for which msgpack would allocate memory at once, at each level."""
    hollow = nested * (1_000_000 // len(nested))
    envelope = b"\x85\xa1v\x03\xa1k\xa4turn\xa1c" + hollow
    meta = {"v": 3, "k": "turn", "c": _checksum("turn", hollow, b"", 3), "m": hollow, "d": b""}
    text = b'{"a":' + b"[" * 500_000
    message = {**meta, "k": "message", "m": b"\x80", "d": text, "c": _checksum("message", b"\x80", text, 3)}
    tracemalloc.start()
    for payload in (hollow, envelope, msgpack.packb(meta), msgpack.packb(message)):
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        with pytest.raises(CorruptRecordError):
            decode(payload)
        assert tracemalloc.get_traced_memory()[1] - before < 8 * len(payload)
    tracemalloc.stop()


def test_a_stream_that_would_fill_the_memory_is_refused() -> None:
    bomb = _deflate(bytes(256 << 20), 0)
    assert len(bomb) < 300_000
    tracemalloc.start()
    with pytest.raises(CorruptRecordError, match="unpacked"):
        decode(_seal("turn", META, bomb))
    assert tracemalloc.get_traced_memory()[1] < (2 * _MOST_RATIO + 8) * len(bomb)
    tracemalloc.stop()


@pytest.mark.parametrize("data", [_deflate(b"12345", 0), _deflate(b"1234" * 9, 0)[:-2], _deflate(b"1234", 0) + b"x"])
def test_a_stream_that_ends_elsewhere_is_damage(data: bytes) -> None:
    with pytest.raises(CorruptRecordError, match="unpacked"):
        decode(_seal("turn", META, data))


def test_one_token_again_and_again_is_coded_within_the_bound() -> None:
    same = TurnRecord(
        writer=WRITER, number=1, prompt_tail=tokens(), response=np.full(100_000, 70_000, np.int32), created=1.0
    )
    payload = encode(same)
    assert 400_000 / _MOST_RATIO < len(payload) < 100_000
    assert decode(payload) == same


def test_tokens_take_less_than_their_bits() -> None:
    """A vocabulary of 100,000 needs 16.6 bits a token, but text uses few tokens often."""
    often = np.random.default_rng(1).zipf(1.3, 20_000) % 100_000
    record = TurnRecord(writer=WRITER, number=1, prompt_tail=tokens(), response=often.astype(np.int32), created=1.0)
    assert len(encode(record)) < 1.7 * 20_000
    assert b"\x01\x00\x00\x00\xff\xff\xff\x7f" in encode(wrong(prompt_tail=tokens(1), response=tokens(2**31 - 1)))


def test_another_version_and_another_kind_are_told_from_damage() -> None:
    envelope = msgpack.unpackb(encode(turn("s", 1)))
    for version in (1, 4):
        with pytest.raises(RecordVersionError, match=f"version {version}"):
            decode(msgpack.packb({**envelope, "v": version, "anything": "else"}))
    with pytest.raises(RecordVersionError, match="snapshot"):
        decode(_seal("snapshot", {}, b""))


def test_later_fields_of_meta_are_ignored() -> None:
    envelope = msgpack.unpackb(_seal("turn", META | PLAIN, tokens(4, 5).tobytes()))
    meta = msgpack.packb(msgpack.unpackb(envelope["m"], strict_map_key=False) | {90: "p1", "mood": 2})
    back = decode(msgpack.packb({**envelope, "m": meta, "c": _checksum("turn", meta, envelope["d"], 3)}))
    assert back == TurnRecord(
        writer=WRITER, number=1, session="s", prompt_tail=tokens(4), response=tokens(5), created=1.0
    )


@pytest.mark.parametrize(
    ("change", "data"),
    [
        *(({field: value}, tokens(4, 5).tobytes()) for field in ("prompt", "kept", "number", "parent", "block")
          for value in (-1, "x", 1.0, True, None)),
        ({"prompt": 3}, tokens(4, 5).tobytes()),
        ({"number": 0}, tokens(4, 5).tobytes()),
        ({"session": 5}, tokens(4, 5).tobytes()),
        ({"session": "x" * 2000}, tokens(4, 5).tobytes()),
        ({"group": 5}, tokens(4, 5).tobytes()),
        ({"writer": "0123"}, tokens(4, 5).tobytes()),
        ({"scope": "all"}, tokens(4, 5).tobytes()),
        ({"scope": []}, tokens(4, 5).tobytes()),
        ({"created": "now"}, tokens(4, 5).tobytes()),
        ({}, tokens(4, -5).tobytes()),
        ({}, b"abc"),
    ],
)  # fmt: skip
def test_a_true_checksum_does_not_excuse_senseless_fields(change: dict[str, object], data: bytes) -> None:
    for payload in (_seal("turn", META | PLAIN | change, data), seal_2("turn", META | change, data)):
        with pytest.raises(CorruptRecordError):
            decode(payload)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b'{"a":1}x', json.dumps("x").encode()])
def test_a_message_that_is_no_json_object_is_damage(data: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        decode(_seal("message", {"session": "s", "created": 1.0}, data))


def test_the_checksum_is_crc32_over_framed_parts() -> None:
    assert _checksum("turn", b"ab", b"c", 3) != _checksum("turn", b"a", b"bc", 3)
    assert _checksum("turn", b"", b"", 3) != zlib.crc32(b"")


def wrong(**fields: Any) -> TurnRecord:
    right = {"writer": WRITER, "number": 1, "prompt_tail": tokens(), "response": tokens(), "created": 1.0}
    return TurnRecord(**{**right, **fields})


@pytest.mark.parametrize(
    ("record", "error", "field"),
    [
        (wrong(kept=-1), InvalidInputError, "kept"),
        (wrong(parent=2**64), InvalidInputError, "parent"),
        (wrong(number=0), InvalidInputError, "number"),
        (wrong(writer="me"), InvalidInputError, "writer"),
        (wrong(scope="all"), InvalidInputError, "scope"),
        (wrong(prompt_tail=tokens(-4)), InvalidTokenError, "prompt_tail"),
        (wrong(response=np.array([1.5])), InvalidTokenError, "response"),
        (wrong(response=tokens(1).reshape(1, 1)), InvalidTokenError, "response"),
        (wrong(session="a\nb"), InvalidSessionError, "session"),
        (wrong(group="a\nb"), InvalidSessionError, "group"),
        (EraseRecord("a\nb"), InvalidSessionError, "session"),
        (MessageRecord("s", {"x": object()}, 1.0), InvalidInputError, "message"),
        (MessageRecord("s", {1: "x"}, 1.0), InvalidInputError, "message"),  # type: ignore[dict-item]
        (MessageRecord("s", {"x": [{2: "x"}]}, 1.0), InvalidInputError, "message"),
        (MessageRecord("s", ["x"], 1.0), InvalidInputError, "message"),  # type: ignore[arg-type]
        (MessageRecord("s", {}, 1.0, position=-1), InvalidInputError, "position"),
        (CutRecord("s", -1), InvalidInputError, "position"),
    ],
)
def test_what_could_not_be_read_back_is_not_encoded(record: Record, error: type[Exception], field: str) -> None:
    with pytest.raises(error, match=field):
        encode(record)


@pytest.mark.parametrize(
    ("group", "family", "scope", "shared_by"),
    [
        ("g", "f", "tenant", "g"),
        ("g", "f", "session", "f"),  # the group's other sessions may not draft from it
        ("g", None, "session", None),
        (None, "f", "tenant", "f"),
        (None, None, "tenant", None),
    ],
)
def test_a_turn_is_found_by_the_group_or_else_the_family_that_drafts_from_it(
    group: str | None, family: str | None, scope: Scope, shared_by: str | None
) -> None:
    record = replace(turn("s", 1, group=group), family=family, scope=scope)
    assert record.shared_by == shared_by


def test_records_that_differ_in_one_field_are_not_equal() -> None:
    record = turn("s", 1)
    assert record == turn("s", 1) and record != encode(record) and record != EraseRecord("s")
    for other in (turn("t", 1), turn("s", 2), turn("s", 1, prompt=3), turn("s", 1, group="g")):
        assert record != other
