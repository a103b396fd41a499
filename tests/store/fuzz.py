"""Decode mutated records: ``python -m tests.store.fuzz --count 10000000``.

A mutation changes bytes of the payload, or, behind a checksum that is computed anew, of its ``meta`` and ``data`` or
single fields of them. Decoding must raise nothing but CorruptRecordError and RecordVersionError, whatever it reads.
"""

import argparse
import random
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np

from agentspec.cache.store import CutRecord, EraseRecord, MessageRecord, Record, TurnRecord, decode, encode
from agentspec.cache.store.codec import _FIELDS, _KEYS, _checksum, _deflate, _deflated
from agentspec.errors import CorruptRecordError, RecordVersionError
from tests.store.helpers import version_2

_ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**64 - 1, 1.5, float("nan"), float("inf"), "", "x", "\ud800", "é" * 300),
    *(b"", b"\xff" * 20, [], [[[]]], {}, {"a": {"b": []}}, "tenant", "0" * 16),
)


def samples() -> list[bytes]:
    """Return records of every kind, and turns of the version before."""
    some, long = np.arange(7, dtype=np.int32), np.arange(5000, dtype=np.int32) % 90
    turn = TurnRecord(writer="ab" * 8, number=3, session="s", prompt_tail=some, response=some, created=1.0)
    names = {name: name for name in ("tenant", "principal", "parent_session", "group", "session_name", "weights")}
    full = replace(turn, kept=70, parent=2**63 + 1, block=5, scope="session", **names)  # type: ignore[arg-type]
    message = MessageRecord("s", {"role": "user", "content": ["é", {"a": None}], "x": 1.5}, 2.0, 4)
    coded = replace(turn, response=long, session="0f" * 16)
    records: list[Record] = [turn, full, coded, message, CutRecord("s", 4), EraseRecord("s")]
    return [*map(encode, records), version_2(turn), version_2(full)]


def fuzz(count: int, seed: int) -> Counter[str]:
    """Decode ``count`` mutated records, and count the outcomes: "decoded", or the name of the error."""
    chance, outcomes, originals = random.Random(seed), Counter[str](), samples()
    for _ in range(count):
        payload = _mutate(chance, chance.choice(originals))
        try:
            record = decode(payload)
        except (CorruptRecordError, RecordVersionError) as error:
            outcomes[type(error).__name__] += 1
            continue
        encode(record) if not isinstance(record, TurnRecord) else record.size  # a decoded record can be used
        outcomes["decoded"] += 1
    return outcomes


def _mutate(chance: random.Random, payload: bytes) -> bytes:
    kind = chance.randrange(4)
    if kind == 0:
        return _changed(chance, payload)
    envelope = msgpack.unpackb(payload)
    version = envelope["v"]
    keys = _KEYS[version]
    name, _, meta, data = (envelope[key] for key in keys)
    if kind == 1:
        meta = _changed(chance, meta)
    elif kind == 2:
        data = _changed(chance, data) if version == 2 or chance.random() < 0.5 else _recoded(chance)
    else:
        fields = msgpack.unpackb(meta, strict_map_key=False)
        for _ in range(chance.randint(1, 2)):
            others = ("further",) if version == 2 else range(len(_FIELDS) + 1)
            fields[chance.choice([*fields, *others])] = chance.choice(_ODD)
        if chance.random() < 0.2:
            del fields[chance.choice(list(fields))]
        if chance.random() < 0.1:
            name = chance.choice(("turn", "message", "erase", "other", ""))
        try:
            meta = msgpack.packb(fields, unicode_errors="surrogatepass")
        except Exception:  # a field that msgpack itself refuses
            return _changed(chance, payload)
    crc = _checksum(name, meta, data, version)
    packed: bytes = msgpack.packb({"v": version, **dict(zip(keys, (name, crc, meta, data), strict=True))})
    return packed


def _recoded(chance: random.Random) -> bytes:
    """Return a true DEFLATE stream of other content: other ids, a part of a number, or far more than is allowed."""
    match chance.randrange(3):
        case 0:
            return _deflated(np.array([chance.randrange(-(2**31), 2**31) for _ in range(40)] * 9, np.int32))[1]
        case 1:
            return _deflate(bytes(chance.randrange(1, 99)), 0)
        case _:
            return _deflate(bytes(1 << chance.randrange(8, 22)), 0)


def _changed(chance: random.Random, given: bytes) -> bytes:
    changed = bytearray(given)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(5):
            case 0 if at < len(changed):
                changed[at] = chance.randrange(256)
            case 1:
                changed[at:at] = chance.choice((b"\xdd", b"\xdf", b"\xc6")) + b"\x7f\xff\xff\xff"
            case 2:
                changed.insert(at, chance.randrange(256))
            case 3:
                del changed[at : at + chance.randint(1, 8)]
            case _ if at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
            case _:
                changed += changed[:at]
    return bytes(changed)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    begin = time.monotonic()
    print(dict(fuzz(given.count, given.seed)), f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
