"""StepCost: what verifying one more token costs, measured while serving.

A decode step of B rows in which d draft tokens are verified takes about ``a(B) + b(B) * d`` seconds: ``a`` is the step
without drafts, ``b`` what each draft token adds. The step gives B rows their tokens, so the time that stands for one
row is ``a(B) / B``, and in units of that, which is what a drafting policy weighs drafts in, one more token to verify
costs::

    cost = b / (a / B) = b * B / a

(A draft of k tokens in one row that is expected to bring e pays where the tokens per second rise:
``(1 + e) / (a / B + b * k)``, that is ``(1 + e) / (1 + cost * k)``.) With more rows the same token costs more: a step
that is shared by many brings more without drafts. Where a row costs no more than a draft token, ``a`` is
``fixed + b * B`` and the price is ``b * B / (fixed + b * B)``.

``b`` is the slope of a least-squares line through (d, seconds), both taken relative to their running means among steps
of as many rows: so what a row costs by itself (attention over its context, sampling) and slow drifts (contexts grow,
other work comes and goes) do not pass for the price of drafts. Steps of other numbers of rows lend their evidence, the
less the more the numbers differ. Old steps are forgotten exponentially. Before drafts of different lengths were seen,
the slope is a guess, the default cost; the evidence takes over as far as it outweighs the noise: the estimate is the
posterior mean of b under a normal prior around the guess. Without drafts the evidence is forgotten too, so that a
price once measured too high cannot silence drafting for good.
"""

from dataclasses import dataclass
from statistics import median

from agentspec.cache.policy import DEFAULT_COST

LOWEST_COST, HIGHEST_COST = 0.0005, 1.0

_TOGETHER = 16
"""Steps taken in at once: what is done between two steps of the engine costs a multiple of what it costs in a row."""
_SETTLING = 8
"""Steps of a new number of rows whose median is the first idea of its duration."""
_MEAN_STEPS = 64
"""Steps that the running means look back."""
_SLOPE_STEPS = 512
"""Steps that the slope looks back."""
_OUTLIER = 4.0
"""A step that is further than so many times the usual deviation from what was expected counts as being so far off:
a pause is no evidence of anything, while a lasting change of pace widens the usual deviation and is followed."""
_FINEST_NOISE, _FIRST_NOISE = 0.01, 0.05
"""Usual deviation of a step, as a share of it: at least, and at least in the beginning, when the slope is a guess."""
_DEVIATIONS = 1.25
"""Standard deviations in a mean absolute deviation, of normal noise."""


@dataclass(slots=True)
class _Level:
    """The steps with some number of rows: running means, and the sums of their least-squares line."""

    rows: int
    seconds: float
    drafted: float
    noise: float
    """mean absolute deviation from what was expected, in seconds"""
    count: int
    dd: float = 0.0
    """sum of (d - mean d)^2, forgotten exponentially"""
    dt: float = 0.0
    """sum of (d - mean d) * (seconds - mean seconds), likewise"""
    as_of: int = 0
    """number of the step up to which both were forgotten"""

    def forget(self, step: int) -> None:
        """Let the sums fade to what they are at that step."""
        kept = (1.0 - 1.0 / _SLOPE_STEPS) ** (step - self.as_of)
        self.dd, self.dt, self.as_of = self.dd * kept, self.dt * kept, step

    def learn(self, d: float, t: float, slope: float) -> None:
        """Take in a step of d draft tokens and t seconds."""
        self.count += 1
        weight = max(1.0 / self.count, 1.0 / _MEAN_STEPS)
        d -= self.drafted
        expected = self.seconds + slope * d
        limit = _OUTLIER * self.noise
        off = min(max(t - expected, -limit), limit)
        t = expected + off - self.seconds
        self.noise = max(self.noise + weight * (abs(off) - self.noise), _FINEST_NOISE * self.seconds)
        self.drafted += weight * d
        self.seconds += weight * t
        self.dd += (1.0 - weight) * d * d
        self.dt += (1.0 - weight) * d * t


class StepCost:
    """The price of verifying one more token, from the durations of decode-only steps. Plain arithmetic, no I/O.

    default: the price before anything is known, as a share of a step.
    """

    def __init__(self, default: float = DEFAULT_COST) -> None:
        self._default = default
        self._levels: dict[int, _Level] = {}
        self._settling: dict[int, list[tuple[float, int]]] = {}
        self._waiting: list[tuple[int, int, float]] = []
        self._prices: dict[int, float] = {}  # by number of rows, until more is known
        self._units: dict[int, float] = {}
        self._rows = 1
        self._steps = 0

    def observe(self, rows: int, drafted: int, seconds: float) -> None:
        """Note a step that verified one token of ``rows`` rows each and ``drafted`` draft tokens, in ``seconds``.

        Steps with prompt tokens, and times in which the engine had nothing to do, are not to be given.
        """
        self._waiting.append((rows, drafted, seconds))
        if len(self._waiting) >= _TOGETHER:
            self._take_in()

    def cost(self, rows: int) -> float:
        """The present price in a batch of ``rows`` rows, as a share of a step: LOWEST_COST to HIGHEST_COST."""
        price = self._prices.get(rows)
        if price is None:
            price = self._prices[rows] = self._price(rows)
        return price

    def row_seconds(self, rows: int) -> float | None:
        """The time that stands for one of ``rows`` rows in a step without drafts, ``a / B``; None: not measured yet."""
        unit = self._units.get(rows)
        if unit is None:
            level = self._nearest(rows)
            if level is None:
                return None
            unit = self._units[rows] = _base(level, self._slope(level)[0]) / rows
        return unit

    def stats(self) -> dict[str, float]:
        """The present estimate as JSON, for as many rows as the latest step had.

        ``cost``: share of a step; ``evidence``: 0 (all of it is the default) to 1 (all of it was measured);
        ``rows``; ``ms_per_draft_token``; ``ms_per_step``: of a step without drafts; ``steps``: how many were taken in.
        """
        self._take_in()
        level = self._nearest(self._rows)
        slope, evidence = self._slope(level) if level is not None else (0.0, 0.0)
        return {
            "cost": self.cost(self._rows),
            "evidence": evidence,
            "rows": self._rows,
            "ms_per_draft_token": 1e3 * slope,
            "ms_per_step": 1e3 * _base(level, slope) if level is not None else 0.0,
            "steps": self._steps,
        }

    def _take_in(self) -> None:
        waiting, self._waiting = self._waiting, []
        slopes: dict[int, float] = {}
        for rows, drafted, seconds in waiting:
            if rows < 1 or not 0.0 < seconds < float("inf"):
                continue
            self._steps += 1
            self._rows = rows
            key = _bucket(rows)
            level = self._levels.get(key)
            if level is None:
                self._settle(key, seconds, drafted)
                continue
            if key not in slopes:
                slopes[key] = self._slope(level)[0]
            level.forget(self._steps)
            level.learn(drafted, seconds, slopes[key])
        self._prices.clear()
        self._units.clear()

    def _settle(self, key: int, seconds: float, drafted: int) -> None:
        """The first steps of a number of rows: no evidence yet, for there is nothing to compare them with."""
        first = self._settling.setdefault(key, [])
        first.append((seconds, drafted))
        if len(first) < _SETTLING:
            return
        middle = median(seconds for seconds, _ in first)
        noise = median(abs(seconds - middle) for seconds, _ in first)
        mean = sum(drafted for _, drafted in first) / len(first)
        self._levels[key] = _Level(key, middle, mean, max(_DEVIATIONS * noise, _FIRST_NOISE * middle), len(first))
        del self._settling[key]

    def _price(self, rows: int) -> float:
        level = self._nearest(rows)
        if level is None:
            return self._default
        slope, _ = self._slope(level)
        return min(max(slope * rows / _base(level, slope), LOWEST_COST), HIGHEST_COST)

    def _slope(self, level: _Level) -> tuple[float, float]:
        """Seconds that one more draft token takes, and how much of that is evidence (0 to 1)."""
        dd = dt = 0.0
        for other in self._levels.values():
            other.forget(self._steps)
            alike = min(level.rows, other.rows) / max(level.rows, other.rows)
            dd += alike**3 * other.dd
            dt += alike**3 * other.dt
        guess = self._default * level.seconds / level.rows
        # The guess may be wrong by as much again, and by more with many rows, where a token can cost anything up to 1.
        # So much evidence, as a sum of squares of d, weighs as much as the guess:
        trust = (_DEVIATIONS * level.noise / guess) ** 2 / level.rows
        return (dt + trust * guess) / (dd + trust), dd / (dd + trust)

    def _nearest(self, rows: int) -> _Level | None:
        level = self._levels.get(_bucket(rows))
        if level is None and self._levels:
            level = self._levels[min(self._levels, key=lambda known: abs(known - rows))]
        return level


def _base(level: _Level, slope: float) -> float:
    """Seconds of a step without drafts, given those of a usual one."""
    return max(level.seconds - slope * level.drafted, 0.05 * level.seconds)


def _bucket(rows: int) -> int:
    """Numbers of rows that are taken together: exact below 16, then to four significant bits."""
    shift = max(0, rows.bit_length() - 4)
    return rows >> shift << shift
