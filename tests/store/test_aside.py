"""Test records that wait for a part of a store, or for one log: they are kept apart, and are sent in order."""

import pytest

from agentspec.cache.store.background.aside import QueuedRecord, RefusedLog, SetAside, StorePart, Target
from agentspec.cache.store.records import EraseRecord
from tests.store.helpers import WRITER, turn

NODE, OTHER = StorePart("node"), StorePart("other")


def records(namespace: str, *numbers: int, session: str = "s") -> list[QueuedRecord]:
    return [QueuedRecord(number, namespace, turn(session, number), 1) for number in numbers]


def numbers_of(items: list[QueuedRecord]) -> list[int]:
    return [item.number for item in items]


def refuse(aside: SetAside, namespace: str, times: int = 5) -> None:
    """Let a log without waiting records be refused `times` times."""
    breaker = aside.breaker_of(RefusedLog(namespace))
    for _ in range(times):
        breaker.failure()


def test_only_a_turn_names_itself_so_that_the_loss_of_one_can_be_said() -> None:
    entry = QueuedRecord(1, "log", turn("s", 6), 1).entry()
    assert (entry.session, entry.group, entry.name) == ("s", None, f"{WRITER}:7")
    entry = QueuedRecord(2, "log", EraseRecord("s"), 1).entry()
    assert (entry.session, entry.group, entry.name) == ("s", None, "")


def test_a_part_has_its_appends_in_order_and_each_as_it_was() -> None:
    aside = SetAside()
    aside.add(NODE, records("a", 3, 4))
    aside.add(NODE, records("b", 5))
    aside.add(NODE, records("a", 1, 2), again=True)
    aside.add(OTHER, records("c", 6))
    assert (len(aside), aside.oldest()) == (6, 1)
    assert [numbers_of(aside.take(NODE)) for _ in range(3)] == [[1, 2], [3, 4], [5]]
    assert (len(aside), aside.oldest()) == (1, 6)


def test_what_waits_for_a_part_goes_before_newer_records_of_its_log_even_if_the_log_has_moved() -> None:
    aside = SetAside()
    aside.add(NODE, records("a", 1))
    aside.add(NODE, records("a", 2))

    def target_of(namespace: str) -> Target | None:
        return aside.target_of(namespace, {"a": "new", "b": "node", "c": "new"}.__getitem__)

    assert [target_of(namespace) for namespace in "abc"] == [NODE, NODE, None]
    aside.take(NODE)
    assert target_of("a") == NODE  # for one more append
    aside.take(NODE)
    assert target_of("a") is None
    aside.add(RefusedLog("a"), records("a", 3))
    assert [target_of(namespace) for namespace in "ab"] == [RefusedLog("a"), NODE]


def test_while_no_part_is_away_nobody_asks_where_a_log_is() -> None:
    """Asking would cost a call of the store for each record."""

    def unasked(namespace: str) -> str:
        raise AssertionError(namespace)

    assert SetAside().target_of("a", unasked) is None


def test_the_oldest_record_of_all_parts_is_dropped_first_and_its_log_forgotten_with_the_last() -> None:
    aside = SetAside()
    aside.add(NODE, records("a", 2, 5))
    aside.add(NODE, records("b", 6))
    aside.add(OTHER, records("c", 3, 4))
    assert [aside.drop_oldest().number for _ in range(3)] == [2, 3, 4]
    assert aside.target_of("a", str) == NODE
    assert (aside.drop_oldest().number, len(aside)) == (5, 1)
    assert aside.target_of("a", str) is None and aside.target_of("b", str) == NODE


def test_an_erased_session_leaves_every_part_and_no_other_does() -> None:
    aside = SetAside()
    aside.add(NODE, records("a", 1) + records("a", 2, session="gone"))
    aside.add(NODE, records("b", 3, session="gone"))
    aside.add(NODE, records("a", 6))
    aside.add(OTHER, records("c", 4, session="gone") + records("c", 5))
    assert numbers_of(aside.forget("gone")) == [2, 3, 4]
    assert len(aside) == 3
    assert [aside.target_of(namespace, str) for namespace in "abc"] == [NODE, None, OTHER]
    assert [numbers_of(aside.take(part)) for part in (NODE, NODE, OTHER)] == [[1], [6], [5]]


def test_a_part_is_back_once_nothing_waits_for_it() -> None:
    aside = SetAside()
    aside.add(NODE, records("a", 1))
    aside.breaker_of(NODE).failure()
    aside.take(NODE)
    assert aside.is_part_away()
    assert aside.take(NODE) == [] and not aside.is_part_away()
    assert aside.targets() == []


def test_a_log_is_refused_after_five_refusals_until_it_takes_a_record() -> None:
    aside = SetAside()
    refuse(aside, "a", 4)
    refuse(aside, "b", 5)
    assert aside.refused_logs() == 1 and not aside.is_part_away()
    assert aside.take(RefusedLog("b")) == [] and aside.refused_logs() == 1
    for _, breaker in aside.targets():
        breaker.success()
    aside.take(RefusedLog("b"))
    assert (aside.refused_logs(), [target for target, _ in aside.targets()]) == (0, [RefusedLog("a")])


def test_a_part_of_a_store_is_away_after_one_failure_and_is_no_refused_log() -> None:
    aside = SetAside()
    aside.add(NODE, records("a", 1))
    assert aside.breaker_of(NODE).failure()
    assert (aside.refused_logs(), aside.is_part_away()) == (0, True)


def test_parts_are_tried_when_their_pauses_are_over_and_a_refused_log_only_for_a_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    aside, slow, quick = SetAside(), StorePart("slow"), StorePart("quick")
    assert aside.wait() is None and aside.due() == []
    refuse(aside, "idle")
    assert aside.wait() is None
    aside.add(slow, records("a", 1))
    aside.breaker_of(slow).failure()
    assert 0.9 < (aside.wait() or 0) <= 1.0 and aside.due() == []
    monkeypatch.setattr("agentspec.cache.store.background.aside._PAUSE", 0.0)
    aside.add(quick, records("b", 2))
    breaker = aside.breaker_of(quick)
    assert [target for target, _ in aside.due()] == [quick]  # not tried yet
    breaker.failure()
    assert aside.wait() == 0.0
    assert [target for target, _ in aside.due()] == [quick] and breaker.state == "half-open"
    assert [target for target, _ in aside.due()] == [quick]  # until its call has ended
    aside.take(quick)
    assert [target for target, _ in aside.due()] == [quick]  # its next call finds out that it is back
    aside.add(RefusedLog("idle"), records("idle", 3))
    assert (aside.wait(), len(aside.due())) == (0.0, 1)
    assert aside.forget("s") and aside.take(quick) == aside.take(slow) == []
    assert aside.wait() is None
    aside.add(RefusedLog("idle"), records("idle", 4))
    assert (aside.wait() or 0) > 0.0  # the log's own pause


def test_of_refused_logs_without_records_those_refused_longest_ago_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logs with waiting records, and parts that are away, are not forgotten."""
    monkeypatch.setattr("agentspec.cache.store.background.aside.REFUSED_LOGS", 3)
    aside = SetAside()
    aside.add(NODE, [])
    aside.add(RefusedLog("waits"), records("waits", 1))
    aside.breaker_of(RefusedLog("waits")).failure()
    aside.add(RefusedLog("good"), [])
    for namespace in "abc":
        refuse(aside, namespace)
    assert aside.refused_logs() == 3
    refuse(aside, "a")  # refused again, so it is the latest
    assert len(aside.targets()) == 6
    refuse(aside, "d")
    kept = [target for target, _ in aside.targets()]
    assert kept == [NODE, *map(RefusedLog, ("waits", "good", "c", "a", "d"))]


def test_a_record_that_went_first_on_trial_goes_back_to_its_place() -> None:
    """The store refuses a record of "bad", and then the trial with one of another session, too."""
    aside = SetAside()
    log = RefusedLog("a")
    aside.add(
        log, records("a", 1, session="bad") + records("a", 2, session="bad") + records("a", 3, 4) + records("a", 5)
    )
    aside.add(log, records("a", 6))
    (trial,) = aside.take_other(log, "bad")
    assert trial.number == 3
    aside.add(log, [trial], again=True)
    assert (len(aside), aside.oldest()) == (6, 1)
    assert [numbers_of(aside.take(log)) for _ in range(4)] == [[1, 2], [3], [4, 5], [6]]


def test_the_oldest_record_is_known_after_others_have_gone() -> None:
    """A part that is away holds appends of several logs, whose records may lie between each other."""
    aside = SetAside()
    aside.add(NODE, records("a", 1, session="gone") + records("a", 4, 6))
    aside.add(NODE, records("b", 2, 3))
    aside.forget("gone")
    assert aside.oldest() == 2
    assert [aside.drop_oldest().number for _ in range(4)] == [2, 3, 4, 6]
    aside.add(NODE, records("a", 1, 5))
    aside.add(NODE, records("b", 2, 3))
    assert [aside.drop_oldest().number for _ in range(4)] == [1, 2, 3, 5]
