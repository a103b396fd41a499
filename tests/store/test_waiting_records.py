"""Test the records that wait for a store: they stay within the limits, and none is lost or counted twice."""

import random
from collections.abc import Callable

import pytest

from agentspec.cache.store.background.aside import QueuedRecord, RefusedLog, StorePart
from agentspec.cache.store.background.waiting_records import WaitingRecords
from tests.store.helpers import NS, number_of, turn

SIZE = turn("s", 0).size
PART, OTHER_PART = StorePart("part"), StorePart("other")


def test_of_what_waits_for_several_parts_the_oldest_is_dropped_first() -> None:
    records = WaitingRecords(1 << 30, 3, 64)
    for number in range(2):
        records.put(f"log{number}", turn("s", number))
    older, newer = records.take_batch()
    records.set_aside(PART, [newer])
    records.set_aside(OTHER_PART, [older])
    for number in range(2, 4):
        records.put("log", turn("s", number))
    assert (records.counts.dropped, records.oldest()) == (1, newer.number)


def test_new_records_are_not_dropped_for_the_sake_of_a_large_one_that_waits_for_another_log() -> None:
    records = WaitingRecords(10 * SIZE, 64, 64)
    large = turn("s", 0, prompt=2000)
    assert large.size > 10 * SIZE
    records.put("refused", large)
    for number in range(1, 9):
        records.put("refused", turn("s", number))
    records.set_aside(RefusedLog("refused"), records.take_batch())
    for number in range(9, 17):
        records.put("log", turn("s", number))
    assert {number_of(item.record) for item in records.all()} >= set(range(9, 17))


def test_an_append_to_a_part_that_is_still_away_is_sent_again_as_it_was() -> None:
    """If only its answer was lost, the store must recognise it."""
    records = WaitingRecords(1 << 30, 64, 64)
    for number in range(4):
        records.put("log", turn("s", number))
    items = records.take_batch()
    records.set_aside(PART, items)
    records.put_back(PART, records.take_aside(PART), refused=False)
    assert records.take_aside(PART) == items


def test_a_batch_is_sent_again_as_it_was_even_if_another_part_came_back_meanwhile() -> None:
    records = WaitingRecords(1 << 30, 64, 2)
    for number in range(3):
        records.put("log", turn("s", number))
    records.set_aside(PART, records.take_batch())
    unsure = records.take_batch()
    records.requeue()
    records.put("log", turn("s", 3))
    records.note_written(records.take_aside(PART), 2)
    assert records.take_batch() == unsure
    records.note_written(unsure, 1)
    for number in range(4, 8):
        records.put("log", turn("s", number))
    assert len(records.take_batch()) == 2


def test_a_session_is_in_flight_while_a_record_of_it_is_and_no_longer() -> None:
    """Forgetting waits for this, so that no record comes after the tombstone of its session."""
    waiting = WaitingRecords(1 << 20, 10, 1)
    for number, session in enumerate(("one", "two")):
        waiting.put(NS, turn(session, number))
    for session in ("one", "two"):
        batch = waiting.take_batch()
        assert [name for name in ("one", "two") if waiting.is_in_flight(name)] == [session]
        waiting.note_written(batch, 1)
        assert not waiting.is_in_flight(session)


def test_a_batch_ends_with_the_record_that_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise large records would not be sent within a socket timeout, and the store would count as away."""
    waiting = WaitingRecords(1 << 20, 10, 10)
    for number in range(5):
        waiting.put(NS, turn("s", number))
    size = turn("s", 0).size
    monkeypatch.setattr("agentspec.cache.store.background.waiting_records._BATCH_BYTES", 2 * size)
    batch = waiting.take_batch()
    assert [number_of(item.record) for item in batch] == [0, 1] and waiting.queued == 3


def test_the_limits_hold_whatever_happens_and_every_record_is_counted_once() -> None:
    """Records in flight, set aside or sent again count, too, so only a new record can exceed the limits."""
    choose = random.Random(1)
    for most_bytes, most in ((6 * SIZE, 100), (1 << 20, 6), (0, 6)):
        waiting = WaitingRecords(most_bytes, most, 3)
        for number in range(2000):
            flight, target = waiting.in_flight, choose.choice((PART, RefusedLog("other")))
            match choose.randrange(7) if flight else choose.choice((0, 0, 0, 1, 2, 6)):
                case 1:
                    waiting.take_batch()
                case 2 if not flight and (away := waiting.aside.targets()):
                    waiting.take_aside(away[0][0])
                case 3:
                    waiting.requeue()
                case 4:
                    waiting.set_aside(target, flight, failed=True)
                case 5 if choose.random() < 0.5:
                    waiting.put_back(target, flight, refused=choose.random() < 0.5)
                case 5:
                    waiting.note_written(flight, len(flight) - choose.randrange(2))
                case 6:
                    waiting.forget(f"s{choose.randrange(4)}")
                case _:
                    waiting.put(NS, turn(f"s{number % 4}", number, prompt=choose.choice((2, 60))))
            beyond = [item.size for item in waiting.all() if item.size > most_bytes]
            assert waiting.bytes - sum(beyond) <= most_bytes and len(beyond) <= 1 and len(waiting) <= most
            counts = waiting.counts
            gone = counts.persisted + counts.dropped + counts.refused + counts.erased
            assert gone + len(waiting) == waiting.newest
        waiting.note_written(waiting.in_flight, len(waiting.in_flight))
        waiting.drop_all()
        assert (waiting.bytes, len(waiting)) == (0, 0)


def test_one_record_that_is_larger_than_the_limit_waits_beside_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """A long prompt under a small budget was never stored, and all that waited was dropped with it."""
    waiting = WaitingRecords(5 * SIZE, 10, 10)
    large = 10 * SIZE
    for number in range(4):
        waiting.put(NS, turn("s", number, prompt=large if number == 2 else 2))
    assert (waiting.counts.dropped, len(waiting), caplog.messages) == (0, 4, [])
    waiting.put(NS, turn("s", 4, prompt=large))
    waiting.put(NS, turn("s", 5, prompt=large))
    assert (waiting.counts.dropped, len(waiting)) == (2, 4)
    (said,) = caplog.messages
    assert f"a record of {turn('s', 4, prompt=large).size} bytes is dropped" in said and str(5 * SIZE) in said
    waiting.note_written(waiting.take_batch(), 4)
    assert waiting.bytes == 0
    waiting.put(NS, turn("s", 6, prompt=large))
    assert (waiting.counts.dropped, len(waiting)) == (2, 1)


def test_as_much_as_the_limits_allow_waits() -> None:
    for waiting in (WaitingRecords(3 * SIZE, 9, 9), WaitingRecords(1 << 20, 3, 9)):
        for number in range(4):
            assert waiting.counts.dropped == 0
            waiting.put(NS, turn("s", number))
        assert (waiting.counts.dropped, waiting.oldest()) == (1, 2)


def test_where_too_much_waits_what_was_set_aside_goes_too() -> None:
    waiting = WaitingRecords(1 << 20, 2, 9)
    for number in range(2):
        waiting.put(NS, turn("s", number))
    waiting.set_aside(PART, waiting.take_batch())
    waiting.put(NS, turn("s", 2))
    waiting.take_batch()
    waiting.put(NS, turn("s", 3))
    assert (len(waiting.aside), waiting.queued, len(waiting.in_flight)) == (0, 1, 1)
    assert (waiting.counts.dropped, len(waiting)) == (2, 2)


def put_in_flight(waiting: WaitingRecords, *sessions: str) -> list[QueuedRecord]:
    for number, session in enumerate(sessions):
        waiting.put(NS, turn(session, number))
    return waiting.take_batch()


@pytest.mark.parametrize("refused", [False, True])
def test_only_a_record_that_is_refused_alone_is_given_up(refused: bool) -> None:
    """A record whose part is away goes on waiting."""
    waiting = WaitingRecords(1 << 20, 10, 10)
    items = put_in_flight(waiting, "s")
    assert waiting.put_back(PART, items, refused=refused) == (items[0] if refused else None)
    assert (waiting.counts.refused, len(waiting), waiting.bytes) == (int(refused), 1 - refused, SIZE * (not refused))


def test_an_append_that_is_refused_is_tried_in_halves_of_which_the_older_comes_first() -> None:
    waiting = WaitingRecords(1 << 20, 10, 10)
    waiting.set_aside(PART, put_in_flight(waiting, "s"))
    items = put_in_flight(waiting, "s", "s", "s", "s")
    assert waiting.put_back(PART, items, refused=True) is None
    assert [[item.number for item in waiting.take_aside(PART)] for _ in range(3)] == [[1], [2, 3], [4, 5]]


FAILURES: dict[str, Callable[[WaitingRecords, list[QueuedRecord]], object]] = {
    "requeued": lambda waiting, items: waiting.requeue(),
    "set aside": lambda waiting, items: waiting.set_aside(PART, items, failed=True),
    "refused": lambda waiting, items: waiting.put_back(PART, items, refused=True),
    "away": lambda waiting, items: waiting.put_back(PART, items, refused=False),
}


@pytest.mark.parametrize("fail", FAILURES.values(), ids=FAILURES)
def test_what_was_erased_while_it_was_in_flight_comes_back_in_no_way(
    fail: Callable[[WaitingRecords, list[QueuedRecord]], object],
) -> None:
    """Otherwise it would come after the tombstone of its session. New turns of the session are not affected."""
    waiting = WaitingRecords(1 << 20, 10, 10)
    items = put_in_flight(waiting, "gone", "stays", "stays", "gone")
    waiting.forget("gone")
    fail(waiting, items)
    assert (waiting.counts.failed, waiting.counts.erased, len(waiting), waiting.bytes) == (1, 2, 2, 2 * SIZE)
    put_in_flight(waiting, "gone")
    waiting.requeue()
    assert (waiting.counts.erased, len(waiting)) == (2, 3)


def test_an_erased_session_leaves_the_queue_and_what_is_set_aside() -> None:
    waiting = WaitingRecords(1 << 20, 10, 10)
    waiting.set_aside(PART, put_in_flight(waiting, "gone", "stays"))
    for number, session in enumerate(("gone", "stays")):
        waiting.put(NS, turn(session, number))
    waiting.forget("gone")
    assert [item.number for item in waiting.take_batch() + waiting.aside.take(PART)] == [4, 2]
    assert (waiting.counts.erased, waiting.bytes) == (2, 2 * SIZE)


def test_what_is_put_after_an_erasure_stays_though_other_records_were_in_flight() -> None:
    waiting = WaitingRecords(1 << 20, 10, 10)
    put_in_flight(waiting, "other")
    waiting.forget("s")
    waiting.put(NS, turn("s", 1))
    waiting.take_batch()
    waiting.requeue()
    assert (waiting.counts.erased, len(waiting)) == (0, 2)


def test_an_erasure_holds_until_the_last_append_of_its_batch_has_failed() -> None:
    waiting = WaitingRecords(1 << 20, 10, 10)
    items = put_in_flight(waiting, "gone", "gone")
    waiting.forget("gone")
    waiting.set_aside(PART, items[:1])
    waiting.set_aside(PART, items[1:])
    assert (waiting.counts.erased, len(waiting)) == (2, 0)


def test_at_the_end_what_is_not_in_flight_is_dropped_and_all_that_waited_is_counted() -> None:
    waiting = WaitingRecords(1 << 20, 10, 1)
    waiting.set_aside(PART, put_in_flight(waiting, "s"))
    put_in_flight(waiting, "s", "s")
    assert waiting.drop_all() == 3
    assert (waiting.counts.dropped, len(waiting), waiting.bytes) == (2, 1, SIZE)
    waiting.set_aside(PART, waiting.in_flight)
    assert (waiting.drop_all(), waiting.counts.dropped, waiting.bytes) == (1, 3, 0)


def test_of_the_queue_and_what_is_set_aside_the_oldest_is_dropped_first() -> None:
    for older_aside in (True, False):
        waiting = WaitingRecords(1 << 20, 2, 9)
        first, second = put_in_flight(waiting, "s", "s")
        waiting.set_aside(PART, [first if older_aside else second])
        waiting.requeue()
        waiting.put(NS, turn("s", 2))
        assert (waiting.counts.dropped, waiting.oldest(), len(waiting.aside)) == (1, 2, 1 - older_aside)


def test_the_oldest_is_the_next_record_where_none_waits() -> None:
    """Otherwise a wait for all records up to the newest would last for ever, or not at all."""
    waiting = WaitingRecords(1 << 20, 10, 10)
    assert waiting.oldest() == 1
    waiting.note_written(put_in_flight(waiting, "s", "s"), 2)
    assert waiting.oldest() == 3


def test_dropping_is_logged_again_only_once_nothing_has_waited(caplog: pytest.LogCaptureFixture) -> None:
    waiting = WaitingRecords(1 << 20, 2, 1)
    for times in (1, 2):
        items = put_in_flight(waiting, "s", "s")
        waiting.note_written(items, 1)  # one more waits
        assert len(caplog.messages) == times - 1
        for number in range(3):
            waiting.put(NS, turn("s", number))
            assert len(caplog.messages) == times - (number == 0)
        while items := waiting.take_batch():
            waiting.note_written(items, 1)
