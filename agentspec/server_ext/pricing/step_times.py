"""Keep how long decode steps take, by their numbers of rows and draft tokens. `step_cost` draws the conclusions."""

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

_SETTLING = 5
"""Number of first steps with some number of rows whose median is the initial duration."""
_MEAN_STEPS = 64
"""Number of latest steps that the running means cover."""
_SLOPE_STEPS = 512
"""Number of latest steps that the slope covers."""
_OUTLIER = 4.0
"""Largest deviation from the expected duration that counts, in usual deviations. Pauses say nothing about the price of
a token. A lasting change of pace widens the usual deviation, so the estimate follows it."""
_FINEST_NOISE, _FIRST_NOISE = 0.01, 0.05
"""Smallest usual deviation of a step, as a share of its duration: later, and at first, when the slope is a guess."""
_DEVIATIONS = 1.25
"""Standard deviation of normal noise, in mean absolute deviations."""
_PLAIN_SHARE, _PLAIN_TRUST = 0.8, 1.0
"""Guess at the duration of a step without drafts, as a share of that of a step with drafts less its draft tokens' time,
and the guess's weight in steps. The share is below 1, because having any draft takes time by itself."""
_PLAIN_STEPS = 16
"""Number of latest steps without drafts from which that share is measured."""
_LEAST_SHARE = 0.05
"""Least expected duration of a step, whatever the slope, as a share of the mean, because no step takes no time."""


@dataclass(slots=True)
class StepTimes:
    """Keep means and least-squares sums of steps with some number of rows, either with drafts or without.

    The names of the fields are part of what `RowTimes.dump` saves.
    """

    seconds: float
    """mean duration of a step"""
    drafted: float
    """mean number of draft tokens of a step"""
    noise: float
    """mean absolute deviation from the expected duration, in seconds"""
    count: int
    dd: float = 0.0
    """sum of (draft tokens - their mean)^2, forgotten exponentially"""
    dt: float = 0.0
    """sum of (draft tokens - their mean) * (seconds - their mean), forgotten exponentially"""
    as_of: int = 0
    """number of the step at which both sums were last reduced"""

    @classmethod
    def of_first(cls, steps: list[tuple[int, float]], slope: float, as_of: int) -> "StepTimes":
        """Return the measurements of the first steps, given as (draft tokens, seconds).

        slope: seconds that a draft token takes, as far as known. as_of: number of the latest step.
        """
        middle = median(seconds for _, seconds in steps)
        mean_drafted = sum(drafted for drafted, _ in steps) / len(steps)
        noise = median(abs(seconds - middle) for _, seconds in steps)
        times = cls(middle, mean_drafted, max(_DEVIATIONS * noise, _FIRST_NOISE * middle), len(steps), as_of=as_of)
        for drafted, seconds in steps:
            drafted_off = drafted - mean_drafted
            times.dd += drafted_off * drafted_off
            times.dt += drafted_off * (times.clipped(seconds, drafted_off, slope) - middle)
        return times

    def forget(self, step: int) -> None:
        """Reduce both sums, because steps have passed since they were last reduced. step: number of the latest one."""
        kept = (1.0 - 1.0 / _SLOPE_STEPS) ** (step - self.as_of)
        self.dd, self.dt, self.as_of = self.dd * kept, self.dt * kept, step

    def clipped(self, seconds: float, drafted_off: float, slope: float) -> float:
        """Return a step's seconds, clipped to near those expected with ``drafted_off`` draft tokens beyond the mean."""
        expected = max(self.seconds + slope * drafted_off, _LEAST_SHARE * self.seconds)
        limit = _OUTLIER * self.noise
        return min(max(seconds, expected - limit), expected + limit)

    def learn(self, drafted: int, seconds: float, slope: float) -> None:
        """Learn from a step of ``drafted`` draft tokens and ``seconds``."""
        self.count += 1
        weight = max(1.0 / self.count, 1.0 / _MEAN_STEPS)
        drafted_off = drafted - self.drafted
        seconds_off = self.clipped(seconds, drafted_off, slope) - self.seconds
        unexplained = abs(seconds_off - slope * drafted_off)
        self.noise = max(self.noise + weight * (unexplained - self.noise), _FINEST_NOISE * self.seconds)
        self.drafted += weight * drafted_off
        self.seconds += weight * seconds_off
        self.dd += (1.0 - weight) * drafted_off * drafted_off
        self.dt += (1.0 - weight) * drafted_off * seconds_off

    @property
    def deviation(self) -> float:
        """Return the usual deviation from the expected duration, in seconds."""
        return _DEVIATIONS * self.noise

    def base(self, slope: float) -> float:
        """Return the seconds of a step without its draft tokens."""
        return _base(self.seconds, self.drafted, slope)


@dataclass(slots=True)
class PlainSteps:
    """Compare the steps without drafts of some number of rows with the steps with drafts around them."""

    steps: int = 0
    """number of the steps without drafts"""
    seconds: float = 0.0
    """mean duration of the steps without drafts"""
    beside: float = 0.0
    """mean duration of the steps with drafts at that time, in seconds"""
    drafted: float = 0.0
    """mean number of draft tokens of the steps with drafts"""

    def learn(self, seconds: float, drafts: StepTimes, steps: int = 1) -> None:
        """Learn from ``steps`` steps without drafts, of ``seconds`` each. drafts: the present means with drafts."""
        self.steps += steps
        weight = steps / min(self.steps, _PLAIN_STEPS)
        self.seconds += weight * (seconds - self.seconds)
        self.beside += weight * (drafts.seconds - self.beside)
        self.drafted += weight * (drafts.drafted - self.drafted)

    def share(self, slope: float) -> float:
        """Return the duration of a step without drafts, as a share of one with drafts less its draft tokens' time."""
        if self.steps == 0:
            return _PLAIN_SHARE
        known = min(self.steps, _PLAIN_STEPS)
        measured = self.seconds / _base(self.beside, self.drafted, slope)
        return min((_PLAIN_TRUST * _PLAIN_SHARE + known * measured) / (_PLAIN_TRUST + known), 1.0)


class RowTimes:
    """Keep the measurements of steps with some number of rows.

    with_drafts, without_drafts: None until _SETTLING such steps were measured.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.with_drafts: StepTimes | None = None
        self.without_drafts: StepTimes | None = None
        self._settling: dict[bool, list[tuple[int, float]]] = {False: [], True: []}  # first steps, True: with drafts
        self.most_drafted = 0
        """most draft tokens that a step had"""
        self.count = 0
        self.share_with_drafts = 0.0
        """share of the latest steps that had drafts"""
        self.plain = PlainSteps()
        self._since = {False: 0, True: 0}
        """False: steps with drafts since one without; True: steps without drafts since one with"""

    @property
    def settled(self) -> bool:
        """Return whether enough steps were measured, with drafts or without."""
        return self.with_drafts is not None or self.without_drafts is not None

    def learn(self, drafted: int, seconds: float, slope: float, step: int) -> None:
        """Learn from a step of ``drafted`` draft tokens and ``seconds``. step: its number."""
        has_drafts = drafted > 0
        self.count += 1
        self.share_with_drafts += max(1.0 / self.count, 1.0 / _MEAN_STEPS) * (has_drafts - self.share_with_drafts)
        self.most_drafted = max(self.most_drafted, drafted)
        self._since[has_drafts] = 0
        self._since[not has_drafts] += 1
        times = self.with_drafts if has_drafts else self.without_drafts
        if times is not None:
            times.forget(step)
            if not has_drafts and self.with_drafts is not None:
                self.plain.learn(times.clipped(seconds, 0.0, slope), self.with_drafts)
            times.learn(drafted, seconds, slope)
            return
        first = self._settling[has_drafts]  # these are learned from together
        first.append((drafted, seconds))
        if len(first) >= _SETTLING:
            times = StepTimes.of_first(first, slope, step)
            if has_drafts:
                self.with_drafts = times
            else:
                self.without_drafts = times
            if self.with_drafts is not None and self.without_drafts is not None:
                self.plain.learn(self.without_drafts.seconds, self.with_drafts, _SETTLING)
            first.clear()

    def take_turn(self, every: int, *, drafts: bool) -> bool:
        """Decide whether the next step has drafts, or none, to be measured: after ``every`` steps of the other kind."""
        due = self._since[drafts] >= every
        if due:
            self._since[drafts] = 0  # now, because the step is measured later
        return due

    @property
    def usual(self) -> StepTimes:
        """Return the times of the steps with drafts, or else of those without. Ask only once `settled`."""
        usual = self.with_drafts or self.without_drafts
        assert usual is not None
        return usual

    @property
    def seconds(self) -> float:
        """Return the mean duration of a step, with or without drafts."""
        return self.base(0.0)

    def base(self, slope: float) -> float:
        """Return the seconds of a step without its draft tokens, averaged over steps with and without drafts."""
        if self.with_drafts is None or self.without_drafts is None:
            return self.usual.base(slope)
        share = self.share_with_drafts
        return share * self.with_drafts.base(slope) + (1.0 - share) * self.without_drafts.seconds

    def dump(self) -> dict[str, Any]:
        """Return the measurements as JSON, for `restored`. Any thread may call it."""
        known = ((0, self.without_drafts), (1, self.with_drafts))
        return {
            "levels": {drafts: asdict(times) for drafts, times in known if times is not None},
            "most": self.most_drafted,
            "count": self.count,
            "share": self.share_with_drafts,
            "plain": asdict(self.plain),
        }

    @classmethod
    def restored(cls, rows: int, kept: dict[str, Any]) -> "RowTimes":
        """Return the measurements from ``dump``. Raises ValueError, TypeError, KeyError or AttributeError otherwise."""
        times = cls(rows)
        levels = {bool(int(drafts)): StepTimes(**level) for drafts, level in kept["levels"].items()}
        times.with_drafts, times.without_drafts = levels.get(True), levels.get(False)
        times.most_drafted, times.count = int(kept["most"]), int(kept["count"])
        times.share_with_drafts = float(kept["share"])
        times.plain = PlainSteps(**kept["plain"])
        return times


def _base(seconds: float, drafted: float, slope: float) -> float:
    return max(seconds - slope * drafted, _LEAST_SHARE * seconds)
