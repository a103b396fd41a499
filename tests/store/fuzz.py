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

from agentspec.cache.store import EraseRecord, MessageRecord, TurnRecord, decode, encode
from agentspec.cache.store.records import _checksum, _seal
from agentspec.errors import CorruptRecordError, RecordVersionError

_ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**64 - 1, 1.5, float("nan"), float("inf"), "", "x", "\ud800", "é" * 300),
    *(b"", b"\xff" * 20, [], [[[]]], {}, {"a": {"b": []}}, "tenant", "0" * 16),
)


def samples() -> list[bytes]:
    """Return records of every kind."""
    some = np.arange(7, dtype=np.int32)
    turn = TurnRecord(writer="ab" * 8, number=3, session="s", prompt_tail=some, response=some, created=1.0)
    names = {name: name for name in ("tenant", "principal", "parent_session", "group", "session_name", "weights")}
    full = replace(turn, kept=70, parent=2**63 + 1, block=5, scope="session", **names)  # type: ignore[arg-type]
    message = MessageRecord("s", {"role": "user", "content": ["é", {"a": None}], "x": 1.5}, 2.0, 4)
    return [encode(record) for record in (turn, full, message, EraseRecord("s"))]


def fuzz(count: int, seed: int) -> Counter[str]:
    """Decode ``count`` mutated records, and count what came of it: "decoded", or the name of the error."""
    chance, outcomes, originals = random.Random(seed), Counter[str](), samples()
    for _ in range(count):
        payload = _mutate(chance, chance.choice(originals))
        try:
            record = decode(payload)
        except (CorruptRecordError, RecordVersionError) as error:
            outcomes[type(error).__name__] += 1
            continue
        encode(record) if not isinstance(record, TurnRecord) else record.size  # what is decoded can be used
        outcomes["decoded"] += 1
    return outcomes


def _mutate(chance: random.Random, payload: bytes) -> bytes:
    kind = chance.randrange(4)
    if kind == 0:
        return _changed(chance, payload)
    envelope = msgpack.unpackb(payload)
    name, meta, data = envelope["kind"], envelope["meta"], envelope["data"]
    if kind == 1:
        meta = _changed(chance, meta)
    elif kind == 2:
        data = _changed(chance, data)
    else:
        fields = msgpack.unpackb(meta)
        for _ in range(chance.randint(1, 2)):
            fields[chance.choice([*fields, "further"])] = chance.choice(_ODD)
        if chance.random() < 0.2:
            del fields[chance.choice(list(fields))]
        if chance.random() < 0.1:
            name = chance.choice(("turn", "message", "erase", "other", ""))
        try:
            return _seal(name, fields, data)
        except Exception:  # a field that msgpack itself refuses
            return _changed(chance, payload)
    checksum = _checksum(name, meta, data)
    packed: bytes = msgpack.packb({**envelope, "meta": meta, "data": data, "crc": checksum})
    return packed


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
