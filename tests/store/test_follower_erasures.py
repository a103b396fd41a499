"""Test what the follower does with tombstones, of other processes and its own, and with the records around them."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from agentspec.cache.store import CircuitBreaker, Entry, Erasure, MemoryStore, Retention
from agentspec.cache.store.base import entry_name
from agentspec.errors import StoreUnavailableError
from tests.store.followed_process import LIFE_SECONDS, OTHER, Process, hide
from tests.store.helpers import NS, entry_of, turn, wait_until


def test_who_may_hold_text_from_before_an_erasure_is_told_of_it_though_the_session_was_used_since(
    process: Process,
) -> None:
    for session in ("used", "gone", "own"):
        process.store.append(NS, [entry_of(turn(session, 1))])
        (process.follower.own if session == "own" else process.store).erase_session(NS, session)
    process.store.append(NS, [entry_of(turn("used", 2))])
    process.begin(NS, "t")
    assert process.erased == [("t", "gone")]
    process.follower.catch_up(NS, "t", None)  # the log is followed by now
    assert process.erased == [("t", "gone"), ("t", "used"), ("t", "gone")]
    assert process.follower.stats().erased == 3


def while_erasing(process: Process, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let this process erase the session "s". Call `act` before it knows that the store has erased it."""
    erase = process.store.erase_session

    def erase_session(log: str, session: str) -> Erasure:
        erasure = erase(log, session)
        act()
        return erasure

    with monkeypatch.context() as patch:
        patch.setattr(process.store, "erase_session", erase_session)
        process.follower.own.erase_session(NS, "s")


def test_two_erasures_of_a_session_at_once_are_both_this_process_s(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may ask again because the first answer took long."""
    monkeypatch.setattr(LIFE_SECONDS, 120.0)  # the follower waits for the erasure's end on a busy machine, too
    process.begin(NS, "t")
    process.store.append(NS, [entry_of(turn("s", 1))])
    process.wait(delivered=1)
    erase, begun = process.store.erase_session, list[str]()

    def erase_session(log: str, session: str) -> Erasure:
        begun.append(session)
        erasure = erase(log, session)
        if len(begun) == 1:  # the second one ends before the first
            time.sleep(0.3)  # the follower reads the tombstone, and waits for the erasure's end
            process.store.append(NS, [entry_of(turn("s", 2))])
            process.follower.own.erase_session(log, session)
            time.sleep(0.3)
        return erasure

    monkeypatch.setattr(process.store, "erase_session", erase_session)
    process.follower.own.erase_session(NS, "s")
    process.store.append(NS, [entry_of(turn("other", 3))])
    wait_until(lambda: 3 in process.numbers())
    assert process.erased == [] and process.follower.stats().erased == 0
    wait_until(lambda: not process.follower.own.may_be_older(NS, "s"))


def test_a_session_whose_erasure_failed_is_delivered_again(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    process.begin(NS, "t")
    with monkeypatch.context() as patch, pytest.raises(StoreUnavailableError):
        patch.setattr(process.store, "erase_session", Mock(side_effect=StoreUnavailableError("away")))
        process.follower.own.erase_session(NS, "s")
    process.store.append(NS, [entry_of(turn("s", 5))])
    process.wait(delivered=1)
    assert process.numbers() == [5] and not process.follower.own.may_be_older(NS, "s")


def test_an_erasure_in_a_log_that_is_not_followed_is_over_when_it_ends(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile = list[bool]()
    while_erasing(process, monkeypatch, lambda: meanwhile.append(process.follower.own.may_be_older(NS, "s")))
    assert meanwhile == [True]
    assert not process.follower.own.may_be_older(NS, "s")


def test_a_turn_that_was_read_before_its_tombstone_is_delivered_before_it(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn was read just before the store erased it. Delivered after the tombstone, it would stay."""
    before, read = MemoryStore(), process.store.read
    before.append(NS, [entry_of(turn("s", 1))])

    def erased_meanwhile(namespace: str, **options: Any) -> Iterator[Entry]:
        yield from before.read(namespace)
        yield from read(namespace, **options)

    monkeypatch.setattr(process.store, "read", erased_meanwhile)
    process.begin(NS, "t")
    process.store.erase_session(NS, "s")
    process.wait(erased=1, delivered=1)
    assert process.taken == [] and process.erased == [("t", "s")]


def test_a_session_counts_as_being_erased_until_its_log_is_read_behind_the_erasure(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    for log in (NS, "other"):
        process.begin(log, "t")

    def erase_session(log: str, session: str) -> Erasure:
        process.store.append(NS, [entry_of(turn("stays", 1))])
        process.wait(delivered=1)
        assert process.follower.own.may_be_older(NS, "s")  # the store may erase it only now
        return Erasure(0, complete=True)  # the log has no tombstone, as one would be read at once

    monkeypatch.setattr(process.store, "erase_session", erase_session)
    process.follower.own.erase_session(NS, "s")
    process.store.append("other", [entry_of(turn("stays", 2))])
    process.wait(delivered=2)
    assert process.follower.own.may_be_older(NS, "s") and not process.follower.own.may_be_older("other", "s")
    process.store.append(NS, [entry_of(turn("s", 3))])
    process.wait(delivered=3)
    assert process.numbers() == [1, 2, 3] and not process.follower.own.may_be_older(NS, "s")


def test_what_is_said_behind_an_erasure_of_this_process_is_delivered_with_it(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, goes_on, read = threading.Event(), threading.Event(), process.store.read

    def slow(namespace: str, **options: Any) -> Iterator[Entry]:
        reading.set()
        assert goes_on.wait(60)
        yield from read(namespace, **options)

    monkeypatch.setattr(process.store, "read", slow)
    process.begin(NS, "t")
    while_erasing(process, monkeypatch, lambda: reading.wait(60))
    process.store.append(NS, [entry_of(turn("s", 3))])  # used again, and read together with the tombstone
    goes_on.set()
    process.wait(delivered=1)
    assert process.numbers() == [3] and process.erased == []


def test_only_so_many_erased_sessions_are_remembered(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.cache.store.background.follower._MAX_ERASED", 3)
    process.begin(NS, "t")
    for number in range(6):
        process.store.erase_session(NS, f"s{number}")
    process.wait(erased=6)
    log = process.follower._logs.all()[NS]
    wait_until(lambda: len(log.recent_tombstones) == len(log.own_turn_at_erasure) == 3, 20)
    assert [*log.own_turn_at_erasure] == ["s3", "s4", "s5"]


def test_no_tombstone_waits_for_this_process_s_own_records(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an outage, thousands of this process's records may be written at once."""
    monkeypatch.setattr("agentspec.cache.store.background.follower._READ_SECONDS", 0.0)  # one slice at a time
    monkeypatch.setattr("agentspec.cache.store.background.follower._SLICE", 8)
    skipped_before = list[int]()

    def erase(tenant: str | None, sessions: Sequence[str]) -> int:
        skipped_before.append(process.follower.stats().skipped)
        return 0

    monkeypatch.setattr(process.follower, "_forget_sessions", erase)
    process.store.gate.clear()
    process.begin(NS, "t")
    process.store.append_ungated(NS, [entry_of(turn("own", number, writer=OTHER)) for number in range(100)])
    process.store.erase_session(NS, "s")
    process.store.gate.set()
    process.wait(skipped=100, behind=0)
    assert skipped_before == [8]


def test_who_settles_waits_until_late_turns_are_erased_though_all_is_read(process: Process) -> None:
    process.refusals = 1_000_000
    process.hear_of_an_erasure()
    process.store.append(NS, [entry_of(turn("s", 5, writer=OTHER))])  # was on its way
    wait_until(lambda: process.refusals < 1_000_000)  # it is read by now, and cannot be erased yet
    process.refusals = 0
    process.follower.settle(20.0)
    assert process.erased_again == [("t", "s")]


def test_logs_that_are_behind_share_the_time_and_no_tombstone_waits_for_the_records_of_others(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.cache.store.background.follower._READ_SECONDS", 0.0)  # one slice at a time
    monkeypatch.setattr("agentspec.cache.store.background.follower._SLICE", 8)
    logs, taken_before, wait = ("a", "b", "c"), dict[str, int](), process.store.wait
    appended = threading.Event()

    def wait_for_all(cursors: Mapping[str, str], timeout: float) -> list[str]:
        return wait(cursors, timeout) if appended.wait(0.01) and len(cursors) == len(logs) else []

    def erase(tenant: str | None, sessions: Sequence[str]) -> int:
        taken_before.update(dict.fromkeys(sessions, len(process.taken)))
        return 0

    monkeypatch.setattr(process.follower, "_forget_sessions", erase)
    monkeypatch.setattr(process.store, "wait", wait_for_all)
    for place, log in enumerate(logs):
        process.begin(log, log)
        records = [turn(f"of {log}", 100 * place + number) for number in range(40)]
        process.store.append(log, [entry_of(record) for record in records])
        process.store.erase_session(log, f"erased in {log}")
    appended.set()
    process.wait(delivered=120, behind=0)
    assert taken_before == {f"erased in {log}": 8 for log in logs}
    slices = [process.taken[at][0] for at in range(0, 120, 8)]
    assert slices == slices[:3] * 5 and set(slices) == {f"of {log}" for log in logs}


def test_it_is_not_current_after_a_freeze_though_its_connection_is_lost(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Erasures during the freeze are not known yet, and the store may be fine."""
    monkeypatch.setattr(process.follower._breaker, "_retry_delay", 600.0)
    process.begin(NS, "t")
    process.store.gate.clear()  # its thread hangs in a call, as if it were frozen
    wait_until(lambda: not process.follower.is_current())
    time.sleep(1.0)  # so that this call, too, is longer than LIFE_SECONDS
    process.store.error = StoreUnavailableError("connection reset by peer")
    process.store.gate.set()
    process.wait(failed=1)
    process.store.error = None
    time.sleep(0.3)
    assert not process.follower.is_current()
    process.follower._breaker._until = 0.0  # the pause is over
    wait_until(process.follower.is_current)


def test_it_stays_current_through_a_long_pause_of_an_outage(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIFE_SECONDS, 2.0)
    monkeypatch.setattr(process.follower, "_breaker", CircuitBreaker(threshold=1, first_pause=60.0))
    process.begin(NS, "t")
    process.store.error = StoreUnavailableError("away")
    process.wait(state="open")
    time.sleep(2.5)
    assert process.follower.is_current()


def test_it_is_current_as_soon_as_it_follows_the_first_log(process: Process) -> None:
    process.follower._alive -= 3_600.0  # for an hour no log was followed
    process.store.gate.clear()  # so that its thread gives no sign of life
    process.begin(NS, "t")
    assert process.follower.is_current()


def test_a_tenant_that_is_forgotten_needs_no_erasure_any_more(process: Process) -> None:
    process.begin(NS, "t")
    process.faults = 1_000_000
    process.store.erase_session(NS, "s")
    wait_until(lambda: not process.follower.is_current())
    process.store.trim(Retention(records=0))  # the tombstone is gone, before it could be applied
    wait_until(process.follower.is_current)
    assert process.forgotten == ["t"]


def test_an_erasure_that_the_store_has_lost_without_a_failure_is_repeated(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked for once a minute, of those known at the beginning, read since, and made here."""
    known = {}
    for session in ("before", "read", "own"):
        if session == "read":
            process.begin(NS, "t")
        erase = process.follower.own.erase_session if session == "own" else process.store.erase_session
        known[session] = entry_name(erase(NS, session).tombstone or "")
    process.wait(erased=2)
    asked = list[dict[str, str]]()

    def undone(log: str, erased: dict[str, str]) -> list[str]:
        asked.append(erased)
        return [] if len(asked) > 2 else ["read"]

    monkeypatch.setattr(process.store, "undone_erasures", undone)
    process.follower._lost.suspect()
    wait_until(lambda: process.erased_again)
    assert (process.erased_again, process.follower.stats().undone) == ([("t", "read")], 1)
    assert asked == [known, {"read": known["read"]}], "it looks once more, just before"


def test_an_erasure_that_another_process_has_repeated_is_not_repeated(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session may be in use again by then."""
    process.begin(NS, "t")
    process.follower.own.erase_session(NS, "s")
    answers = [["s"], list[str]()]
    monkeypatch.setattr(process.store, "undone_erasures", lambda *_: answers.pop(0))
    process.follower._lost.suspect()
    wait_until(lambda: not answers)
    process.follower.settle(20.0)
    assert process.erased_again == []


def test_a_part_of_the_store_that_is_away_holds_up_no_log_of_the_others(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.begin(NS, "t")
    process.begin("other", "u")
    process.follower.own.erase_session(NS, "s")
    calls = []

    def away(log: str, erased: dict[str, str]) -> list[str]:
        calls.append(log)
        raise StoreUnavailableError("its node is away")

    monkeypatch.setattr(process.store, "undone_erasures", away)
    monkeypatch.setattr(process.store, "part", lambda log: "node" if log == NS else "")
    process.follower._lost.suspect()
    wait_until(lambda: calls)
    process.store.append("other", [entry_of(turn("o", 7))])
    process.wait(delivered=1, failed=0)
    assert calls == [NS], "it is asked again a few seconds later"
    assert process.follower._lost.look_at > 0.0


def test_a_session_that_was_used_since_is_erased_here_where_its_turns_wait_for_the_store(process: Process) -> None:
    """They may be older than the erasure."""
    for session in ("waits", "other"):
        process.store.erase_session(NS, session)
        process.store.append(NS, [entry_of(turn(session, 1))])
    process.unwritten = {"waits"}
    process.begin(NS, "t")
    assert process.erased == [("t", "waits")]


def test_what_retention_took_in_a_part_of_the_store_that_was_away_may_have_been_an_erasure(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logs in the other parts are followed meanwhile, so the store as a whole was asked all the time."""
    monkeypatch.setattr(LIFE_SECONDS, 0.5)
    hidden = hide(process, monkeypatch, NS)
    process.begin(NS, "t")
    process.begin("other", "u")
    process.store.erase_session(NS, "s")
    process.store.trim(Retention(records=0))
    process.store.append(NS, [entry_of(turn("stays", 1))])
    assert not process.store.tombstones(NS)
    process.store.append("other", [entry_of(turn("o", 7))])
    process.wait(delivered=1)
    time.sleep(0.6)
    assert process.forgotten == []
    process.busy = {"t"}
    hidden.clear()
    wait_until(lambda: process.follower.outdated == {"t"})
    process.busy = set()
    wait_until(lambda: process.forgotten)
    process.store.append(NS, [entry_of(turn("stays", 2))])
    process.wait(delivered=3)
    assert process.forgotten == ["t"] and process.numbers() == [7, 1, 2] and not process.follower.outdated


def test_a_part_that_is_away_after_a_long_round_holds_up_no_log_of_the_others(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then all logs are looked at, as after a freeze."""
    monkeypatch.setattr(LIFE_SECONDS, 0.1)
    history, away = process.store.history, threading.Event()

    def of_a_part(log: str, after: str) -> str:
        if log == NS and not away.is_set():
            raise StoreUnavailableError("its node is away")
        return history(log, after)

    monkeypatch.setattr(process.store, "part", lambda log: "node" if log == NS else "another")
    monkeypatch.setattr(process.store, "history", of_a_part)
    process.begin(NS, "t")
    process.begin("other", "u")
    time.sleep(0.3)
    process.store.erase_session("other", "s")
    process.store.append(NS, [entry_of(turn("n", 1))])
    process.wait(erased=1, failed=0)
    assert process.taken == []  # it may lack tombstones
    away.set()
    process.wait(delivered=1)
    assert process.forgotten == []
