"""Test, on every store, what stores promise of retention: by age, bytes and records."""

import time

import pytest

from agentspec.cache.store import Erasure, NewEntry, Retention, Store, trim_sessions
from tests.store.helpers import NS, fill, payloads

pytestmark = pytest.mark.usefixtures("patience")


def trim(store: Store, retention: Retention) -> int:
    """Trim slice by slice. Return how many entries were removed."""
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
    assert trim(store, Retention(records=102)) == 667 + 1 - 102
    assert [payload for payload in payloads(store) if payload.startswith(b"payload")] == left[-101:]
    assert [entry.payload for entry in store.read("other")] == [b"newer"]
    assert store.usage().records == 102 + 1, "the tombstone does not count"
    assert trim(store, Retention(records=102)) == 0
    assert trim(store, Retention(records=0)) == 102 + 1
    assert (payloads(store), store.sessions(NS), store.tombstones(NS)) == ([], [], {})
    assert store.usage().records == 0
    (sequence,) = store.append(NS, [NewEntry("s1", b"x")])  # a session whose beginning was removed can go on
    assert [entry.sequence for entry in store.read(NS)] == [sequence]


def test_erasures_take_the_place_of_no_turns(store: Store) -> None:
    kept = [NewEntry(f"kept{number}", b"turn %d" % number) for number in range(20)]
    store.append(NS, kept)
    for number in range(30):
        store.append(NS, [NewEntry(f"gone{number}", b"x")])
        store.erase_session(NS, f"gone{number}")
    assert trim(store, Retention(records=30)) == 0
    assert {entry.payload for entry in kept} < set(payloads(store)) and len(store.tombstones(NS)) == 30
    assert trim(store, Retention(records=20)) == 10, "erasures beyond the limit do count, so they do not grow for ever"
    assert trim(store, Retention(records=0)) == 40 and store.usage().records == 0


def test_retention_takes_the_oldest_whichever_log_they_are_in(store: Store) -> None:
    logs = ["rare", *(f"log-{number}" for number in range(3))]

    def add(numbers: range) -> None:
        for number in numbers:
            log = "rare" if number % 5 == 0 else f"log-{number % 3}"
            store.append(log, [NewEntry(f"s{number % 7}", number.to_bytes(2))])
            time.sleep(0.002)  # Redis knows milliseconds

    def left() -> list[int]:
        return sorted(int.from_bytes(entry.payload) for log in logs for entry in store.read(log))

    add(range(60))
    assert trim(store, Retention(records=35)) == 25
    assert left() == list(range(25, 60))
    add(range(60, 400))
    assert trim(store, Retention(records=300)) == 75
    assert left() == list(range(100, 400))
    assert trim(store, Retention(records=0)) == 300


def test_a_log_that_grows_without_end_takes_nothing_from_small_ones(store: Store) -> None:
    """A caller who writes ten times what the store may hold loses their own history, and not other callers'."""
    cursors = {f"small-{number}": store.append(f"small-{number}", [NewEntry("s", b"x")] * 5) for number in range(20)}
    time.sleep(0.002)  # Redis knows milliseconds
    for removed in (100, *[300] * 9):
        store.append("endless", [NewEntry("s", b"x")] * 300)
        assert trim(store, Retention(records=300)) == removed
    assert len(list(store.read("endless"))) == 200 and store.history("endless", "") == "trimmed"
    for log, entries in cursors.items():
        assert [entry.sequence for entry in store.read(log)] == entries
        assert store.history(log, "") == store.history(log, entries[2]) == "whole"
    time.sleep(0.002)
    assert trim(store, Retention(days=0.0, records=300)) == 300, "age spares nobody"


@pytest.mark.parametrize("owner", ["", "greedy"])
def test_a_caller_with_many_logs_takes_nothing_from_others(store: Store, owner: str) -> None:
    """Each cache salt and each adapter has a log of its own, which holds less than others' logs."""
    family = "model" if owner else "model.greedy"
    cursors = store.append("model.small", [NewEntry("s", b"x")] * 20)
    store.append("model.other.salted", [NewEntry("s", b"x")] * 10)
    store.append("model.other", [NewEntry("s", b"x")] * 10)
    time.sleep(0.002)  # Redis knows milliseconds
    for number in range(100):
        store.append(f"{family}.{number}", [NewEntry("s", b"x", owner=owner)] * 3)
    assert trim(store, Retention(records=100)) == 240
    assert [entry.sequence for entry in store.read("model.small")] == cursors
    assert len(list(store.read("model.other"))) == len(list(store.read("model.other.salted"))) == 10
    left = [len(list(store.read(log))) for log in store.namespaces("model.") if log[6:11] not in ("small", "other")]
    assert sum(left) == 60 and store.usage().records == 100
    while store.trim(Retention(records=0)).more:
        pass
    store.append("model.small", [NewEntry("s", b"x")] * 3)
    assert trim(store, Retention(records=3)) == 0


def test_small_logs_are_trimmed_once_they_hold_what_others_do(store: Store) -> None:
    for number, size in enumerate((4, 100, 8)):
        store.append(f"log-{number}", [NewEntry("s", b"x")] * size)
        time.sleep(0.002)  # Redis knows milliseconds
    held = []
    for limit in (60, 30, 24, 12, 2):
        trim(store, Retention(records=limit))
        held.append([len(list(store.read(f"log-{number}"))) for number in range(3)])
    assert held == [[4, 48, 8], [4, 18, 8], [4, 12, 8], [3, 3, 6], [0, 1, 1]]


def test_one_slice_leaves_a_log_half_of_the_mean_one(store: Store) -> None:
    """Otherwise a small log that holds more than that would lose all turns at once, because they are the oldest."""
    store.append("idle", [NewEntry("s", b"x")] * 8)
    time.sleep(0.002)  # Redis knows milliseconds
    store.append("small", [NewEntry("s", b"x")])
    store.append("endless", [NewEntry("s", b"x")] * 19)
    assert trim(store, Retention(records=20)) == 8
    assert [len(list(store.read(log))) for log in ("idle", "small", "endless")] == [4, 1, 15]
    for _ in range(10):
        store.append("endless", [NewEntry("s", b"x")] * 20)
        assert trim(store, Retention(records=20)) == 20
    left = [len(list(store.read(log))) for log in ("idle", "small", "endless")]
    assert left[0] >= 3 and left[1] == 1 and sum(left) == 20


def test_retention_spares_what_is_newer_than_the_oldest_of_a_third_log(store: Store) -> None:
    logs = ["a", "b", "c", "b", "a"]
    for number, log in enumerate(logs):
        store.append(log, [NewEntry("s", number.to_bytes(2))])
        time.sleep(0.002)  # Redis knows milliseconds
    assert trim(store, Retention(records=2)) == 3
    left = {log: [int.from_bytes(entry.payload) for entry in store.read(log)] for log in "abc"}
    assert left == {"a": [4], "b": [3], "c": []}


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


@pytest.mark.parametrize("retention", [Retention(days=0.0), Retention(records=0), Retention(bytes=0)])
def test_a_slice_is_about_a_megabyte(store: Store, retention: Retention) -> None:
    """Otherwise appends would wait for 256 large records."""
    for _ in range(64):
        store.append(NS, [NewEntry("s", bytes(100_000))])
    time.sleep(0.002)  # Redis knows milliseconds
    removed, more = store.trim(retention)
    assert 10 <= removed <= 12
    assert more
    assert removed + trim(store, retention) == 64


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


def test_it_knows_whether_retention_took_something_behind_a_cursor(store: Store) -> None:
    assert store.history(NS, "") == "whole"
    cursors = store.append(NS, [NewEntry("s", b"0"), NewEntry("s", b"1"), NewEntry("t", b"2")])
    assert all(store.history(NS, cursor) == "whole" for cursor in ("", *cursors))
    store.erase_session(NS, "t")
    assert all(store.history(NS, cursor) == "whole" for cursor in cursors)
    assert store.trim(Retention(records=1)).records == 1
    assert all(store.history(NS, cursor) == "whole" for cursor in cursors[1:])
    store.erase_session(NS, "u")
    assert store.trim(Retention(records=1)).records == 1
    assert store.history(NS, cursors[0]) == store.history(NS, "") == "trimmed"
    end = store.newest(NS)
    while store.trim(Retention(records=0)).more:
        pass
    assert store.history(NS, end) == "whole" and store.history(NS, cursors[2]) == "trimmed"


def test_the_end_of_a_log_is_whole_though_retention_has_emptied_it_or_others(store: Store) -> None:
    """Otherwise a tenant that is new, or was idle for long, would be forgotten each second, with running requests."""
    store.append(NS, [NewEntry("s", b"x")] * 3)
    store.append("small", [NewEntry("s", b"x")])
    assert trim(store, Retention(records=0)) == 4
    for log in (NS, "small", "new"):
        end = store.newest(log)
        assert list(store.read(log, after=end)) == [] and store.history(log, end) == "whole", log
        (sequence,) = store.append(log, [NewEntry("s", b"y")])
        assert end < sequence == store.newest(log)
        assert store.wait({log: end}, 0.0) == [log]


def test_a_log_that_was_spared_is_whole_though_larger_ones_were_emptied(store: Store) -> None:
    entries = store.append("small", [NewEntry("s", b"x")] * 2)
    time.sleep(0.002)  # Redis knows milliseconds
    store.append("large", [NewEntry("s", bytes(100_000))])
    time.sleep(0.002)
    store.append("endless", [NewEntry("s", bytes(10_000))] * 9)
    assert trim(store, Retention(records=10)) == 2
    assert list(store.read("large")) == [] and store.history("large", "") == "trimmed"
    assert [store.history("small", cursor) for cursor in ("", *entries)] == ["whole"] * 3


def test_logs_that_were_emptied_do_not_count_in_the_mean(store: Store) -> None:
    small = store.append("small", [NewEntry("s", b"x")] * 4)
    time.sleep(0.002)  # Redis knows milliseconds
    for number in range(30):
        store.append(f"gone-{number}", [NewEntry("s", b"x")])
        store.erase_session(f"gone-{number}", "s", mark=False)
    store.append("large", [NewEntry("s", b"x")] * 100)
    assert trim(store, Retention(records=90)) == 14
    assert [entry.sequence for entry in store.read("small")] == small


def test_what_age_took_counts_towards_the_number(store: Store) -> None:
    store.append(NS, [NewEntry("s", b"old")] * 10)
    middle = time.time() + 0.01
    time.sleep(1.5)
    store.append(NS, [NewEntry("s", b"new")] * 10)
    assert trim(store, Retention(days=(time.time() - middle) / 86_400, records=12)) == 10
    assert payloads(store) == [b"new"] * 10


def test_a_session_that_is_used_while_others_are_erased_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        store.append(NS, [NewEntry(name, b"1")])
    erase = store.erase_session

    def use_b(namespace: str, session: str, *, mark: bool = True) -> Erasure:
        store.append(NS, [NewEntry("b", b"2")])
        return erase(namespace, session, mark=mark)

    monkeypatch.setattr(store, "erase_session", use_b)
    assert trim_sessions(store, NS, Retention(records=0)) == 1
    assert [entry.payload for entry in store.read(NS)] == [b"1", b"2"]


def test_a_caller_that_erases_nothing_in_many_logs_takes_nothing_from_others(store: Store) -> None:
    """Each erasure leaves a tombstone in the log of the salt under which it was asked for."""
    kept = store.append("model.small", [NewEntry("s", b"x", owner="small")] * 20)
    for number in range(100):
        store.erase_session(f"model.{number}", "none")
    time.sleep(0.002)
    store.append("model.large", [NewEntry("s", b"x" * 500, owner="large")] * 300)
    assert trim(store, Retention(records=200)) >= 120
    assert [entry.sequence for entry in store.read("model.small")] == kept
    store.append("model.0", [NewEntry("s", b"x")] * 20)  # a log of an owner of its own from now on
    assert trim(store, Retention(records=100)) > 0
    assert [entry.sequence for entry in store.read("model.small")] == kept
    assert len(list(store.read("model.0", session="s"))) == 20
