"""The background loader: what it gives, in which order, how often; and the chain that keeps contexts true."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache.store import BackgroundLoader, Chain, CircuitBreaker, MessageRecord, NewEntry, TurnRecord, encode
from agentspec.errors import StoreError, StoreUnavailableError
from tests.store.helpers import NS, FlakyStore, entry_of, number_of, tokens, turn, wait_until


@pytest.fixture
def store() -> Iterator[FlakyStore]:
    opened = FlakyStore()
    yield opened
    opened.gate.set()


@pytest.fixture
def loader(store: FlakyStore) -> Iterator[BackgroundLoader]:
    breaker = CircuitBreaker(first_pause=0.02, max_pause=0.05, retry_delay=0.001)
    started = BackgroundLoader(store, NS, breaker=breaker)
    yield started
    started.close()


def gather(loader: BackgroundLoader, *sessions: str | None) -> list[TurnRecord]:
    """Poll until nothing is pending for ``sessions`` (None: the preload)."""
    records: list[TurnRecord] = []

    def done() -> bool:
        pending = any(loader.is_pending(session) for session in sessions)
        for batch in loader.poll():
            assert batch
            records.extend(batch)
        return not pending

    wait_until(done)
    return records


def fill(store: FlakyStore, count: int, sessions: int = 3) -> None:
    """Turns 0 … count - 1, round the sessions; each repeats all of its session's turn before."""
    length = [0] * sessions
    for number in range(count):
        which = number % sessions
        store.append(NS, [entry_of(turn(f"s{which}", number, kept=length[which]))])
        length[which] += 4
    store.appended.clear()


def test_a_session_comes_whole_in_order_and_once(store: FlakyStore, loader: BackgroundLoader) -> None:
    fill(store, 600)
    loader.request("s1")
    loader.request("s1")
    records = gather(loader, "s1")
    assert [number_of(record) for record in records] == list(range(1, 600, 3))
    assert records[1].kept == 4
    loader.request("s1")
    assert gather(loader, "s1") == []
    store.append(NS, [entry_of(turn("s1", 600, kept=4))])
    loader.request("s1")
    assert [number_of(record) for record in gather(loader, "s1")] == [600]
    assert loader.stats().delivered == 201


def test_polling_never_waits_and_an_unknown_session_is_soon_done(store: FlakyStore, loader: BackgroundLoader) -> None:
    assert loader.poll() == []
    store.gate.clear()
    loader.request("nobody")
    begin = time.perf_counter()
    for _ in range(1000):
        assert loader.poll() == []
        assert loader.is_pending("nobody")
    assert time.perf_counter() - begin < 0.5
    store.gate.set()
    assert gather(loader, "nobody") == []
    assert not loader.is_pending("nobody")


def test_the_preload_gives_the_newest_in_log_order(store: FlakyStore, loader: BackgroundLoader) -> None:
    for number in range(500):
        store.append(NS, [entry_of(turn(f"s{number % 7}", number))])
    loader.preload(200)
    assert loader.is_pending(None)
    assert [number_of(record) for record in gather(loader, None)] == list(range(300, 500))
    assert not loader.is_pending(None)


def test_the_preload_of_an_empty_log_is_soon_done(loader: BackgroundLoader) -> None:
    loader.preload(10)
    assert gather(loader, None) == []


def test_the_preload_completes_sessions_that_began_before_its_window(
    store: FlakyStore, loader: BackgroundLoader
) -> None:
    fill(store, 30)
    store.append(NS, [entry_of(turn("old", 30)), entry_of(turn("new", 31))])
    loader.preload(4)  # turns 28 (s1), 29 (s2), 30, 31
    records = gather(loader, None)
    assert [number_of(record) for record in records] == [*range(1, 30, 3), *range(2, 30, 3), 30, 31]
    assert [record.kept for record in records if record.session == "s1"] == [4 * index for index in range(10)]


def test_preload_and_requests_give_each_record_once(store: FlakyStore, loader: BackgroundLoader) -> None:
    fill(store, 900)
    store.gate.clear()
    loader.preload(900)
    for session in ("s0", "s2"):
        loader.request(session)
    store.gate.set()
    records = gather(loader, None, "s0", "s2")
    assert sorted(number_of(record) for record in records) == list(range(900))
    for which in range(3):
        own = [number_of(record) for record in records if record.session == f"s{which}"]
        assert own == list(range(which, 900, 3))


def test_a_request_is_served_before_the_rest_of_a_preload(store: FlakyStore) -> None:
    # room for one batch only, so the preload cannot run ahead
    loader = BackgroundLoader(store, NS, max_ready_bytes=1)
    for number in range(2000):
        store.append(NS, [entry_of(turn("bulk", number))])
    store.append(NS, [entry_of(turn("live", 2000))])
    loader.preload(2001)
    wait_until(lambda: loader.stats().delivered or loader._ready)
    loader.request("live")
    records = gather(loader, "live")
    assert 2000 in map(number_of, records)
    assert len(records) < 1000
    rest = gather(loader, None)
    assert sorted(number_of(record) for record in records + rest) == list(range(2001))
    loader.close()


def test_a_forgotten_session_can_be_had_again(store: FlakyStore, loader: BackgroundLoader) -> None:
    fill(store, 9)
    loader.request("s0")
    first = gather(loader, "s0")
    loader.forget("s0")
    loader.request("s0")
    assert gather(loader, "s0") == first
    assert len(first) == 3


def test_turns_of_after_the_request_are_left_out(store: FlakyStore) -> None:
    loader = BackgroundLoader(store, NS, clock=lambda: 100.0)
    for number, created in enumerate((50.0, 99.0, 100.0, 101.0)):
        store.append(NS, [entry_of(turn("s", number, created=created))])
    loader.request("s")
    assert [number_of(record) for record in gather(loader, "s")] == [0, 1]
    loader.close()


def test_a_store_that_is_away_costs_waiting_only(
    store: FlakyStore, loader: BackgroundLoader, caplog: pytest.LogCaptureFixture
) -> None:
    fill(store, 9)
    store.error = StoreUnavailableError("away")
    loader.request("s0")
    loader.preload(100)
    wait_until(lambda: loader.stats().failed > 6)
    assert loader.is_pending("s0")
    assert loader.poll() == []
    store.error = None
    assert sorted(number_of(record) for record in gather(loader, "s0", None)) == list(range(9))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "cannot be read: away" in lines[0]
    assert "again" in lines[1]


@pytest.mark.parametrize("whole_log", [False, True])
def test_a_read_that_breaks_off_goes_on_behind_what_it_gave(
    store: FlakyStore, loader: BackgroundLoader, whole_log: bool
) -> None:
    fill(store, 300, sessions=1)
    store.fail_read_after = 100
    if whole_log:
        loader.preload(300)
    else:
        loader.request("s0")
    records = gather(loader, None if whole_log else "s0")
    assert [number_of(record) for record in records] == list(range(300))
    assert [record.kept for record in records] == [4 * index for index in range(300)]
    assert loader.stats().failed == 1


@pytest.mark.parametrize("error", [StoreError("damaged file"), RuntimeError("a bug")])
def test_a_read_that_can_never_work_is_given_up(store: FlakyStore, loader: BackgroundLoader, error: Exception) -> None:
    fill(store, 9)
    store.error = error
    loader.request("s0")
    loader.preload(5)
    assert gather(loader, "s0", None) == []
    assert loader.stats().failed == 2
    store.error = None
    loader.request("s0")
    assert len(gather(loader, "s0")) == 3


def test_unusable_records_are_skipped_counted_and_warned_of_once(
    store: FlakyStore, loader: BackgroundLoader, caplog: pytest.LogCaptureFixture
) -> None:
    good = entry_of(turn("s", 1))
    damaged = NewEntry("s", good[1][:-1] + b"\x7f")
    for entry in (damaged, good, damaged, NewEntry("s", b""), NewEntry("s", encode(MessageRecord("s", {}, 1.0)))):
        store.append(NS, [entry])
    loader.request("s")
    assert [number_of(record) for record in gather(loader, "s")] == [1]
    assert loader.stats().damaged == 3
    assert len(caplog.records) == 1


def test_too_many_requests_are_turned_away_and_counted(store: FlakyStore) -> None:
    store.gate.clear()
    loader = BackgroundLoader(store, NS, max_pending=2)
    for session in "abcd":
        loader.request(session)
    assert [loader.is_pending(session) for session in "abcd"] == [True, True, False, False]
    assert loader.stats().refused == 2
    store.gate.set()
    loader.close()


def test_close_ends_the_thread_even_if_nobody_polls(store: FlakyStore) -> None:
    fill(store, 600)
    loader = BackgroundLoader(store, NS, max_ready_bytes=1)
    loader.preload(600)
    wait_until(lambda: loader._ready)
    loader.close()
    assert not loader._thread.is_alive()
    loader.request("s0")
    assert not loader.is_pending("s0")


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 4), st.integers(1, 4), st.sampled_from(["ok", "lost", "gap"])),
        max_size=12,
    )
)
def test_rebuilt_contexts_never_hold_text_that_was_not_said(turns: list[tuple[int, int, int, str]]) -> None:
    """Whatever records are missing, each context rebuilt is the true one, less tokens in front."""
    chain = Chain()
    true: list[int] = []
    rebuilt: list[int] = []
    fresh = iter(range(1_000_000))
    marked = False
    for wanted, prompt, response, fate in turns:
        kept = min(wanted, len(true))
        tail, answer = [next(fresh) for _ in range(prompt)], [next(fresh) for _ in range(response)]
        true = true[:kept] + tail + answer
        if fate == "lost":  # read, but damaged
            chain.lose()
            continue
        if fate == "gap":  # never written: the writer marks the next
            marked = True
            continue
        record = TurnRecord("s", kept, tokens(*tail), tokens(*answer), 1.0, gap=marked)
        marked = False
        linked = chain.link(record)
        assert linked.kept <= len(rebuilt)
        assert not linked.gap
        assert np.array_equal(linked.prompt_tail, record.prompt_tail)
        rebuilt = rebuilt[: linked.kept] + tail + answer
        assert rebuilt == true[len(true) - len(rebuilt) :]
    if all(fate == "ok" for *_, fate in turns):
        assert rebuilt == true


def test_a_mended_record_keeps_its_group() -> None:
    chain = Chain()
    record = TurnRecord("s", 7, tokens(1), tokens(2), 1.0, gap=True, group="p")
    assert chain.link(record) == TurnRecord("s", 0, tokens(1), tokens(2), 1.0, group="p")


def test_an_unbroken_chain_is_delivered_as_it_was_written() -> None:
    chain = Chain()
    records = [turn("s", 1), turn("s", 2, kept=4), turn("s", 3, kept=6), turn("s", 4, kept=0)]
    assert [chain.link(record) for record in records] == records


def test_a_record_that_repeats_more_than_there_is_starts_anew() -> None:
    """Two replicas wrote one session's turns, so that the turn before is not the one that this record continues."""
    chain = Chain()
    chain.link(turn("s", 1))  # a context of 4 tokens
    assert chain.link(turn("s", 2, kept=9)).kept == 0
    assert chain.link(turn("s", 3, kept=12)).kept == 3  # of the 4 tokens that lack 9 in front
