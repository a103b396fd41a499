"""Test the calibrated probabilities of a draft model's tokens, and the alternatives that are made of them."""

from collections.abc import Sequence

import pytest

from agentspec.server_ext.fusion.alternatives import DraftAlternatives, ModelRow, pack
from agentspec.server_ext.fusion.calibrator import (
    BEHIND_AGREED,
    BEHIND_RIVAL,
    UNKNOWN,
    AcceptanceCalibrator,
    SuffixToken,
)


def weigh(
    calibrator: AcceptanceCalibrator,
    length: int,
    draft: list[int],
    probabilities: list[float],
    forced: ModelRow | None,
    unforced: ModelRow,
    limit: int,
) -> DraftAlternatives:
    tokens = [SuffixToken(*pair) for pair in zip(draft, probabilities, strict=True)]
    return DraftAlternatives.score(calibrator, length, tokens, forced, unforced, limit)


class TestCalibrator:
    def test_a_model_that_is_too_sure_is_believed_less(self) -> None:
        calibrator = AcceptanceCalibrator()
        assert calibrator.own(5, 0, 0.9).probability == pytest.approx(0.9)
        for number in range(300):
            calibrator.learn(calibrator.own(5, 0, 0.9), accepted=number % 2 == 0)
        assert calibrator.own(5, 0, 0.9).probability == pytest.approx(0.5, abs=0.05)
        assert calibrator.own(5, 1, 0.9).probability == pytest.approx(0.9), "another position is another matter"

    def test_a_probability_that_rounding_made_larger_than_one_is_one(self) -> None:
        """The core would refuse the draft as a fault of the drafter, and leave that out after a few times."""
        assert AcceptanceCalibrator().own(5, 0, 1.0000001).probability == 1.0

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

    def test_an_observation_may_stand_for_several(self) -> None:
        often, rarely = AcceptanceCalibrator(), AcceptanceCalibrator()
        for number in range(320):
            often.learn(often.own(5, 0, 0.9), accepted=number % 2 == 0)
        for number in range(10):
            rarely.learn(rarely.own(5, 0, 0.9), number % 2 == 0, observation_weight=32)
        assert rarely.own(5, 0, 0.9).probability == pytest.approx(often.own(5, 0, 0.9).probability)
        assert rarely.worth(1) == pytest.approx(often.worth(1))
        assert rarely.stats()["own"] == {"seen": 10, "right": 5}

    def test_both_opinions_are_weighed_by_what_they_were_worth(self) -> None:
        """The model is right where both differ: its tokens gain, the suffix indexes' lose, agreed ones stay."""
        calibrator = AcceptanceCalibrator()
        before = calibrator.disputed(SuffixToken(7, 0.8), 0, 0.1, 0.7), calibrator.rival(8, 0, 0.7, SuffixToken(1, 0.8))
        for _ in range(400):
            calibrator.learn(calibrator.disputed(SuffixToken(7, 0.8), 0, 0.1, 0.7), accepted=False)
            calibrator.learn(calibrator.rival(8, 0, 0.7, SuffixToken(1, 0.8)), accepted=True)
            calibrator.learn(calibrator.agreed(SuffixToken(9, 0.8), 0, 0.7), accepted=True)
        assert calibrator.disputed(SuffixToken(7, 0.8), 0, 0.1, 0.7).probability < 0.1 < before[0].probability
        assert calibrator.rival(8, 0, 0.7, SuffixToken(1, 0.8)).probability > 0.9 > before[1].probability
        assert calibrator.agreed(SuffixToken(9, 0.8), 0, 0.7).probability > 0.9

    def test_stronger_evidence_gives_higher_chances(self) -> None:
        calibrator = AcceptanceCalibrator()
        agreed = [calibrator.agreed(SuffixToken(1, suffix), 0, 0.6).probability for suffix in (0.2, 0.5, 0.9)]
        assert agreed == sorted(agreed)
        disputed = [calibrator.disputed(SuffixToken(1, suffix), 0, 0.1, 0.6).probability for suffix in (0.2, 0.5, 0.9)]
        assert disputed == sorted(disputed)

    def test_a_token_of_which_the_model_does_not_tell_is_less_likely_than_one_that_it_almost_takes(self) -> None:
        calibrator, suffix = AcceptanceCalibrator(), SuffixToken(1, 0.5)
        assert (
            calibrator.disputed(suffix, 0, None, 0.6).probability < calibrator.disputed(suffix, 0, 0.6, 0.6).probability
        )

    def test_a_token_is_worth_what_it_was_where_the_suffix_indexes_said_as_much(self) -> None:
        """Tokens without probabilities: right where the indexes draft nothing, wrong behind a token off their draft."""
        calibrator = AcceptanceCalibrator()
        for _ in range(200):
            calibrator.learn(calibrator.own(5, 1, UNKNOWN), accepted=True)
            calibrator.learn(calibrator.own(5, 1, UNKNOWN, BEHIND_RIVAL), accepted=False)
        assert calibrator.own(5, 1, UNKNOWN).probability > 0.9
        assert calibrator.own(5, 1, UNKNOWN, BEHIND_RIVAL).probability < 0.1
        assert 0.3 < calibrator.own(5, 1, UNKNOWN, BEHIND_AGREED).probability < 0.7, "nothing was seen there yet"

    @pytest.mark.parametrize(("one", "other"), [({"match": 1}, {"match": 40}), ({"source": 0}, {"source": 2})])
    def test_matches_and_sources_are_told_apart(self, one: dict[str, int], other: dict[str, int]) -> None:
        """The index gives both kinds the same probability. Of those that the model contradicts, one kind is right."""
        calibrator = AcceptanceCalibrator()
        wrong, right = SuffixToken(7, 0.6, **one), SuffixToken(7, 0.6, **other)
        for _ in range(400):
            for suffix in (wrong, right):
                calibrator.learn(calibrator.disputed(suffix, 0, None, UNKNOWN), accepted=suffix is right)
        assert calibrator.disputed(wrong, 0, None, UNKNOWN).probability < 0.3
        assert calibrator.disputed(right, 0, None, UNKNOWN).probability > 0.7

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
            calibrator.disputed(SuffixToken(1, probability), 0, None, probability),
        ):
            assert 0.0 <= scored.probability <= 1.0
            calibrator.learn(scored, accepted=False)


def row(tokens: Sequence[int], top: Sequence[int], probability: float = 0.6, own: float = 0.1) -> ModelRow:
    """Return a model's row that was forced to ``tokens`` and would have drafted ``top``."""
    taken = [probability if token == best else own for token, best in zip(tokens, top, strict=True)]
    return ModelRow(list(tokens), taken, list(top), [probability] * len(top))


def tokens_of(drafts: Sequence[Sequence[tuple[int, float]]]) -> list[list[int]]:
    return [[token for token, _ in draft] for draft in drafts]


class TestAlternatives:
    def test_without_a_draft_of_the_suffix_indexes_the_model_has_its_own(self) -> None:
        alternatives = weigh(AcceptanceCalibrator(), 10, [], [], None, row([1, 2, 3], [1, 2, 3]), 8)
        assert tokens_of(alternatives.drafts()) == [[1, 2, 3]]

    def test_the_model_goes_on_behind_a_short_draft(self) -> None:
        same, rounded = row([1, 2, 3], [1, 2, 3]), row([5, 6, 7], [5, 6, 7])
        alternatives = weigh(AcceptanceCalibrator(), 10, [1, 2], [0.9, 0.9], same, same, 8)
        assert tokens_of(alternatives.drafts()) == [[1, 2, 3]]
        alternatives = weigh(AcceptanceCalibrator(), 10, [1, 2], [0.9, 0.9], same, rounded, 8)
        assert tokens_of(alternatives.drafts()) == [[1, 2, 3]], "whatever an unforced row says that went another way"

    def test_a_token_behind_what_both_drafted_is_worth_what_such_tokens_were(self) -> None:
        """An unforced token must not count as one where the suffix indexes draft nothing."""
        calibrator, same, rounded = AcceptanceCalibrator(), row([1, 2, 3], [1, 2, 3]), row([5, 6, 7], [5, 6, 7])
        for _ in range(200):
            calibrator.learn(calibrator.own(5, 2, 0.6), accepted=False)
            calibrator.learn(calibrator.own(5, 2, 0.6, BEHIND_AGREED), accepted=True)
        for forced, unforced in ((same, rounded), (None, same), (same, same)):
            (draft,) = weigh(calibrator, 10, [1, 2], [0.9, 0.9], forced, unforced, 8).drafts()
            assert draft[2][1] > 0.9

    def test_where_they_part_both_ways_are_offered(self) -> None:
        alternatives = weigh(
            AcceptanceCalibrator(), 10, [1, 2, 3, 4], [0.9] * 4, row([1, 2, 3], [1, 7, 3]), row([1, 7, 8], [1, 7, 8]), 8
        )
        assert tokens_of(alternatives.drafts()) == [[1, 2, 3], [1, 7, 8]]

    def test_a_token_the_model_prefers_later_takes_the_place_of_the_suffix_indexes(self) -> None:
        calibrator = AcceptanceCalibrator()
        for _ in range(300):  # where they differ the model is right
            calibrator.learn(calibrator.disputed(SuffixToken(3, 0.5), 2, 0.01, 0.9), accepted=False)
            calibrator.learn(calibrator.rival(9, 2, 0.9, SuffixToken(1, 0.5)), accepted=True)
        forced = row([1, 2, 3], [7, 2, 9], probability=0.9, own=0.01)
        alternatives = weigh(calibrator, 10, [1, 2, 3], [0.9, 0.9, 0.5], forced, row([7, 8, 9], [7, 8, 9]), 8)
        assert [1, 2, 9] in tokens_of(alternatives.drafts())

    def test_a_doubted_draft_is_offered_with_its_lower_chance(self) -> None:
        calibrator = AcceptanceCalibrator()
        forced = row([1, 2, 3], [7, 8, 9], probability=0.9, own=0.001)
        drafts = weigh(calibrator, 10, [1, 2, 3], [0.6, 0.6, 0.6], forced, row([7, 8, 9], [7, 8, 9]), 8).drafts()
        assert drafts[0][0][0] == 1
        assert drafts[0][0][1] < 0.6

    def test_no_more_than_there_is_room_for(self) -> None:
        alternatives = weigh(AcceptanceCalibrator(), 10, [], [], None, row([1, 2, 3], [1, 2, 3]), 2)
        assert tokens_of(alternatives.drafts()) == [[1, 2]]

    def test_an_unforced_row_that_went_another_way_is_not_mixed_in(self) -> None:
        """Two rows of one batch may differ by rounding, and so in a token."""
        alternatives = weigh(
            AcceptanceCalibrator(), 10, [1, 2], [0.9] * 2, row([1, 2, 3], [5, 2, 3]), row([6, 7, 8], [6, 7, 8]), 8
        )
        assert [5] in tokens_of(alternatives.drafts())
        assert not any(7 in draft for draft in tokens_of(alternatives.drafts()))

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

    def test_drafts_become_arrays(self) -> None:
        tokens, probabilities, lengths = pack([[(1, 0.5)], [(2, 0.25), (3, 1.0)]], 3)
        assert tokens.tolist() == [[1, 0, 0], [2, 3, 0]]
        assert probabilities.tolist() == [[0.5, 0.0, 0.0], [0.25, 1.0, 0.0]]
        assert lengths.tolist() == [1, 2]
