"""Test the engine-side logic without vLLM: what is drafted for which request, and what a failure costs."""

import itertools
import time
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from agentspec.cache import FinishedTurn, Scope
from agentspec.server_ext.engine import DraftingEngine
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.identity.prompt_groups import PromptGroups
from agentspec.server_ext.persistence.turn_records import turn_of
from agentspec.server_ext.requests.turnover import Turnover
from agentspec.server_ext.settings import Settings
from agentspec.server_ext.step import Batch, NewRequest, Step

from .plain_engine import TEXT, Engine, Rows, in_memory


def test_a_second_turn_drafts_from_the_first() -> None:
    engine = Engine()
    first = engine.run("a", [1, 2, 3], TEXT, session="s")
    second = engine.run("b", [1, 2, 3, *TEXT, 4, 5, 100, 101], TEXT[2:], session="s")
    assert first == len(TEXT)
    assert second < first / 3


def test_a_long_turn_is_indexed_without_further_steps() -> None:
    engine = Engine()
    prompt = np.random.default_rng(1).integers(0, 1000, 20_000).tolist()
    engine.run("a", prompt, TEXT[:4], session="s")
    deadline = time.monotonic() + 180
    while engine.proposer.stats()["cache"]["pending"]:
        assert time.monotonic() < deadline, "nothing indexes"
        time.sleep(0.01)
    engine.proposer.close()


def test_another_session_draws_nothing_where_sessions_keep_to_themselves() -> None:
    engine = Engine(scope="session")
    engine.run("a", [1, 2, 3, 100], TEXT[1:], session="s")
    assert engine.run("b", [7, 8, 100], TEXT[1:], session="other") == len(TEXT) - 1


@pytest.mark.parametrize("scope", ["session", "tenant"])
def test_a_child_drafts_from_its_family(scope: Scope) -> None:
    engine = Engine(scope=scope)
    engine.run("a", [1, 2, 3, 100], TEXT[1:], session="root")
    assert engine.run("b", [7, 8, 100], TEXT[1:], session="child", parent="root") < len(TEXT) / 2
    turns = {record.session: record.family for record in engine.turns()}
    assert turns == {"root": None, "child": "root"}


@pytest.mark.parametrize("length", [1, 2, len(TEXT)])
def test_a_session_that_its_client_ends_is_freed(length: int) -> None:
    """This holds whether or not its last request is kept. The next request begins the session again."""
    engine = Engine(scope="session")
    engine.run("a", [1, 2, 3, 100], TEXT[1:], session="s")
    engine.run("b", [1, 2, 3, *TEXT, 4], TEXT[:length], session="s", final=True)
    stats = engine.proposer.cache.stats()
    assert (stats.sessions, stats.tokens, stats.requests) == (0, 0, 0)
    assert len(engine.turns()) == 1 + (length > 1)  # the store keeps the turns
    assert engine.proposer.stats()["counters"]["sessions_ended"] == 1
    engine.run("c", [1, 2, 3, 100], TEXT[1:], session="s")
    assert engine.proposer.cache.stats().sessions == 1


def test_a_session_ends_behind_its_other_requests() -> None:
    engine = Engine(scope="session")
    prompt = np.array([1, 2, 3], np.int32)
    step = Step(
        started=[NewRequest("long", prompt, Identity(None, "s", scope="session"))],
        batch=Batch(("long",), np.zeros(1, np.int32)),
        tokens=np.array([[1, 2, 3, 100, 101, 102]], np.int32),
        lengths=np.array([6], np.int32),
        max_draft_tokens=np.array([4], np.int32),
        num_verified_draft_tokens=np.zeros(1, np.int32),
        num_draft_tokens=0,
    )
    engine.proposer.propose(step)
    engine.run("last", [5], TEXT, session="s", final=True)
    engine.proposer.propose(replace(step, started=()))
    assert engine.proposer.cache.has_session(None, "s")
    engine.proposer.finish("long", 3)
    engine.proposer.finish_if_idle()
    assert not engine.proposer.cache.has_session(None, "s")


def test_a_session_ends_also_where_its_last_request_failed_before_its_start() -> None:
    engine = Engine(scope="session")
    engine.run("a", [1, 2, 3], TEXT, session="s")
    requests = engine.proposer._requests
    requests.begin(NewRequest("last", [1, 2, 3], Identity(None, "s", scope="session", final=True)), 0)
    requests.fail(requests.of(["last"]))
    engine.proposer.finish("last", 3, lambda: [1, 2, 3, 4, 5, 6])
    engine.proposer.finish_if_idle()
    assert not engine.proposer.cache.has_session(None, "s") and len(engine.turns()) == 1


def test_the_cache_knows_whom_a_request_counts_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, given = Engine(tenant="acme"), dict[str, Any]()
    start = engine.proposer.cache.start

    def noted(*args: Any, **names: Any) -> None:
        given.update(names)
        start(*args, **names)

    monkeypatch.setattr(engine.proposer.cache, "start", noted)
    identity = Identity("acme", "s", principal="mac", caller="ada", named_tenant="acme", ignored_ids=2)
    engine.proposer._requests.begin(NewRequest("r", [1, 2, 3], identity), 0)
    engine.proposer.finish("r", 3, lambda: [1, 2, 3, 4, 5, 6])
    engine.proposer.finish_if_idle()
    assert (given["owner"], given["tenant_owner"]) == ("ada", "acme")
    assert engine.proposer.stats()["counters"]["ignored_ids"] == 2


@pytest.mark.parametrize("scope", ["tenant", "session"])
def test_a_stored_turn_says_whose_it_is_and_who_may_draft_from_it(scope: Scope) -> None:
    engine = Engine(tenant="acme")
    identity = Identity("acme", "s", "g", scope, session_name="fix-42", group_name="p7", principal="mac")
    identity = replace(identity, parent_session="root", weight_version="step-9")
    engine.proposer._requests.begin(NewRequest("r", [1, 2, 3], identity), 0)
    engine.proposer.finish("r", 3, lambda: [1, 2, 3, 4, 5, 6])
    engine.proposer.finish_if_idle()
    (turn,) = engine.turns()
    assert (turn.tenant, turn.principal, turn.scope, turn.weights) == ("acme", "mac", scope, "step-9")
    assert (turn.session, turn.session_name, turn.parent_session, turn.group_name) == ("s", "fix-42", "root", "p7")
    loaded = turn_of(turn)
    assert (loaded.scope, loaded.owner, loaded.session) == (scope, "mac", "s")


def test_samples_of_one_prompt_are_a_group_without_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two problems whose answers begin alike and go on differently, sampled in turns."""
    answers = {1: TEXT, 2: [*TEXT[:5], *range(300, 355)]}

    def steps(**ids: Any) -> int:
        engine = Engine()
        taken = [
            engine.run(
                f"{turn} {problem}",
                [problem, *range(3, 60)],
                answer,
                **{name: ids[name] + str(problem) for name in ids},
            )
            for turn in range(6)
            for problem, answer in answers.items()
        ]
        return sum(taken[4:])

    alone = steps()
    assert alone == steps(group="g")
    monkeypatch.setattr(PromptGroups, "group_of", lambda groups, identity, prompt: identity.group)
    assert alone < steps()


@pytest.mark.parametrize("tenant", [None, "t"])
def test_the_tenants_index_serves_another_session(tenant: str | None) -> None:
    engine = Engine(tenant=tenant)
    engine.run("a", [1, 2, 3], TEXT, session="s")
    assert engine.run("b", [7, 8, 100, 101, 102], TEXT[3:], session="other") < len(TEXT) / 2


def test_a_failing_suffix_index_costs_drafts_and_is_counted_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken on purpose")

    engine.proposer.cache.step = broken  # type: ignore[method-assign,assignment]
    assert engine.run("a", [1, 2], TEXT, session="s") == len(TEXT)
    assert engine.run("b", [1, 2], TEXT, session="s") == len(TEXT)
    assert engine.proposer.stats()["counters"]["errors_propose"] == 2
    assert sum("broken on purpose" in (r.exc_text or "") for r in caplog.records) == 1


def test_a_step_for_which_memory_runs_out_costs_drafts() -> None:
    """The core then forgets everything, the requests that run included."""
    engine = Engine()
    step, core = engine.proposer.cache.step, engine.proposer.cache._core
    steps = itertools.count()

    def short_of_memory(*given: Any, **named: Any) -> Any:
        number = next(steps)
        if number == 5:
            core.abort(0)  # as the core does
            raise MemoryError
        return step(*given, **named)

    engine.proposer.cache.step = short_of_memory  # type: ignore[method-assign]
    assert engine.run("a", [1, 2], TEXT, session="s") > len(TEXT) / 2
    assert engine.run("b", [1, 2], TEXT, session="s") == len(TEXT), "nothing of the first was kept"
    assert engine.run("c", [1, 2], TEXT, session="s") < len(TEXT) / 2
    counters = engine.proposer.stats()["counters"]
    assert counters["errors_propose"] == 1 and counters["finished"] == 3


def test_a_request_that_cannot_start_leaves_the_others_alone() -> None:
    engine = Engine(tenant="t")
    engine.run("warm", [1, 2, 3], TEXT)
    assert engine.run("bad", [-5], TEXT[:5]) == 5
    assert engine.run("image", [5_000_000], TEXT[:5]) < 5
    assert engine.run("good", [1, 2, 3, 100, 101], TEXT[2:]) < len(TEXT) / 2
    assert engine.proposer.stats()["counters"]["errors_start"] == 1


def test_an_end_that_fails_costs_its_response_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tenant="t")
    with monkeypatch.context() as broken:
        broken.setattr(Turnover, "end", Mock(side_effect=RuntimeError("broken on purpose")))
        engine.run("a", [1, 2, 3], TEXT, detailed=True)
    stats = engine.proposer.stats()
    assert (stats["counters"]["errors_finish"], stats["running"], stats["cache"]["requests"]) == (1, 0, 0)
    assert not engine.proposer.metrics._running and engine.proposer._traces.running == 0  # no limit holds for these
    assert engine.run("b", [1, 2, 3, 100, 101], TEXT[2:]) > len(TEXT) / 2  # nothing of it was kept
    assert engine.run("c", [1, 2, 3, 100, 101], TEXT[2:]) < len(TEXT) / 2


def test_switched_off_never_drafts() -> None:
    settings = Settings(store="memory://", enabled=False)
    proposer = DraftingEngine(settings, in_memory(settings))
    step = Step(
        Batch(("x",), np.zeros(1, np.int32)),
        [],
        np.ones((1, 8), np.int32),
        np.array([8], np.int32),
        np.array([4], np.int32),
        np.array([0], np.int32),
        0,
    )
    assert proposer.propose(step) == [[]]


def test_a_row_that_failed_gets_no_drafts_and_those_beside_it_do() -> None:
    rows = Rows()
    start = rows.proposer.cache.start

    def picky(request_id: str, *args: Any, **names: Any) -> None:
        if request_id == "1":
            raise RuntimeError("broken on purpose")
        start(request_id, *args, **names)

    rows.proposer.cache.start = picky  # type: ignore[method-assign]
    rows.step(("0", "1", "2"))
    drafts = rows.repeat()
    assert drafts[0][:1] == [7] and drafts[2][:1] == [207] and not drafts[1]
    assert rows.proposer.stats()["running"] == 2
    rows.proposer.finish("1")
    assert not rows.proposer.knows("1", 3)
    assert [draft[:1] for draft in rows.repeat()] == [[7], [], [207]]
    assert rows.proposer.stats()["counters"]["errors_start"] == 1


def test_figures_go_on_where_drafting_has_failed() -> None:
    rows = Rows()
    both, step, start = ("0", "1"), rows.proposer.cache.step, rows.proposer.cache.start

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken on purpose")

    rows.step(both)
    rows.step(both)
    rows.proposer.cache.step = broken  # type: ignore[method-assign,assignment]
    rows.step(both, drafted=2)
    assert rows.tokens_and_steps("0") == rows.tokens_and_steps("1") == (5, 3)
    rows.proposer.cache.step, rows.proposer.cache.start = step, broken  # type: ignore[method-assign]
    rows.step(("0", "1", "2"))
    rows.proposer.cache.start = start  # type: ignore[method-assign]
    for _ in range(3):
        rows.step(("0", "1", "2", "3"))
    assert [rows.tokens_and_steps(name) for name in "0123"] == [(9, 7), (9, 7), (4, 4), (3, 3)]
    for name in "0123":
        rows.proposer.finish(name)
    rows.proposer.finish_if_idle()
    counters = rows.proposer.stats()["counters"]
    assert (counters["started"], counters["finished"], counters["errors_start"]) == (3, 3, 1)
    assert "errors_finish" not in counters  # a failed request has left the cache already


def test_a_batch_whose_request_has_ended_drafts_for_the_others_alone() -> None:
    """A stale batch from the reader must not give one request's tokens to another."""
    rows = Rows()
    both = ("0", "1")
    rows.step(both)
    rows.proposer.finish("0")
    rows.proposer.cache.start("another", [1, 2, 3])  # takes the place that has become free
    first, second = rows.repeat()
    assert first == [] and second[:1] == [107]
    assert rows.proposer.cache.propose(["another"], 8)[0].token_ids.tolist() == []
    assert not [name for name in rows.proposer.stats()["counters"] if name.startswith("errors")]


def test_streamed_input_ends_a_turn_and_begins_the_next() -> None:
    engine = Engine()
    said: list[FinishedTurn | None] = []
    finish = engine.proposer.cache.finish

    def noted(*args: Any, **names: Any) -> Any:
        said.append(finish(*args, **names))
        return said[-1]

    engine.proposer.cache.finish = noted  # type: ignore[method-assign]
    prompt = [1, 2, 3]
    for number in range(3):
        response = [token + 100 * number for token in range(500, 510)]
        tokens = np.array([[*prompt, *response]], np.int32)
        for length in range(len(prompt) + 1, len(prompt) + 11):
            first = length == len(prompt) + 1
            batch = Batch(("r",), np.zeros(1, np.int32))
            new = [NewRequest("r", prompt, Identity(session="s"))] if first else []
            none = np.zeros(1, np.int32)
            engine.proposer.propose(Step(batch, new, tokens, none + length, none + 4, none, num_draft_tokens=0))
        prompt = [*prompt, *response[:-1], 700 + number, 710 + number]
    assert engine.proposer.stats()["running"] == 1
    engine.proposer.finish("r", 10)
    engine.proposer.finish_if_idle()
    assert [turn and (turn.kept, turn.prompt_tail.tolist(), len(turn.response)) for turn in said] == [
        (0, [1, 2, 3], 9),
        (12, [700, 710], 9),
        (23, [701, 711], 10),
    ]
    assert not [name for name in engine.proposer.metrics.counters if name.startswith("errors")]


def test_a_step_is_left_as_its_reader_made_it() -> None:
    rows = Rows(disable_by_batch_size=1)
    rows.step(("0", "1"))
    room = np.full(2, 8, np.int32)
    step = Step(rows.batch, (), rows.tokens, rows.lengths[:2], room, np.zeros(2, np.int32), 0)
    assert rows.proposer.propose(step) == [[], []]
    assert step.max_draft_tokens is room and room.tolist() == [8, 8]


def test_requests_make_way_in_the_midst_of_a_batch_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is that of the latest step, and others in it would lose their drafts with an error."""
    rows = Rows()
    rows.step(("0", "1"))
    assert all(rows.repeat())
    monkeypatch.setattr(rows.proposer._persistence, "outdated", lambda: frozenset([None]))
    assert rows.repeat() == rows.repeat() == [[], []]
    stats = rows.proposer.stats()
    assert stats["running"] == 0 and "errors_propose" not in stats["counters"]
