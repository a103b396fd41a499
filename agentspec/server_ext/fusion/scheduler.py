"""DraftModelScheduler: for which rows of a step the draft model is worth its time.

Everything is weighed in expected tokens. ``unit`` is the time that stands for one row in a step without drafts; a step
of B rows with d draft tokens takes B + cost * d units, and brings B tokens and those accepted: ``rate`` tokens a unit.
A draft that is expected to bring e of its k tokens is worth e - rate * cost * k. What running the model on a row adds
to that, its gain, is learned from the rows on which it ran, by how much the trees' draft promised there and by
request. It runs on those rows whose gains together exceed what they could have brought in the time that it takes,
rate * seconds / unit. With drafts that no longer pay, as in large batches, there is nothing to gain, and it rests.

Gains are seen only where the model runs. A small share of the time therefore goes to trials on all rows, so that a
model that was useless for a while is found out to be useful again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_TRIAL_SHARE = 0.01
"""Share of the time that trials may take."""
_BOUNDS = (0.0, 0.3, 0.6, 1.0, 1.5, 2.5, 4.0, 8.0)
"""Expected tokens of the trees' draft that are told apart."""
_FIRST_GAIN, _FIRST_WEIGHT = 1.0, 4.0
"""A gain that is hoped for in the beginning, for so many observations; less where the trees promise much."""
_MEMORY = 256
"""Rows that the mean gains look back."""
_REQUEST_PRIOR, _REQUEST_MEMORY = 6.0, 48
_TIME_MEMORY = 32
"""Runs that the mean times look back."""
_SETTLING = 4
"""First runs with a number of rows, the quickest of which counts."""
_OUTLIER = 3.0
"""A run that took so many times as long as usual counts as that long: a pause is no property of the model."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What time costs in this step.

    cost: of verifying one more token, in units. rate: expected tokens a unit, as things stand. unit: its seconds; None:
    not measured yet.
    """

    cost: float
    rate: float
    unit: float | None

    def worth(self, expected: float, drafted: int) -> float:
        """Of a draft, in tokens."""
        return expected - self.rate * self.cost * drafted


@dataclass(slots=True)
class _Mean:
    value: float
    count: float

    def add(self, value: float, memory: float) -> None:
        self.count = min(self.count + 1.0, memory)
        self.value += (value - self.value) / self.count


class LoopTime:
    """How long the model takes for so many rows, in seconds."""

    def __init__(self) -> None:
        self._means: dict[int, _Mean] = {}

    def observe(self, rows: int, seconds: float) -> None:
        """Note a run."""
        mean = self._means.get(rows)
        if mean is None:
            known = self.seconds(rows)
            self._means[rows] = _Mean(seconds if known is None else min(seconds, _OUTLIER * known), 1.0)
        elif mean.count < _SETTLING:  # the first runs find nothing ready
            mean.value, mean.count = min(seconds, mean.value), mean.count + 1
        else:
            mean.add(min(seconds, _OUTLIER * mean.value), _TIME_MEMORY)

    def seconds(self, rows: int) -> float | None:
        """The usual time; between numbers of rows that were seen by a straight line, None where none was."""
        if not self._means:
            return None
        mean = self._means.get(rows)
        if mean is not None:
            return mean.value
        below = max((known for known in self._means if known < rows), default=None)
        above = min((known for known in self._means if known > rows), default=None)
        if below is None or above is None:
            nearest = self._means[below or above or 0]
            return nearest.value * max(1.0, rows / (below or rows))
        low, high = self._means[below].value, self._means[above].value
        return low + (high - low) * (rows - below) / (above - below)


class DraftModelScheduler:
    """Decides for which rows the model runs, and learns what that brings. Plain arithmetic, no I/O."""

    def __init__(self) -> None:
        self.time = LoopTime()
        self._gains = [_Mean(max(0.0, _FIRST_GAIN - bound / 4), _FIRST_WEIGHT) for bound in _BOUNDS]
        self._requests: dict[str, _Mean] = {}  # how much more than usual it gains there
        self._credit = 0.0
        self.trials = 0

    def choose(
        self,
        request_ids: Sequence[str],
        promised: Sequence[float],
        widths: Sequence[int],
        prices: Prices,
    ) -> list[int]:
        """The rows worth running the model for, in their order.

        promised: expected tokens of the trees' draft, by row. widths: how many rows of the model's a row takes, 0 for
        one that has no room for a draft.
        """
        able = [i for i, width in enumerate(widths) if width > 0]
        if not able:
            return []
        everything = self.time.seconds(sum(widths))
        if prices.unit is None or everything is None:
            return able  # nothing is known yet
        price = prices.rate / prices.unit
        gains = sorted(((self.gain(request_ids[i], promised[i]), i) for i in able), reverse=True)
        best, total, width, count = 0.0, 0.0, 0, 0
        for number, (gain, i) in enumerate(gains, 1):
            if gain <= 0.0:
                break
            total += gain
            width += widths[i]
            surplus = total - price * (self.time.seconds(width) or 0.0)
            if surplus > best:
                best, count = surplus, number
        if count:
            return sorted(i for _, i in gains[:count])
        self._credit = min(self._credit + _TRIAL_SHARE * prices.unit * len(request_ids), everything)
        if self._credit < everything:
            return []
        self._credit = 0.0
        self.trials += 1
        return able

    def gain(self, request_id: str, promised: float) -> float:
        """Tokens that running the model on a row should add."""
        mean = self._gains[_bucket(promised)].value
        own = self._requests.get(request_id)
        return mean if own is None else mean + own.value * own.count / (own.count + _REQUEST_PRIOR)

    def learn(self, request_id: str, promised: float, gain: float) -> None:
        """Running the model on that row has added so much."""
        mean = self._gains[_bucket(promised)]
        own = self._requests.get(request_id)
        if own is None:
            own = self._requests[request_id] = _Mean(0.0, 0.0)
        own.add(gain - mean.value, _REQUEST_MEMORY)
        mean.add(gain, _MEMORY)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._requests.pop(request_id, None)

    def stats(self) -> dict[str, object]:
        """Mean gains by what the trees promise, in tokens, and how many trials there were, as JSON."""
        return {
            "trials": self.trials,
            "gains": [
                {"promised_from": bound, "tokens": round(mean.value, 4)}
                for bound, mean in zip(_BOUNDS, self._gains, strict=True)
            ],
        }


def _bucket(promised: float) -> int:
    return sum(promised >= bound for bound in _BOUNDS[1:])
