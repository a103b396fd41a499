"""Test what the engine counts and measures of its steps: the record, acceptance, the price of a token."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import numpy as np
import pytest

from agentspec.cache.policy import DEFAULT_COST
from agentspec.server_ext.figures.response_count import Repetition
from agentspec.server_ext.figures.traces import steps_of
from agentspec.server_ext.fusion import StepModel
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.step import Batch, DraftRows, NewRequest, Step
from tests.timing import cpu

from .plain_engine import TEXT, Engine, Rows


def test_the_record_has_a_line_a_step_and_adds_up(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    engine = Engine(record=path)
    engine.run("a", [1, 2, 3], TEXT, session="s")
    steps = engine.run("b", [1, 2, 3, *TEXT, 4, 5, 100, 101], TEXT[2:], session="s")
    engine.proposer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    mine = [line for line in lines if line["request"] == "b"]
    assert len(mine) == steps
    assert sum(line["tokens"] for line in mine) == len(TEXT) - 2
    assert sum(line["accepted"] for line in mine) == len(TEXT) - 2 - steps
    assert {"step", "request", "session", "source", "drafted", "accepted", "ns"} <= set(mine[0])
    assert {line["source"] for line in mine} & {"session", "request"}
    figures = engine.proposer.metrics.request("b")
    assert figures is not None
    assert figures["accepted"] == sum(figures["accepted_by_source"].values()) == len(TEXT) - 2 - steps


@pytest.mark.parametrize("told_first", [True, False])
def test_what_is_accepted_behind_the_end_of_a_response_is_nobodys(told_first: bool, tmp_path: Path) -> None:
    """The API server has found a stop text, but the engine goes on until it is told."""
    path = tmp_path / "steps.jsonl"
    rows = Rows(verify_cost=0.01, record=str(path))
    rows.step(("0",))
    (draft,) = rows.repeat()
    if told_first:
        rows.proposer.note_lengths({"0": 5})
    length, following = int(rows.lengths[0]), [*draft, 7]
    rows.tokens[0, length : length + len(following)] = following
    rows.lengths[0] += len(following)
    verified, room = np.array([len(draft)], np.int32), np.full(1, 8, np.int32)
    rows.proposer.propose(
        Step(rows.batch, (), rows.tokens, rows.lengths[:1], room, verified, num_draft_tokens=len(draft))
    )
    figures = rows.proposer.request("0")
    assert figures is not None and figures["drafted"] == len(draft) == 8
    if not told_first:
        assert figures["accepted"] == 8
        rows.proposer.note_lengths({"0": 5})
        figures = rows.proposer.request("0")
        assert figures is not None
    assert 5 >= figures["tokens"] >= figures["accepted"]
    rows.proposer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[-1]["drafted"] == 8
    assert all(line["accepted"] <= line["tokens"] for line in lines)


@pytest.mark.parametrize("length", [0, 1, 2, 5, 17, 18, 19, 31, 33, 40, 43])
def test_of_what_was_accepted_the_figures_have_what_the_caller_got(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    engine.run("a", [1, 2, 3], TEXT)
    monkeypatch.setattr(engine.proposer, "finish", lambda *_: None)  # it goes on until it is told of the stop text
    engine.run("b", [1, 2, 3], [*TEXT[:30], 7, 8, 9, *TEXT[40:50]], detailed=True)
    before = engine.proposer.request("b")
    assert before is not None and before["accepted"] > 30
    engine.proposer.note_lengths({"b": length})
    figures = engine.proposer.request("b")
    assert figures is not None and figures["drafted"] == before["drafted"]
    accepted = sum(len(step["sources"]) for step in steps_of(figures["detail"]))
    assert figures["accepted"] == sum(figures["accepted_by_source"].values()) == accepted


@pytest.mark.parametrize(("repetition", "tokens"), [(Repetition(1, 4, 2), 7), (Repetition(4, 9, 2), 10), (None, 10)])
def test_what_is_accepted_behind_a_repetition_that_ends_the_response_is_not_counted(
    repetition: Repetition | None, tokens: int
) -> None:
    rows = Rows()
    rows.step(("0",))
    rows.proposer._requests.by_id["0"].response.repetition = repetition
    rows.tokens[0, 4:13] = [7, 8, 9] * 3
    verified, room = np.array([8], np.int32), np.full(1, 8, np.int32)
    rows.proposer.propose(Step(rows.batch, (), rows.tokens, np.array([13], np.int32), room, verified, 8))
    assert rows.tokens_and_steps("0") == (tokens, 2)


def test_streamed_input_leaves_a_response_as_long_as_the_repetition_that_ended_it() -> None:
    """vLLM also drops the last of these tokens, and the prompt goes on with the rest."""
    rows = Rows()
    rows.step(("0",))
    rows.proposer._requests.by_id["0"].response.repetition = Repetition(3, 3, 2)
    rows.tokens[0, 4:13] = [7, 8, 9] * 3
    verified, room = np.array([8], np.int32), np.full(1, 8, np.int32)
    rows.proposer.propose(Step(rows.batch, (), rows.tokens, np.array([13], np.int32), room, verified, 8))
    finish = rows.proposer.cache.finish
    with patch.object(rows.proposer.cache, "finish", side_effect=finish) as finished:
        new = NewRequest("0", [*rows.tokens[0, :9].tolist(), 500, 501], Identity())
        rows.proposer.propose(Step(rows.batch, (new,), rows.tokens, np.array([12], np.int32), room, verified * 0, 0))
    assert [call.kwargs["output_limit"] for call in finished.call_args_list] == [6]


@pytest.mark.alone
def test_patterns_of_thousands_of_tokens_take_no_longer_than_their_number_explains() -> None:
    """A caller may ask vLLM for such patterns, and each step looks for them."""
    response = np.random.default_rng(0).integers(0, 1000, 16_000, np.int32)
    assert cpu(lambda: Repetition(1, 8_000, 2).end_of(response, 15_990)) < 200
    assert Repetition(1, 8_000, 2).end_of(np.concatenate([response[:5_000]] * 2), 9_990) == 10_000


def test_the_end_of_a_response_is_never_drafted() -> None:
    """The step that accepts the token before it samples it anyway. vLLM drops it then if streamed input follows."""
    rows = Rows(verify_cost=0.01)
    rows.step(("0", "1"))
    rows.proposer._requests.by_id["0"].not_drafted = frozenset({8, 5})
    ended, whole = rows.repeat()
    assert ended == [7] and whole[:4] == [107, 108, 109, 107]


def test_what_ends_a_response_or_must_not_be_drafted_cuts_drafts() -> None:
    engine = Engine()
    requests = engine.proposer._requests
    requests.begin(NewRequest("r", [1, 2, 3], Identity(), end_tokens=[5], never_drafted=[7]), 0)
    (state,) = requests.of(["r"])
    assert set(state.response.end_tokens) == {5} and set(state.not_drafted) == {5, 7}
    assert [state.may_draft(token) for token in (5, 6, 7)] == [False, True, False]


def test_figures_count_steps_without_drafts_whenever_they_are_asked_for() -> None:
    batch = Rows()
    both, one = ("0", "1"), ("1",)
    for _ in range(5):
        assert batch.step(both) == [[], []]
    assert batch.tokens_and_steps("0") == batch.tokens_and_steps("1") == (5, 5)
    batch.step(both)
    batch.step(both, drafted=2)  # 3 tokens each
    batch.step(both)
    assert batch.tokens_and_steps("0") == (10, 8)
    batch.proposer.finish("0")
    for _ in range(4):
        batch.step(one)
    assert batch.tokens_and_steps("0") == (10, 8)
    assert batch.tokens_and_steps("1") == (14, 12)
    batch.step(("2", "1"))
    batch.step(one)
    assert batch.tokens_and_steps("1") == (16, 14)
    assert batch.tokens_and_steps("2") == (1, 1)
    assert batch.proposer.stats()["steps"] == 14


def test_a_token_that_was_sampled_behind_an_accepted_end_is_not_counted() -> None:
    """The response ends within the draft, but vLLM's row still has the token behind it when the step is counted."""
    batch = Rows()
    both = ("0", "1")
    batch.step(both)
    batch.proposer._requests.by_id["0"].response.end_tokens = frozenset({5})  # its tokens count up from 3
    batch.step(both, drafted=3)
    assert batch.tokens_and_steps("0") == (3, 2)
    assert batch.tokens_and_steps("1") == (5, 2)
    batch.proposer.note_lengths({"0": 3})  # as the API server does if the request has stop texts, too
    assert batch.tokens_and_steps("0") == (3, 2)


@pytest.mark.parametrize("lost", [2, 3, 5])
def test_the_step_record_takes_a_row_that_a_failed_load_of_the_kv_cache_shortens(lost: int, tmp_path: Path) -> None:
    """vLLM shortens the row before the next step, so it may be shorter than at the step before."""
    record = tmp_path / "steps.jsonl"
    rows = Rows(record=str(record))
    rows.step(("0",))
    rows.step(("0",), drafted=5)
    rows.lengths[0] -= lost
    rows.step(("0",))
    assert rows.tokens_and_steps("0") == (8 - lost, 3)
    figures = rows.proposer.request("0")
    assert figures is not None and figures["accepted"] <= figures["tokens"] - 1
    rows.proposer.close()
    assert [json.loads(line)["tokens"] for line in record.read_text().splitlines()] == [1, 6, max(1 - lost, 0)]


def test_the_given_price_goes_with_every_step() -> None:
    batch = Rows(verify_cost=0.07)
    for _ in range(40):
        batch.step(("0",), seconds=0.01)
    assert batch.costs == [0.07] * 40
    assert batch.proposer.stats()["verify_cost"]["given"] == 0.07
    assert batch.proposer.stats()["verify_cost"]["steps"] == 0


def test_the_time_of_the_draft_model_is_no_part_of_a_steps_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fusion decides separately whether the model's draft is worth that time."""
    batch = Rows()
    batch.step(("0",))
    engine, observed = batch.proposer, list[tuple[int, int, float]]()

    def fused(rows: DraftRows, model: StepModel, cost: float, row_seconds: float | None) -> SimpleNamespace:
        return SimpleNamespace(drafts=rows.draft(engine.cache, cost), seconds=0.004)

    monkeypatch.setattr(engine.fusion, "draft", fused)
    monkeypatch.setattr(engine.pricing.cost, "observe", lambda *step: observed.append(step))
    room, none = np.full(1, 8, np.int32), np.zeros(1, np.int32)
    model, others = cast(StepModel, object()), Batch(("unknown",), none)  # rows that get no drafts
    for rows, its_model in ((batch.batch, model), (batch.batch, model), (others, None), (batch.batch, None)):
        step = Step(rows, (), batch.tokens, batch.lengths[:1], room, none, 0, seconds=0.02)
        engine.propose(step, its_model)
    assert observed == [(1, 0, 0.02), (1, 0, pytest.approx(0.016)), (1, 0, 0.02)]


def test_the_price_is_measured_where_none_is_given() -> None:
    batch = Rows()
    for number in range(150):
        drafted = number % 3
        batch.step(("0",), drafted=drafted, seconds=0.01 + 0.001 * drafted)
    assert batch.costs[0] == DEFAULT_COST
    assert batch.costs[-1] == pytest.approx(0.1, rel=0.1)
    figures = batch.proposer.stats()["verify_cost"]
    assert figures["given"] is None
    assert figures["cost"] == pytest.approx(0.1, rel=0.1)
    assert figures["ms_per_draft_token"] == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(("slowest", "budget"), [(1, 20), (2, 40), (5, 160)])
def test_a_batch_whose_rows_all_accept_much_may_draft_more(slowest: int, budget: int) -> None:
    """Two rows draft at a price of .1: one gets 5 tokens a step, the other ``slowest``."""
    batch = Rows(verify_cost=0.1)
    budgets = []
    for _ in range(80):
        batch.lengths[:2] += (4, slowest - 1)  # step() adds one
        batch.step(("0", "1"))
        budgets.append(batch.proposer.stats()["step_budget"]["tokens"])
    assert budgets[0] == 20 and budgets == sorted(budgets)
    assert budgets[-1] == pytest.approx(budget, rel=0.12)
    batch.lengths[0] += 4
    batch.step(("0", "2", "3"))  # new rows count with the start of those before
    start = (8 * 1 + 8 * 5 + 8 * slowest) / 24
    assert batch.proposer.stats()["step_budget"]["tokens"] == pytest.approx(30 * (2 * (start - 0.5) - 1), rel=0.1)


def test_steps_of_unknown_duration_are_not_measured() -> None:
    batch = Rows()
    for number in range(60):
        batch.step(("0",), drafted=number % 2)
    assert batch.proposer.stats()["verify_cost"]["steps"] == 0
