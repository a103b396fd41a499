"""Test the follower: what it delivers, skips and applies, and what it does if the store fails or it falls behind."""

import time
from collections.abc import Mapping
from unittest.mock import Mock

import pytest

from agentspec.cache.store import Retention, encode
from agentspec.cache.store.base import NewEntry, entry_name
from agentspec.errors import StoreError, StoreUnavailableError
from tests.store.followed_process import FOLLOWER, LIFE_SECONDS, OTHER, Process
from tests.store.helpers import NS, entry_of, turn, wait_until


def test_what_was_read_may_go_by_retention(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only unread records may have held an erasure, for which all of the tenant's text is forgotten."""
    monkeypatch.setattr(LIFE_SECONDS, 0.05)  # shorter than a wait, so that all logs are looked at each time
    history = Mock(wraps=process.store.history)
    monkeypatch.setattr(process.store, "history", history)
    process.begin(NS, "t")
    process.store.append(NS, [entry_of(turn("s", number)) for number in range(3)])
    process.wait(delivered=3)
    process.store.trim(Retention(records=1))
    looks = history.call_count
    wait_until(lambda: history.call_count >= looks + 2)
    assert process.forgotten == []


def test_what_went_unread_by_retention_makes_a_tenant_be_forgotten_once(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(cursors: Mapping[str, str], timeout: float) -> list[str]:
        time.sleep(0.1)  # longer than LIFE_SECONDS, so that all logs are looked at again
        return []

    monkeypatch.setattr(LIFE_SECONDS, 0.05)
    monkeypatch.setattr(process.store, "wait", wait)  # nothing is read
    history = Mock(wraps=process.store.history)
    monkeypatch.setattr(process.store, "history", history)
    process.begin(NS, "t")
    process.store.append(NS, [entry_of(turn("s", number)) for number in range(3)])
    process.store.trim(Retention(records=1))
    wait_until(lambda: process.forgotten)
    looks = history.call_count
    wait_until(lambda: history.call_count >= looks + 2)
    assert process.forgotten == ["t"]


def test_a_store_that_was_emptied_is_followed_from_its_new_beginning(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock may be behind, as after a failover, so that new entries and tombstones lie before the old cursor."""
    monkeypatch.setattr(LIFE_SECONDS, 0.05)  # so that all logs are looked at each time
    process.begin(NS, "t")
    process.store.append(NS, [entry_of(turn("s", number)) for number in range(5)])
    process.wait(delivered=5)
    with process.store._write() as connection:
        for table in ("entries", "payloads", "logs", "sqlite_sequence"):
            connection.execute(f"DELETE FROM {table}")
        connection.execute("INSERT INTO logs VALUES ('', 0, 0, 0)")
    process.store.append(NS, [entry_of(turn("new", 5))])
    process.store.erase_session(NS, "s")
    wait_until(lambda: process.erased == [("t", "s")] and process.numbers() == [5])
    assert process.forgotten == []  # what it holds may still be drafted from
    process.store.append(NS, [entry_of(turn("new", 6))])
    process.wait(delivered=7)
    assert process.numbers() == [5, 6] and process.erased == [("t", "s")]


@pytest.mark.parametrize(("seconds", "least", "most"), [(0.0, 10, 10), (0.4, 1, 3)])
def test_others_records_are_learned_from_while_there_is_time(
    process: Process, seconds: float, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other records are delivered, too."""
    # A busy machine may hold up a thread for 20 ms, so this is a second.
    monkeypatch.setattr(f"{FOLLOWER}._LEARN_SECONDS", 1.0 if seconds else 60.0)
    process.learning_takes = seconds
    process.begin(NS, "t")
    process.store.append(NS, [entry_of(turn("s", number)) for number in range(10)])
    process.wait(delivered=10)
    assert process.learned == list(range(process.follower.stats().learned))
    assert least <= len(process.learned) <= most
    assert process.numbers() == list(range(10))


def test_only_what_others_append_from_now_on_is_delivered(process: Process) -> None:
    process.store.append(NS, [entry_of(turn("s", 1))])
    process.begin(NS, "t")
    process.begin(NS, "t")  # a second time changes nothing
    process.store.append(NS, [entry_of(turn("s", number)) for number in range(10, 15)])
    process.store.append("unread", [entry_of(turn("s", 90))])
    process.wait(delivered=5)
    assert process.numbers() == [10, 11, 12, 13, 14]
    own = [entry_of(turn("s", number, writer=OTHER)) for number in range(20, 23)]
    process.store.append(NS, [*own, NewEntry("s", b"damaged"), entry_of(turn("s", 30))])
    process.wait(delivered=6, skipped=3, damaged=1, behind=0, logs=1)
    assert process.numbers() == [10, 11, 12, 13, 14, 30]
    assert process.follower.stats().delay_ms >= 0


def test_a_tombstone_is_applied_at_once_and_in_order(process: Process) -> None:
    process.begin(NS, "t")
    process.store.append(NS, [entry_of(turn("s", 1)), entry_of(turn("other", 2))])
    process.store.erase_session(NS, "s")
    process.store.append(NS, [entry_of(turn("s", 3))])
    process.wait(erased=1)
    wait_until(lambda: 3 in process.numbers())
    assert process.numbers() == [2, 3]
    assert process.erased == [("t", "s")]


def test_its_own_tombstones_are_not_applied_again(process: Process) -> None:
    process.begin(NS, "t")
    process.store.gate.clear()  # the follower cannot read meanwhile
    process.store.append_ungated(NS, [entry_of(turn("s", 1))])
    process.follower.own.erase_session(NS, "s")
    process.store.gate.set()
    process.store.append(NS, [entry_of(turn("x", 2))])
    process.wait(delivered=1)
    assert process.erased == []


def test_what_was_erased_before_is_erased_at_the_beginning_unless_it_was_used_since(process: Process) -> None:
    process.store.append(NS, [entry_of(turn(name, 1)) for name in ("a", "b")])
    for name in ("a", "b"):
        process.store.erase_session(NS, name)
    process.store.append(NS, [entry_of(turn("b", 2))])
    process.begin(NS, "t")
    process.begin(NS, "t")  # a second time changes nothing
    assert process.erased == [("t", "a")]


def test_a_turn_that_arrives_behind_its_sessions_tombstone_is_erased_again(process: Process) -> None:
    process.begin(NS, "t")
    process.number = 7
    process.store.append(NS, [entry_of(turn("s", 1))])
    process.store.erase_session(NS, "s")
    process.wait(erased=1)
    process.store.append(NS, [entry_of(turn("s", 7, writer=OTHER))])  # this process's eighth turn: it came later
    process.store.append(NS, [entry_of(turn("x", 3, writer=OTHER))])
    process.wait(skipped=2)
    assert process.erased_again == []
    process.store.append(NS, [entry_of(turn("s", 6, writer=OTHER))])  # the seventh, which was on its way
    wait_until(lambda: process.erased_again)  # the turn is counted as skipped before that
    assert process.erased_again == [("t", "s")]
    assert process.follower.stats().skipped == 3


def test_erasing_again_is_tried_until_it_succeeds(process: Process) -> None:
    process.refusals = 3
    process.hear_of_an_erasure()
    process.store.append(NS, [entry_of(turn("s", number, writer=OTHER)) for number in (5, 6)])
    wait_until(lambda: process.erased_again)
    process.wait(failed=3, state="closed")
    assert process.erased_again == [("t", "s")]


def test_an_erasure_that_failed_here_is_tried_again(process: Process) -> None:
    process.begin(NS, "t")
    process.store.append(NS, [entry_of(turn("s", 1))])
    process.wait(delivered=1)
    process.faults = 1
    process.store.erase_session(NS, "s")
    process.store.append(NS, [entry_of(turn("other", 2))])
    wait_until(lambda: 2 in process.numbers())
    assert process.erased == [("t", "s")]
    assert process.numbers() == [2]


def test_it_is_not_current_while_an_erasure_fails_here(process: Process) -> None:
    process.begin(NS, "t")
    process.wait(logs=1)
    process.faults = 1000
    process.store.erase_session(NS, "s")
    wait_until(lambda: not process.follower.is_current())
    process.wait(state="open")
    assert not process.follower.is_current()  # although the store is asked less often now
    process.faults = 0
    wait_until(process.follower.is_current)
    assert process.erased == [("t", "s")]


def test_a_turn_that_was_on_its_way_when_following_began_is_erased_again(process: Process) -> None:
    """Its session was erased before, so this process reads of that when it begins to follow."""
    process.number = 7
    process.store.append(NS, [entry_of(turn("s", 1))])
    process.store.erase_session(NS, "s")
    process.begin(NS, "t")
    process.store.append(NS, [entry_of(turn("s", 7, writer=OTHER))])  # the eighth turn of this process: it came later
    process.wait(skipped=1)
    assert process.erased_again == []
    process.store.append(NS, [entry_of(turn("s", 6, writer=OTHER))])  # the seventh
    process.wait(skipped=2)
    wait_until(lambda: process.erased_again, 5.0)
    assert process.erased_again == [("t", "s")]


def test_a_log_is_followed_until_what_is_to_be_erased_again_is(process: Process) -> None:
    process.refusals = 1_000_000
    process.hear_of_an_erasure()
    process.store.append(NS, [entry_of(turn("s", 5, writer=OTHER))])
    wait_until(lambda: process.refusals < 1_000_000)
    for number in range(3):  # it follows at most three logs
        process.begin(f"log{number}", f"t{number}")
    assert process.forgotten == []
    process.refusals = 0
    wait_until(lambda: process.erased_again)
    assert process.erased_again == [("t", "s")]
    wait_until(lambda: not process.follower._logs.all()[NS].late_turns)  # it is noted after the call
    process.begin("log3", "t3")
    assert "t" in process.forgotten
    assert process.follower.stats().logs == 3


def test_a_tombstone_does_not_wait_for_the_records_before_it(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{FOLLOWER}._READ_SECONDS", 0.02)
    monkeypatch.setattr(f"{FOLLOWER}._SLICE", 8)  # a slow machine takes long enough for these
    monkeypatch.setattr(LIFE_SECONDS, 2.0)
    process.taking_takes = 0.005
    process.begin(NS, "t")
    process.store.append(NS, [entry_of(turn(f"s{number % 7}", number)) for number in range(1000)])
    process.wait(behind=1)
    time.sleep(2.0)  # longer than the follower counts as current without a read
    process.store.erase_session(NS, "s3")
    process.wait(erased=1)
    assert process.follower.stats().delivered < 900
    assert process.follower.is_current()
    process.taking_takes = 0.0
    process.wait(behind=0)
    assert process.numbers() == [number for number in range(1000) if number % 7 != 3]
    assert process.erased == [("t", "s3")]  # the tombstone's place was reached, and not applied twice


def test_many_tombstones_ahead_are_applied_once_and_none_is_forgotten(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{FOLLOWER}._READ_SECONDS", 0.02)
    monkeypatch.setattr(f"{FOLLOWER}._MAX_ERASED", 2)
    process.taking_takes = 0.005
    process.number = 7
    process.begin(NS, "t")
    process.store.append(NS, [entry_of(turn("x", number)) for number in range(500)])
    process.wait(behind=1)
    for number in range(5):
        process.store.erase_session(NS, f"s{number}")
    process.store.append(NS, [entry_of(turn("s0", 6, writer=OTHER))])  # was on its way
    process.wait(erased=5)
    assert process.follower.stats().delivered < 500
    process.taking_takes = 0.0
    wait_until(lambda: process.erased_again)
    assert process.erased_again == [("t", "s0")]
    assert process.erased == [("t", f"s{number}") for number in range(5)]


def test_two_that_begin_to_follow_a_log_at_once_skip_nothing_of_it(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader, and the thread that checks a late snapshot, may both begin to follow it."""
    newest, wait = process.store.newest, process.store.wait

    def late(namespace: str) -> str:
        monkeypatch.setattr(process.store, "newest", newest)
        process.begin(NS, "t")
        process.store.append(NS, [entry_of(turn("s", 2))])  # the first one doesn't read it now
        return newest(namespace)

    monkeypatch.setattr(process.store, "newest", late)
    monkeypatch.setattr(process.store, "wait", lambda cursors, timeout: [])
    process.begin(NS, "t")
    monkeypatch.setattr(process.store, "wait", wait)
    process.store.append(NS, [entry_of(turn("s", 3))])
    wait_until(lambda: 3 in process.numbers())
    assert process.numbers() == [2, 3]


def test_what_was_read_of_a_session_that_this_process_erases_is_dropped(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{FOLLOWER}._LEARN_SECONDS", 60.0)  # a busy machine may take all 20 ms
    process.may_learn.clear()  # the follower holds the record until the session is erased
    process.begin(NS, "t")
    process.store.append(NS, [entry_of(turn("s", 1)), entry_of(turn("other", 2))])
    wait_until(lambda: process.learned)
    process.follower.own.erase_session(NS, "s")
    process.may_learn.set()
    process.store.append(NS, [entry_of(turn("s", 3))])
    wait_until(lambda: 3 in process.numbers())
    assert process.numbers() == [2, 3]


def test_an_outage_is_survived_and_nothing_is_missed(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIFE_SECONDS, 3.0)  # a busy machine may hold up a thread for a second
    process.begin(NS, "t")
    process.store.error = StoreUnavailableError("away")
    wait_until(lambda: process.follower.stats().state == "open")
    for _ in range(80):  # four seconds: the follower knows that the store is away
        assert process.follower.is_current()
        time.sleep(0.05)
    process.store.error = None
    process.store.append(NS, [entry_of(turn("s", 1))])
    process.store.erase_session(NS, "gone")
    process.wait(delivered=1, erased=1, state="closed")
    assert process.numbers() == [1]
    assert process.follower.stats().failed >= 2


def test_it_is_not_current_while_it_cannot_ask(process: Process) -> None:
    assert process.follower.is_current()  # nothing is followed
    process.begin(NS, "t")
    assert process.follower.is_current()
    process.store.gate.clear()  # its thread hangs in a call, as if it were frozen
    wait_until(lambda: not process.follower.is_current())
    process.store.gate.set()
    wait_until(process.follower.is_current)


def test_a_log_that_cannot_be_begun_is_not_followed(process: Process) -> None:
    process.store.error = StoreError("no")
    with pytest.raises(StoreError, match="no"):
        process.begin(NS, "t")
    assert process.follower.stats().logs == 0
    assert not process.follower.use(NS)


def test_of_too_many_tenants_those_used_last_are_followed(process: Process) -> None:
    for number in range(3):
        process.begin(f"log{number}", f"t{number}")
    assert process.follower.use("log0")
    process.begin("log3", "t3")
    assert process.forgotten == ["t1"]
    process.busy = {"t2", "t0"}
    process.begin("log4", "t4")  # the tenants of the idlest logs have running requests
    assert process.forgotten == ["t1"]
    process.busy = set()
    for number in range(5, 40):
        process.begin(f"log{number}", f"t{number}")
    assert process.follower.stats().logs == 3
    assert not process.follower.use("log0") and process.follower.use("log39")


def test_an_owner_of_ever_new_logs_displaces_its_own(process: Process) -> None:
    """A caller has a log for each cache salt that it makes up."""
    for name in ("ada", "bob"):
        assert not process.follower.use(f"log-{name}", name)
        process.begin(f"log-{name}", name)
    for number in range(40):
        process.follower.use(f"log{number}", "eve")
        process.begin(f"log{number}", f"t{number}")
    assert process.forgotten == [f"t{number}" for number in range(39)]
    assert all(process.follower.use(name) for name in ("log-ada", "log-bob", "log39"))
    process.follower.use("log-carol", "carol")
    process.begin("log-carol", "carol")  # each owner has one log: the longest idle one is dropped
    assert process.forgotten[39:] == ["ada"]


def test_a_log_that_was_left_and_comes_back_by_turns_that_waited_has_its_owner(process: Process) -> None:
    for number in range(40):
        process.follower.use(f"log{number}", "eve")
        process.begin(f"log{number}", f"t{number}")
    for name in ("ada", "bob"):
        process.follower.use(f"log-{name}", name)
        process.begin(f"log-{name}", name)
    for number in range(10):
        process.begin(f"log{number}", f"t{number}")  # as before an append; no request names the owner
    assert process.follower.use("log-ada") and process.follower.use("log-bob")


def test_owners_of_logs_that_are_never_followed_take_no_more_memory(process: Process) -> None:
    for number in range(20_000):
        process.follower.use(f"log{number}", "eve")
    assert len(process.follower._logs._owners) == 4_096
    process.begin("log19999", "t")
    assert len(process.follower._logs._owners) == 4_095


def test_two_logs_are_followed_side_by_side(process: Process) -> None:
    process.begin("a", "ta")
    process.begin("b", "tb")
    process.store.append("a", [NewEntry("s", encode(turn("s", 1)))])
    process.store.append("b", [NewEntry("s", encode(turn("s", 2)))])
    process.store.erase_session("b", "x")
    process.wait(delivered=2, erased=1)
    assert process.erased == [("tb", "x")]
    assert sorted(process.numbers()) == [1, 2]


def test_who_follows_nothing_misses_nothing(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIFE_SECONDS, 0.0)
    assert process.follower.is_current()
    process.begin(NS, "t")
    assert not process.follower.is_current()


def test_what_is_remembered_of_tombstones_and_owners_is_bounded(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.cache.store.background.own_erasures._MAX_TOMBSTONES", 3)
    monkeypatch.setattr("agentspec.cache.store.background.followed._MAX_OWNERS", 3)
    for number in range(10):
        process.follower.own.erase_session(NS, f"s{number}")
        assert not process.follower.use(f"log-{number}", "ada")
    newest = [process.store.tombstones(NS)[f"s{number}"] for number in (7, 8, 9)]
    assert [*process.follower.own._tombstones] == [entry_name(cursor) for cursor in newest]
    assert [*process.follower._logs._owners] == ["log-7", "log-8", "log-9"]
