"""Test how many draft tokens StepCost affords a step, by its duration, on synthetic step times."""

import random
from statistics import median

import pytest

from agentspec.server_ext.pricing.step_cost import AIMED_DEVIATIONS, LEAST_AIMED_SHARE, StepCost
from agentspec.server_ext.settings import LONGEST_STEP
from tests.server_ext.machine import Machine

AIMED = LONGEST_STEP / (1 + AIMED_DEVIATIONS * 0.05)
"""Duration that steps with drafts aim at, with the usual noise, in multiples of a step without drafts."""
BUSY_AIMED = LEAST_AIMED_SHARE * LONGEST_STEP
"""The same duration with much noise."""


@pytest.mark.parametrize("rows", [2, 8, 64])
def test_before_anything_is_measured_a_step_may_draft_a_token_a_row(rows: int) -> None:
    cost = StepCost()
    assert cost.affordable_tokens(rows) == rows
    Machine(0.0004).run(cost, 50, rows, longest=0)
    assert cost.affordable_tokens(rows) == rows


@pytest.mark.parametrize("plain", [0, 6])
@pytest.mark.parametrize("surcharge", [0.0, 0.003])
@pytest.mark.parametrize("per_token", [0.0002, 0.0005, 0.002])
def test_drafts_that_use_what_is_allowed_grow_until_steps_take_as_long_as_they_may(
    per_token: float, surcharge: float, plain: int
) -> None:
    """Steps take as many draft tokens as allowed, or a few less."""
    machine, cost = Machine(per_token, surcharge=surcharge), StepCost()
    machine.run(cost, plain, 8, longest=0)
    most = 0.0
    for _ in range(200):
        tokens = int(cost.affordable_tokens(8) * machine.random.uniform(0.8, 1.0))
        assert tokens <= max(8, 2 * most)
        tokens = 0 if cost.decide_to_measure_plain(8) else tokens
        most = max(most, tokens)
        cost.observe(8, tokens, machine.seconds(8, tokens))
    fits = max((AIMED * 0.018 - 0.018 - surcharge) / per_token, 8)
    assert cost.affordable_tokens(8) == pytest.approx(fits, rel=0.3)
    assert most < 1.5 * fits


def test_where_every_step_has_drafts_a_few_have_none_so_that_their_time_is_known() -> None:
    machine, cost = Machine(0.0004, surcharge=0.006), StepCost()
    plain: list[int] = []
    for number in range(1000):
        tokens = int(cost.affordable_tokens(8))
        if cost.decide_to_measure_plain(8):
            tokens = 0
            plain.append(number)
        cost.observe(8, tokens, machine.seconds(8, tokens))
    assert 5 <= len([number for number in plain if number < 100]) <= 8
    assert 6 <= len([number for number in plain if number >= 100]) <= 8
    longest = machine.base + 8 * machine.per_row
    assert cost.affordable_tokens(8) == pytest.approx((AIMED * longest - longest - 0.006) / 0.0004, rel=0.3)


@pytest.mark.parametrize(("given", "rows"), [(0.02, 8), (None, 1)])
def test_no_step_goes_without_drafts_where_nothing_depends_on_it(given: float | None, rows: int) -> None:
    machine, cost = Machine(0.0004), StepCost(given)
    for _ in range(300):
        assert not cost.decide_to_measure_plain(rows)
        cost.observe(rows, 8, machine.seconds(rows, 8))


def test_a_step_that_drafts_too_much_is_not_repeated() -> None:
    """After a few steps beyond a knee, where the time grows faster, drafts stay below it."""
    machine, cost = Machine(0.0001, noise=0.02), StepCost()
    over = 0
    for _ in range(300):
        tokens = int(cost.affordable_tokens(8))
        seconds = machine.seconds(8, tokens) + 0.001 * max(tokens - 40, 0)
        over += seconds > LONGEST_STEP * 0.018
        cost.observe(8, tokens, seconds)
    assert over <= 15


@pytest.mark.parametrize("share", [0.9, 1.0])
def test_drafts_grow_on_a_busy_machine_too(share: float) -> None:
    """Steps without drafts vary as much on a busy machine, so drafts may take as much time."""
    fits = (BUSY_AIMED - 1) * 0.018 / 0.0002
    found = []
    for seed in range(21):
        machine, cost = Machine(0.0002, noise=0.3), StepCost()
        machine.random = random.Random(seed)
        machine.run(cost, 20, 8, longest=0)
        for _ in range(400):
            tokens = machine.random.randint(4, int(cost.affordable_tokens(8))) if machine.random.random() < share else 0
            other = machine.random.expovariate(1 / 0.03) if machine.random.random() < 0.1 else 0.0
            cost.observe(8, tokens, machine.seconds(8, tokens) + other)
        found.append(cost.affordable_tokens(8))
    assert 0.45 * fits < median(found) < 1.4 * fits, found


@pytest.mark.parametrize(("length", "multiple"), [(1.0, AIMED), (1.5, AIMED), (3.0, 2.5 * AIMED), (5.0, 4.5 * AIMED)])
def test_a_step_may_take_longer_where_every_row_accepts_much(length: float, multiple: float) -> None:
    machine, cost = Machine(0.0002), StepCost()
    for _ in range(200):
        machine.run(cost, 1, 8, longest=0)
        tokens = int(cost.affordable_tokens(8, length) * machine.random.uniform(0.5, 1.0))
        cost.observe(8, tokens, machine.seconds(8, tokens))
    assert cost.affordable_tokens(8, length) == pytest.approx((multiple - 1) * 0.018 / 0.0002, rel=0.3)


@pytest.mark.parametrize(("length", "tokens"), [(1.0, 400), (1.5, 400), (2.0, 800), (5.0, 3200)])
def test_where_all_rows_accept_much_a_given_price_affords_more(length: float, tokens: int) -> None:
    assert StepCost(0.02).affordable_tokens(8, length) == tokens


@pytest.mark.parametrize(("longest", "tokens"), [(1.5, 200), (2.0, 400), (6.0, 2000), (None, float("inf"))])
def test_the_operator_says_how_long_a_step_may_take(longest: float | None, tokens: float) -> None:
    assert StepCost(0.02, longest).affordable_tokens(8) == tokens


@pytest.mark.parametrize(("longest", "least", "most"), [(1.5, 4, 15), (2.0, 10, 45), (4.0, 60, 135)])
def test_he_does_where_the_price_is_measured(longest: float, least: float, most: float) -> None:
    """Steps take 18 ms and .4 ms for each draft token."""
    machine, cost = Machine(0.0004), StepCost(None, longest)
    machine.run(cost, 300, rows=8, longest=20)
    assert least <= cost.affordable_tokens(8) <= most


def test_what_one_batch_size_measured_bounds_another() -> None:
    machine, cost = Machine(0.0001), StepCost()
    machine.run(cost, 500, rows=8, longest=4)
    assert 2 * 8 < cost.affordable_tokens(8) <= 2 * 8 * 4
    assert cost.affordable_tokens(9) <= 2 * 8 * 4
    assert cost.affordable_tokens(64) <= 64
