"""The suffix index and a draft model together: probabilities, alternatives, and for which rows the model runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from agentspec.cache import DraftPolicy, SuffixCache
from agentspec.server_ext import FREE
from agentspec.server_ext.figures.metrics import RequestFigures
from agentspec.server_ext.fusion import DraftFusion, ModelDraft
from agentspec.server_ext.fusion.alternatives import DraftAlternatives, ModelRow, pack
from agentspec.server_ext.fusion.calibrator import (
    BEHIND_AGREED,
    BEHIND_RIVAL,
    UNKNOWN,
    AcceptanceCalibrator,
    SuffixToken,
)
from agentspec.server_ext.fusion.draft_model import RESTS, Int64
from agentspec.server_ext.fusion.scheduler import DraftModelScheduler, ModelTime, Pace, PassTime, gained_tokens
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.step import AcceptanceLength, DraftRows, RequestState

VOCABULARY = 1000


def request(name: str = "r") -> RequestState:
    return RequestState(name, Identity(), RequestFigures(), AcceptanceLength(0, 0), 0)


def weigh(
    calibrator: AcceptanceCalibrator,
    length: int,
    draft: list[int],
    probabilities: list[float],
    forced: ModelRow | None,
    unforced: ModelRow | None,
    limit: int,
) -> DraftAlternatives:
    tokens = [SuffixToken(*pair) for pair in zip(draft, probabilities, strict=True)]
    return DraftAlternatives.weigh(calibrator, length, tokens, forced, unforced, limit)


class TestCalibrator:
    def test_a_model_that_is_too_sure_is_believed_less(self) -> None:
        calibrator = AcceptanceCalibrator()
        assert calibrator.own(5, 0, 0.9).probability == pytest.approx(0.9)
        for number in range(300):
            calibrator.learn(calibrator.own(5, 0, 0.9), accepted=number % 2 == 0)
        assert calibrator.own(5, 0, 0.9).probability == pytest.approx(0.5, abs=0.05)
        assert calibrator.own(5, 1, 0.9).probability == pytest.approx(0.9), "another position is another matter"

    def test_what_it_is_not_sure_of_may_be_right_more_often(self) -> None:
        calibrator = AcceptanceCalibrator()
        for number in range(300):
            calibrator.learn(calibrator.own(5, 0, 0.2), accepted=number % 10 != 0)
        assert calibrator.own(5, 0, 0.2).probability == pytest.approx(0.9, abs=0.05)

    def test_old_observations_are_forgotten(self) -> None:
        calibrator = AcceptanceCalibrator()
        for accepted in (True, False):
            for _ in range(3000):
                calibrator.learn(calibrator.own(5, 0, 0.5), accepted)
        assert calibrator.own(5, 0, 0.5).probability < 0.15

    def test_both_opinions_are_weighed_by_what_they_were_worth(self) -> None:
        """The model is right where they differ: the suffix indexes' tokens lose, the model's gain, agreement stays."""
        calibrator = AcceptanceCalibrator()
        before = calibrator.judged(SuffixToken(7, 0.8), 0, 0.1, 0.7), calibrator.rival(8, 0, 0.7, SuffixToken(1, 0.8))
        for _ in range(400):
            calibrator.learn(calibrator.judged(SuffixToken(7, 0.8), 0, 0.1, 0.7), accepted=False)
            calibrator.learn(calibrator.rival(8, 0, 0.7, SuffixToken(1, 0.8)), accepted=True)
            calibrator.learn(calibrator.agreed(SuffixToken(9, 0.8), 0, 0.7), accepted=True)
        assert calibrator.judged(SuffixToken(7, 0.8), 0, 0.1, 0.7).probability < 0.1 < before[0].probability
        assert calibrator.rival(8, 0, 0.7, SuffixToken(1, 0.8)).probability > 0.9 > before[1].probability
        assert calibrator.agreed(SuffixToken(9, 0.8), 0, 0.7).probability > 0.9

    def test_stronger_evidence_gives_higher_chances(self) -> None:
        calibrator = AcceptanceCalibrator()
        agreed = [calibrator.agreed(SuffixToken(1, suffix), 0, 0.6).probability for suffix in (0.2, 0.5, 0.9)]
        assert agreed == sorted(agreed)
        judged = [calibrator.judged(SuffixToken(1, suffix), 0, 0.1, 0.6).probability for suffix in (0.2, 0.5, 0.9)]
        assert judged == sorted(judged)

    def test_a_token_is_worth_what_it_was_where_the_suffix_indexes_said_as_much(self) -> None:
        """Tokens without probabilities: right where the indexes are silent, wrong behind one that left their draft."""
        calibrator = AcceptanceCalibrator()
        for _ in range(200):
            calibrator.learn(calibrator.own(5, 1, UNKNOWN), accepted=True)
            calibrator.learn(calibrator.own(5, 1, UNKNOWN, BEHIND_RIVAL), accepted=False)
        assert calibrator.own(5, 1, UNKNOWN).probability > 0.9
        assert calibrator.own(5, 1, UNKNOWN, BEHIND_RIVAL).probability < 0.1
        assert 0.3 < calibrator.own(5, 1, UNKNOWN, BEHIND_AGREED).probability < 0.7, "nothing was seen there yet"

    @pytest.mark.parametrize(("one", "other"), [({"match": 1}, {"match": 40}), ({"source": 0}, {"source": 2})])
    def test_matches_and_sources_are_told_apart(self, one: dict[str, int], other: dict[str, int]) -> None:
        """The index promises the same for both tokens; of those that the model contradicts, one kind is right."""
        calibrator = AcceptanceCalibrator()
        wrong, right = SuffixToken(7, 0.6, **one), SuffixToken(7, 0.6, **other)
        for _ in range(400):
            for suffix in (wrong, right):
                calibrator.learn(calibrator.judged(suffix, 0, None, UNKNOWN), accepted=suffix is right)
        assert calibrator.judged(wrong, 0, None, UNKNOWN).probability < 0.3
        assert calibrator.judged(right, 0, None, UNKNOWN).probability > 0.7

    def test_a_draft_of_the_models_own_is_worth_what_its_positions_were(self) -> None:
        calibrator = AcceptanceCalibrator()
        for number in range(600):
            calibrator.learn(calibrator.own(5, 0, UNKNOWN), accepted=True)
            calibrator.learn(calibrator.own(5, 1, UNKNOWN), accepted=number % 2 == 0)
        first, second, third = calibrator.worth(3)
        assert first == pytest.approx(1.0, abs=0.05)
        assert second == pytest.approx(1.5, abs=0.07)
        assert third == pytest.approx(1.75, abs=0.07), "half of what is not known"

    @pytest.mark.parametrize("probability", [0.0, 1.0])
    def test_certainty_stays_finite(self, probability: float) -> None:
        calibrator = AcceptanceCalibrator()
        for scored in (
            calibrator.own(1, 0, probability),
            calibrator.agreed(SuffixToken(1, probability), 5, probability),
            calibrator.rival(1, 0, probability, SuffixToken(1, probability)),
            calibrator.judged(SuffixToken(1, probability), 0, None, probability),
        ):
            assert 0.0 <= scored.probability <= 1.0
            calibrator.learn(scored, accepted=False)


def row(tokens: Sequence[int], top: Sequence[int], probability: float = 0.6, own: float = 0.1) -> ModelRow:
    """A model's row that took ``tokens`` where it would have taken ``top``."""
    taken = [probability if token == best else own for token, best in zip(tokens, top, strict=True)]
    return ModelRow(list(tokens), taken, list(top), [probability] * len(top))


def tokens_of(offers: Sequence[Sequence[tuple[int, float]]]) -> list[list[int]]:
    return [[token for token, _ in offer] for offer in offers]


class TestAlternatives:
    def test_without_a_draft_of_the_suffix_indexes_the_model_has_its_own(self) -> None:
        alternatives = weigh(AcceptanceCalibrator(), 10, [], [], None, row([1, 2, 3], [1, 2, 3]), 8)
        assert tokens_of(alternatives.offers()) == [[1, 2, 3]]

    def test_the_model_goes_on_behind_a_short_draft(self) -> None:
        same = row([1, 2, 3], [1, 2, 3])
        alternatives = weigh(AcceptanceCalibrator(), 10, [1, 2], [0.9, 0.9], same, same, 8)
        assert tokens_of(alternatives.offers()) == [[1, 2, 3]]
        assert tokens_of(weigh(AcceptanceCalibrator(), 10, [1, 2], [0.9, 0.9], same, None, 8).offers()) == [[1, 2, 3]]

    def test_where_they_part_both_ways_are_offered(self) -> None:
        alternatives = weigh(
            AcceptanceCalibrator(), 10, [1, 2, 3, 4], [0.9] * 4, row([1, 2, 3], [1, 7, 3]), row([1, 7, 8], [1, 7, 8]), 8
        )
        assert tokens_of(alternatives.offers()) == [[1, 2, 3], [1, 7, 8]]

    def test_a_token_the_model_prefers_later_takes_the_place_of_the_suffix_indexes(self) -> None:
        calibrator = AcceptanceCalibrator()
        for _ in range(300):  # where they differ the model is right
            calibrator.learn(calibrator.judged(SuffixToken(3, 0.5), 2, 0.01, 0.9), accepted=False)
            calibrator.learn(calibrator.rival(9, 2, 0.9, SuffixToken(1, 0.5)), accepted=True)
        forced = row([1, 2, 3], [7, 2, 9], probability=0.9, own=0.01)
        alternatives = weigh(calibrator, 10, [1, 2, 3], [0.9, 0.9, 0.5], forced, None, 8)
        assert [1, 2, 9] in tokens_of(alternatives.offers())

    def test_a_doubted_draft_is_offered_with_its_lower_chance(self) -> None:
        calibrator = AcceptanceCalibrator()
        forced = row([1, 2, 3], [7, 8, 9], probability=0.9, own=0.001)
        offers = weigh(calibrator, 10, [1, 2, 3], [0.6, 0.6, 0.6], forced, None, 8).offers()
        assert offers[0][0][0] == 1
        assert offers[0][0][1] < 0.6

    def test_no_more_than_there_is_room_for(self) -> None:
        alternatives = weigh(AcceptanceCalibrator(), 10, [], [], None, row([1, 2, 3], [1, 2, 3]), 2)
        assert tokens_of(alternatives.offers()) == [[1, 2]]

    def test_a_free_row_that_went_another_way_is_not_mixed_in(self) -> None:
        """Two rows of one batch may differ in the last bit, and so in a token."""
        alternatives = weigh(
            AcceptanceCalibrator(), 10, [1, 2], [0.9] * 2, row([1, 2, 3], [5, 2, 3]), row([6, 7, 8], [6, 7, 8]), 8
        )
        assert [5] in tokens_of(alternatives.offers())
        assert not any(7 in offer for offer in tokens_of(alternatives.offers()))

    def test_only_what_the_text_reveals_is_learned(self) -> None:
        calibrator = AcceptanceCalibrator()
        alternatives = weigh(
            calibrator, 10, [1, 2, 3], [0.9] * 3, row([1, 2, 3], [1, 7, 3]), row([1, 7, 8], [1, 7, 8]), 8
        )
        alternatives.learn([1, 2])
        assert (calibrator.seen, calibrator.accepted) == ([0, 1, 1, 1], [0, 1, 0, 1])
        alternatives.learn([1, 7, 8, 4])
        assert (calibrator.seen, calibrator.accepted) == ([1, 2, 2, 2], [1, 2, 1, 1])
        alternatives.learn([4])
        assert (calibrator.seen, calibrator.accepted) == ([1, 3, 2, 2], [1, 2, 1, 1])
        alternatives.learn([])
        assert calibrator.seen == [1, 3, 2, 2]

    def test_offers_become_arrays(self) -> None:
        tokens, probabilities, lengths = pack([[(1, 0.5)], [(2, 0.25), (3, 1.0)]], 3)
        assert tokens.tolist() == [[1, 0, 0], [2, 3, 0]]
        assert probabilities.tolist() == [[0.5, 0.0, 0.0], [0.25, 1.0, 0.0]]
        assert lengths.tolist() == [1, 2]


class TestGain:
    def test_a_draft_that_stays_gains_nothing(self) -> None:
        assert gained_tokens((1.5, 4), (1.5, 4), 0.05) == 0.0

    def test_tokens_for_nothing_are_gained_whole(self) -> None:
        assert gained_tokens((0.0, 0), (1.5, 2), 0.0) == pytest.approx(1.5)
        assert gained_tokens((1.0, 1), (2.5, 4), 0.0) == pytest.approx(1.5)

    def test_verifying_more_costs_what_the_time_would_have_brought(self) -> None:
        assert 1.2 < gained_tokens((0.0, 0), (1.5, 2), 0.1) < 1.3
        assert gained_tokens((0.0, 0), (0.1, 8), 0.1) < 0.0

    def test_a_draft_that_is_doubted_loses(self) -> None:
        assert gained_tokens((1.5, 4), (0.0, 0), 0.05) < 0.0


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


class TestScheduler:
    @staticmethod
    def taught(gain: float, seconds: float = 0.001, promised: float = 0.0) -> DraftModelScheduler:
        scheduler = DraftModelScheduler()
        for rows in (1, 2, 4, 8):
            scheduler.time.observe(rows, seconds)
        for _ in range(400):
            scheduler.learn(request(), promised, gain)
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
            scheduler.learn(request(), 5.0, -0.1)
        assert scheduler.choose([request() for _ in range(3)], [5.0, 0.0, 5.0], [2, 1, 2], Pace(1.0, 0.010)) == [1]

    def test_rows_that_pay_only_together_are_run_together(self) -> None:
        """A loop of many rows takes hardly longer than one of a single row."""
        scheduler = self.taught(0.08, seconds=0.001)
        pace = Pace(1.0, 0.010)
        assert scheduler.choose([request()], [0.0], [1], pace) == []
        assert scheduler.choose([request() for _ in range(3)], [0.0] * 3, [1] * 3, pace) == [0, 1, 2]

    def test_a_request_of_its_own_kind_is_known_after_a_while(self) -> None:
        scheduler = self.taught(-0.2)
        usual, good = request("usual"), request("good")
        for _ in range(40):
            scheduler.learn(good, 0.0, 1.0)
        pace = Pace(1.0, 0.010)
        assert scheduler.choose([usual, good], [0.0, 0.0], [1, 1], pace) == [1]
        assert scheduler.gain(request("good"), 0.0) == scheduler.gain(usual, 0.0), "an id used again is another request"

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
                scheduler.learn(state, 0.0, 1.0)
                runs += 1
        assert runs > 4000


class TestPasses:
    """A drafter of whole batches: how many tokens it drafts, or whether it rests."""

    @staticmethod
    def taught(gain: float, first: float = 0.002, further: float = 0.001) -> DraftModelScheduler:
        scheduler = DraftModelScheduler()
        for tokens in (0, 1, 3):
            scheduler.passes.observe(1, tokens, first + tokens * further)
        for _ in range(400):
            scheduler.learn(request(), 0.0, gain)
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
        """Return the number of tokens for one row, where 1 ms is a tenth of a token."""
        choices = (RESTS, *range(1, len(worth) + 1)) if rests else range(len(worth) + 1)
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

    def test_it_drafts_all_before_anything_is_known(self) -> None:
        assert self.choose(DraftModelScheduler()) == 3

    def test_it_drafts_as_many_as_are_worth_their_passes(self) -> None:
        assert self.choose(self.taught(1.8)) == 3
        assert self.choose(self.taught(1.8), worth=(0.8, 0.96, 0.98)) == 2
        assert self.choose(self.taught(1.8), worth=(0.8, 0.82, 0.83)) == 1

    def test_it_stops_where_the_suffix_indexes_are_sure(self) -> None:
        scheduler = self.taught(1.8)
        for _ in range(400):
            scheduler.learn(request(), 6.0, 0.0)
        assert self.choose(scheduler, promised=6.0) == 0
        assert self.choose(scheduler, promised=0.0) == 3

    def test_it_rests_where_its_tokens_are_not_worth_the_first_pass(self) -> None:
        """The first pass takes .2 tokens, each further one .1."""
        assert self.choose(self.taught(0.15), worth=(0.9, 0.95, 1.0)) == 1
        assert self.choose(self.taught(0.15), worth=(0.9, 0.95, 1.0), rests=True) == RESTS
        assert self.choose(self.taught(1.8), rests=True) == 3
        assert self.choose(self.taught(1.8), room=0, rests=True) == RESTS

    def test_nothing_is_drafted_for_rows_without_room(self) -> None:
        assert self.choose(self.taught(1.8), room=0) == 0

    def test_what_cannot_be_stopped_is_not(self) -> None:
        choices = Pace(1.0, 0.010)
        assert self.taught(-1.0).choose_tokens([request()], [0.0], [9], [0.8, 1.4, 1.8], (3,), choices) == 3

    def test_trials_take_a_hundredth_of_the_time(self) -> None:
        scheduler = self.taught(0.0)
        tried = [self.choose(scheduler) for _ in range(1000)]
        assert set(tried) == {0, 3}
        assert tried.count(3) == pytest.approx(1000 * 0.01 * 0.010 / 0.003, abs=2)


TEXT = np.random.default_rng(5).integers(10, VOCABULARY, 3000).tolist()


class Oracle:
    """A draft model that knows the text, and errs now and then. ``sure``: the probability that it gives its token."""

    def __init__(self, text: Sequence[int], right: float, sure: float = 0.8, overlaps: bool = False) -> None:
        self.positions = 3
        self.overlaps = overlaps
        self.choices: Sequence[int] | None = None
        self.length = 0
        self.launched: list[tuple[list[int], Int64]] = []
        self._text = text
        self._random = np.random.default_rng(1)
        self._right, self._sure = right, sure

    def rest(self) -> None:
        raise AssertionError("a rest is none of its choices")

    def launch(self, rows: Sequence[int], proposals: Int64) -> Callable[[], ModelDraft]:
        self.launched.append((list(rows), proposals))
        truth = np.array([self._text[self.length : self.length + 3]] * len(rows))
        wrong = self._random.random((1, 3)) > self._right
        top = np.where(wrong, 1, truth)
        tokens = np.where(proposals == FREE, top, proposals)
        given = np.where(tokens == top, self._sure, 0.05)
        return lambda: ModelDraft(tokens, given.astype(np.float32), top, np.full(top.shape, self._sure, np.float32))


class Clock:
    """Stands for the module ``time`` in fusion."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("agentspec.server_ext.fusion.fusion.time", found)
    return found


class Whole(Oracle):
    """A drafter of whole batches that knows the text: tokens without probabilities, each in 2 ms."""

    def __init__(self, text: Sequence[int], clock: Clock, choices: Sequence[int] = range(4)) -> None:
        super().__init__(text, 1.0)
        self.choices = choices
        self.rests = 0
        self._clock = clock

    def rest(self) -> None:
        self.rests += 1

    def launch(self, rows: Sequence[int], proposals: Int64) -> Callable[[], ModelDraft]:
        self.launched.append((list(rows), proposals))
        assert (proposals == FREE).all()
        self._clock.now += 0.001 + 0.002 * proposals.shape[1]
        tokens = np.array([self._text[self.length :][: proposals.shape[1]]] * len(rows), np.int64)
        given = np.full(tokens.shape, UNKNOWN, np.float32)
        return lambda: ModelDraft(tokens, given, tokens, given)


@dataclass
class Decoded:
    steps: int = 0
    drafted: int = 0


def decode(
    fusion: DraftFusion,
    cache: SuffixCache,
    prompt: list[int],
    text: list[int],
    oracle: Oracle,
    cost: float = 0.02,
    unit: float = 1.0,
) -> Decoded:
    """Greedy decoding of ``text`` in one row. unit: seconds of a step; a second makes the oracle's time nothing."""
    full = [*prompt, *text]
    tokens = np.zeros((1, len(full) + 40), dtype=np.int32)
    cache.start("r", prompt, tenant="t")
    state, handle, row = request(), cache.batch(["r"]), np.zeros(1, np.int32)
    length, draft, result = len(prompt), [0][:0], Decoded()
    while length < len(full) - 8:
        accepted = 0
        while accepted < len(draft) and draft[accepted] == full[length + accepted]:
            accepted += 1
        length += accepted + 1
        tokens[0, :length] = full[:length]
        lengths, room, verified = (np.array([value], np.int32) for value in (length, 8, len(draft)))
        oracle.length = length - len(prompt)
        rows = DraftRows([state], handle, tokens, row, lengths, room, verified)
        draft = fusion.draft(rows, oracle, cost, unit).drafts.lists()[0]
        result.steps += 1
        result.drafted += len(draft)
    cache.finish("r")
    return result


@pytest.fixture
def cache() -> SuffixCache:
    return SuffixCache(policy=DraftPolicy(max_draft=16), vocab_size=VOCABULARY)


class TestFusion:
    @pytest.mark.parametrize("overlaps", [False, True])
    def test_a_good_model_makes_new_text_quick(self, cache: SuffixCache, overlaps: bool) -> None:
        text = TEXT[:400]
        result = decode(DraftFusion(cache), cache, [1, 2, 3], text, Oracle(text, 0.95, overlaps=overlaps))
        assert result.steps < len(text) / 2.5

    def test_a_useless_model_is_left_alone_and_drafts_nothing(self, cache: SuffixCache) -> None:
        text = TEXT[:600]
        fusion = DraftFusion(cache)
        oracle = Oracle(text, 0.0)
        assert decode(fusion, cache, [1, 2, 3], text, oracle, unit=1e-5).steps >= len(text) - 8
        assert len(oracle.launched) < 100

    def test_repeated_text_is_copied_in_long_drafts_whatever_the_model_says(self, cache: SuffixCache) -> None:
        text = TEXT[:300]
        fusion = DraftFusion(cache)
        oracle = Oracle(text, 0.2)
        decode(fusion, cache, [1, 2, 3], text, oracle)
        assert decode(fusion, cache, [1, 2, 3], text, oracle).steps < len(text) / 4

    def test_a_model_that_only_knows_when_the_suffix_indexes_are_wrong_saves_their_drafts(self) -> None:
        """A third of the recorded text is followed by something new: the suffix indexes cannot tell where."""

        def throughput(scores: bool) -> float:
            cache = SuffixCache(policy=DraftPolicy(max_draft=16), vocab_size=VOCABULARY)
            fusion, random = DraftFusion(cache, score_suffix_drafts=scores), np.random.default_rng(2)
            steps = drafted = 0
            for _ in range(12):
                text = [token if random.random() < 0.7 else int(random.integers(10, 1000)) for token in TEXT[:200]]
                oracle = Oracle([token if token == old else 1 for token, old in zip(text, TEXT, strict=False)], 1.0)
                result = decode(fusion, cache, [1, 2, 3], text, oracle, cost=0.2)
                steps, drafted = steps + result.steps, drafted + result.drafted
            return 12 * 192 / (steps + 0.2 * drafted)

        assert throughput(scores=True) > 1.04 * throughput(scores=False)

    def test_rows_are_the_engines_and_proposals_the_suffix_indexes(self, cache: SuffixCache) -> None:
        text = TEXT[:60]
        fusion = DraftFusion(cache)
        decode(fusion, cache, [1, 2, 3], text, Oracle(text, 1.0))
        oracle = Oracle(text, 1.0)
        fusion = DraftFusion(cache)
        decode(fusion, cache, [1, 2, 3], text, oracle)
        asked = [proposals for _, proposals in oracle.launched if len(proposals) == 2]
        assert asked, "the suffix indexes had drafts, and the model was asked about them"
        for proposals in asked:
            assert (proposals[1] == FREE).all()
            assert (proposals[0][0] != FREE).all()

    def test_a_drafter_of_whole_batches_drafts_new_text_and_stops_in_repeated_text(
        self, cache: SuffixCache, clock: Clock
    ) -> None:
        text = TEXT[:300]
        fusion, oracle = DraftFusion(cache), Whole(text, clock)
        first = decode(fusion, cache, [1, 2, 3], text, oracle, unit=0.01)
        assert first.steps < len(text) / 2.5
        fresh = [proposals.shape[1] for _, proposals in oracle.launched]
        oracle.launched.clear()
        assert decode(fusion, cache, [1, 2, 3], text, oracle, unit=0.01).steps < len(text) / 5
        repeated = [proposals.shape[1] for _, proposals in oracle.launched]
        assert sum(fresh) / len(fresh) > 2.5
        assert sum(repeated) / len(repeated) < 1.0
        assert len(repeated) > 5, "its first pass runs in every step"

    def test_a_drafter_that_may_rest_does_so_in_repeated_text(self, cache: SuffixCache, clock: Clock) -> None:
        text = TEXT[:300]
        fusion, oracle = DraftFusion(cache), Whole(text, clock, (RESTS, 1, 2, 3))
        first = decode(fusion, cache, [1, 2, 3], text, oracle, unit=0.01)
        assert first.steps < len(text) / 2.5
        before, runs = oracle.rests, len(oracle.launched)
        again = decode(fusion, cache, [1, 2, 3], text, oracle, unit=0.01)
        assert again.steps < len(text) / 5
        assert oracle.rests - before + len(oracle.launched) - runs == again.steps
        assert oracle.rests - before > 0.8 * again.steps
        assert fusion.stats()["rests"] == oracle.rests

    def test_steps_that_leave_a_drafter_out_say_nothing_about_its_time(self, cache: SuffixCache, clock: Clock) -> None:
        text = TEXT[:100]
        fusion, oracle = DraftFusion(cache), Whole(text, clock)
        decode(fusion, cache, [1, 2, 3], text, oracle, unit=0.01)
        saved, runs = fusion.scheduler.passes.saved(1, 3, 0), len(oracle.launched)
        oracle.choices = (0,)
        decode(fusion, cache, [1, 2, 4], text, oracle, unit=0.01)
        assert len(oracle.launched) == runs
        assert fusion.scheduler.passes.saved(1, 3, 0) == saved

    def test_the_suffix_indexes_continue_a_drafters_tokens(self, cache: SuffixCache, clock: Clock) -> None:
        """Its first token tells which of two texts goes on; the suffix indexes, which cannot tell, know the rest."""
        stem, one, other = TEXT[:20], TEXT[100:140], TEXT[200:240]
        fusion = DraftFusion(cache)
        for text in (one, other, one, other):
            decode(fusion, cache, stem, text, Whole(text, clock), unit=0.01)
        assert decode(fusion, cache, stem, one, Whole(one, clock), unit=0.01).steps <= len(one) / 6

    @pytest.mark.parametrize("overlaps", [False, True])
    @pytest.mark.parametrize("number", [np.nan, np.inf])
    def test_an_answer_without_probabilities_is_no_error(
        self, cache: SuffixCache, overlaps: bool, number: float
    ) -> None:
        """As where its hidden states overflowed: the model goes on with the next answers."""
        errors: list[Exception] = []
        fusion, text = DraftFusion(cache, errors.append), TEXT[:400]
        sick = Oracle(text, 1.0, number, overlaps=overlaps)
        decode(fusion, cache, [1, 2, 3], text[:60], sick)
        assert not errors
        assert decode(fusion, cache, [1, 2, 4], text, Oracle(text, 0.95, overlaps=overlaps)).steps < len(text) / 2.5

    def test_figures(self, cache: SuffixCache) -> None:
        text = TEXT[:200]
        fusion = DraftFusion(cache)
        oracle = Oracle(text, 0.9)
        decode(fusion, cache, [1, 2, 3], text, oracle)
        figures = fusion.stats()
        assert figures["runs"] == len(oracle.launched)
        assert figures["rows"] == sum(len(rows) for rows, _ in oracle.launched)
        assert figures["tokens"]["own"]["right"] > 100
        assert figures["ms_per_run"] > 0
