"""Test the lowest mean acceptance length of a batch's rows, which limits how long a step may take."""

import pytest

from agentspec.server_ext.pricing.acceptance_length import AcceptanceLengths
from agentspec.server_ext.step import AcceptanceLength


class Rows:
    """Give each row its number of tokens a step, `gains`."""

    def __init__(self, *gains: float) -> None:
        self.lengths = AcceptanceLengths()
        self.step = 0
        self.rows: list[AcceptanceLength] = []
        self.gains: list[float] = []
        self.texts: list[float] = []
        for gain in gains:
            self.begin(gain)

    def begin(self, gain: float) -> None:
        self.rows.append(self.lengths.begin(0, self.step))
        self.gains.append(gain)
        self.texts.append(0.0)

    def run(self, steps: int, every: int = 1, failed: int = 0) -> float:
        """Return the lowest mean after `steps` steps, read now and then. failed: further rows, without drafts."""
        lowest = 0.0
        for _ in range(steps):
            self.step += 1
            self.texts = [text + gain for text, gain in zip(self.texts, self.gains, strict=True)]
            if self.step % every == 0:
                measured = list(zip(self.rows, map(int, self.texts), strict=True))
                lowest = self.lengths.lowest(measured, self.step, len(self.rows) + failed)
        return lowest


@pytest.mark.parametrize("every", [1, 5, 16])
def test_the_row_that_gets_fewest_tokens_counts(every: int) -> None:
    assert Rows(9.0, 3.0, 5.0).run(320, every) == pytest.approx(3.0, rel=0.05)
    assert Rows(9.0, 1.0, 5.0).run(320, every) == pytest.approx(1.0, rel=0.05)


def test_at_first_a_row_counts_as_one_that_gets_a_token() -> None:
    rows = Rows(9.0, 5.0)
    assert rows.run(1) < 1.5
    assert 1.5 < rows.run(7) < 3.5


def test_a_row_that_turns_quiet_is_noticed_within_its_latest_256_steps() -> None:
    rows = Rows(9.0, 9.0)
    rows.run(2000)
    rows.gains[1] = 1.0
    assert rows.run(16) > 8
    assert rows.run(300) < 4


def test_a_short_beginning_does_not_count_for_long() -> None:
    """After 8 quiet steps and 24 others, a row's mean is that of all its steps and of the assumed start."""
    rows = Rows(1.0)
    rows.run(8)
    rows.gains[0] = 9.0
    assert rows.run(24) == pytest.approx((8 * 1.0 + 8 * 1.0 + 24 * 9.0) / 40, rel=0.05)


@pytest.mark.parametrize(("count", "steps"), [(2, 100), (64, 5)])
def test_steps_in_which_a_row_was_preempted_do_not_count(count: int, steps: int) -> None:
    rows = Rows(*[9.0] * count)
    rows.run(100)
    away = rows.rows.pop(), rows.gains.pop(), rows.texts.pop()
    rows.run(steps)
    rows.rows.append(away[0])
    rows.gains.append(away[1])
    rows.texts.append(away[2])
    assert rows.run(20) > 8


def test_new_rows_begin_as_rows_before_them_did() -> None:
    rows = Rows(5.0)
    for _ in range(60):
        rows.run(20)
        rows.rows, rows.gains, rows.texts = [], [], []
        rows.begin(5.0)
    assert rows.run(1) > 4.5


def test_short_quiet_rows_keep_the_next_ones_quiet() -> None:
    """The quiet rows end within 8 steps, beside a row that always accepts much."""
    rows = Rows(20.0)
    rows.run(300)
    for _ in range(60):
        rows.rows, rows.gains, rows.texts = rows.rows[:1], rows.gains[:1], rows.texts[:1]
        for _ in range(3):
            rows.begin(1.0)
        lowest = rows.run(5)
    assert lowest < 1.5


def test_where_half_of_the_rows_get_no_drafts_they_decide() -> None:
    rows = Rows(9.0, 9.0)
    assert rows.run(300, failed=1) > 8
    assert rows.run(1, failed=2) == 1.0


def test_among_many_rows_a_new_one_counts_at_once() -> None:
    """With many rows, all are measured every 16 steps and when the lowest has left. New rows begin with their mean."""
    many = Rows(*[9.0] * 64)
    many.begin(3.0)
    assert many.run(325) == pytest.approx(3.0, rel=0.05)
    many.rows.pop(), many.gains.pop(), many.texts.pop()
    assert many.run(1) > 8
    many.begin(1.0)
    assert many.run(1) == many.rows[-1].mean.value < 8.9
    assert many.run(800) == pytest.approx(1.0, rel=0.1)
