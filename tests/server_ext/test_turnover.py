"""Test that requests that begin or end together do so a part at a time, one step after the other."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agentspec.server_ext.identity import Identity
from agentspec.server_ext.identity.prompt_groups import PromptGroups
from agentspec.server_ext.requests.turnover import Turnover
from agentspec.server_ext.step import Batch, NewRequest, RequestState, Step
from tests.server_ext.drafts import request
from tests.server_ext.slow_rows import PROMPT, ROWS, Rows, rows

__all__ = ["rows"]


def test_a_step_starts_half_of_what_begins_and_counts_for_all(rows: Rows) -> None:
    names = [f"r{row}" for row in range(ROWS)]
    rows.begin(*names)
    for count in (2, 3, 4):
        assert rows.started == count
        assert all(rows.engine.knows(name, PROMPT) for name in names)
        rows.step()
    assert rows.started == ROWS
    for name in names:
        figures = rows.engine.request(name)
        assert figures is not None and figures["tokens"] == figures["steps"] == 4


def test_ends_do_not_hold_up_the_request_that_begins_in_their_step(rows: Rows) -> None:
    """All requests end in one step, and vLLM says so with the next request, whose step must not finish them all."""
    names = [f"r{row}" for row in range(ROWS)]
    rows.begin(*names)
    for _ in names:
        rows.step()
    for name in names:
        rows.end(name, last=False)
    rows.begin("next0")
    assert (rows.started, rows.finished) == (ROWS + 1, 0)
    for count in range(1, ROWS + 1):
        rows.step()
        assert rows.finished == count
    rows.end("next0")  # vLLM has no further step
    assert rows.finished == ROWS + 1
    assert {len(turn.response) for turn in rows.stored()} == {ROWS + 1}


@pytest.mark.parametrize("note", ["note_new_weights", "note_new_epoch"])
def test_what_ended_before_new_weights_is_kept_before_them(rows: Rows, note: str) -> None:
    rows.begin("r0", "r1", "r2", "r3")
    for _ in range(ROWS):
        rows.step()
    kept: list[int] = []
    for begin in (rows.engine.cache.begin_weights, rows.engine.cache.begin_epoch):

        def begun(begin: Callable[[], None] = begin) -> None:
            kept.append(rows.finished)
            begin()

        setattr(rows.engine.cache, begin.__name__, begun)
    for name in ("r0", "r1", "r2"):
        rows.end(name, last=False)
    getattr(rows.engine, note)()
    rows.step()
    assert kept == [3]


def test_requests_begin_before_others_end_unless_their_session_waits_for_that(rows: Rows) -> None:
    rows.begin("a0", session="s")
    rows.begin("b1")
    rows.end("a0")
    rows.begin("c2", session="s")
    assert (rows.started, rows.finished) == (2, 1)  # the session's earlier turn was finished first
    rows.end("b1")
    rows.begin("d3")
    assert (rows.started, rows.finished) == (3, 1)
    rows.step()
    assert (rows.started, rows.finished) == (4, 1)
    rows.step()
    assert (rows.started, rows.finished) == (4, 2)


def test_a_step_whose_time_went_into_what_begins_in_front_of_its_forward_pass_ends_nothing_behind_it(
    rows: Rows,
) -> None:
    rows.begin("stays0")
    rows.begin("ends1")
    rows.end("ends1")
    rows.begin_first("r2", "r3")
    for started, finished in ((3, 0), (3, 0), (4, 0), (4, 1)):
        assert (rows.started, rows.finished) == (started, finished)
        rows.step()


def test_a_request_that_is_known_already_puts_off_no_end(rows: Rows) -> None:
    rows.begin("stays0")
    rows.begin("ends1")
    rows.engine.begin([NewRequest("stays0", rows.tokens[0, :PROMPT], Identity())])
    rows.end("ends1")
    rows.step()
    assert rows.finished == 1


def test_requests_that_begin_before_each_of_several_forward_passes_start_though_no_step_drafts(rows: Rows) -> None:
    for number, name in enumerate(("r0", "r1", "r2"), 1):
        rows.begin_first(name)
        assert rows.started == number


def test_a_step_finishes_one_request_and_the_last_finishes_the_rest(rows: Rows) -> None:
    names = [f"r{row}" for row in range(ROWS)]
    rows.begin(*names)
    for _ in range(ROWS):
        rows.step()
    for name in names[1:3]:
        rows.end(name)
    assert rows.finished == 0
    rows.step()
    assert rows.finished == 1
    rows.end(names[3])
    assert rows.finished == 1
    rows.end(names[0])  # no step may follow
    assert rows.finished == ROWS
    assert [record.prompt_tail[0] for record in rows.stored()] == [200, 400, 600, 0]
    assert [record.number for record in rows.stored()] == [1, 2, 3, 4]


def test_a_request_that_ends_before_it_was_started_is_kept(rows: Rows) -> None:
    rows.begin("a0", "b1", "d3", "c2")
    rows.step()
    assert rows.started == 3
    rows.end("c2")
    rows.end("d3")
    rows.step()
    rows.step()
    rows.end("a0")
    rows.end("b1")
    kept = {int(record.prompt_tail[0]): record.response.tolist() for record in rows.stored()}
    assert kept == {400: [405, 406], 600: [605, 606], 0: [5, 6, 7, 8], 200: [205, 206, 207, 208]}
    assert not [name for name in rows.engine.metrics.counters if name.startswith("errors")]


def test_a_request_of_which_nothing_is_told_is_forgotten(rows: Rows) -> None:
    rows.begin("a0", "b1")
    rows.end("b1", told=False)
    rows.step()
    rows.end("a0")
    assert len(rows.stored()) == 1 and rows.engine.cache.stats().requests == 0


def test_a_sessions_next_turn_starts_behind_the_end_of_the_one_before(rows: Rows) -> None:
    rows.begin("other3")
    rows.begin("first0", session="s")
    rows.step()
    rows.end("first0")
    rows.tokens[1] = rows.tokens[0]  # it repeats the earlier turn
    rows.begin("second1", session="s")
    assert (rows.finished, rows.started) == (1, 2)
    rows.step()
    rows.end("second1")
    rows.end("other3")
    assert rows.started == 3
    first, second, _ = rows.stored()
    assert first.kept == 0 and second.kept == PROMPT


@pytest.mark.parametrize("ends", ["before it is started", "later"])
def test_a_session_that_is_erased_while_a_request_waits_keeps_nothing_of_it(rows: Rows, ends: str) -> None:
    rows.begin("a0", "b1", session="s")
    assert rows.started == 1
    if ends == "before it is started":
        rows.end("b1")
    rows.engine._persistence._forget_sessions(None, ["s"])
    rows.step()
    rows.step()
    if ends == "later":
        rows.end("b1")
    rows.end("a0")
    assert rows.started == 2 and rows.finished == 2
    assert rows.stored() == [] and not rows.engine.cache.has_session(None, "s")
    assert rows.engine.cache.stats().tokens == 0


def stream_in(rows: Rows, name: str, prompt: int) -> None:
    """Take a step in which streamed input makes a request's first tokens a prompt."""
    rows.lengths[name] = prompt + 1
    lengths = np.array([*rows.lengths.values()], np.int32)
    none = np.zeros(len(lengths), np.int32)
    batch = Batch(tuple(rows.rows), np.array([*rows.rows.values()], np.int32))
    new = [NewRequest(name, rows.tokens[rows.rows[name], :prompt], Identity())]
    rows.engine.propose(Step(batch, new, rows.tokens, lengths, none + 8, none, num_draft_tokens=0))


def test_streamed_input_begins_behind_the_end_of_its_turn_before(rows: Rows) -> None:
    """Both have the same id, and neither needs a session."""
    rows.begin("a0")
    rows.begin("b1")
    stream_in(rows, "a0", PROMPT + 2)
    rows.step()
    rows.step()
    assert not [name for name in rows.engine.metrics.counters if name.startswith("errors")]
    assert (rows.started, rows.finished) == (3, 1)
    assert rows.engine.stats()["running"] == 2


def test_a_turn_that_streamed_input_ends_before_its_start_is_kept(rows: Rows) -> None:
    rows.begin("a0", "b1", "c2", "d3")
    rows.lengths["d3"] += 2
    rows.step()
    assert rows.started == 3
    stream_in(rows, "d3", PROMPT + 5)  # the last of its four tokens is dropped
    for name in ("d3", "a0", "b1", "c2"):
        rows.end(name)
    kept = [(record.prompt_tail.tolist(), record.response.tolist()) for record in rows.stored()]
    assert ([600, 601, 602, 603, 604], [605, 606, 607]) in kept
    assert not [name for name in rows.engine.metrics.counters if name.startswith("errors")]


def test_requests_that_end_do_not_pile_up_while_others_begin(rows: Rows) -> None:
    """Each step begins a request and ends one, and has time for one of the two."""
    most = 0
    rows.begin("stays0")
    for number in range(60):
        name = f"r{number}-{1 + number % 2}"
        rows.begin(name)
        if number:
            rows.end(f"r{number - 1}-{1 + (number - 1) % 2}")
        most = max(most, len(rows.engine._turnover))
    assert most <= 16 and rows.finished >= 40
    assert not [name for name in rows.engine.metrics.counters if name.startswith("errors")]


def test_closing_waits_for_the_indexing_thread(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.server_ext.engine._JOIN_SECONDS", 60.0)  # a busy machine holds the thread up
    index = rows.engine.cache.index_until_closed

    def slowly() -> None:
        index()
        time.sleep(0.2)

    rows.engine.cache.index_until_closed = slowly  # type: ignore[method-assign]
    rows.engine.warm_up()
    rows.engine.close()
    assert rows.engine._indexing is not None and not rows.engine._indexing.is_alive()


def test_what_waits_is_kept_when_the_engine_closes(rows: Rows) -> None:
    rows.begin("a0", "b1")
    rows.step()
    rows.end("a0")
    assert rows.finished == 0
    rows.engine.close()
    assert rows.finished == 1


def figures(rows: Rows, name: str) -> dict[str, Any]:
    found = rows.engine.request(name)
    assert found is not None
    return found


@pytest.mark.parametrize("first", ["told", "ended"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_response_ends_where_its_caller_was_told(
    rows: Rows, monkeypatch: pytest.MonkeyPatch, first: str, alone: bool
) -> None:
    """The API server finds a stop text and tells the length, before or after the engine is told of the end."""
    monkeypatch.setattr("agentspec.server_ext.requests.running._REPORT_SECONDS", 1000.0)
    rows.begin("a0", session="s")
    if not alone:
        rows.begin("b1")
    for _ in range(8):
        rows.step()
    said = rows.lengths["a0"] - PROMPT
    if first == "told":
        rows.engine.note_lengths({"a0": 3, "unknown": 1})
        rows.step()  # the engine takes it because it does not know of the end yet
        assert figures(rows, "a0")["tokens"] == 3
        rows.end("a0", may_be_shorter=True)
    else:
        assert figures(rows, "a0")["tokens"] == said
        rows.end("a0", may_be_shorter=True)
        for _ in range(0 if alone else 20):
            rows.step()
        assert rows.finished == 0 and not rows.engine._turnover.has_work()
        rows.engine.note_lengths({"a0": 3})
    if not alone:
        rows.step()
    (turn,) = rows.stored()
    assert turn.response.tolist() == rows.tokens[0, PROMPT : PROMPT + 3].tolist()
    assert figures(rows, "a0")["tokens"] == 3 and figures(rows, "a0")["steps"] >= said
    rows.engine.note_lengths({"a0": 2})  # late, or twice
    assert figures(rows, "a0")["tokens"] == 3


def test_a_response_whose_length_was_not_told_yet_is_stored_when_the_engine_stops(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.server_ext.requests.running._REPORT_SECONDS", 1000.0)
    rows.begin("a0")
    rows.step()
    rows.end("a0", may_be_shorter=True)
    rows.engine.close()
    assert rows.persistence._writer.stats().persisted == 1


@pytest.mark.parametrize("closed", [True, False])
def test_a_response_whose_length_nobody_tells_is_kept_whole(
    rows: Rows, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """Its caller has left."""
    monkeypatch.setattr("agentspec.server_ext.requests.running._REPORT_SECONDS", 1000.0 if closed else 0.0)
    rows.begin("a0")
    rows.step()
    said = rows.lengths["a0"] - PROMPT
    rows.end("a0", may_be_shorter=True)
    if closed:
        assert rows.finished == 0
        rows.engine._turnover.finish_all(unreported_too=True)
    (turn,) = rows.stored()
    assert len(turn.response) == said


def test_an_erasure_in_another_thread_finds_a_request_at_every_moment_of_its_end(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows.begin("r0", session="s")
    requests = rows.engine._requests
    found: list[bool] = []

    class Watched(dict[str, RequestState]):
        def pop(self, *args: Any) -> Any:
            popped = super().pop(*args)
            found.append("r0" in [state.request_id for state in requests.states()])
            return popped

        def __delitem__(self, name: str) -> None:
            super().__delitem__(name)
            found.append("r0" in [state.request_id for state in requests.states()])

    monkeypatch.setattr(requests, "by_id", Watched(requests.by_id))
    rows.end("r0", last=False)
    assert found == [True]


def test_the_next_turn_does_not_wait_for_a_length(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.server_ext.requests.running._REPORT_SECONDS", 1000.0)
    rows.begin("a0", session="s")
    rows.end("a0", may_be_shorter=True)
    rows.begin("b1", session="s")
    assert (rows.started, rows.finished) == (2, 0)


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_nothing_is_finished_before_it_is_started_whatever_the_order(seconds: float) -> None:
    """Requests of few sessions begin and end at random, some before they were started."""
    random_ = np.random.default_rng(4)
    running: dict[str, RequestState] = {}
    done: list[tuple[str, str]] = []
    turnover = Turnover(
        lambda state, *_: done.append(("start", state.request_id)),
        lambda state, _: done.append(("finish", state.request_id)),
    )
    session_of: dict[str, str | None] = {}
    for number in range(400):
        for part in range(int(random_.integers(0, 4))):
            name = f"{number}.{part}"
            session_of[name] = (None, "s", "t")[int(random_.integers(3))]
            state = running[name] = request(name, 0, session_of[name])
            turnover.begin(state, NewRequest(name, [1, 2], state.identity))
        for name in list(running):
            if random_.random() < 0.3:
                turnover.end(running.pop(name), 8, lambda: [1, 2, 3])
        rows, none = tuple(running), np.zeros(len(running), np.int32)
        tokens = np.zeros((1, 4), np.int32)
        turnover.advance(seconds, (), Step(Batch(rows, none), (), tokens, none, none, none, num_draft_tokens=0))
        assert len(turnover) < 40
    turnover.finish_all()
    order = {event: place for place, event in enumerate(done)}
    ended = [name for what, name in done if what == "finish"]
    assert len(ended) > 300 and all(order["start", name] < order["finish", name] for name in ended)


@pytest.mark.parametrize(
    ("other_work", "expected"), [(False, [3, 3, 2, 2, 2] + 8 * [1]), (True, [2, 2, 2, 1, 1, 1, 1, 1, 1, 1])]
)
def test_a_step_finishes_an_eighth_of_what_ends(other_work: bool, expected: list[int]) -> None:
    """With other_work, an eighth is rounded down, so the last seven wait."""
    done: list[str] = []
    turnover = Turnover(lambda *_: None, lambda state, _: done.append(state.request_id))
    for number in range(20):
        turnover.end(request(str(number)), 8, None)
    none = np.zeros(0, np.int32)
    step = Step(Batch((), none), (), none.reshape(0, 0), none, none, none, num_draft_tokens=0)
    counts = []
    for _ in expected:
        before = len(done)
        turnover.advance(0.0, step.started, step, other_work=other_work)
        counts.append(len(done) - before)
    assert counts == expected and done == [str(number) for number in range(sum(expected))]
    turnover.advance(0.0, step.started, step, other_work=other_work)
    assert len(done) == sum(expected)


@pytest.mark.parametrize("late", [False, True])
def test_what_cannot_be_done_is_not_tried_again(late: bool) -> None:
    """Otherwise every step would fail at it, and draft for nobody."""
    done: list[str] = []

    def start(state: RequestState, *_: Any) -> None:
        if state.request_id == "bad":
            raise RuntimeError
        done.append(state.request_id)

    def text() -> list[int]:
        raise RuntimeError

    turnover = Turnover(start, lambda *_: None)
    new = [NewRequest(name, [1, 2], Identity()) for name in ("bad", "good")]
    for each in new:
        state = request(each.request_id, 2)
        turnover.begin(state, each)
        if late and each.request_id == "bad":
            turnover.end(state, None, text)
    with pytest.raises(RuntimeError):
        turnover.advance(1.0, new)
    turnover.advance(1.0, new)
    assert (done, len(turnover)) == (["good"], 0)


@pytest.mark.parametrize("what", ["groups", "loads", "ends"])
def test_an_error_beside_the_cache_costs_one_request_at_most(
    rows: Rows, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError

    where: dict[str, tuple[Any, str]] = {
        "groups": (PromptGroups, "group_of"),
        "loads": (rows.persistence, "request_load"),
        "ends": (rows.engine.cache, "free_session"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*where[what], refuse)
        identity = Identity(session="s", final=True)
        rows.engine.begin([NewRequest("a0", rows.tokens[0, :PROMPT], identity)])
        rows.rows["a0"], rows.lengths["a0"] = 0, PROMPT
        rows.step()
        rows.end("a0")
    rows.begin("b1")
    rows.step()
    assert rows.started == (1 if what == "groups" else 2)
    counters = rows.engine.stats()["counters"]
    kind = {"groups": "start", "loads": "load", "ends": "finish"}[what]
    assert (counters[f"errors_{kind}"], counters.get("errors_propose", 0)) == (1, 0)


def test_a_request_whose_start_fails_half_way_leaves_the_cache(rows: Rows) -> None:
    """Here at a token beyond the vocabulary, in the text of a request that ended before its start."""
    rows.engine._work_time.for_begun = lambda: 0.0  # type: ignore[method-assign]
    rows.begin_first("r0", "r1", "r2", "r3")
    for name in ("r0", "r1", "r2", "r3"):
        rows.engine.finish(name, None, lambda: [*range(PROMPT), 5000, 5, 6])
    rows.engine.finish_if_idle()
    assert rows.engine.stats()["counters"]["errors_start"] >= 2
    assert rows.engine.cache.stats().requests == 0


def test_a_request_whose_end_fails_leaves_the_cache(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise MemoryError

    rows.begin("r0")
    monkeypatch.setattr(rows.engine.cache, "finish", refuse)
    rows.end("r0")
    assert rows.engine.cache.stats().requests == 0
