"""Make turns to store, and a store that fails when told to."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgpack
import numpy as np

from agentspec.cache.store import (
    BackgroundLoader,
    Entry,
    LogNames,
    MemoryStore,
    NewEntry,
    Store,
    TurnRecord,
    Wanted,
    encode,
)
from agentspec.cache.store.codec import _checksum
from agentspec.cache.store.sqlite.file import FRONT
from agentspec.cache.types import Int32Array
from agentspec.errors import StoreUnavailableError

_LOOK_SECONDS = 0.002
_LONGEST_WAIT = 180.0

NS = "0123abcd"
LOGS = LogNames("0123456789abcdef", b"secret of the tests")


def tokens(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


WRITER = "0123456789abcdef"


def turn(session: str, number: int, *, prompt: int = 2, group: str | None = None, writer: str = WRITER) -> TurnRecord:
    """Return a turn that can be told from others: its response is [number, number + 1]."""
    return TurnRecord(
        writer=writer,
        number=number + 1,
        session=session,
        prompt_tail=np.arange(prompt, dtype=np.int32),
        response=tokens(number, number + 1),
        created=1.0,
        group=group,
    )


def version_2(record: TurnRecord) -> bytes:
    """Return the turn as the release before compact records wrote it."""
    meta = {name: getattr(record, name) for name in TurnRecord.__slots__ if name not in ("prompt_tail", "response")}
    meta = {name: value for name, value in meta.items() if value is not None} | {"prompt": len(record.prompt_tail)}
    return seal_2("turn", meta, record.prompt_tail.tobytes() + record.response.tobytes())


def seal_2(kind: str, meta: dict[str, object], data: bytes) -> bytes:
    """Return a record of version 2 with a valid checksum."""
    packed = msgpack.packb(meta, unicode_errors="surrogatepass")
    crc = _checksum(kind, packed, data, 2)
    sealed: bytes = msgpack.packb({"v": 2, "kind": kind, "crc": crc, "meta": packed, "data": data})
    return sealed


def unwritable(session: str) -> TurnRecord:
    """Return a turn that no store accepts."""
    return TurnRecord(writer=WRITER, number=1, session=session, prompt_tail=tokens(-1), response=tokens(), created=1.0)


def number_of(record: object) -> int:
    assert isinstance(record, TurnRecord)
    return int(record.response[0])


def entry_of(record: TurnRecord) -> NewEntry:
    return NewEntry(record.session, encode(record), record.group)


def wait_until(condition: Callable[[], object], timeout: float = 10.0) -> None:
    """Wait until ``condition`` holds. Raise AssertionError after ``timeout`` seconds.

    Time for which a busy machine holds this thread up does not count, up to three minutes in all: it holds up the
    awaited threads, too. So the timeout can be short, and a test that fails does so within seconds. No test waits for
    longer than one second on an idle machine.
    """
    begin, held_up = time.monotonic(), 0.0
    while not condition():
        looked = time.monotonic()
        waited = looked - begin
        assert waited - held_up < timeout and waited < max(timeout, _LONGEST_WAIT), "what was awaited did not come true"
        time.sleep(_LOOK_SECONDS)
        held_up += max(0.0, time.monotonic() - looked - 2 * _LOOK_SECONDS)


def gather(loader: BackgroundLoader, *wanted: Wanted) -> list[TurnRecord]:
    """Take records until none is pending, and return them."""
    records: list[TurnRecord] = []

    def done() -> bool:
        pending = any(loader.is_pending(each) for each in wanted)
        while loaded := loader.take():
            assert loaded.records or loaded.complete
            records.extend(loaded.records)
        return not pending

    wait_until(done)
    return records


def payloads(store: Store, session: str | None = None, *, newest: int | None = None) -> list[bytes]:
    return [entry.payload for entry in store.read(NS, session=session, newest=newest)]


def fill(store: Store, count: int, sessions: int = 3) -> list[NewEntry]:
    entries = [NewEntry(f"s{number % sessions}", b"payload %d" % number) for number in range(count)]
    for start in range(0, count, 100):
        store.append(NS, entries[start : start + 100])
    return entries


class FlakyStore(MemoryStore):
    """Keep records in memory, raise ``error`` while that is set, wait if held up, and note every append."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.fail_read_after: int | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.calls = 0
        self.appended: list[list[NewEntry]] = []

    def append_ungated(self, namespace: str, entries: Sequence[NewEntry]) -> None:
        """Append as another process does, without being held up."""
        super().append(namespace, entries)

    def wait(self, cursors: Mapping[str, str], timeout: float) -> list[str]:
        found = super().wait(cursors, timeout)
        assert self.gate.wait(120)
        if self.error is not None:
            raise self.error
        return found

    def newest(self, namespace: str) -> str:
        if self.error is not None:
            raise self.error
        return super().newest(namespace)

    def append(self, namespace: str, entries: Sequence[NewEntry], *, expect: str | None = None) -> list[str]:
        self.calls += 1
        assert self.gate.wait(120)
        if self.error is not None:
            raise self.error
        sequences = super().append(namespace, entries, expect=expect)
        self.appended.append(list(entries))
        return sequences

    def read(
        self,
        namespace: str,
        *,
        session: str | None = None,
        group: str | None = None,
        after: str | None = None,
        newest: int | None = None,
    ) -> Iterator[Entry]:
        self.calls += 1
        assert self.gate.wait(120)
        if self.error is not None:
            raise self.error
        return self._failing(super().read(namespace, session=session, group=group, after=after, newest=newest))

    def ping(self) -> None:
        if self.error is not None:
            raise self.error

    def _failing(self, entries: Iterator[Entry]) -> Iterator[Entry]:
        for count, entry in enumerate(entries):
            if self.fail_read_after is not None and count >= self.fail_read_after:
                self.fail_read_after = None
                raise StoreUnavailableError("went away in the middle")
            yield entry


def damage_payload(path: Path, sequence: int) -> None:
    """Flip a bit near the end of a stored payload."""
    connection = sqlite3.connect(path)
    query = "SELECT padded, size FROM payloads JOIN entries USING (sequence) WHERE sequence = ?"
    padded, size = connection.execute(query, (sequence,)).fetchone()
    at = FRONT + size - 3
    damaged = padded[:at] + bytes([padded[at] ^ 0x40]) + padded[at + 1 :]
    connection.execute("UPDATE payloads SET padded = ? WHERE sequence = ?", (damaged, sequence))
    connection.commit()
    connection.close()
