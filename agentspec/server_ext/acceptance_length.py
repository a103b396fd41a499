"""Measure how many tokens a step gives each row: the row that gets fewest limits how long a step may take.

A new row counts with what rows get at their beginning, until it has steps of its own. Loops that begin all the time
then need not begin with short drafts each time, and short answers that repeat nothing stay protected.
"""

from collections.abc import Iterable
from dataclasses import dataclass

_FIRST_STEPS = 8
"""Steps that a row's start counts for in its mean, and from which other rows' start is learned."""
_MEAN_STEPS = 256
"""Most steps that a mean covers, of a row or of the first steps of all rows."""


@dataclass(slots=True)
class AcceptanceLength:
    """Hold the mean acceptance length of one row, over its latest _MEAN_STEPS steps.

    length: tokens of its text at step ``step``. mean: of the ``steps`` steps until then and of its start, which counts
    as _FIRST_STEPS.
    """

    length: int
    step: int
    mean: float
    steps: int = 0


class AcceptanceLengths:
    """Measure the mean acceptance length of each row, the bonus token included. Steps are numbered by the caller."""

    def __init__(self) -> None:
        self._start = AcceptanceLength(0, 0, 1.0)  # of the first steps of all rows

    def begin(self, length: int, step: int) -> AcceptanceLength:
        """Return the measure of a new row. length: tokens of its text at that step."""
        return AcceptanceLength(length, step, self._start.mean)

    def lowest(self, rows: Iterable[tuple[AcceptanceLength, int]], step: int, count: int) -> float:
        """Note how long the rows' texts are at a step, and return the lowest mean.

        rows: measure and tokens of each. count: rows of the batch, of which others get no drafts. If they are half of
        the batch or more, the result is 1.
        """
        means = []
        for row, length in rows:
            steps, gained = step - row.step, length - row.length
            if steps > 0:
                if row.steps < _FIRST_STEPS:
                    _learn(self._start, gained, steps)
                _learn(row, gained, steps)
                row.length, row.step = length, step
            means.append(row.mean)
        return min(means) if 2 * len(means) > count else 1.0


def _learn(mean: AcceptanceLength, gained: int, steps: int) -> None:
    mean.steps += steps
    weight = min(steps / min(_FIRST_STEPS + mean.steps, _MEAN_STEPS), 1.0)
    mean.mean += weight * (gained / steps - mean.mean)
