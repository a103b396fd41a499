"""What every store promises, on each of them; Redis is a real server."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentspec.cache.store import (
    NEW_SESSION,
    EraseRecord,
    Erasure,
    MemoryStore,
    NewEntry,
    Retention,
    Store,
    decode,
    open_store,
    trim_sessions,
)
from agentspec.errors import InvalidInputError, SessionConflictError, StoreError
from agentspec.testing.redis_server import RedisServer
from tests.store.helpers import NS

KINDS = ("memory", "sqlite", "redis")


pytestmark = pytest.mark.usefixtures("patience")


def url_of(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of the test's store."""
    kind = request.node.callspec.params["store"]
    if kind == "redis":
        server: RedisServer = request.getfixturevalue("server")
        return f"{server.url}?prefix={tmp_path.name.replace('[', '-').replace(']', '-')[:64]}"
    return "memory://" if kind == "memory" else f"sqlite:///{tmp_path}/a/b/store.db"


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened = open_store(url_of(request, tmp_path))
    yield opened
    opened.close()


def payloads(store: Store, session: str | None = None, *, newest: int | None = None) -> list[bytes]:
    return [entry.payload for entry in store.read(NS, session=session, newest=newest)]


def fill(store: Store, count: int, sessions: int = 3) -> list[NewEntry]:
    entries = [NewEntry(f"s{number % sessions}", b"payload %d" % number) for number in range(count)]
    for start in range(0, count, 100):
        store.append(NS, entries[start : start + 100])
    return entries


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


def test_a_read_ends_with_what_was_there_when_it_began(store: Store) -> None:
    entries = fill(store, 300)
    reading = store.read(NS)
    first = next(reading)
    store.append(NS, [NewEntry("s0", b"later")])
    assert [first.payload, *(entry.payload for entry in reading)] == [payload for _, payload, *_ in entries]


def test_namespaces_are_apart(store: Store) -> None:
    store.append(NS, [NewEntry("s", b"ours")])
    store.append("other", [NewEntry("s", b"theirs")])
    assert payloads(store) == [b"ours"]
    assert [entry.payload for entry in store.read("other", session="s")] == [b"theirs"]
    assert store.erase_session("other", "s") == Erasure(1, complete=True)
    assert payloads(store, "s") == [b"ours"]
    assert store.sessions("other") == []


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
    # each entry names the one before it
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


def trim(store: Store, retention: Retention) -> int:
    """Trim slice by slice, and return how many entries went."""
    removed = 0
    for _ in range(10_000):
        records, more = store.trim(retention)
        assert records <= 256
        removed += records
        if not more:
            return removed
    raise AssertionError("trimming does not end")


def test_retention_by_records_keeps_the_newest(store: Store) -> None:
    entries = fill(store, 1000)
    store.append("other", [NewEntry("t", b"newer")])
    store.erase_session(NS, "s2")
    left = [payload for session, payload, *_ in entries if session != "s2"]
    assert trim(store, Retention(records=102)) == 667 + 2 - 102
    assert [payload for payload in payloads(store) if payload.startswith(b"payload")] == left[-100:]
    assert [entry.payload for entry in store.read("other")] == [b"newer"]
    assert store.usage().records == 102
    assert trim(store, Retention(records=102)) == 0
    assert trim(store, Retention(records=0)) == 102
    assert (payloads(store), store.sessions(NS), store.usage().records) == ([], [], 0)
    (sequence,) = store.append(NS, [NewEntry("s1", b"x")])  # a session whose head is gone goes on
    assert [entry.sequence for entry in store.read(NS)] == [sequence]


def test_retention_takes_the_oldest_whichever_log_they_are_in(store: Store) -> None:
    for number in range(60):
        log = "rare" if number % 20 == 0 else f"log-{number % 3}"
        store.append(log, [NewEntry(f"s{number % 7}", number.to_bytes(2))])
        time.sleep(0.002)  # Redis knows milliseconds
    logs = ["rare", *(f"log-{number}" for number in range(3))]

    def left() -> list[int]:
        return sorted(int.from_bytes(entry.payload) for log in logs for entry in store.read(log))

    assert trim(store, Retention(records=35)) == 25
    assert left() == list(range(25, 60))
    store.append("log-0", [NewEntry("s", number.to_bytes(2)) for number in range(60, 400)])
    assert trim(store, Retention(records=300)) == 75
    assert left() == list(range(100, 400))
    assert trim(store, Retention(records=0)) == 300


def test_retention_by_bytes_holds_at_ten_times_the_limit_and_gives_the_space_back(store: Store) -> None:
    empty = store.usage().bytes
    limit = 2 << 20
    for number in range(2500):
        store.append(NS, [NewEntry(f"s{number % 97}", number.to_bytes(2) * 4200, f"g{number % 5}")])
    full = store.usage().bytes
    assert full > 10 * limit
    removed = trim(store, Retention(bytes=limit))
    usage = store.usage()
    assert empty < usage.bytes < 1.15 * limit
    assert usage.bytes > 0.7 * limit
    assert usage.records == 2500 - removed == len(payloads(store))
    numbers = [int.from_bytes(payload[:2]) for payload in payloads(store)]
    assert numbers == list(range(removed, 2500))
    assert sum(session.records for session in store.sessions(NS)) == usage.records
    assert sum(len(list(store.read(NS, group=f"g{group}"))) for group in range(5)) == usage.records


def test_whole_sessions_are_erased_least_recently_used_first(store: Store) -> None:
    for number in range(30):
        store.append(NS, [NewEntry(f"s{number % 10}", bytes(1000))] * 10)
        time.sleep(0.002)
    store.append(NS, [NewEntry("s0", b"again")])  # the oldest session is in use
    assert trim_sessions(store, NS, Retention(bytes=300_000, days=1, records=400)) == 1
    assert [usage.session for usage in store.sessions(NS)] == ["s0", *(f"s{number}" for number in range(2, 10))]
    assert trim_sessions(store, NS, Retention(records=100)) == 6
    assert [(usage.session, usage.records) for usage in store.sessions(NS)] == [("s0", 31), ("s8", 30), ("s9", 30)]
    assert len(list(store.read(NS))) == 91  # no tombstones
    begin = time.time()
    time.sleep(1.5)
    store.append(NS, [NewEntry("s8", b"again")])
    assert trim_sessions(store, NS, Retention(days=(time.time() - begin - 0.1) / 86_400)) == 2
    assert [usage.session for usage in store.sessions(NS)] == ["s8"]
    assert trim_sessions(store, NS, Retention()) == 0


def test_retention_by_age(store: Store) -> None:
    fill(store, 600)
    assert trim(store, Retention(days=1)) == 0
    time.sleep(0.02)
    assert trim(store, Retention(days=0.01 / 86_400)) == 600
    assert payloads(store) == []


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


def test_unusable_bounds_are_refused_by_name(store: Store) -> None:
    with pytest.raises(InvalidInputError, match="after"):
        store.read(NS, after="not a cursor")
    with pytest.raises(InvalidInputError, match="newest"):
        store.read(NS, newest=-1)


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


def test_an_append_elsewhere_ends_a_wait(store: Store, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    other = store if isinstance(store, MemoryStore) else open_store(url_of(request, tmp_path))
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


def test_it_knows_whether_retention_took_something_behind_a_cursor(store: Store) -> None:
    assert store.history(NS, "") == "whole"
    cursors = store.append(NS, [NewEntry("s", b"0"), NewEntry("s", b"1"), NewEntry("t", b"2")])
    assert all(store.history(NS, cursor) == "whole" for cursor in ("", *cursors))
    store.erase_session(NS, "t")
    assert all(store.history(NS, cursor) == "whole" for cursor in cursors)
    assert store.trim(Retention(records=2)).records == 1
    assert all(store.history(NS, cursor) == "whole" for cursor in cursors[1:])
    assert store.trim(Retention(records=1)).records == 1
    assert store.history(NS, cursors[0]) == store.history(NS, "") == "trimmed"
    end = store.newest(NS)
    while store.trim(Retention(records=0)).more:
        pass
    assert store.history(NS, end) == "whole" and store.history(NS, cursors[2]) == "trimmed"


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
