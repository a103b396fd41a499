"""Test a draft model beside the suffix index: the merged draft, and what is learned about both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from agentspec.cache import DraftPolicy, SuffixCache
from agentspec.server_ext import UNFORCED
from agentspec.server_ext.fusion import DraftFusion, ModelDraft
from agentspec.server_ext.fusion.calibrator import UNKNOWN
from agentspec.server_ext.fusion.draft_model import Int64, TokenChoices
from agentspec.server_ext.step import DraftRows

from .drafts import VOCABULARY, request

TEXT = np.random.default_rng(5).integers(10, VOCABULARY, 3000).tolist()

DRAFT_OR_PASS, CANNOT_RUN = TokenChoices(0, 3), TokenChoices(0, 0)


class Oracle:
    """Draft the text, with errors now and then. sure: the probability given to each token."""

    def __init__(self, text: Sequence[int], right: float, sure: float = 0.8, overlaps: bool = False) -> None:
        self.positions = 3
        self.overlaps = overlaps
        self.choices: TokenChoices | None = None
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
        tokens = np.where(proposals == UNFORCED, top, proposals)
        given = np.where(tokens == top, self._sure, 0.05)
        return lambda: ModelDraft(tokens, given.astype(np.float32), top, np.full(top.shape, self._sure, np.float32))


class Clock:
    """Stand in for the module ``time`` in fusion."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("agentspec.server_ext.fusion.fusion.time", found)
    return found


class Whole(Oracle):
    """Draft the text for whole batches: tokens without probabilities, each in 2 ms."""

    def __init__(self, text: Sequence[int], clock: Clock, choices: TokenChoices = DRAFT_OR_PASS) -> None:
        super().__init__(text, 1.0)
        self.choices = choices
        self.rests = 0
        self._clock = clock

    def rest(self) -> None:
        self.rests += 1

    def launch(self, rows: Sequence[int], proposals: Int64) -> Callable[[], ModelDraft]:
        self.launched.append((list(rows), proposals))
        assert (proposals == UNFORCED).all()
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
    """Decode ``text`` greedily in one row. unit: seconds of a step; in 1 s, the oracle's time is negligible."""
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


class Rows:
    """Step rows by hand that all have the same text. limits: most draft tokens of each."""

    def __init__(self, fusion: DraftFusion, cache: SuffixCache, limits: Sequence[int] = (8,)) -> None:
        self.names = [f"row {number}" for number in range(len(limits))]
        for name in self.names:
            cache.start(name, [1, 2, 3], tenant="t")
        self.states, self.handle = [request(name) for name in self.names], cache.batch(self.names)
        self.limits, self.fusion = np.array(limits, np.int32), fusion

    def step(self, text: Sequence[int], model: Oracle) -> list[list[int]]:
        """Take a step at whose beginning each row's response is `text`. Return the drafts."""
        count = len(self.names)
        tokens = np.array([[1, 2, 3, *text]] * count, np.int32)
        lengths, none = np.full(count, tokens.shape[1], np.int32), np.zeros(count, np.int32)
        model.length = len(text)
        rows = DraftRows(self.states, self.handle, tokens, np.arange(count, dtype=np.int32), lengths, self.limits, none)
        return self.fusion.draft(rows, model, 0.02, 1.0).drafts.lists()


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

    def test_a_slow_model_that_was_useless_for_a_while_comes_back(self, cache: SuffixCache, clock: Clock) -> None:
        """A run takes half a step, and the model is as sure of itself as ever while all that it drafts is wrong."""

        class Slow(Oracle):
            def launch(self, rows: Sequence[int], proposals: Int64) -> Callable[[], ModelDraft]:
                clock.now += 0.5
                return super().launch(rows, proposals)

        fusion, random = DraftFusion(cache), np.random.default_rng(6)

        def steps(tokens: int, right: float) -> int:
            text = random.integers(10, VOCABULARY, tokens).tolist()
            return decode(fusion, cache, [1, 2, 3], text, Slow(text, right)).steps

        steps(3000, 0.9)
        usual = steps(500, 0.9)
        steps(6000, 0.0)
        runs = fusion.runs
        assert steps(1000, 0.0) > 990
        assert fusion.runs - runs < 50, "it rests"
        steps(2500, 0.9)
        assert steps(500, 0.9) < 1.1 * usual

    def test_repeated_text_is_copied_in_long_drafts_whatever_the_model_says(self, cache: SuffixCache) -> None:
        text = TEXT[:300]
        fusion = DraftFusion(cache)
        oracle = Oracle(text, 0.2)
        decode(fusion, cache, [1, 2, 3], text, oracle)
        assert decode(fusion, cache, [1, 2, 3], text, oracle).steps < len(text) / 4

    def test_a_model_that_only_knows_when_the_suffix_indexes_are_wrong_saves_their_drafts(self) -> None:
        """A third of the recorded text is followed by something new, and the suffix indexes cannot tell where."""

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
            assert (proposals[1] == UNFORCED).all()
            assert (proposals[0][0] != UNFORCED).all()

    def test_the_draft_is_the_models_where_it_is_surer_of_another_text(self, cache: SuffixCache) -> None:
        text, fusion = TEXT[:40], DraftFusion(cache)
        decode(fusion, cache, [1, 2, 3], text, Oracle(text, 1.0))
        other = [*text[:20], *TEXT[100:120]]
        assert Rows(fusion, cache).step(text[:20], Oracle(other, 1.0, sure=0.99)) == [other[20:23]]

    def test_a_step_is_learned_from_once_though_the_model_does_not_run_in_the_next_ones(
        self, cache: SuffixCache, clock: Clock
    ) -> None:
        text, fusion = TEXT[:40], DraftFusion(cache)
        rows, model = Rows(fusion, cache), Whole(text, clock)
        rows.step(text[:1], model)
        model.choices = CANNOT_RUN  # from now on it cannot run
        rows.step(text[:2], model)
        learned = fusion.stats()["tokens"]
        assert learned["own"]["seen"] == 1
        rows.step(text[:3], model)
        assert fusion.stats()["tokens"] == learned

    def test_a_drafter_of_whole_batches_is_asked_for_rows_that_may_have_a_draft(
        self, cache: SuffixCache, clock: Clock
    ) -> None:
        model = Whole(TEXT[:40], clock)
        drafts = Rows(DraftFusion(cache), cache, limits=(8, 0)).step(TEXT[:1], model)
        assert [len(draft) > 0 for draft in drafts] == [True, False]
        assert [rows for rows, _ in model.launched] == [[0]]

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
        fusion, oracle = DraftFusion(cache), Whole(text, clock, TokenChoices(1, 3, may_rest=True))
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
        oracle.choices = CANNOT_RUN
        decode(fusion, cache, [1, 2, 4], text, oracle, unit=0.01)
        assert len(oracle.launched) == runs
        assert fusion.scheduler.passes.saved(1, 3, 0) == saved

    def test_the_suffix_indexes_continue_a_drafters_tokens(self, cache: SuffixCache, clock: Clock) -> None:
        """The drafter's first token tells which of two texts goes on. The suffix indexes know only the rest of both."""
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
        """Its hidden states may have overflowed. Its next answers are used again."""
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
