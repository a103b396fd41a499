"""Test, on every store, what stores promise of logs: their cursors, ends and lists, and waits for them."""

import threading
import time

import pytest

from agentspec.cache.store import (
    Erasure,
    MemoryStore,
    NewEntry,
    Store,
    open_store,
)
from agentspec.cache.store.base import entry_name
from tests.store.helpers import NS, fill, payloads

pytestmark = pytest.mark.usefixtures("patience")


def test_cursors_sort_as_the_log_and_are_the_same_in_a_session(store: Store) -> None:
    fill(store, 300)
    sequences = [entry.sequence for entry in store.read(NS)]
    assert sequences == sorted(set(sequences))
    assert [entry.sequence for entry in store.read(NS, session="s1")] == sequences[1::3]


@pytest.mark.parametrize("session", [None, "s1"])
def test_after_goes_on_where_another_read_ended(store: Store, session: str | None) -> None:
    fill(store, 400)
    entries = list(store.read(NS, session=session))
    for index in (0, 63, 127, 128, len(entries) - 1):
        rest = list(store.read(NS, session=session, after=entries[index].sequence))
        assert rest == entries[index + 1 :]


@pytest.mark.parametrize("session", [None, "s1"])
@pytest.mark.parametrize("newest", [0, 1, 2, 64, 128, 129, 10_000])
def test_newest_gives_the_last_ones_oldest_first(store: Store, session: str | None, newest: int) -> None:
    fill(store, 400)
    entries = list(store.read(NS, session=session))
    assert list(store.read(NS, session=session, newest=newest)) == (entries[-newest:] if newest else [])
    behind = entries[-5:]
    assert list(store.read(NS, session=session, after=entries[-6].sequence, newest=newest)) == (
        behind[-newest:] if newest else []
    )


@pytest.mark.parametrize("session", [None, "s1"])
def test_a_read_ends_with_what_was_there_when_it_began(store: Store, session: str | None) -> None:
    fill(store, 600)
    entries = list(store.read(NS, session=session))
    reading = store.read(NS, session=session)
    first = next(reading)
    store.append(NS, [NewEntry("s1", b"later")])
    assert [first, *reading] == entries


def test_tombstones_do_not_count_among_the_newest(store: Store) -> None:
    assert list(store.read(NS, newest=3)) == []
    for number in range(6):
        store.append(NS, [NewEntry(f"kept{number}", b"turn %d" % number)])
        time.sleep(0.002)  # shards of Redis know milliseconds
        for erased in range(40):
            store.erase_session(NS, f"gone{number}-{erased}")
    whole = list(store.read(NS))
    for newest in (1, 3, 6, 7):
        found = list(store.read(NS, newest=newest))
        turns = [entry.payload for entry in found if entry.payload.startswith(b"turn")]
        assert turns == [b"turn %d" % number for number in range(6)][-newest:]
        assert found == whole[-len(found) :] and len(found) == 41 * len(turns)
    assert list(store.read(NS, newest=0)) == []
    assert len(list(store.read(NS, newest=2, after=whole[-30].sequence))) == 29


def test_namespaces_are_apart(store: Store) -> None:
    store.append(NS, [NewEntry("s", b"ours")])
    store.append("other", [NewEntry("s", b"theirs")])
    assert payloads(store) == [b"ours"]
    assert [entry.payload for entry in store.read("other", session="s")] == [b"theirs"]
    assert store.erase_session("other", "s") == Erasure(1, complete=True)
    assert payloads(store, "s") == [b"ours"]
    assert store.sessions("other") == []


def test_the_end_of_a_log_is_a_cursor(store: Store) -> None:
    assert store.newest(NS) == ""
    assert list(store.read(NS, after=store.newest(NS))) == []
    first, second = store.append(NS, [NewEntry("s", b"1"), NewEntry("t", b"2")])
    store.append("other", [NewEntry("s", b"x")])
    assert store.newest(NS) == second
    assert [entry.payload for entry in store.read(NS, after=first)] == [b"2"]
    assert [entry.payload for entry in store.read(NS, after="")] == [b"1", b"2"]
    tombstone = store.erase_session(NS, "t").tombstone
    assert store.newest(NS) == tombstone != second
    again = store.erase_session(NS, "t").tombstone
    assert store.newest(NS) == again != tombstone
    assert store.tombstones(NS) == {"t": again}
    assert len(list(store.read(NS))) == 2
    assert store.erase_session(NS, "s", mark=False).tombstone is None


def test_a_wait_names_the_logs_that_have_more(store: Store) -> None:
    ends = {name: store.newest(name) for name in (NS, "other", "third")}
    begin = time.monotonic()
    assert store.wait(ends, 0.05) == []
    assert 0.04 < time.monotonic() - begin < 10
    store.append("other", [NewEntry("s", b"1")])
    assert store.wait(ends, 60) == ["other"]
    store.erase_session(NS, "s")
    store.append("unwatched", [NewEntry("s", b"1")])
    assert sorted(store.wait(ends, 10)) == sorted([NS, "other"])
    ends = {name: store.newest(name) for name in ends}
    assert store.wait(ends, 0) == []
    assert store.wait({}, 0) == []


def test_an_append_elsewhere_ends_a_wait(store: Store, store_url: str) -> None:
    other = store if isinstance(store, MemoryStore) else open_store(store_url)
    ends = {NS: store.newest(NS)}
    for number in range(3):
        delay = threading.Timer(0.1, lambda: other.append(NS, [NewEntry("s", b"x")]))
        begin = time.monotonic()
        delay.start()
        assert store.wait(ends, 60) == [NS]
        assert 0.05 < time.monotonic() - begin < 30
        delay.join()
        ends[NS] = store.newest(NS)
        assert len(list(store.read(NS))) == number + 1
    other.close()


def test_tombstones_are_listed_in_order_and_behind_a_cursor(store: Store) -> None:
    store.append(NS, [NewEntry(name, b"x") for name in ("a", "b", "c")])
    assert store.tombstones(NS) == {}
    marks = {name: store.erase_session(NS, name).tombstone for name in ("c", "a", "nobody")}
    end = store.newest(NS)
    store.append(NS, [NewEntry("a", b"again")])
    assert list(store.tombstones(NS).items()) == list(marks.items())
    assert store.tombstones("other") == {}
    assert store.tombstones(NS, after=end) == {}
    again = store.erase_session(NS, "a").tombstone
    assert store.tombstones(NS, after=end) == {"a": again}
    assert list(store.tombstones(NS).items()) == [("c", marks["c"]), ("nobody", marks["nobody"]), ("a", again)]


def test_an_erasure_is_undone_where_older_entries_are_there(store: Store) -> None:
    """Only a store that went back to an older state has such entries."""
    store.append(NS, [NewEntry("a", b"x"), NewEntry("b", b"x"), NewEntry("c", b"x")])
    marks = {name: entry_name(store.erase_session(NS, name).tombstone or "") for name in ("a", "b")}
    assert store.undone_erasures(NS, marks) == []
    store.append(NS, [NewEntry("a", b"again")])
    assert store.undone_erasures(NS, marks) == []
    (later,) = store.append(NS, [NewEntry("d", b"x")])
    assert store.undone_erasures(NS, {"a": entry_name(later), "b": marks["b"], "d": entry_name(later)}) == ["a"]
    assert store.undone_erasures("other", marks) == []


def test_logs_are_listed_by_prefix(store: Store) -> None:
    names = ["m1.a", "m1.b", "m10.a", "m2.a", "n"]
    for name in reversed(names):
        store.append(name, [NewEntry("s", b"x")] * 3)
    assert store.namespaces() == names
    assert store.namespaces("m1.") == ["m1.a", "m1.b"]
    assert store.namespaces("m2") == ["m2.a"]
    assert store.namespaces("m3") == store.namespaces("z") == []


def test_logs_are_listed_by_the_session_that_they_hold(store: Store) -> None:
    for name, session in (("m1.a", "s"), ("m1.b", "t"), ("m1.c", "s"), ("m2.a", "s"), ("m1.d", "")):
        store.append(name, [NewEntry("other", b"x"), NewEntry(session, b"x")])
    assert store.namespaces("m1.", session="s") == ["m1.a", "m1.c"]
    assert store.namespaces(session="s") == ["m1.a", "m1.c", "m2.a"]
    assert store.namespaces(session="") == ["m1.d"]
    assert store.namespaces(session="nobody") == []
    store.erase_session("m1.a", "s")
    assert store.namespaces("m1.", session="s") == ["m1.c"]
