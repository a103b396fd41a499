"""Choose the rows of a step for which the draft model is worth its time.

The core values a draft (``draft_value``) by the tokens that its step yields per unit of work. A unit takes
``row_seconds``, the time of a step without drafts divided by its rows. Running the model on a row improves its draft by
some tokens, the gain. The scheduler learns gains from the rows on which the model ran, by request and by the expected
tokens of the suffix draft. The model runs on rows whose gains together exceed the tokens that a step yields in the time
that the model takes. If drafts do not pay, as in large batches, there is no gain, and the model does not run.

A drafter of vLLM's runs over the whole batch. Then the choice is how many tokens it drafts, or whether it rests. Its
first pass cannot always be left out.

Gains and times are measured only where the model runs. So a small share of the time goes to trials, on all rows and of
all tokens. They show when a model that was useless or slow for a while, or whose later tokens were wrong, is so no
longer. Where trials are rare, each counts for the steps between.
"""

from bisect import bisect, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentspec.cache.core import draft_value
from agentspec.server_ext.fusion.draft_model import RESTS, TokenChoices
from agentspec.server_ext.step import RequestState, RunningMean

_TRIAL_SHARE = 0.01
"""Largest share of the time that trials take."""
_BOUNDS = (0.0, 0.3, 0.6, 1.0, 1.5, 2.5, 4.0, 8.0)
"""Bounds of the bins of gains, in expected tokens of the suffix draft."""
_FIRST_GAIN, _FIRST_WEIGHT = 1.0, 4.0
"""Initial gain in tokens and its weight in observations; the gain is smaller if the suffix draft promises much."""
_MEMORY = 256
"""Number of latest rows that the mean gains cover."""
_MOST_PASSED_OVER = 31
"""Most rows without a run that the next run's observation stands for, too."""
_REQUEST_PRIOR, _REQUEST_MEMORY = 6.0, 48
_TIME_MEMORY = 32
"""Number of latest runs that the mean times cover."""
_MOST_TIMED = 8
"""Most steps that the time of one run stands for."""
_SETTLING = 4
"""Number of first runs with some number of rows; only the quickest counts. A model's first runs decide nothing."""
_OUTLIER = 3.0
"""Longest time that a run counts as, in multiples of the usual time, because pauses say nothing about the model."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Hold how fast steps yield tokens now.

    rate: tokens per unit of work. row_seconds: duration of a unit; None: not yet measured.
    """

    rate: float
    row_seconds: float | None


class DraftPromise(NamedTuple):
    """Hold what a draft promises: ``expected`` accepted tokens, of ``drafted`` ones."""

    expected: float
    drafted: int


def gained_tokens(before: DraftPromise, after: DraftPromise, cost: float) -> float:
    """Return how many tokens more a row yields with the draft ``after`` than with ``before`` in the same time.

    cost: price of verifying one more token.
    """
    return (1.0 + after.expected) * (1.0 - draft_value(*before, cost) / draft_value(*after, cost))


class ModelTime:
    """Estimate how long the draft model takes for some number of rows, in seconds."""

    def __init__(self) -> None:
        self.runs = 0
        self._means: dict[int, RunningMean] = {}
        self._sizes: list[int] = []  # the numbers of rows seen, ascending

    @property
    def settled(self) -> bool:
        """Return whether so many runs were seen that a slow first one says nothing any more."""
        return self.runs >= _SETTLING

    def observe(self, rows: int, seconds: float, weight: int = 1) -> None:
        """Add the time of a run. weight: 1 for the run itself, plus the steps since the latest one."""
        self.runs += 1
        mean = self._means.get(rows)
        if mean is None:
            known = self.seconds(rows)
            insort(self._sizes, rows)
            self._means[rows] = RunningMean(seconds if known is None else min(seconds, _OUTLIER * known), 1.0)
        elif mean.count < _SETTLING:  # the first runs are slow, because they compile and allocate
            mean.value, mean.count = min(seconds, mean.value), mean.count + 1
        else:
            mean.add(min(seconds, _OUTLIER * mean.value), _TIME_MEMORY, min(weight, _MOST_TIMED))
        for size, other in self._means.items():  # a slow first run with some rows says nothing about runs with others
            if other.count < _SETTLING:
                other.value = min(other.value, _OUTLIER * self._means[rows].value * max(1.0, size / rows))

    def seconds(self, rows: int) -> float | None:
        """Return the usual time, interpolated between the numbers of rows seen; None before the first run."""
        mean = self._means.get(rows)
        if mean is not None:
            return mean.value
        if not self._sizes:
            return None
        at = bisect(self._sizes, rows)
        if at == 0:
            return self._means[self._sizes[0]].value
        below = self._sizes[at - 1]
        low = self._means[below].value
        if at == len(self._sizes):
            return low * rows / below
        above = self._sizes[at]
        return low + (self._means[above].value - low) * (rows - below) / (above - below)


class PassTime:
    """Estimate how long a drafter of whole batches takes, by the number of tokens that it drafts, in seconds.

    RESTS counts as a number of tokens. The times of the other numbers are taken to lie on a line: the time of a first
    pass, plus the same time for each token. Numbers that were not drafted for a while count less.
    """

    def __init__(self) -> None:
        self._times: dict[int, ModelTime] = {}
        self._latest: dict[int, int] = {}  # by number of tokens: the number of its latest run
        self._runs = 0
        self._lines: dict[int, tuple[float, float] | None] = {}  # by number of rows, until the next run

    @property
    def settled(self) -> bool:
        """Return whether so many runs have drafted that a slow first one says nothing any more."""
        return any(time.settled for tokens, time in self._times.items() if tokens > 0)

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """Add the time of a run over a batch of ``rows`` rows that drafted ``tokens`` tokens in each."""
        since = self._runs - self._latest.get(tokens, self._runs)
        self._times.setdefault(tokens, ModelTime()).observe(rows, seconds, 1 + since)
        self._runs += 1
        self._latest[tokens] = self._runs
        self._lines.clear()

    def saved(self, rows: int, tokens: int, least: int) -> float | None:
        """Return the time that drafting ``least`` tokens instead would save; None before the first run that drafted.

        Until a rest is measured, it counts as no time.
        """
        if tokens == least:
            return 0.0
        if rows not in self._lines:
            self._lines[rows] = self._line(rows)
        line = self._lines[rows]
        if line is None:
            return None
        first, further = line
        if least != RESTS:
            return further * (tokens - least)
        return max(0.0, first + further * tokens - self._resting(rows))

    def beyond_least(self, rows: int, tokens: int) -> float:
        """Return how much longer a run takes than a rest or, if the drafter never rested, than a first pass."""
        return self.saved(rows, tokens, RESTS if RESTS in self._times else 0) or 0.0

    def _line(self, rows: int) -> tuple[float, float] | None:
        """Return the seconds of a first pass and of each token; None before the first run that drafted.

        While only one number of tokens was seen, the first pass counts as long as each token. With more, this is a
        least-squares line.
        """
        known = {number: time.seconds(rows) or 0.0 for number, time in self._times.items() if number >= 0}
        most = max(known, default=0)
        if most == 0:
            return None
        if len(known) == 1:
            each = known[most] / (most + 1)
            return each, each
        weights = {number: 1.0 / (_TIME_MEMORY + self._runs - self._latest[number]) for number in known}
        total = sum(weights.values())
        middle = sum(weight * number for number, weight in weights.items()) / total
        mean = sum(weight * known[number] for number, weight in weights.items()) / total
        over = sum(weight * (number - middle) * (known[number] - mean) for number, weight in weights.items())
        further = max(0.0, over / sum(weight * (number - middle) ** 2 for number, weight in weights.items()))
        return max(0.0, mean - further * middle), further

    def _resting(self, rows: int) -> float:
        resting = self._times.get(RESTS)
        return 0.0 if resting is None else resting.seconds(rows) or 0.0


class Gains:
    """Learn how many tokens the model gains on a row, by request and by the expected tokens of the suffix draft.

    An observation also stands for the rows of its bin that were passed over since the latest one. If it did not, a
    model that was useless for a while would have to be right in hundreds of trials, in tens of thousands of steps.
    """

    def __init__(self) -> None:
        self._means = [RunningMean(max(0.0, _FIRST_GAIN - bound / 4), _FIRST_WEIGHT) for bound in _BOUNDS]
        self._passed_over = [0] * len(_BOUNDS)

    def of(self, state: RequestState, expected: float) -> float:
        """Return the gain to expect from running the model on a row of this request, in tokens."""
        own = state.model_gain
        return self._means[_bin(expected)].value + own.value * own.count / (own.count + _REQUEST_PRIOR)

    def learn(self, state: RequestState, expected: float, gain: float) -> None:
        """Note the gain of running the model on a row of this request, in tokens."""
        at = _bin(expected)
        mean = self._means[at]
        state.model_gain.add(gain - mean.value, _REQUEST_MEMORY)
        mean.add(gain, _MEMORY, 1 + self._passed_over[at])
        self._passed_over[at] = 0

    def pass_over(self, expected: Iterable[float]) -> None:
        """Note rows that might have a draft, but for which the model does not run."""
        for at in map(_bin, expected):
            self._passed_over[at] = min(self._passed_over[at] + 1, _MOST_PASSED_OVER)

    def stats(self) -> list[dict[str, float]]:
        """Return the mean gains in tokens, by the suffix draft's expected tokens, as JSON."""
        means = zip(_BOUNDS, self._means, strict=True)
        return [{"promised_from": bound, "tokens": round(mean.value, 4)} for bound, mean in means]


class DraftModelScheduler:
    """Choose the rows for which the draft model runs, by its gains and its time. Plain arithmetic, no I/O.

    observation_weights: by position, for how many steps this step's run stands: 1, plus the steps since the latest run
    that drafted there. The last one counts for later positions, too.
    """

    def __init__(self) -> None:
        self.time = ModelTime()
        self.passes = PassTime()
        self.gains = Gains()
        self.observation_weights = [1]
        self._credit = 0.0
        self._undrafted: dict[int, int] = {}  # by position: steps since the latest run that drafted there
        self.trials = 0

    def choose(
        self, states: Sequence[RequestState], expected: Sequence[float], widths: Sequence[int], pace: Pace
    ) -> list[int]:
        """Return the rows worth running the model for, in their order.

        expected: expected tokens of each row's suffix draft. widths: rows of the model that each row takes, 0 if it
        may not have a draft.
        """
        able = [i for i, width in enumerate(widths) if width > 0]
        if not able:
            return []
        everything = self.time.seconds(sum(widths))
        if pace.row_seconds is None or everything is None or not self.time.settled:
            self._note_run(1, 1)
            return able  # run on all rows while nothing is known
        tokens_a_second = pace.rate / pace.row_seconds
        gains = sorted(((self.gains.of(states[i], expected[i]), i) for i in able), reverse=True)
        best, total, width, count = 0.0, 0.0, 0, 0
        for number, (gain, i) in enumerate(gains, 1):
            if gain <= 0.0:
                break
            total += gain
            width += widths[i]
            surplus = total - tokens_a_second * (self.time.seconds(width) or 0.0)
            if surplus > best:
                best, count = surplus, number
        chosen = gains[:count]
        if count < len(able) and self._may_try(everything, pace.row_seconds * len(states)):
            chosen = gains
        self.gains.pass_over(expected[i] for _, i in gains[len(chosen) :])
        self._note_run(1 if chosen else 0, 1)
        return sorted(i for _, i in chosen)

    def choose_tokens(
        self,
        states: Sequence[RequestState],
        expected: Sequence[float],
        limits: Sequence[int],
        worth: Sequence[float],
        choices: TokenChoices,
        pace: Pace,
    ) -> int:
        """Return how many tokens a drafter of whole batches should draft, or RESTS.

        expected: expected tokens of each row's suffix draft. limits: most tokens of each row's draft. worth: expected
        tokens of the drafter's own draft of 1, 2, … tokens.
        """
        able = [i for i, limit in enumerate(limits) if limit > 0]
        least, most = choices.cheapest, choices.most  # the time of the cheapest cannot be saved
        if least == most or not able:
            self._note_run(least, most)
            return least
        saved = self.passes.saved(len(states), most, least)
        if pace.row_seconds is None or saved is None or not self.passes.settled:
            self._note_run(most, most)
            return most  # while nothing is known
        gain = sum(max(0.0, self.gains.of(states[i], expected[i])) for i in able)
        tokens_a_second = pace.rate / pace.row_seconds
        best, count = 0.0, least
        for tokens in choices.others:
            time = self.passes.saved(len(states), tokens, least) or 0.0
            surplus = gain * worth[tokens - 1] / worth[most - 1] - tokens_a_second * time
            if surplus > best:
                best, count = surplus, tokens
        if count < most and self._may_try(saved, pace.row_seconds * len(states)):
            count = most
        if count <= 0:  # a first pass alone shows no gain
            self.gains.pass_over(expected[i] for i in able)
        self._note_run(count, most)
        return count

    def _may_try(self, cost: float, step: float) -> bool:
        """Return whether a trial that takes ``cost`` seconds is due. step: seconds of a step without drafts."""
        self._credit = min(self._credit + _TRIAL_SHARE * step, cost)
        if self._credit < cost:
            return False
        self._credit = 0.0
        self.trials += 1
        return True

    def _note_run(self, tokens: int, most: int) -> None:
        """Note how many tokens, of at most ``most``, the model drafts in this step; RESTS or 0: none.

        A model for chosen rows drafts all its tokens or none, so 1 of 1 stands for all of them.
        """
        self.observation_weights = [1 + self._undrafted.get(at, 0) for at in range(max(tokens, 1))]
        for at in range(most):
            undrafted = min(self._undrafted.get(at, 0) + 1, _MOST_PASSED_OVER)
            self._undrafted[at] = 0 if at < tokens else undrafted

    def stats(self) -> dict[str, object]:
        """Return the mean gains in tokens, by the suffix draft's expected tokens, and the trials, as JSON."""
        return {"trials": self.trials, "gains": self.gains.stats()}


def _bin(expected: float) -> int:
    return bisect(_BOUNDS, expected, lo=1) - 1
