"""Test how much a step may draft, and which of its drafts are kept."""

import pytest

from agentspec.server_ext.pricing import Allowance, StepPricing
from agentspec.server_ext.step import AcceptanceLength
from tests.server_ext.drafts import drafts_of

ROWS = 4
PLAIN, TOKEN = 0.010, 0.001
"""Seconds that a step without drafts takes, and that each draft token adds."""


class Batch:
    """Run four rows whose texts grow by a token a step."""

    def __init__(self, given: float | None = None, step_tokens: int = 1024) -> None:
        self.pricing = StepPricing(given, step_tokens)
        self.measures = [AcceptanceLength(0, 0) for _ in range(ROWS)]

    def allow(self, step: int) -> Allowance:
        return self.pricing.allow([(measure, step) for measure in self.measures], ROWS, step)

    def observe(self, steps: int, drafted: int = 3) -> None:
        for number in range(steps):
            tokens = drafted + number % 3
            self.pricing.cost.observe(ROWS, tokens, PLAIN + TOKEN * tokens)


def test_an_allowance_holds_until_the_prices_change_or_for_sixteen_steps() -> None:
    batch = Batch()
    first = batch.allow(step=1)
    assert batch.pricing.is_valid(first, 16) and not batch.pricing.is_valid(first, 17)
    batch.observe(1)
    assert not batch.pricing.is_valid(first, 2)
    assert not batch.pricing.is_valid(Allowance(), 0)


def test_work_beside_drafting_is_two_percent_of_a_measured_step_and_half_a_millisecond_at_most() -> None:
    batch = Batch()
    assert batch.allow(1).work == pytest.approx(0.0005)  # no step was measured yet
    batch.observe(200)
    assert batch.allow(2).work == pytest.approx(0.02 * PLAIN, rel=0.1)


def test_the_rows_that_accept_little_limit_a_step_by_its_duration() -> None:
    batch = Batch(given=0.1)
    allowance = batch.allow(1)
    assert (allowance.tokens, allowance.by_latency) == (ROWS / 0.1, True)
    assert not Batch(given=0.1, step_tokens=10).allow(1).by_latency


DRAFTS = [[1, 2, 3], [4, 5, 6], [7], [8]]


def cut(batch: Batch, allowance: Allowance) -> list[list[int]]:
    return batch.pricing.cut(drafts_of(DRAFTS, [[0.9] * len(draft) for draft in DRAFTS]), allowance, ROWS)


def test_drafts_within_the_allowance_stay_whole() -> None:
    batch = Batch()
    batch.observe(20)  # steps without drafts have never been measured
    assert cut(batch, Allowance(tokens=8, by_latency=True)) == DRAFTS


def test_now_and_then_a_step_whose_duration_cuts_drafts_has_none() -> None:
    batch = Batch()
    batch.observe(20)
    allowance = Allowance(tokens=4, by_latency=True)
    assert cut(batch, allowance) == [[], [], [], []]
    assert sum(map(len, cut(batch, allowance))) == 4  # not twice in a row


def test_drafts_that_do_not_earn_their_step_are_left_out() -> None:
    batch = Batch()
    for number in range(400):  # any draft adds the time of a step without one
        tokens = number % 3
        batch.pricing.cost.observe(ROWS, tokens, PLAIN + TOKEN * tokens + (PLAIN if tokens else 0.0))
    allowance = Allowance(tokens=8, by_latency=True)
    few, many = [[1], [], [], []], [[1, 2]] * 4
    assert batch.pricing.cut(drafts_of(few, [[0.9], [], [], []]), allowance, ROWS) == [[], [], [], []]
    assert batch.pricing.cut(drafts_of(many, [[0.99] * 2] * 4), allowance, ROWS) == many


def test_where_the_setting_cuts_drafts_every_step_has_some() -> None:
    batch = Batch()
    batch.observe(20)
    allowance = Allowance(tokens=4, by_latency=False)
    assert sum(map(len, cut(batch, allowance))) == 4
