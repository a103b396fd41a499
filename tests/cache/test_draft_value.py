"""The value of a draft, as the core and whoever weighs drafts against each other reckon it."""

import pytest

from agentspec.cache._native import draft_value
from tests.oracle.drafting import CAUTION, DraftValue


@pytest.mark.parametrize("cost", [0.0, 0.02, 0.3])
def test_it_is_the_value_that_drafts_are_cut_by(cost: float) -> None:
    value = DraftValue(CAUTION * cost)
    for probability in (0.9, 0.5, 0.8, 0.1):
        value.add(probability)
        assert draft_value(value.expected - 1.0, value.length, cost) == pytest.approx(value.value, rel=1e-15)
    assert draft_value(0.0, 0, cost) == 1.0


def test_a_draft_is_worth_more_the_more_it_promises_and_less_the_dearer_it_is() -> None:
    assert draft_value(2.0, 4, 0.02) > draft_value(1.5, 4, 0.02) > draft_value(1.5, 8, 0.02) > draft_value(1.5, 8, 0.1)
