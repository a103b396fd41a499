"""Decide for which rows of a step the draft model is worth its time.

A draft is worth what the core says (``draft_value``): the tokens that its step brings per unit of work, where a unit is
the time that stands for one row in a step without drafts. Running the model on a row makes the draft there better. The
tokens by which it does so, its gain, are learned from the rows on which it ran, by how much the suffix draft promised
there and by request. The model runs on those rows whose gains together exceed what a step brings in the time that the
model takes. With drafts that no longer pay, as in large batches, there is nothing to gain, and it rests.

Gains are seen only where the model runs. A small share of the time therefore goes to trials on all rows, so that a
model that was useless for a while is found out to be useful again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agentspec.cache.suffix_cache import draft_value
from agentspec.server_ext.step import RequestState, RunningMean

_TRIAL_SHARE = 0.01
"""Share of the time that trials may take."""
_BOUNDS = (0.0, 0.3, 0.6, 1.0, 1.5, 2.5, 4.0, 8.0)
"""Expected tokens of the suffix draft that are told apart."""
_FIRST_GAIN, _FIRST_WEIGHT = 1.0, 4.0
"""A gain that is hoped for in the beginning, for so many observations; less where the suffix draft promises much."""
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
class Pace:
    """What a step brings as things stand. rate: tokens a unit of work. unit: its seconds; None: not measured yet."""

    rate: float
    unit: float | None


def gained_tokens(before: tuple[float, int], after: tuple[float, int], cost: float) -> float:
    """Return by how many tokens a row's step brings more than the draft before would have brought in the same time.

    before, after: (expected tokens, drafted tokens) of the row's draft. cost: of verifying one more token.
    """
    return (1.0 + after[0]) * (1.0 - draft_value(*before, cost) / draft_value(*after, cost))


class ModelTime:
    """Say how long the draft model takes for some number of rows, in seconds."""

    def __init__(self) -> None:
        self._means: dict[int, RunningMean] = {}

    def observe(self, rows: int, seconds: float) -> None:
        """Note a run."""
        mean = self._means.get(rows)
        if mean is None:
            known = self.seconds(rows)
            self._means[rows] = RunningMean(seconds if known is None else min(seconds, _OUTLIER * known), 1.0)
        elif mean.count < _SETTLING:  # the first runs find nothing ready
            mean.value, mean.count = min(seconds, mean.value), mean.count + 1
        else:
            mean.add(min(seconds, _OUTLIER * mean.value), _TIME_MEMORY)

    def seconds(self, rows: int) -> float | None:
        """Return the usual time; between numbers of rows that were seen by a straight line, None where none was."""
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
    """Choose the rows for which the draft model runs, and learn what that brings. Plain arithmetic, no I/O."""

    def __init__(self) -> None:
        self.time = ModelTime()
        self._gains = [RunningMean(max(0.0, _FIRST_GAIN - bound / 4), _FIRST_WEIGHT) for bound in _BOUNDS]
        self._credit = 0.0
        self.trials = 0

    def choose(
        self, states: Sequence[RequestState], promised: Sequence[float], widths: Sequence[int], pace: Pace
    ) -> list[int]:
        """Return the rows worth running the model for, in their order.

        promised: expected tokens of the suffix draft, by row. widths: how many of the model's rows a row takes, 0 for
        one that may have no draft.
        """
        able = [i for i, width in enumerate(widths) if width > 0]
        if not able:
            return []
        everything = self.time.seconds(sum(widths))
        if pace.unit is None or everything is None:
            return able  # nothing is known yet
        tokens_a_second = pace.rate / pace.unit
        gains = sorted(((self.gain(states[i], promised[i]), i) for i in able), reverse=True)
        best, total, width, count = 0.0, 0.0, 0, 0
        for number, (gain, i) in enumerate(gains, 1):
            if gain <= 0.0:
                break
            total += gain
            width += widths[i]
            surplus = total - tokens_a_second * (self.time.seconds(width) or 0.0)
            if surplus > best:
                best, count = surplus, number
        if count:
            return sorted(i for _, i in gains[:count])
        self._credit = min(self._credit + _TRIAL_SHARE * pace.unit * len(states), everything)
        if self._credit < everything:
            return []
        self._credit = 0.0
        self.trials += 1
        return able

    def gain(self, state: RequestState, promised: float) -> float:
        """Return the tokens that running the model on a row of this request should add."""
        own = state.model_gain
        return self._gains[_bucket(promised)].value + own.value * own.count / (own.count + _REQUEST_PRIOR)

    def learn(self, state: RequestState, promised: float, gain: float) -> None:
        """Note that running the model on a row of this request has added so many tokens."""
        mean = self._gains[_bucket(promised)]
        state.model_gain.add(gain - mean.value, _REQUEST_MEMORY)
        mean.add(gain, _MEMORY)

    def stats(self) -> dict[str, object]:
        """Return the mean gains by what the suffix drafts promise, in tokens, and the number of trials, as JSON."""
        return {
            "trials": self.trials,
            "gains": [
                {"promised_from": bound, "tokens": round(mean.value, 4)}
                for bound, mean in zip(_BOUNDS, self._gains, strict=True)
            ],
        }


def _bucket(promised: float) -> int:
    return sum(promised >= bound for bound in _BOUNDS[1:])
