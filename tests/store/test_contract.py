"""Test, on every store, what stores promise of entries, sessions, groups and arguments."""

import threading
import time

import pytest

from agentspec.cache.store import (
    NEW_SESSION,
    EraseRecord,
    Erasure,
    NewEntry,
    Store,
    decode,
)
from agentspec.errors import InvalidInputError, SessionConflictError, StoreError
from tests.store.helpers import NS, fill, payloads

pytestmark = pytest.mark.usefixtures("patience")


def test_entries_come_back_in_order_and_exact(store: Store) -> None:
    raw = bytes(range(256)) * 3
    store.append(NS, [NewEntry("a", raw), NewEntry("b", b""), NewEntry("a", b"2")])
    store.append(NS, [NewEntry("a", b"3")])
    assert [(entry.session, entry.payload) for entry in store.read(NS)] == [
        ("a", raw),
        ("b", b""),
        ("a", b"2"),
        ("a", b"3"),
    ]
    assert payloads(store, "a") == [raw, b"2", b"3"]
    assert payloads(store, "b") == [b""]
    assert payloads(store, "nobody") == []


def test_erasing_a_session_is_exact_and_leaves_a_tombstone(store: Store) -> None:
    entries = fill(store, 600)
    last = list(store.read(NS))[-1].sequence
    assert store.erase_session(NS, "s1") == Erasure(200, complete=True)
    assert payloads(store, "s1") == []
    *rest, tombstone = store.read(NS)
    assert [entry.payload for entry in rest] == [payload for session, payload, *_ in entries if session != "s1"]
    assert decode(tombstone.payload) == EraseRecord("s1")
    assert (tombstone.session, tombstone.sequence > last) == ("s1", True)
    assert [usage.session for usage in store.sessions(NS)] == ["s0", "s2"]
    store.append(NS, [NewEntry("s1", b"again")])
    (entry,) = store.read(NS, session="s1")
    assert entry.payload == b"again"
    assert entry.sequence > tombstone.sequence  # cursors of other readers stay valid


def test_erasing_again_adds_nothing_and_an_unknown_session_is_marked_once(store: Store) -> None:
    store.append(NS, [NewEntry("s", b"1"), NewEntry("t", b"2")])
    for session in ("s", "nobody"):
        for _ in range(3):
            store.erase_session(NS, session)
    found = [entry.payload for entry in store.read(NS)]
    assert found[0] == b"2"
    assert [decode(payload) for payload in found[1:]] == [EraseRecord("s"), EraseRecord("nobody")]
    store.append(NS, [NewEntry("s", b"3")])
    store.erase_session(NS, "s")
    assert [decode(entry.payload) for entry in list(store.read(NS))[1:]] == [EraseRecord("nobody"), EraseRecord("s")]
    assert store.erase_session(NS, "t", mark=False) == Erasure(1, complete=True)
    assert [decode(entry.payload) for entry in store.read(NS)] == [EraseRecord("nobody"), EraseRecord("s")]


def test_groups_are_read_across_sessions(store: Store) -> None:
    for number in range(300):
        group = (None, "g", "h")[number % 3]
        store.append(NS, [NewEntry(f"s{number % 2}", b"%d" % number, group)])
    entries = list(store.read(NS, group="g"))
    assert [entry.payload for entry in entries] == [b"%d" % number for number in range(1, 300, 3)]
    assert {(entry.session, entry.group) for entry in entries} == {("s0", "g"), ("s1", "g")}
    assert list(store.read(NS, group="g", after=entries[4].sequence, newest=7)) == entries[-7:]
    assert list(store.read(NS, group="nobody")) == []
    store.erase_session(NS, "s0")
    assert [entry.payload for entry in store.read(NS, group="g")] == [
        b"%d" % number for number in range(1, 300, 3) if number % 2
    ]
    with pytest.raises(InvalidInputError, match="session, group"):
        store.read(NS, session="s1", group="g")


def test_an_append_may_expect_the_sessions_newest_entry(store: Store) -> None:
    first = store.append(NS, [NewEntry("s", b"1"), NewEntry("s", b"2")], expect=NEW_SESSION)
    assert first == [entry.sequence for entry in store.read(NS, session="s")]
    store.append(NS, [NewEntry("other", b"x")])
    (second,) = store.append(NS, [NewEntry("s", b"3")], expect=first[-1])
    for stale in (NEW_SESSION, first[0], first[-1]):
        with pytest.raises(SessionConflictError, match="'s'"):
            store.append(NS, [NewEntry("s", b"lost"), NewEntry("s", b"lost")], expect=stale)
    assert payloads(store, "s") == [b"1", b"2", b"3"]
    store.erase_session(NS, "s")
    with pytest.raises(SessionConflictError):
        store.append(NS, [NewEntry("s", b"lost")], expect=second)
    store.append(NS, [NewEntry("s", b"4")], expect=NEW_SESSION)
    assert payloads(store, "s") == [b"4"]
    with pytest.raises(InvalidInputError, match="expect"):
        store.append(NS, [NewEntry("s", b"5"), NewEntry("t", b"5")], expect=NEW_SESSION)
    with pytest.raises(InvalidInputError, match="expect"):
        store.append(NS, [NewEntry("s", b"5")], expect="no cursor")


def test_of_many_who_append_to_one_session_at_once_one_wins_each_time(store: Store) -> None:
    conflicts = []

    def work() -> None:
        for _ in range(20):
            newest = [entry.sequence for entry in store.read(NS, session="s")][-1:] or [NEW_SESSION]
            try:
                store.append(NS, [NewEntry("s", newest[0].encode())], expect=newest[0])
            except SessionConflictError as error:
                conflicts.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = list(store.read(NS, session="s"))
    assert len(entries) + len(conflicts) == 60
    # Each entry names the previous one.
    assert [entry.payload.decode() for entry in entries] == ["", *(entry.sequence for entry in entries)][:-1]


def test_sessions_tell_what_they_hold_and_any_unicode_key_works(store: Store) -> None:
    names = ["b", "a", "ünïcode/{x}:*", "日本語 ", "%s' OR 1=1 --", ""]
    before = time.time()
    for name in names * 2:
        store.append(NS, [NewEntry(name, name.encode(), name or None)])
    found = store.sessions(NS)
    assert [usage.session for usage in found] == sorted(names)
    for usage in found:
        assert (usage.records, usage.bytes) == (2, 2 * len(usage.session.encode()))
        assert before - 1 < usage.used < time.time() + 1
        assert payloads(store, usage.session) == [usage.session.encode()] * 2
        if usage.session:
            assert len(list(store.read(NS, group=usage.session))) == 2


def test_the_secret_is_made_once(store: Store) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(store.secret())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert len(found[0]) == 32
    assert len(set(found[0])) > 8


def test_a_store_keeps_the_latest_id_of_a_secret(store: Store) -> None:
    before = [store.swap_secret_id(secret_id) for secret_id in ("first", "first", "second", "first")]
    assert before == [None, "first", "first", "second"]


def test_an_empty_append_and_an_empty_log(store: Store) -> None:
    store.append(NS, [])
    assert payloads(store) == []
    assert payloads(store, newest=3) == []
    assert store.sessions(NS) == []
    store.ping()


def test_a_large_record(store: Store) -> None:
    payload = bytes(range(256)) * 1600  # about 100 000 tokens
    store.append(NS, [NewEntry("s", payload)])
    assert payloads(store) == [payload]


def test_threads_may_share_it(store: Store) -> None:
    def work(name: str) -> None:
        for number in range(20):
            store.append(NS, [NewEntry(name, b"%d" % number)] * 3)
            assert sum(1 for _ in store.read(NS, session=name)) == 3 * (number + 1)

    errors: list[BaseException] = []

    def caught(name: str) -> None:
        try:
            work(name)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=caught, args=(f"t{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sum(1 for _ in store.read(NS)) == 240


@pytest.mark.parametrize("namespace", ["", "a{b}", "x" * 129, "a b", "é"])
def test_an_unusable_namespace_is_refused(store: Store, namespace: str) -> None:
    with pytest.raises(InvalidInputError, match="namespace"):
        store.append(namespace, [NewEntry("s", b"x")])
    with pytest.raises(InvalidInputError, match="namespace"):
        store.read(namespace)


def test_an_erasure_without_a_mark_tells_of_the_tombstone_that_is_there(store: Store) -> None:
    store.append(NS, [NewEntry("a", b"1"), NewEntry("b", b"2")])
    marked = store.erase_session(NS, "a")
    store.append(NS, [NewEntry("a", b"3")])
    unmarked = store.erase_session(NS, "a", mark=False)
    assert unmarked.records == 1 and unmarked.tombstone == marked.tombstone is not None
    assert store.erase_session(NS, "b", mark=False).tombstone is None
    assert store.tombstones(NS) == {"a": marked.tombstone}


def test_unusable_bounds_are_refused_by_name(store: Store) -> None:
    for cursor in ("not a cursor", "²", "٣"):  # str.isdigit accepts both, and int() the second
        with pytest.raises(InvalidInputError, match="after"):
            store.read(NS, after=cursor)
    with pytest.raises(InvalidInputError, match="newest"):
        store.read(NS, newest=-1)


@pytest.mark.parametrize("digits", ["9" * 20, "9" * 5000])
def test_a_cursor_beyond_the_stores_numbers_is_refused_by_name(store: Store, digits: str) -> None:
    """SQLite counts up to 2**63 - 1, Redis up to 2**64 - 1, and Python reads at most 4300 digits."""
    (held,) = store.append(NS, [NewEntry("s", b"1")])
    beyond = digits + held[20:]
    for call, name in (
        (lambda: list(store.read(NS, after=beyond)), "after"),
        (lambda: store.tombstones(NS, after=beyond), "after"),
        (lambda: store.history(NS, beyond), "after"),
        (lambda: store.wait({NS: beyond}, 0.0), "cursors"),
        (lambda: store.append(NS, [NewEntry("s", b"2")], expect=beyond), "expect"),
    ):
        with pytest.raises(InvalidInputError, match=f"^{name}: not a cursor of this store"):
            call()
    assert payloads(store) == [b"1"]


def test_a_closed_store_says_so(store: Store) -> None:
    store.append(NS, [NewEntry("s", b"x")])
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.append(NS, [NewEntry("s", b"x")])
    with pytest.raises(StoreError, match="closed"):
        list(store.read(NS))
    with pytest.raises(StoreError, match="closed"):
        store.ping()
