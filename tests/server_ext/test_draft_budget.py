"""Test how many draft tokens a step may hold, and which are kept."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agentspec.cache import SuffixCache
from agentspec.errors import ConfigurationError
from agentspec.server_ext import UNFORCED
from agentspec.server_ext.engine import DraftingEngine
from agentspec.server_ext.fusion import ModelDraft
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.pricing.draft_budget import DraftBudget, EngineLimits, kept_lengths
from agentspec.server_ext.pricing.step_cost import Prices, StepCost
from agentspec.server_ext.settings import Settings, load_settings
from agentspec.server_ext.step import Batch, NewRequest, Step
from tests.server_ext.drafts import drafts_of
from tests.server_ext.plain_engine import in_memory


def lengths_of(chances: list[list[float]], budget: int) -> list[int]:
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in chances]))).astype(np.int32)
    kept: list[int] = kept_lengths(offsets, np.array(list(chain(*chances)), np.float32), budget).tolist()
    return kept


def by_hand(chances: list[list[float]], budget: int) -> list[int]:
    """Take the likeliest next token again and again, at first from rows below their even share. Return the lengths."""
    lengths, worth = [0] * len(chances), [1.0] * len(chances)
    even = budget // 2 // max(sum(map(bool, chances)), 1)
    for _ in range(budget):
        _, value, _, row = max(
            (lengths[i] < even, worth[i] * row[lengths[i]], -lengths[i], -i)
            for i, row in enumerate(chances)
            if lengths[i] < len(row)
        )
        worth[-row] = value
        lengths[-row] += 1
    return lengths


class TestWhatStays:
    def test_the_likeliest_tokens_of_all_rows(self) -> None:
        assert lengths_of([[0.9, 0.5, 0.9], [0.6], [0.8, 0.9]], 4) == [1, 1, 2]

    def test_surer_rows_leave_the_others_an_even_part_of_half_the_budget(self) -> None:
        sure, unsure = [0.99] * 60, [0.5] * 3
        assert lengths_of([sure, unsure, sure, []], 30) == [14, 3, 13, 0]
        assert lengths_of([sure, [0.5] * 60, sure], 30) == [13, 5, 12]

    def test_as_if_taken_one_by_one(self) -> None:
        random = np.random.default_rng(1)
        for _ in range(100):
            sizes = random.integers(0, 30, size=random.integers(1, 12))
            chances = [random.choice([0.1, 0.5, 0.9, 0.99], size=size).tolist() for size in sizes]
            total = int(sizes.sum())
            budget = int(random.integers(0, total + 1))
            assert lengths_of(chances, budget) == by_hand(chances, budget)

    def test_equals_go_by_position(self) -> None:
        assert lengths_of([[1.0] * 5, [1.0] * 2, [1.0] * 5], 7) == [3, 2, 2]
        assert lengths_of([[0.5, 0.5], [0.25]], 2) == [1, 1]

    def test_no_chance_at_all_goes_last(self) -> None:
        assert lengths_of([[0.0, 1.0], [0.3, 0.3]], 2) == [0, 2]
        assert lengths_of([[0.0, 1.0], [0.3, 0.3]], 3) == [1, 2]

    def test_a_long_sure_draft_among_many(self) -> None:
        lengths = lengths_of([[0.99] * 128, *[[0.5, 0.5, 0.5]] * 255], 512)
        assert sum(lengths) == 512 and lengths[0] > 60 and set(lengths[1:]) <= {1, 2}

    def test_within_the_budget_nothing_is_cut(self) -> None:
        budget = DraftBudget(5)
        tokens, chances = [[1, 2, 3], [], [4, 5]], [[0.9, 0.1, 0.9], [], [0.2, 0.2]]
        assert budget.cut(drafts_of(tokens, chances), 5) == tokens
        assert budget.stats()["cut_steps"] == 0

    def test_beyond_the_budget_the_least_likely_are_cut_and_counted(self) -> None:
        budget = DraftBudget(3)
        tokens, chances = [[1, 2, 3], [], [4, 5]], [[0.9, 0.1, 0.9], [], [0.2, 0.2]]
        expected = [[1, 2], [], [4]]
        assert budget.cut(drafts_of(tokens, chances), 3) == expected
        assert budget.stats()["cut_steps"] == 1 and budget.stats()["cut_tokens"] == 2


class TestHowMany:
    @pytest.mark.parametrize(
        ("limits", "rows", "cost", "tokens", "limited_by"),
        [
            (EngineLimits(), 1, 0.02, 1024, "setting"),
            (EngineLimits(), 1, 1.0, 1024, "setting"),  # no other row would wait
            (EngineLimits(), 8, 0.02, 400, "latency"),
            (EngineLimits(), 8, 1.0, 8, "latency"),
            (EngineLimits(), 64, 0.02, 1024, "setting"),
            (EngineLimits(free_bytes=8_000, position_bytes=20), 1, 0.02, 100, "memory"),
            (EngineLimits(free_bytes=0, position_bytes=20, provided_tokens=256), 1, 0.02, 256, "memory"),
            (EngineLimits(free_bytes=8_000, position_bytes=20), 2, 0.1, 20, "latency"),
            (EngineLimits(scheduled_tokens=2048), 256, 0.02, 896, "scheduler"),
            (EngineLimits(scheduled_tokens=256), 256, 0.02, 0, "scheduler"),
        ],
    )
    def test_the_least_limit_holds(
        self, limits: EngineLimits, rows: int, cost: float, tokens: int, limited_by: str
    ) -> None:
        budget = DraftBudget(1024, limits)
        assert budget.tokens(rows, StepCost(cost).affordable_tokens(rows)) == tokens
        stats = budget.stats()
        assert (stats["tokens"], stats["limited_by"], stats["rows"]) == (tokens, limited_by, rows)

    def test_a_step_at_the_latency_limit_takes_twice_as_long(self) -> None:
        fixed, row, token, rows = 0.010, 0.001, 0.0004, 12
        plain = fixed + row * rows
        d = DraftBudget(100_000).tokens(rows, StepCost(token * rows / plain).affordable_tokens(rows))
        assert plain + token * d == pytest.approx(2 * plain, rel=0.02)

    @pytest.mark.parametrize(("rows", "budget", "most"), [(1, 1024, 128), (32, 1024, 128), (256, 1024, 16), (4, 3, 3)])
    def test_a_row_gets_some_times_its_share(self, rows: int, budget: int, most: int) -> None:
        assert DraftBudget(1024).row_tokens(rows, budget) == most

    def test_without_a_budget_nothing_is_drafted(self) -> None:
        assert DraftBudget(1024).row_tokens(2, 0) == 0


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_the_cache_takes_a_cut_draft_as_it_was_verified(kept: int) -> None:
    """Only the first `num_verified` tokens count, and drafting goes on behind the verified text."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8] * 3
    cache = SuffixCache()
    cache.start("r", prompt)
    table = np.zeros((1, 64), np.int32)

    def step(text: list[int], num_verified: int) -> Any:
        table[0, : len(text)] = text
        return cache.step(["r"], table, [0], [len(text)], [8], [num_verified])

    draft = step(prompt, 0).lists()[0]
    assert len(draft) > 3
    result = step([*prompt, *draft[:kept], draft[kept]], kept)
    assert result.drafted.sum() == result.accepted.sum() == kept
    assert result.lists()[0][:3] == [(draft[kept] + i) % 8 + 1 for i in range(3)]


class SureModel:
    """Draft token 7 everywhere, with certainty."""

    positions = 4
    overlaps = False
    choices = None

    def launch(self, rows: Sequence[int], proposals: NDArray[np.int64]) -> Callable[[], ModelDraft]:
        tokens = np.where(proposals == UNFORCED, 7, proposals)
        sure = np.full(tokens.shape, 0.99, np.float32)
        return lambda: ModelDraft(tokens, sure, tokens, sure)

    def rest(self) -> None:
        raise NotImplementedError


class TestProposer:
    """Test four rows that copy from themselves for ever."""

    ROWS = 4

    def run(self, model: SureModel | None, **settings: Any) -> tuple[list[list[list[int]]], DraftingEngine]:
        given = Settings(store="memory://", verify_cost=0.01, **settings)
        limits = EngineLimits(scheduled_tokens=2048)
        proposer = DraftingEngine(given, in_memory(given, max_draft=128), limits)
        proposer.pricing.cost.at = lambda rows: Prices(0.01, 1.0)  # type: ignore[method-assign]
        text = [list(range(100 * row, 100 * row + 40)) * 30 for row in range(1, self.ROWS + 1)]
        table = np.array(text, np.int32)
        ids, length, drafts = tuple("abcd"), 100, [[0][:0]] * self.ROWS
        batch = Batch(ids, np.arange(self.ROWS, dtype=np.int32))
        lengths = np.full(self.ROWS, length, np.int32)
        steps = []
        for number in range(4):
            scheduled = np.array([len(draft) for draft in drafts], np.int32)
            lengths = lengths + scheduled + 1 if number else lengths
            started = [NewRequest(name, row[:length], Identity()) for name, row in zip(ids, text, strict=True)]
            step = Step(
                started=[] if number else started,
                batch=batch,
                tokens=table,
                lengths=lengths,
                max_draft_tokens=np.full(self.ROWS, 128, np.int32),
                num_verified_draft_tokens=scheduled,
                num_draft_tokens=int(scheduled.sum()),
            )
            drafts = proposer.propose(step, model)
            for row, draft in enumerate(drafts):
                if model is None:
                    assert draft == text[row][lengths[row] : lengths[row] + len(draft)]
            steps.append(drafts)
        assert not [name for name in proposer.stats()["counters"] if name.startswith("errors")]
        return steps, proposer

    @pytest.mark.parametrize("model", [None, SureModel()], ids=["suffix", "model"])
    def test_no_step_holds_more_than_the_budget(self, model: SureModel | None) -> None:
        free, _ = self.run(model)
        assert max(sum(map(len, drafts)) for drafts in free) > 60
        steps, proposer = self.run(model, step_draft_tokens=10)
        assert (proposer.stats()["model"]["runs"] > 0) == (model is not None)
        assert [sum(map(len, drafts)) for drafts in steps] == [10] * 4
        stats = proposer.stats()["step_budget"]
        assert stats["tokens"] == 10 and stats["limited_by"] == "setting" and stats["cut_steps"] > 0

    def test_what_was_verified_is_what_counts(self) -> None:
        steps, proposer = self.run(None, step_draft_tokens=10)
        verified = sum(len(draft) for drafts in steps[:-1] for draft in drafts)
        counters = proposer.stats()["counters"]
        assert counters["drafted"] == counters["accepted"] == verified

    def test_the_price_bounds_the_wait_of_the_rows_beside(self) -> None:
        steps, proposer = self.run(None, step_draft_tokens=100_000)
        assert proposer.stats()["step_budget"]["tokens"] == 400  # 4 rows at .01
        assert proposer.stats()["step_budget"]["limited_by"] == "latency"
        assert max(sum(map(len, drafts)) for drafts in steps) <= 400

    def test_a_budget_of_nothing_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="step_draft_tokens"):
            load_settings({"agentspec": {"step_draft_tokens": 0}}, environ={})
