"""Measure how many tokens a step gives each row. The lowest of these limits how long a step may take.

A new row starts with the mean of all rows' first steps. So agents that send one request after the other need not start
each with short drafts, and short answers that repeat nothing are still protected from long steps.
"""

from collections.abc import Sequence

from agentspec.server_ext.step import AcceptanceLength, RunningMean

_FIRST_STEPS = 8
"""Weight of a new row's initial mean, in steps, and number of a row's first steps from which that mean is learned."""
_MEAN_STEPS = 256
"""Most steps that a mean covers, of a row or of the first steps of all rows."""
_MANY_ROWS = 16
"""With more rows, only new ones are measured when rows change. All are measured every _MANY_STEPS steps, and when the
row with the lowest mean has left."""
_MANY_STEPS = 16


class AcceptanceLengths:
    """Measure the mean acceptance length of each row: tokens per step, the bonus token included.

    The caller numbers the steps.
    """

    def __init__(self) -> None:
        self._start = RunningMean(1.0, _FIRST_STEPS)  # of the first steps of all rows
        self._rows: set[AcceptanceLength] = set()  # of the latest call of `lowest`
        self._lowest: AcceptanceLength | None = None  # the row with the lowest mean of these
        self._measured = -_MANY_STEPS  # the step at which all rows were measured

    def begin(self, length: int, step: int) -> AcceptanceLength:
        """Return the measure of a new row. length: tokens of its text at step ``step``."""
        return AcceptanceLength(length, step, RunningMean(self._start.value, _FIRST_STEPS))

    def lowest(self, rows: Sequence[tuple[AcceptanceLength, int]], step: int, count: int) -> float:
        """Note how long the rows' texts are at a step, and return the lowest mean.

        Call it whenever the rows change. A row that was missing in the call before is new or was preempted, so the
        steps since it was last there are not counted.
        rows: each row that gets drafts, as its measure and the tokens of its text. count: all rows of the batch. The
        result is 1 if at least half of these get no drafts.
        """
        joined = [row for row in rows if row[0] not in self._rows]
        if joined or len(rows) < len(self._rows):
            self._rows = {row for row, _ in rows}
        for row, length in joined:
            row.length, row.step = length, step
        if len(rows) <= _MANY_ROWS or step - self._measured >= _MANY_STEPS or self._lowest not in self._rows:
            self._measured = step
            for row, length in rows:
                self._measure(row, length, step)
            candidates = [row for row, _ in rows]
        else:
            candidates = [self._lowest, *(row for row, _ in joined)]
        self._lowest = min(candidates, key=_mean, default=None)
        return _mean(self._lowest) if self._lowest is not None and 2 * len(rows) > count else 1.0

    def _measure(self, row: AcceptanceLength, length: int, step: int) -> None:
        """Add the steps since the row was measured before to its mean."""
        steps = step - row.step
        if steps > 0:
            latest = (length - row.length) / steps
            if row.mean.count < 2 * _FIRST_STEPS:
                self._start.add(latest, _MEAN_STEPS, steps)
            row.mean.add(latest, _MEAN_STEPS, steps)
            row.length, row.step = length, step


def _mean(row: AcceptanceLength) -> float:
    return row.mean.value
