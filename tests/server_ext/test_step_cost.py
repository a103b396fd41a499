"""Test StepCost on synthetic step times: what it measures, when it trusts that, and what must not mislead it."""

import random
from itertools import pairwise

import pytest

from agentspec.cache.policy import DEFAULT_COST
from agentspec.server_ext.pricing.step_cost import HIGHEST_COST, LOWEST_COST, StepCost
from tests.server_ext.machine import Machine, tokens_per_second


@pytest.mark.parametrize("per_token", [0.0001, 0.0004, 0.0015])
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_it_finds_the_price_in_noise(per_token: float, rows: int) -> None:
    machine, cost = Machine(per_token), StepCost()
    machine.run(cost, 1500, rows)
    assert cost.at(rows).cost == pytest.approx(machine.true_cost(rows), rel=0.2)


@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
def test_what_a_step_with_drafts_costs_by_itself_is_not_taken_for_the_price_of_a_token(share: float) -> None:
    """At batch 8, vLLM's rejection sampler makes a step with any draft 65 % longer."""
    machine, cost = Machine(0.0004, surcharge=0.0117), StepCost()
    for _ in range(4000):
        drafted = machine.random.randint(1, 40) if machine.random.random() < share else 0
        cost.observe(8, drafted, machine.seconds(8, drafted))
    assert cost.stats()["ms_per_draft_token"] == pytest.approx(0.4, rel=0.25)
    assert cost.stats()["ms_per_step"] == pytest.approx(18 + 11.7 * share, rel=0.1)


def test_pauses_do_not_count() -> None:
    machine, cost = Machine(0.0004), StepCost()
    machine.pauses = 0.03
    machine.run(cost, 2000)
    assert cost.at(1).cost == pytest.approx(machine.true_cost(1), rel=0.25)


def test_pauses_at_the_very_beginning_do_not_count() -> None:
    machine, cost = Machine(0.0004), StepCost()
    for seconds in (8.0, 0.011, 3.0):
        cost.observe(1, 0, seconds)
    machine.run(cost, 400)
    assert cost.at(1).cost == pytest.approx(machine.true_cost(1), rel=0.3)


def test_before_anything_is_known_it_is_the_default() -> None:
    machine, cost = Machine(0.003), StepCost(0.03)
    assert cost.at(1).cost == cost.at(64).cost == 0.03
    machine.run(cost, 4, longest=16)
    assert cost.at(1).cost == 0.03
    assert cost.stats()["evidence"] == 0.0


def test_until_it_is_measured_a_token_is_dearer_in_a_large_batch() -> None:
    cost = StepCost()
    prices = [cost.at(rows).cost for rows in (1, 3, 8, 64, 1024)]
    assert prices == [DEFAULT_COST, DEFAULT_COST, 8 / 108, 64 / 164, 1024 / 1124]


def test_steps_without_drafts_say_nothing_about_their_price() -> None:
    machine, cost = Machine(0.003), StepCost()
    machine.run(cost, 3000, longest=0)
    assert cost.at(1).cost == pytest.approx(DEFAULT_COST, rel=1e-6)
    assert cost.stats()["evidence"] == 0.0
    assert cost.stats()["ms_per_step"] == pytest.approx(11.0, rel=0.05)


def test_drafts_of_one_length_say_nothing_either() -> None:
    cost = StepCost()
    for _ in range(3000):
        cost.observe(1, 4, 0.02)
    assert cost.at(1).cost == pytest.approx(DEFAULT_COST, rel=0.3)


def test_little_evidence_moves_it_a_little() -> None:
    few, many = StepCost(), StepCost()
    Machine(0.003, noise=0.3).run(few, 200, share=0.1, longest=2)
    Machine(0.003, noise=0.3).run(many, 4000, share=0.5, longest=8)
    assert 0 < few.stats()["evidence"] < many.stats()["evidence"]
    assert many.stats()["evidence"] > 0.8


def test_what_rows_cost_is_not_taken_for_the_price_of_drafts() -> None:
    """A row costs twenty times what a draft token costs, and most of the variation is in the number of rows."""
    machine, cost = Machine(0.0001, per_row=0.002, noise=0.02), StepCost()
    for _ in range(600):
        machine.run(cost, 10, rows=machine.random.randint(1, 8), longest=8)
    for rows in (1, 2, 4, 8):
        assert cost.at(rows).cost == pytest.approx(machine.true_cost(rows), rel=0.35)


def test_more_rows_make_a_draft_token_dearer() -> None:
    """The price is b * B / (a + b * B) if a row costs as much as a draft token."""
    machine, cost = Machine(0.0005, per_row=0.0005), StepCost()
    for rows in (1, 2, 4, 8, 16, 40, 100) * 20:
        machine.run(cost, 25, rows, longest=4)
    prices = [cost.at(rows).cost for rows in (1, 2, 4, 8, 16, 40, 100)]
    assert all(more > 0.95 * fewer for fewer, more in pairwise(prices))
    assert cost.at(8).cost == pytest.approx(0.0005 * 8 / (0.01 + 0.0005 * 8), rel=0.25)
    assert cost.at(100).cost == pytest.approx(0.0005 * 100 / (0.01 + 0.0005 * 100), rel=0.25)
    assert cost.at(90).cost == pytest.approx(
        cost.at(100).cost, rel=0.15
    )  # measured in few steps, so the nearest size's price counts


def test_a_machine_that_changes_its_pace_changes_nothing() -> None:
    """Other work slows all steps down for a while. The price, as a share of a step, stays the same."""
    machine, cost = Machine(0.0005), StepCost()
    for pace in (1.0, 1.5, 1.0, 1.8):
        machine.pace = pace
        machine.run(cost, 600)
    assert cost.at(1).cost == pytest.approx(machine.true_cost(1), rel=0.25)


def test_a_machine_that_never_varied_is_followed_when_it_changes_its_pace() -> None:
    """Its steps do not deviate at all, so any other duration would count as a pause."""
    cost = StepCost()
    for _ in range(3000):
        cost.observe(1, 0, 0.01)
    for _ in range(300):
        cost.observe(1, 0, 0.02)
    assert cost.stats()["ms_per_step"] == pytest.approx(20, rel=0.1)


def test_a_price_that_changes_is_followed() -> None:
    machine, cost = Machine(0.0002), StepCost()
    machine.run(cost, 1500)
    machine.per_token = 0.002
    machine.run(cost, 3000)
    assert cost.at(1).cost == pytest.approx(machine.true_cost(1), rel=0.2)


def test_a_price_measured_too_high_cannot_silence_drafting_for_good() -> None:
    machine, cost = Machine(0.02), StepCost()
    machine.run(cost, 500)
    assert cost.at(1).cost == HIGHEST_COST
    machine.run(cost, 8000, longest=0)
    assert cost.at(1).cost < 2 * DEFAULT_COST


@pytest.mark.parametrize(("per_token", "bound"), [(0.0, LOWEST_COST), (-0.0005, LOWEST_COST), (0.1, HIGHEST_COST)])
def test_the_price_stays_within_its_bounds(per_token: float, bound: float) -> None:
    machine, cost = Machine(per_token, noise=0.01, base=0.02), StepCost()
    machine.run(cost, 3000, rows=4)
    assert cost.at(4).cost == pytest.approx(bound, abs=0.0005)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_cannot_be_are_passed_over(seconds: float) -> None:
    cost = StepCost()
    for _ in range(100):
        cost.observe(1, 3, seconds)
        cost.observe(0, 0, 0.01)
    assert cost.stats()["steps"] == 0
    assert cost.at(1).cost == DEFAULT_COST


@pytest.mark.parametrize("seed", range(8))
def test_whatever_steps_took_one_without_drafts_takes_some_time_and_no_more_than_one_with(seed: int) -> None:
    """The price of a token changes from step to step, so no line fits."""
    luck = random.Random(seed)
    for _ in range(25):
        cost, sizes = StepCost(), luck.choices([1, 2, 8, 17, 64, 256], k=3)
        for _ in range(150):
            rows = luck.choice(sizes)
            drafted = luck.choice([0, 0, 1, rows, luck.randint(0, 128 * rows)])
            seconds = (0.01 + 1e-4 * rows + luck.choice([0.0, 1e-5, 1e-3]) * drafted) * luck.choice([1, 1, 1, 50])
            cost.observe(rows, drafted, seconds)
            prices = cost.at(luck.choice(sizes))
            assert prices.row_seconds is None or prices.row_seconds > 0.0
            assert prices.plain_share is None or 0.0 < prices.plain_share <= 1.0


def test_a_price_that_depends_on_the_number_of_rows_is_kept_apart() -> None:
    """A busy batch fills the machine and pays five times as much a token."""
    single, many, cost = Machine(0.0002, noise=0.02), Machine(0.001, noise=0.02), StepCost()
    for _ in range(40):
        single.run(cost, 25, rows=1)
        many.run(cost, 25, rows=8)
    assert cost.at(1).cost == pytest.approx(single.true_cost(1), rel=0.3)
    assert cost.at(8).cost == pytest.approx(many.true_cost(8), rel=0.2)


def gated(machine: Machine, cost: StepCost, steps: int, rows: int, drafted: int, expected: float) -> float:
    """Take steps with such drafts, where they pay. Return the share of the last 256 steps with drafts."""
    had = []
    for _ in range(steps):
        had.append(cost.decide_to_draft(rows, drafted, expected))
        cost.observe(rows, drafted if had[-1] else 0, machine.seconds(rows, drafted if had[-1] else 0))
    return sum(had[-256:]) / 256


def test_drafts_that_do_not_earn_what_any_draft_takes_are_left_out() -> None:
    """A plain step takes 18 ms, one with drafts 24 ms and .1 ms a token."""
    for expected, least, most in ((0.5, 0.0, 0.06), (2.0, 0.0, 0.06), (4.0, 0.9, 1.0)):
        machine = Machine(0.0001, per_row=0.001, surcharge=0.006)
        share = gated(machine, StepCost(), 2000, rows=8, drafted=10, expected=expected)
        assert least <= share <= most, (expected, share)


def test_drafts_that_earn_little_stay_where_any_draft_takes_nothing() -> None:
    """At first StepCost assumes a surcharge. The drafts left out for that show that there is none."""
    assert gated(Machine(0.0001, noise=0.02), StepCost(), 2000, rows=8, drafted=10, expected=1.5) > 0.9


def test_what_any_draft_takes_is_noticed_when_it_changes() -> None:
    machine, cost = Machine(0.0001, surcharge=0.006), StepCost()
    assert gated(machine, cost, 2000, rows=8, drafted=10, expected=2.0) < 0.06
    machine.surcharge = 0.0
    assert gated(machine, cost, 6000, rows=8, drafted=10, expected=2.0) > 0.9
    machine.surcharge = 0.012
    assert gated(machine, cost, 6000, rows=8, drafted=10, expected=2.0) < 0.06


def test_drafts_always_pay_where_the_price_is_given_or_nothing_is_measured() -> None:
    given, new = StepCost(given=0.02), StepCost()
    Machine(0.0001, surcharge=0.02).run(given, 500, rows=8)
    assert given.decide_to_draft(8, 10, 0.0) and new.decide_to_draft(8, 10, 0.0)


def test_natural_steps_without_drafts_are_enough() -> None:
    machine, cost = Machine(0.0004), StepCost()
    for number in range(1000):
        assert not cost.decide_to_measure_plain(8) or number < 100
        tokens = 0 if number % 20 == 0 else 12
        cost.observe(8, tokens, machine.seconds(8, tokens))


@pytest.mark.parametrize(("rows", "per_token"), [(1, 0.00003), (1, 0.001), (8, 0.0005), (8, 0.002)])
def test_drafting_by_the_measured_price_is_as_good_as_by_the_true_one(rows: int, per_token: float) -> None:
    """The drafts decide which prices can be measured, and the measured prices decide the drafts."""
    true = Machine(per_token).true_cost(rows)
    assert tokens_per_second(Machine(per_token), rows, None) > 0.95 * tokens_per_second(Machine(per_token), rows, true)


def test_drafts_gain_from_the_first_steps_of_a_large_batch_on() -> None:
    """A token costs nearly as much as a row, as on CPUs."""

    def machine() -> Machine:
        return Machine(0.0003, base=0.004, per_row=0.0004, noise=0.1)

    first = range(60)
    assert tokens_per_second(machine(), 64, None, first) > 1.06 * tokens_per_second(machine(), 64, 10.0, first)


def test_prices_of_another_device_or_of_other_options_are_not_taken_over() -> None:
    before, same, other = StepCost(), StepCost(), StepCost()
    before.machine = same.machine = "GPU, graphs"
    other.machine = "GPU, eager"
    Machine(0.0004).run(before, 300, rows=4)
    for cost in (same, other):
        cost.restore(before.dump())
    assert same.at(4).cost == before.at(4).cost != other.at(4).cost == StepCost().at(4).cost


def test_the_first_step_of_each_size_does_not_count_in_a_restarted_process_either() -> None:
    """Memory and kernels are new in a restarted process, although the sizes are known."""
    before, restarted = StepCost(), []
    Machine(0.0004).run(before, 30, rows=4)
    for seconds in (0.02, 10.0):
        cost = StepCost()
        cost.restore(before.dump())
        for drafted in (0, 20, 40, 60):
            cost.observe(4, drafted, seconds)
        restarted.append(cost.stats())
    assert restarted[0] == restarted[1]
    assert restarted[0]["steps"] == 34
