"""Test for which rows a draft model runs, and how many passes it gets."""

from collections.abc import Sequence

import pytest

from agentspec.server_ext.fusion.draft_model import RESTS, TokenChoices
from agentspec.server_ext.fusion.scheduler import (
    DraftModelScheduler,
    DraftPromise,
    ModelTime,
    Pace,
    PassTime,
    gained_tokens,
)

from .drafts import request


class TestGain:
    def test_a_draft_that_stays_gains_nothing(self) -> None:
        assert gained_tokens(DraftPromise(1.5, 4), DraftPromise(1.5, 4), 0.05) == 0.0

    def test_tokens_for_nothing_are_gained_whole(self) -> None:
        assert gained_tokens(DraftPromise(0.0, 0), DraftPromise(1.5, 2), 0.0) == pytest.approx(1.5)
        assert gained_tokens(DraftPromise(1.0, 1), DraftPromise(2.5, 4), 0.0) == pytest.approx(1.5)

    def test_verifying_more_costs_what_the_time_would_have_brought(self) -> None:
        assert 1.2 < gained_tokens(DraftPromise(0.0, 0), DraftPromise(1.5, 2), 0.1) < 1.3
        assert gained_tokens(DraftPromise(0.0, 0), DraftPromise(0.1, 8), 0.1) < 0.0

    def test_a_draft_that_is_doubted_loses(self) -> None:
        assert gained_tokens(DraftPromise(1.5, 4), DraftPromise(0.0, 0), 0.05) < 0.0


class TestModelTime:
    def test_between_and_beyond_what_was_seen(self) -> None:
        time = ModelTime()
        assert time.seconds(1) is None
        for rows, seconds in ((2, 0.002), (6, 0.004)):
            for _ in range(5):
                time.observe(rows, seconds)
        assert [time.seconds(rows) for rows in (1, 2, 4, 6)] == pytest.approx([0.002, 0.002, 0.003, 0.004])
        assert time.seconds(12) == pytest.approx(0.008)

    def test_a_pause_is_no_property_of_the_model(self) -> None:
        time = ModelTime()
        for _ in range(20):
            time.observe(1, 0.001)
        time.observe(1, 10.0)
        assert (time.seconds(1) or 1.0) < 0.0012

    def test_a_run_stands_for_the_steps_between(self) -> None:
        time = ModelTime()
        for _ in range(100):
            time.observe(1, 0.001)
        time.observe(1, 0.002, weight=4)
        assert time.seconds(1) == pytest.approx(0.001 + 4 / 32 * 0.001)
        time = ModelTime()
        for _ in range(100):
            time.observe(1, 0.001)
        time.observe(1, 0.002, weight=1000)
        assert time.seconds(1) == pytest.approx(0.001 + 8 / 32 * 0.001), "it may have been a pause"

    def test_of_the_first_four_runs_only_the_quickest_counts(self) -> None:
        """They compile and allocate."""
        time = ModelTime()
        for seconds in (5.0, 0.5, 0.5, 0.001):
            time.observe(1, seconds)
        assert time.seconds(1) == 0.001
        time.observe(1, 0.0005)
        assert time.seconds(1) == pytest.approx(0.0009), "one of five"

    def test_a_slow_first_run_is_bounded_by_the_quick_ones_with_other_rows(self) -> None:
        time = ModelTime()
        time.observe(1, 5.0)
        for _ in range(3):
            time.observe(2, 0.001)
        assert time.seconds(1) == pytest.approx(3 * 0.001) and time.settled

    def test_a_pause_in_the_first_run_of_a_size_is_none_either(self) -> None:
        time = ModelTime()
        time.observe(1, 0.001)
        time.observe(2, 10.0)
        assert time.seconds(2) == pytest.approx(3 * 0.002), "three times what one row lets expect"


class TestScheduler:
    @staticmethod
    def taught(gain: float, seconds: float = 0.001, promised: float = 0.0) -> DraftModelScheduler:
        scheduler = DraftModelScheduler()
        for rows in (1, 2, 4, 8):
            scheduler.time.observe(rows, seconds)
        for _ in range(400):
            scheduler.gains.learn(request(), promised, gain)
        return scheduler

    def test_it_runs_before_anything_is_known(self) -> None:
        assert DraftModelScheduler().choose([request(), request()], [0.0, 3.0], [1, 2], Pace(1.0, None)) == [0, 1]

    def test_rows_without_room_are_left_out(self) -> None:
        assert DraftModelScheduler().choose([request(), request()], [0.0, 3.0], [0, 1], Pace(1.0, 0.01)) == [1]
        assert self.taught(0.5).choose([request(), request()], [0.0, 3.0], [0, 0], Pace(1.0, 0.01)) == []

    def test_it_runs_where_the_gain_is_worth_the_time(self) -> None:
        pace = Pace(1.0, 0.010)  # 1 ms of the loop is a tenth of a token
        assert self.taught(0.5).choose([request()], [0.0], [1], pace) == [0]
        assert self.taught(0.05).choose([request()], [0.0], [1], pace) == []

    def test_only_rows_whose_suffix_indexes_promise_little_are_chosen(self) -> None:
        scheduler = self.taught(0.5)
        for _ in range(400):
            scheduler.gains.learn(request(), 5.0, -0.1)
        assert scheduler.choose([request() for _ in range(3)], [5.0, 0.0, 5.0], [2, 1, 2], Pace(1.0, 0.010)) == [1]

    def test_a_row_costs_the_time_of_as_many_of_the_models_rows_as_it_takes(self) -> None:
        scheduler, pace = self.taught(0.15), Pace(1.0, 0.010)
        scheduler.time = ModelTime()
        for rows in (1, 2) * 4:
            scheduler.time.observe(rows, 0.001 * rows)
        assert scheduler.choose([request()], [0.0], [1], pace) == [0]
        runs = sum(bool(scheduler.choose([request()], [0.0], [2], pace)) for _ in range(1000))
        assert runs == pytest.approx(1000 * 0.01 * 0.010 / 0.002, abs=2), "trials only, and these are as dear"

    def test_little_is_expected_of_the_model_at_first_where_the_suffix_indexes_promise_much(self) -> None:
        gains = DraftModelScheduler().gains
        assert [gains.of(request(), promised) for promised in (0.0, 1.0, 4.0, 8.0)] == [1.0, 0.75, 0.0, 0.0]

    def test_rows_that_pay_only_together_are_run_together(self) -> None:
        """A draft loop over many rows takes hardly longer than over a single row."""
        scheduler = self.taught(0.08, seconds=0.001)
        pace = Pace(1.0, 0.010)
        assert scheduler.choose([request()], [0.0], [1], pace) == []
        assert scheduler.choose([request() for _ in range(3)], [0.0] * 3, [1] * 3, pace) == [0, 1, 2]

    def test_a_request_of_its_own_kind_is_known_after_a_while(self) -> None:
        scheduler = self.taught(-0.2)
        usual, good = request("usual"), request("good")
        for _ in range(40):
            scheduler.gains.learn(good, 0.0, 1.0)
        pace = Pace(1.0, 0.010)
        assert scheduler.choose([usual, good], [0.0, 0.0], [1, 1], pace) == [1]
        again = request("good")
        assert scheduler.gains.of(again, 0.0) == scheduler.gains.of(usual, 0.0), "an id used again is another request"

    def test_one_good_run_says_little_of_a_request(self) -> None:
        gains = self.taught(0.5).gains
        good = request()
        gains.learn(good, 0.0, gains.of(request(), 0.0) + 1.0)
        assert gains.of(good, 0.0) - gains.of(request(), 0.0) == pytest.approx(1 / 7)

    def test_a_trial_now_and_then_takes_a_hundredth_of_the_time(self) -> None:
        scheduler = self.taught(-0.1)
        pace = Pace(1.0, 0.010)
        runs = sum(bool(scheduler.choose([request()], [0.0], [1], pace)) for _ in range(1000))
        assert runs == pytest.approx(1000 * 0.01 * 0.010 / 0.001, abs=2)
        assert scheduler.trials == runs

    def test_a_model_that_has_become_useful_is_found_out(self) -> None:
        scheduler = self.taught(-0.1)
        pace = Pace(1.0, 0.010)
        runs, state = 0, request()
        for _ in range(5000):
            if scheduler.choose([state], [0.0], [1], pace):
                scheduler.gains.learn(state, 0.0, 1.0)
                runs += 1
        assert runs > 4000

    def test_a_slow_model_that_has_become_useful_is_found_out_in_a_few_trials(self) -> None:
        """Where a run takes half a step, one step in fifty may be a trial."""
        scheduler = self.taught(-0.1, seconds=0.005)
        runs, state = 0, request()
        for _ in range(1000):
            if scheduler.choose([state], [0.0], [1], Pace(1.0, 0.010)):
                scheduler.gains.learn(state, 0.0, 1.0)
                runs += 1
        assert runs > 800

    def test_a_trial_counts_for_the_rows_of_its_kind_alone(self) -> None:
        """While it runs for rows of which little is promised, nothing is known anew about the others."""
        scheduler = self.taught(1.0)
        for _ in range(4000):
            scheduler.gains.learn(request(), 5.0, -0.5)
        for _ in range(100):
            chosen = scheduler.choose([request(), request()], [0.0, 5.0], [1, 2], Pace(1.0, 0.010))
            assert chosen in ([0], [0, 1]), "now and then it is tried on both"
            scheduler.gains.learn(request(), 0.0, 1.0)
        assert scheduler.observation_weights == [1], "it ran in every step"
        assert scheduler.choose([request(), request()], [0.0, 5.0], [1, 2], Pace(1.0, 0.010)) == [0]
        scheduler.gains.learn(request(), 0.0, 0.0)
        assert scheduler.gains.of(request(), 0.0) == pytest.approx(1.0 - 1 / 256)
        scheduler.gains.learn(request(), 5.0, 1.5)
        assert scheduler.gains.of(request(), 5.0) == pytest.approx(-0.5 + 2.0 * 32 / 256)
        scheduler.gains.learn(request(), 5.0, scheduler.gains.of(request(), 5.0) + 1.0)
        assert scheduler.gains.of(request(), 5.0) == pytest.approx(-0.5 + 2.0 * 32 / 256 + 1 / 256), "for itself alone"

    def test_a_run_stands_for_the_steps_without_one(self) -> None:
        scheduler = self.taught(-0.1, seconds=0.005)
        runs = [bool(scheduler.choose([request()], [0.0], [1], Pace(1.0, 0.010))) for _ in range(20)]
        assert not any(runs)
        while not scheduler.choose([request()], [0.0], [1], Pace(1.0, 0.010)):
            pass
        assert scheduler.observation_weights == [32], "at most that many, of the fifty"
        scheduler.gains.learn(request(), 0.0, 60.0)
        assert scheduler.choose([request()], [0.0], [1], Pace(1.0, 0.010)) == [0]
        assert scheduler.observation_weights == [1]

    def test_a_slow_first_run_decides_nothing_though_the_time_of_a_step_is_known(self) -> None:
        """It compiles, and a restarted engine knows at once how long its steps take."""
        scheduler, runs = DraftModelScheduler(), 0
        for _ in range(100):
            if scheduler.choose([request()], [0.0], [1], Pace(1.0, 0.010)):
                scheduler.time.observe(1, 0.001 if runs else 5.0)
                runs += 1
        assert runs == 100

    def test_rows_that_were_slow_for_a_while_are_tried_again(self) -> None:
        scheduler, rows, chosen = DraftModelScheduler(), [request() for _ in range(4)], list[int]()
        for width in range(1, 5):
            for _ in range(40):
                scheduler.time.observe(width, 0.001)
        for step in range(4000):
            chosen = scheduler.choose(rows, [0.0] * 4, [1] * 4, Pace(1.0, 0.020))
            if chosen:
                scheduler.time.observe(len(chosen), 0.030 if step < 40 else 0.001)
            for row in chosen:
                scheduler.gains.learn(rows[row], 0.0, 0.5)
        assert chosen == [0, 1, 2, 3]


class TestPasses:
    """Test a drafter of whole batches: how many tokens it drafts, or whether it rests."""

    @staticmethod
    def taught(gain: float, first: float = 0.002, further: float = 0.001) -> DraftModelScheduler:
        scheduler = DraftModelScheduler()
        for tokens in (0, 1, 3) * 4:
            scheduler.passes.observe(1, tokens, first + tokens * further)
        for _ in range(400):
            scheduler.gains.learn(request(), 0.0, gain)
        return scheduler

    @staticmethod
    def choose(
        scheduler: DraftModelScheduler,
        worth: Sequence[float] = (0.8, 1.4, 1.8),
        promised: float = 0.0,
        room: int = 9,
        *,
        rests: bool = False,
    ) -> int:
        """Return the number of tokens for one row. In 1 ms a step yields a tenth of a token."""
        choices = TokenChoices(int(rests), len(worth), may_rest=rests)
        return scheduler.choose_tokens([request()], [promised], [room], worth, choices, Pace(1.0, 0.010))

    def test_the_first_pass_is_no_cost(self) -> None:
        times = PassTime()
        assert times.saved(1, 3, 0) is None
        times.observe(1, 3, 0.008)
        assert times.saved(1, 3, 0) == pytest.approx(0.006), "a first pass like the others, until more is known"
        times.observe(1, 0, 0.005)
        assert times.saved(1, 3, 0) == pytest.approx(0.003)
        assert times.saved(1, 1, 0) == pytest.approx(0.001)

    def test_a_rest_saves_the_first_pass_too(self) -> None:
        times = PassTime()
        times.observe(1, RESTS, 0.001)
        assert times.saved(1, 3, RESTS) is None
        assert times.saved(1, RESTS, RESTS) == 0.0
        times.observe(1, 3, 0.008)
        assert times.saved(1, 1, RESTS) == pytest.approx(0.003), "a first pass like the others, until more is known"
        times.observe(1, 0, 0.005)
        assert times.saved(1, 3, RESTS) == pytest.approx(0.007)
        assert times.saved(1, 1, RESTS) == pytest.approx(0.005)
        assert times.saved(1, 3, 0) == pytest.approx(0.003)

    def test_what_a_run_takes_beyond_the_least_is_no_part_of_a_step(self) -> None:
        times = PassTime()
        for tokens, seconds in ((0, 0.005), (3, 0.008)):
            times.observe(1, tokens, seconds)
        assert [times.beyond_least(1, tokens) for tokens in (0, 3)] == pytest.approx([0.0, 0.003])
        times.observe(1, RESTS, 0.001)
        assert [times.beyond_least(1, tokens) for tokens in (RESTS, 0, 3)] == pytest.approx([0.0, 0.004, 0.007])

    def test_noise_in_the_times_makes_no_pass_pay_by_itself(self) -> None:
        times = PassTime()
        for tokens, seconds in ((1, 0.008), (3, 0.004)):
            times.observe(1, tokens, seconds)
        assert times.saved(1, 3, 0) == 0.0, "more tokens take no less time"
        times.observe(1, RESTS, 0.020)
        assert times.saved(1, 3, RESTS) == 0.0, "a rest takes no longer than a run"

    def test_it_drafts_all_before_anything_is_known(self) -> None:
        assert self.choose(DraftModelScheduler()) == 3

    def test_it_drafts_as_many_as_are_worth_their_passes(self) -> None:
        assert self.choose(self.taught(1.8)) == 3
        assert self.choose(self.taught(1.8), worth=(0.8, 0.96, 0.98)) == 2
        assert self.choose(self.taught(1.8), worth=(0.8, 0.82, 0.83)) == 1

    def test_it_stops_where_the_suffix_indexes_are_sure(self) -> None:
        scheduler = self.taught(1.8)
        for _ in range(400):
            scheduler.gains.learn(request(), 6.0, 0.0)
        assert self.choose(scheduler, promised=6.0) == 0
        assert self.choose(scheduler, promised=0.0) == 3

    def test_it_rests_where_its_tokens_are_not_worth_the_first_pass(self) -> None:
        """The first pass takes the time of .2 tokens, each further one that of .1."""
        assert self.choose(self.taught(0.15), worth=(0.9, 0.95, 1.0)) == 1
        assert self.choose(self.taught(0.15), worth=(0.9, 0.95, 1.0), rests=True) == RESTS
        assert self.choose(self.taught(1.8), rests=True) == 3
        assert self.choose(self.taught(1.8), room=0, rests=True) == RESTS

    def test_nothing_is_drafted_for_rows_without_room(self) -> None:
        assert self.choose(self.taught(1.8), room=0) == 0

    def test_of_several_rows_those_count_that_have_room_and_gain(self) -> None:
        scheduler, pace, worth = self.taught(1.8), Pace(1.0, 0.010), (0.8, 1.4, 1.8)
        choices = TokenChoices(0, 3)
        for _ in range(400):
            scheduler.gains.learn(request(), 6.0, -2.0)
        rows = [request(), request()]
        assert scheduler.choose_tokens(rows, [0.0, 6.0], [9, 9], worth, choices, pace) == 3
        assert scheduler.choose_tokens(rows, [0.0, 6.0], [0, 9], worth, choices, pace) == 0

    def test_a_run_stands_for_the_steps_in_which_nothing_was_drafted(self) -> None:
        scheduler = self.taught(1.8)
        for _ in range(400):
            scheduler.gains.learn(request(), 6.0, 0.0)
        for room, promised in ((0, 0.0), (9, 6.0), (9, 6.0)):
            assert self.choose(scheduler, promised=promised, room=room) == 0
        assert (self.choose(scheduler), scheduler.observation_weights) == (3, [4, 4, 4])
        gains = scheduler.gains
        for promised, times in ((0.0, 1), (6.0, 3)):  # rows without room were no loss
            before = gains.of(request(), promised)
            gains.learn(request(), promised, before + 1.0)
            assert gains.of(request(), promised) - before == pytest.approx(times / 256)

    def test_what_cannot_be_stopped_is_not(self) -> None:
        choices, pace = TokenChoices(3, 3), Pace(1.0, 0.010)
        assert self.taught(-1.0).choose_tokens([request()], [0.0], [9], [0.8, 1.4, 1.8], choices, pace) == 3

    def test_trials_take_a_hundredth_of_the_time(self) -> None:
        scheduler = self.taught(0.0)
        tried = [self.choose(scheduler) for _ in range(1000)]
        assert set(tried) == {0, 3}
        assert tried.count(3) == pytest.approx(1000 * 0.01 * 0.010 / 0.003, abs=2)

    def test_trials_are_of_all_tokens_where_some_are_drafted(self) -> None:
        """Otherwise nothing would show that later tokens, which were wrong for a while, are right."""
        scheduler, worth = self.taught(0.35), (0.8, 0.82, 0.83)
        tried = [self.choose(scheduler, worth) for _ in range(1000)]
        assert set(tried) == {1, 3}
        assert tried.count(3) == pytest.approx(1000 * 0.01 * 0.010 / 0.003, abs=2)
        while self.choose(scheduler, worth) == 1:
            pass
        assert scheduler.observation_weights == [1, 31, 31], "each for the steps that did not draft there"

    def test_a_slow_first_run_decides_nothing_though_the_time_of_a_step_is_known(self) -> None:
        scheduler, runs = DraftModelScheduler(), 0
        for _ in range(100):
            tokens = self.choose(scheduler, rests=True)
            scheduler.passes.observe(1, tokens, 0.0 if tokens == RESTS else 0.004 if runs else 5.0)
            runs += tokens > 0
        assert runs == 100

    def test_passes_that_were_slow_for_a_while_are_timed_again(self) -> None:
        scheduler, late = DraftModelScheduler(), list[int]()
        worth, choices = (0.8, 1.44, 1.95, 2.36, 2.69), TokenChoices(1, 5, may_rest=True)
        for step in range(8000):
            tokens = scheduler.choose_tokens([request()], [0.0], [9], worth, choices, Pace(1.0, 0.020))
            seconds = 0.0 if tokens == RESTS else 0.001 * (1 + tokens) * (8 if 500 <= step < 800 else 1)
            scheduler.passes.observe(1, tokens, seconds)
            if tokens > 0:
                scheduler.gains.learn(request(), 0.0, 2.69)
            late.append(tokens)
        assert set(late[-1000:]) == {5}

    def test_what_was_not_timed_for_long_counts_less(self) -> None:
        times = PassTime()
        for tokens in (1, 2, 3):
            times.observe(1, tokens, 0.010 * tokens)
        for _ in range(1000):
            for tokens in (1, 3):
                times.observe(1, tokens, 0.001 * tokens)
        assert [times.saved(1, 3, least) for least in (0, RESTS)] == pytest.approx([0.003, 0.003], rel=0.1)
