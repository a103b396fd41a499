"""The engine-side logic without vLLM: a real suffix index, a real store, plain steps."""

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentspec.cache import FinishedTurn, HistoryWindow, Scope, SuffixCache
from agentspec.cache.policy import DEFAULT_COST
from agentspec.cache.store import NewEntry, TurnRecord, open_store
from agentspec.cache.store.records import decode
from agentspec.server_ext.engine import DraftingEngine
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.identity.prompt_groups import PromptGroups
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.pricing.step_cost import StepCost
from agentspec.server_ext.settings import MemoryShares, Settings
from agentspec.server_ext.step import Batch, NewRequest, Repetition, Step
from tests.store.helpers import LOGS

TEXT = list(range(100, 160))
NONE = np.zeros(0, dtype=np.int32)


class Engine:
    """The least of an engine: requests whose output is given, verified greedily against the drafts."""

    def __init__(
        self,
        url: str = "memory://",
        tenant: str | None = None,
        record: Path | None = None,
        scope: Scope = "tenant",
        snapshot: Path | None = None,
        history_window: HistoryWindow | None = None,
    ) -> None:
        settings = Settings(
            tenant=tenant, store=url, record=str(record) if record else None, history_window=history_window
        )
        self.store = open_store(url)
        self.persistence = Persistence(self.store, LOGS, 100)
        self.proposer = DraftingEngine(settings, self.persistence, 1000, 16, snapshot=snapshot)
        self.proposer.warm_up()
        self.tenant, self.scope = tenant, scope

    def run(
        self,
        request_id: str,
        prompt: Sequence[int],
        output: Sequence[int],
        session: str | None = None,
        group: str | None = None,
        *,
        parent: str | None = None,
        final: bool = False,
        detailed: Any = False,
    ) -> int:
        """Decode ``output``; returns the number of steps."""
        tokens = np.zeros((1, len(prompt) + len(output) + 32), dtype=np.int32)
        full = [*prompt, *output]
        length, draft, steps = len(prompt), [0][:0], 0
        batch = Batch((request_id,), np.zeros(1, np.int32))
        while length < len(full):
            accepted = 0
            while accepted < len(draft) and length + accepted < len(full) - 1:
                if draft[accepted] != full[length + accepted]:
                    break
                accepted += 1
            new = length + accepted + 1
            tokens[0, :new] = full[:new]
            identity = Identity(self.tenant, session, group, self.scope, parent_session=parent, final=final)
            started = [] if steps else [NewRequest(request_id, prompt, identity, detailed=detailed)]
            step = Step(
                started=started,
                batch=batch,
                tokens=tokens,
                lengths=np.array([new], np.int32),
                max_draft_tokens=np.array([max(0, len(full) - new - 1)], np.int32),
                num_verified_draft_tokens=np.array([len(draft)], np.int32),
                num_draft_tokens=len(draft),
            )
            (draft,) = self.proposer.propose(step)
            length, steps = new, steps + 1
        self.proposer.finish(request_id, len(output))
        return steps

    def turns(self) -> list[TurnRecord]:
        """The turns that are stored."""
        assert self.persistence._writer.flush(60)
        records = (decode(entry.payload) for log in self.store.namespaces("") for entry in self.store.read(log))
        return [record for record in records if isinstance(record, TurnRecord)]


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


@pytest.mark.parametrize(
    ("kept", "drafts"),
    [
        (None, True),
        ("2 weights", True),
        ("1 weight", False),
        ("2 epochs", True),
        ("1 epoch", False),
        ("1 token", False),
    ],
)
def test_an_old_policys_samples_fade(kept: str | None, drafts: bool) -> None:
    engine = Engine(history_window=HistoryWindow.parse(kept) if kept else None)
    engine.run("a", [1, 2, 3, 100], TEXT[1:], group="g")
    for _ in range(3):  # one update, tensor by tensor
        engine.proposer.note_new_weights()
    engine.proposer.note_new_epoch()
    engine.run("first", [900], [901, 902], group="g")
    engine.proposer.cache.catch_up()
    steps = engine.run("b", [1, 2, 3, 100], TEXT[1:], group="g")
    assert steps < len(TEXT) / 3 if drafts else steps == len(TEXT) - 1
    counters = engine.proposer.stats()["counters"]
    assert counters["weight_updates"] == counters["epochs"] == 1


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


@pytest.mark.parametrize("length", [1, len(TEXT)])
def test_a_session_that_its_client_ends_is_freed(length: int) -> None:
    """Whether its last request is kept or not; the next one begins it again."""
    engine = Engine(scope="session")
    engine.run("a", [1, 2, 3, 100], TEXT[1:], session="s")
    engine.run("b", [1, 2, 3, *TEXT, 4], TEXT[:length], session="s", final=True)
    stats = engine.proposer.cache.stats()
    assert (stats.sessions, stats.tokens, stats.requests) == (0, 0, 0)
    assert len(engine.turns()) == 1 + (length > 1)  # the store has them
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
    assert not engine.proposer.cache.has_session(None, "s")


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


def test_a_restart_restores_the_session_from_the_store(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'log.db'}"
    engine = Engine(url)
    engine.run("a", [1, 2, 3], TEXT, session="s")
    engine.proposer.close()
    again = Engine(url)
    assert again.run("b", [1, 2, 3, *TEXT, 4, 5, 100, 101], TEXT[2:], session="s") < len(TEXT) / 3
    again.proposer.close()


def test_a_restart_goes_on_with_the_saved_indexes_and_prices(tmp_path: Path) -> None:
    """The second store is empty, so all that is known comes from the snapshot."""
    engine = Engine(snapshot=tmp_path / "saved")
    engine.run("a", [1, 2, 3], TEXT, session="s")
    for step in range(200):
        engine.proposer.pricing.cost.observe(1, step % 5, 0.010 + 0.001 * (step % 5))
    price = engine.proposer.pricing.cost.at(1).cost
    engine.proposer.close()
    again = Engine(snapshot=tmp_path / "saved")
    assert again.proposer.pricing.cost.at(1).cost == pytest.approx(price)
    assert again.proposer.pricing.cost.at(1).cost != Engine().proposer.pricing.cost.at(1).cost
    assert again.run("b", [1, 2, 3, *TEXT, 4, 5, 100, 101], TEXT[2:], session="s") < len(TEXT) / 3
    assert again.proposer.stats()["snapshot"]["loaded_tokens"] > 0
    again.proposer.close()


def test_what_a_snapshot_and_the_store_both_hold_counts_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'log.db'}"
    engine = Engine(url, snapshot=tmp_path / "saved")
    engine.run("a", [1, 2, 3], TEXT, session="s")
    held = engine.proposer.cache.stats().tokens
    engine.proposer.close()
    again = Engine(url, snapshot=tmp_path / "saved")
    assert again.proposer.cache.stats().tokens == held
    again.proposer.close()


def test_prices_that_cannot_be_read_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    costs = StepCost()
    fresh = costs.at(1).cost
    for damaged in (b"no json", b"[]", b'{"batches": {"1": {}}}', b'{"batches": {"1": {"levels": {"0": {"x": 1}}}}}'):
        costs.restore(damaged)
    costs.restore(b"")  # there is no snapshot
    assert costs.at(1).cost == fresh
    assert len(caplog.records) == 4


@pytest.mark.parametrize("session", [None, "s"])
def test_single_tokens_of_beam_search_are_not_kept(session: str | None) -> None:
    engine = Engine()
    for number in range(5):
        engine.run(f"beam{number}", [1, 2, 3, *TEXT[:number]], TEXT[number : number + 1], session=session)
    stats = engine.proposer.stats()
    assert stats["counters"]["started"] == stats["counters"]["finished"] == 5
    assert stats["cache"]["tokens"] == 0
    assert stats["store"]["writer"]["persisted"] + stats["store"]["writer"]["queued"] == 0
    engine.run("answer", [1, 2, 3], TEXT[:2], session=session)
    assert engine.proposer.cache.stats().tokens > 0


@pytest.mark.parametrize("scope", ["tenant", "session"])
def test_a_restart_restores_what_was_shared_and_nothing_else(tmp_path: Path, scope: Scope) -> None:
    url = f"sqlite:///{tmp_path / 'log.db'}"
    engine = Engine(url, "owner", scope=scope)
    engine.run("a", [1, 2, 3], TEXT, session="s")
    engine.proposer.close()
    for tenant, drawn in (("owner", scope == "tenant"), ("another", False), (None, False)):
        again = Engine(url, tenant)
        steps = again.run("b", [7, 8, 100, 101, 102], TEXT[3:], session="other")
        assert (steps < len(TEXT) / 2) == drawn, tenant
        again.proposer.close()


def test_a_failing_suffix_index_costs_drafts_and_is_counted_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken on purpose")

    engine.proposer.cache.step = broken  # type: ignore[method-assign,assignment]
    assert engine.run("a", [1, 2], TEXT, session="s") == len(TEXT)
    assert engine.run("b", [1, 2], TEXT, session="s") == len(TEXT)
    assert engine.proposer.stats()["counters"]["errors_propose"] == 2
    assert sum("broken on purpose" in (r.exc_text or "") for r in caplog.records) == 1


def test_a_request_that_cannot_start_leaves_the_others_alone() -> None:
    engine = Engine(tenant="t")
    engine.run("warm", [1, 2, 3], TEXT)
    assert engine.run("bad", [-5], TEXT[:5]) == 5
    assert engine.run("image", [5_000_000], TEXT[:5]) < 5
    assert engine.run("good", [1, 2, 3, 100, 101], TEXT[2:]) < len(TEXT) / 2
    assert engine.proposer.stats()["counters"]["errors_start"] == 1


def test_switched_off_never_drafts() -> None:
    settings = Settings(store="memory://", enabled=False)
    store = open_store("memory://")
    proposer = DraftingEngine(settings, Persistence(store, LOGS, 0), 1000, 16)
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


class Rows:
    """Rows whose tokens never repeat or always do, stepped by hand."""

    def __init__(self, **settings: object) -> None:
        given = Settings(store="memory://", **settings)  # type: ignore[arg-type]
        self.proposer = DraftingEngine(given, Persistence(open_store("memory://"), LOGS, 0), 1000, 16)
        self.tokens = np.zeros((4, 500), dtype=np.int32)
        self.lengths = np.zeros(4, dtype=np.int32)
        self.costs: list[float | None] = []
        self.batch = Batch((), np.zeros(0, np.int32))
        step = self.proposer.cache.step

        def noted(*args: Any, cost: float | None = None, **names: Any) -> Any:
            self.costs.append(cost)
            return step(*args, cost=cost, **names)

        self.proposer.cache.step = noted  # type: ignore[method-assign]

    def step(self, ids: tuple[str, ...], drafted: int = 0, seconds: float | None = None) -> list[list[int]]:
        """Every row is given one token more, and the tokens of ``drafted`` where that is not 0."""
        rows = [int(request_id) for request_id in ids]
        if self.batch.request_ids != ids:
            self.batch = Batch(ids, np.array(rows, np.int32))
        started = []
        for row, request_id in zip(rows, ids, strict=True):
            if not self.proposer.knows(request_id, 3):
                self.tokens[row, :3] = [900 + row, 910 + row, 920 + row]
                self.lengths[row] = 3
                started.append(NewRequest(request_id, self.tokens[row, :3].tolist(), Identity()))
            for _ in range(drafted + 1):
                self.tokens[row, self.lengths[row]] = 100 * row + self.lengths[row]
                self.lengths[row] += 1
        step = Step(
            started=started,
            batch=self.batch,
            tokens=self.tokens,
            lengths=self.lengths[rows],
            max_draft_tokens=np.full(len(rows), 8, np.int32),
            num_verified_draft_tokens=np.full(len(rows), drafted, np.int32),
            num_draft_tokens=drafted * len(rows),
            seconds=seconds,
        )
        drafts = self.proposer.propose(step)
        if started:
            self.proposer._turnover.advance(step, 60.0)  # however slow this machine is
            self.proposer._leave_batch()
        return drafts

    def repeat(self) -> list[list[int]]:
        """Take a step of the batch as it is, in which each row is given 30 tokens that repeat."""
        for row in self.batch.rows.tolist():
            length = int(self.lengths[row])
            self.tokens[row, length : length + 30] = 100 * row + np.tile([7, 8, 9], 10)
            self.lengths[row] += 30
        none, room = np.zeros(len(self.batch), np.int32), np.full(len(self.batch), 8, np.int32)
        return self.proposer.propose(
            Step(self.batch, (), self.tokens, self.lengths[self.batch.rows], room, none, num_draft_tokens=0)
        )

    def tokens_and_steps(self, request_id: str) -> tuple[int, int]:
        figures = self.proposer.request(request_id)
        assert figures is not None
        return figures["tokens"], figures["steps"]


@pytest.mark.parametrize("told_first", [True, False])
def test_what_is_accepted_behind_the_end_of_a_response_is_nobodys(told_first: bool) -> None:
    """The API server has found a stop text, and the engine takes steps until it hears of that."""
    rows = Rows(verify_cost=0.01)
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


@pytest.mark.parametrize(("repetition", "tokens"), [(Repetition(1, 4, 2), 7), (Repetition(4, 9, 2), 10), (None, 10)])
def test_what_is_accepted_behind_a_repetition_that_ends_the_response_is_not_counted(
    repetition: Repetition | None, tokens: int
) -> None:
    rows = Rows()
    rows.step(("0",))
    rows.proposer._requests.by_id["0"].repetition = repetition
    rows.tokens[0, 4:13] = [7, 8, 9] * 3
    verified, room = np.array([8], np.int32), np.full(1, 8, np.int32)
    rows.proposer.propose(Step(rows.batch, (), rows.tokens, np.array([13], np.int32), room, verified, 8))
    assert rows.tokens_and_steps("0") == (tokens, 2)


def test_the_end_of_a_response_is_never_drafted() -> None:
    """The step that accepts what stands before it samples it. vLLM takes it back then where streamed input follows."""
    rows = Rows(verify_cost=0.01)
    rows.step(("0", "1"))
    rows.proposer._requests.by_id["0"].end_tokens = frozenset({8, 5})
    ended, whole = rows.repeat()
    assert ended == [7] and whole[:4] == [107, 108, 109, 107]


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
    batch.proposer._requests.by_id["0"].end_tokens = frozenset({5})  # its tokens count up from 3
    batch.step(both, drafted=3)
    assert batch.tokens_and_steps("0") == (3, 2)
    assert batch.tokens_and_steps("1") == (5, 2)


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
    counters = rows.proposer.stats()["counters"]
    assert (counters["started"], counters["finished"], counters["errors_start"]) == (3, 3, 1)


def test_a_batch_whose_request_has_ended_drafts_for_the_others_alone() -> None:
    """A reader that hands out a stale batch cannot make one request's tokens another's."""
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


def test_the_given_price_goes_with_every_step() -> None:
    batch = Rows(verify_cost=0.07)
    for _ in range(40):
        batch.step(("0",), seconds=0.01)
    assert batch.costs == [0.07] * 40
    assert batch.proposer.stats()["verify_cost"]["given"] == 0.07
    assert batch.proposer.stats()["verify_cost"]["steps"] == 0


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
    """The budget of two rows at a price of .1: one gets 5 tokens a step, the other ``slowest``."""
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


def test_a_group_reaches_the_suffix_indexes_and_comes_back_from_the_store() -> None:
    engine = Engine(tenant="t")
    groups: list[str | None] = []
    start = engine.proposer.cache.start
    restored: list[FinishedTurn] = []

    def noted(*args: Any, group: str | None = None, **names: Any) -> None:
        groups.append(group)
        start(*args, group=group, **names)

    engine.proposer.cache.start = noted  # type: ignore[method-assign]
    engine.run("a", [1, 2, 3], TEXT, session="s", group="p")
    engine.run("b", [1, 2, 3], TEXT, session="s2")
    assert groups == ["p", None]

    turns = [FinishedTurn("t", "s", 0, NONE, NONE, "p"), FinishedTurn("t", None, 0, NONE, NONE, None)]
    store = open_store("memory://")
    for turn in turns:
        persistence = Persistence(store, LOGS, 100)
        writer, number = persistence.next_name()
        persistence.save(replace(turn, writer=writer, number=number), Identity(tenant="t"))
        persistence._writer.close()
    cache = SuffixCache()
    cache.restore = lambda turn, *, held_only=False: restored.append(turn)  # type: ignore[method-assign]
    Persistence(store, LOGS, 100).warm_up(cache, 5.0, "t")
    assert [(turn.session, turn.group) for turn in restored] == [("s", "p"), (None, None)]


def test_sessions_persist_while_the_store_is_slow(tmp_path: Path) -> None:
    engine = Engine(f"sqlite:///{tmp_path / 'log.db'}")
    append, decoded, held = engine.store.append, threading.Event(), []

    def slow(*args: object) -> list[str]:
        held.append(decoded.wait(180))
        return append(*args)  # type: ignore[arg-type]

    engine.store.append = slow  # type: ignore[method-assign,assignment]
    for i in range(5):
        engine.run(f"r{i}", [1, 2, 3], TEXT[:5], session=f"s{i}")
    decoded.set()
    assert len(engine.turns()) == 5
    assert held and all(held)  # decoding did not wait until the store gave up
    engine.proposer.close()


def test_a_store_in_memory_stays_within_the_budget() -> None:
    """Ten times its share is said. It took up to 256 MB beside the budget once."""
    settings = Settings(store="memory://", max_bytes=4_000_000)
    shares = MemoryShares.of(settings.max_bytes, settings.store)
    assert shares.store == 1_000_000
    assert shares.cache + 2 * shares.queue + shares.figures + shares.store == settings.max_bytes
    store = open_store("memory://", memory_bytes=shares.store)
    proposer = DraftingEngine(settings, Persistence(store, LOGS, 0, queue_bytes=shares.queue), 1000, 16)
    log, payload = LOGS.of(None), bytes(50_000)
    for number in range(200):
        store.append(log, [NewEntry(f"s{number}", payload)])
        memory = proposer.stats()["memory"]
        assert memory["store"] <= 1.1 * shares.store and memory["bytes"] <= memory["limit"] == settings.max_bytes
    assert memory["store"] > 0.5 * shares.store
    assert 0 < len(list(store.read(log))) < 20
    proposer.close()
