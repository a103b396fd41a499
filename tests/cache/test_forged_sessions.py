"""Test that snapshots with right checksums, but wrong turns, lengths, names or header of a session, are refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from agentspec.cache import SuffixCache
from agentspec.errors import SnapshotError
from tests.cache.mutations import VOCABULARY, seal

NOWHERE = 2**32 - 1

Words = NDArray[np.uint64]


class Turns:
    """Hold the words of a session's turns. A document: hash, length, parent and start, begin and missing tokens.

    A place or record: hash and position. The newest context is between the documents and the places. In front of the
    documents, places and records is how many they are, and that all have memory.
    """

    def __init__(self, words: Words) -> None:
        first = np.array([2, 0, 0, 0, NOWHERE, 0], np.uint64)
        (self._begin,) = (at for at in range(len(words) - 6) if (words[at : at + 6] == first).all())
        at, self._words = self._begin, words
        self.documents, at = self._rows(at, 4)
        self.newest, at = words[at : at + 2], at + 2
        self.places, at = self._rows(at, 2)
        self.records, self._end = self._rows(at, 2)

    def _rows(self, at: int, width: int) -> tuple[Words, int]:
        end = at + 2 + width * int(self._words[at])
        return self._words[at + 2 : end].reshape(-1, width).copy(), end

    def forged(self) -> bytes:
        """Return the snapshot with these turns and right checksums."""
        parts: list[Words] = [self._words[: self._begin]]
        for rows in (self.documents, self.newest, self.places, self.records):
            parts += [rows.ravel()] if rows is self.newest else [np.array([len(rows), 0], np.uint64), rows.ravel()]
        return seal(bytearray(np.concatenate([*parts, self._words[self._end :]]).tobytes()))

    def set_document(self, number: int, *, parent: int, start: int, begin: int) -> None:
        self.documents[number, 2:] = parent | start << 32, begin

    def forget_places(self) -> None:
        self.places = self.places[:0]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    cache, path = SuffixCache(vocab_size=VOCABULARY), tmp_path / "snapshot"
    for number, prompt in enumerate(([], range(20))):
        cache.start("r", prompt, session="s", scope="session")
        cache.extend("r", range(100 * number, 100 * number + 50 - 20 * number))
        assert cache.finish("r", name=("w", number + 1))
    cache.save(path)
    return path


def no_documents(turns: Turns) -> None:
    turns.documents, turns.records = turns.documents[:0], turns.records[:0]
    turns.forget_places()


def a_record_behind_the_text(turns: Turns) -> None:
    turns.records[0, 1] = 10_000


def a_place_twice(turns: Turns) -> None:
    turns.places[1] = turns.places[0]


def a_record_nowhere(turns: Turns) -> None:
    turns.records[0, 1] = NOWHERE


def a_place_in_front(turns: Turns) -> None:
    turns.set_document(0, parent=NOWHERE, start=0, begin=1)


def a_record_in_front(turns: Turns) -> None:
    a_place_in_front(turns)
    turns.forget_places()
    turns.records[0, 1] = 0


def a_parent_in_front(turns: Turns) -> None:
    a_place_in_front(turns)
    turns.forget_places()
    turns.set_document(1, parent=0, start=50, begin=51)


def document(number: int, *, parent: int = NOWHERE, start: int, begin: int) -> Callable[[Turns], None]:
    def forge(turns: Turns) -> None:
        turns.set_document(number, parent=parent, start=start, begin=begin)

    return forge


@pytest.mark.parametrize(
    ("forge", "fault"),
    [
        (no_documents, "a session's turns"),
        (document(1, start=0, begin=51), "a session's turns"),  # it starts in the first one
        (document(1, start=60, begin=51), "a session's turns"),  # it begins before it starts
        (document(1, start=50, begin=10_000), "a session's turns"),  # it begins behind the text
        (document(1, parent=60, start=50, begin=51), "a session's turns"),  # it goes on from itself
        (document(0, parent=0, start=0, begin=0), "a session's turns"),  # the first one goes on from itself
        (a_parent_in_front, "a session's turns"),
        (a_place_in_front, "a session's turns"),
        (a_record_in_front, "a session's turns"),
        (a_record_behind_the_text, "a session's turns"),
        (a_record_nowhere, "a session's turns"),
        (a_place_twice, "a turn's place"),
    ],
)
def test_turns_that_do_not_fit_their_text_are_refused(saved: Path, forge: Callable[[Turns], None], fault: str) -> None:
    words = np.frombuffer(saved.read_bytes(), np.uint64)
    assert Turns(words).forged() == saved.read_bytes()
    turns = Turns(words)
    forge(turns)
    saved.write_bytes(turns.forged())
    with pytest.raises(SnapshotError, match=fault):
        SuffixCache.load(saved, vocab_size=VOCABULARY)


def test_a_place_in_text_that_came_while_the_session_was_saved_is_left_out(saved: Path) -> None:
    turns = Turns(np.frombuffer(saved.read_bytes(), np.uint64))
    places = len(turns.places)
    turns.places[-1, 1] = 10_000
    saved.write_bytes(turns.forged())
    SuffixCache.load(saved, vocab_size=VOCABULARY).save(saved)
    assert len(Turns(np.frombuffer(saved.read_bytes(), np.uint64)).places) == places - 1


def text_of(path: Path) -> tuple[Words, int]:
    """Return the snapshot's words, and the index of the word with the size of the session's text."""
    words = np.frombuffer(path.read_bytes(), np.uint64).copy()
    text = np.array([97, 0, *[2**64 - 1] * 4, 1 << 32], np.uint64)  # eight boundaries are in front of it
    (at,) = (at for at in range(len(words) - 7) if (words[at : at + 7] == text).all())
    return words, at


@pytest.mark.parametrize(
    ("size", "released", "fault"),
    [
        (97, 98, "length of an array"),  # more elements are released than there are
        (2**34, 0, "length of an array"),  # refused before any memory is allocated
        (99, 2, "length of an array"),  # a text this small never releases memory
        (2**32, 0, "ends early"),
    ],
)
def test_a_text_of_another_length_is_refused(saved: Path, size: int, released: int, fault: str) -> None:
    words, at = text_of(saved)
    words[at : at + 2] = size, released
    saved.write_bytes(seal(bytearray(words.tobytes())))
    with pytest.raises(SnapshotError, match=fault):
        SuffixCache.load(saved, vocab_size=VOCABULARY)


def test_a_number_that_its_type_cannot_hold_is_refused(saved: Path) -> None:
    """Cut to 32 bits, the number would be valid."""
    words, at = text_of(saved)
    words[at - 1] += np.uint64(2**32)
    saved.write_bytes(seal(bytearray(words.tobytes())))
    with pytest.raises(SnapshotError, match="damaged snapshot: number"):
        SuffixCache.load(saved, vocab_size=VOCABULARY)


def test_a_list_so_long_that_its_bytes_cannot_be_counted_is_refused(saved: Path) -> None:
    data, two = bytearray(saved.read_bytes()), np.array([2, 0, 0, 0, NOWHERE, 0], np.uint64).tobytes()
    at = data.index(two)
    data[at : at + 8] = (2**59 + 2).to_bytes(8, "little")  # times 32, modulo 2 ** 64, this is the true length
    saved.write_bytes(seal(data))
    with pytest.raises(SnapshotError, match="length of an array"):
        SuffixCache.load(saved, vocab_size=VOCABULARY)


@pytest.mark.parametrize(
    ("at", "value", "fault"),
    [(8, 1, "snapshot of version 1; this build reads version"), (12, 0x04030201, "another byte order")],
)
def test_a_snapshot_of_another_build_or_machine_is_refused(saved: Path, at: int, value: int, fault: str) -> None:
    data = bytearray(saved.read_bytes())
    data[at : at + 4] = value.to_bytes(4, "little")
    saved.write_bytes(seal(data))
    with pytest.raises(SnapshotError, match=fault):
        SuffixCache.load(saved, vocab_size=VOCABULARY)


NOT_UTF_8 = [
    *(b"\xff", b"\x80", b"\xc3", b"\xe2\x82", b"\xc3A"),
    *(b"\xc0\x80", b"\xe0\x9f\xbf", b"\xf0\x8f\xbf\xbf"),  # longer than needed
    *(b"\xed\xa0\x80", b"\xf4\x90\x80\x80"),  # half of a surrogate pair; behind the last character
]


@pytest.mark.parametrize("name", ["ACME", "OWNER", "CHILD", "PARENT", "the child's family"])
def test_a_name_that_is_not_utf_8_is_refused(name: str, tmp_path: Path) -> None:
    """Python could not decode it when it lists the tenants, or when a request names the session."""
    cache, path = SuffixCache(vocab_size=VOCABULARY), tmp_path / "snapshot"
    cache.start("r", [1, 2, 3], session="CHILD", tenant="ACME", parent="PARENT", owner="OWNER")
    cache.extend("r", [4, 5, 6])
    cache.finish("r")
    cache.save(path)
    data, there = path.read_bytes(), name.encode()
    if there not in data:
        there = b"\x0c" + bytes(7) + b"4:ACMEPARENT"
    assert there in data
    for illegal in NOT_UTF_8:
        with pytest.raises(UnicodeDecodeError):
            illegal.decode()
        path.write_bytes(seal(bytearray(data.replace(there, there[: -len(illegal)] + illegal))))
        with pytest.raises(SnapshotError, match="a name is not UTF-8"):
            SuffixCache.load(path, vocab_size=VOCABULARY)


def test_names_of_all_characters_are_loaded(tmp_path: Path) -> None:
    cache, name = SuffixCache(), "\u00a1\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff~"
    cache.start("r", [1, 2, 3], session=name, tenant=name, parent=name[1:], owner=name)
    cache.extend("r", [4, 5, 6])
    cache.finish("r")
    cache.save(tmp_path / "snapshot")
    loaded = SuffixCache.load(tmp_path / "snapshot")
    assert loaded.tenants() == [name] and loaded.has_session(name, name)
    loaded.start("r", [1, 2, 3], session=name, tenant=name)
    assert loaded.family_of("r") == name[1:]
