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

A step with any draft at all also costs more by itself: vLLM's rejection sampler runs, rows have tokens of different
number. That is not the price of a token. So ``b`` is the slope of a least-squares line through (d, seconds) among the
steps with drafts alone, both taken relative to their running means among steps of as many rows. What a row costs by
itself (attention over its context, sampling) and slow drifts (contexts grow, other work comes and goes) do not pass for
the price of drafts either. ``a`` is what a step takes beside its draft tokens: the mean of the steps without drafts and
of those with drafts less ``b * d``, in the shares in which they occur.

Steps of other numbers of rows lend their evidence, the less the more the numbers differ. Old steps are forgotten
exponentially. Before drafts of different lengths were seen, the slope is a guess, the default cost; the evidence takes
over as far as it outweighs the noise: the estimate is the posterior mean of b under a normal prior around the guess.
Without drafts the evidence is forgotten too, so that a price once measured too high cannot silence drafting for good.

How long a step may last is decided by a more cautious estimate: see ``tokens_within``.
"""

from dataclasses import dataclass
from statistics import median
from typing import Any

from agentspec.cache.policy import DEFAULT_COST

LOWEST_COST, HIGHEST_COST = 0.0005, 1.0

STEP_MULTIPLE = 2.0
"""A step with several rows may last at most so many times as long as one without drafts."""
AIMED_MULTIPLE = 1.75
"""What a measured estimate aims at, so that steps stay within STEP_MULTIPLE: they vary, and where every step has
drafts, one without drafts is extrapolated and comes out too long."""

_TOGETHER = 16
"""Steps taken in at once: what is done between two steps of the engine costs a multiple of what it costs in a row. The
first steps are taken in sooner."""
_SETTLING = 5
"""Steps of a new number of rows, with or without drafts, whose median is the first idea of their duration."""
_MEAN_STEPS = 64
"""Steps that the running means look back."""
_SLOPE_STEPS = 512
"""Steps that the slope looks back."""
_OUTLIER = 4.0
"""A step that is further than so many times the usual deviation from what was expected counts as being so far off.
Pauses say nothing about the cost of a token, while a lasting change of pace widens the usual deviation and is
followed."""
_FINEST_NOISE, _FIRST_NOISE = 0.01, 0.05
"""Usual deviation of a step, as a share of it: at least, and at least in the beginning, when the slope is a guess."""
_DEVIATIONS = 1.25
"""Standard deviations in a mean absolute deviation, of normal noise."""
_GROWTH = 2.0
"""The latency limit lets a step draft at most so many times the most draft tokens that a step was measured with."""


@dataclass(slots=True)
class _Level:
    """Steps of one number of rows, with drafts or without: running means, and the sums of their least-squares line."""

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

    @classmethod
    def settled(cls, steps: list[tuple[int, float]], slope: float, as_of: int) -> "_Level":
        """Return a level that starts with these steps: (draft tokens, seconds) of each."""
        middle = median(seconds for _, seconds in steps)
        drafted = sum(d for d, _ in steps) / len(steps)
        noise = median(abs(seconds - middle) for _, seconds in steps)
        level = cls(middle, drafted, max(_DEVIATIONS * noise, _FIRST_NOISE * middle), len(steps), as_of=as_of)
        for d, seconds in steps:
            off = d - drafted
            level.dd += off * off
            level.dt += off * (level.believed(off, seconds, slope) - middle)
        return level

    def forget(self, step: int) -> None:
        """Let the sums fade to what they are at that step."""
        kept = (1.0 - 1.0 / _SLOPE_STEPS) ** (step - self.as_of)
        self.dd, self.dt, self.as_of = self.dd * kept, self.dt * kept, step

    def believed(self, off: float, t: float, slope: float) -> float:
        """Return t, brought near to what was expected of a step with ``off`` more draft tokens than usual."""
        expected = self.seconds + slope * off
        limit = _OUTLIER * self.noise
        return min(max(t, expected - limit), expected + limit)

    def learn(self, d: float, t: float, slope: float) -> None:
        """Take in a step of d draft tokens and t seconds."""
        self.count += 1
        weight = max(1.0 / self.count, 1.0 / _MEAN_STEPS)
        d -= self.drafted
        t = self.believed(d, t, slope) - self.seconds
        self.noise = max(self.noise + weight * (abs(t - slope * d) - self.noise), _FINEST_NOISE * self.seconds)
        self.drafted += weight * d
        self.seconds += weight * t
        self.dd += (1.0 - weight) * d * d
        self.dt += (1.0 - weight) * d * t

    def base(self, slope: float) -> float:
        """Return the seconds of a step beside its draft tokens."""
        return max(self.seconds - slope * self.drafted, 0.05 * self.seconds)


class _Batch:
    """The steps with some number of rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.levels: dict[bool, _Level] = {}  # with drafts (True) and without
        self._settling: dict[bool, list[tuple[int, float]]] = {False: [], True: []}
        self.most = 0
        """the most draft tokens that a step had"""
        self.count = 0
        self.share = 0.0
        """of the steps with drafts among all, of late"""

    def learn(self, d: int, t: float, slope: float, step: int) -> None:
        """Take in a step of d draft tokens and t seconds. A level's first steps have nothing to be compared with."""
        drafts = d > 0
        self.count += 1
        self.share += max(1.0 / self.count, 1.0 / _MEAN_STEPS) * (drafts - self.share)
        self.most = max(self.most, d)
        level = self.levels.get(drafts)
        if level is not None:
            level.forget(step)
            level.learn(d, t, slope)
            return
        first = self._settling[drafts]
        first.append((d, t))
        if len(first) >= _SETTLING:
            self.levels[drafts] = _Level.settled(first, slope, step)
            first.clear()

    @property
    def usual(self) -> _Level:
        """The level of the steps with drafts, or else of those without; there is one."""
        return self.levels.get(True) or self.levels[False]

    @property
    def seconds(self) -> float:
        """The mean duration of a step, with or without drafts."""
        return self.base(0.0)

    def base(self, slope: float) -> float:
        """Return the seconds of a step beside its draft tokens, with drafts and without in their shares."""
        if True not in self.levels or False not in self.levels:
            return self.usual.base(slope)
        return self.share * self.levels[True].base(slope) + (1.0 - self.share) * self.levels[False].seconds


class StepCost:
    """Say what verifying one more token costs, and how many tokens a step can afford. Plain arithmetic, no I/O.

    given: the price that the operator set, as a share of a step; None: it is measured from the durations of
    decode-only steps. default: the price before anything is measured.
    """

    def __init__(self, given: float | None = None, default: float = DEFAULT_COST) -> None:
        self.given = given
        self._default = default
        self._batches: dict[int, _Batch] = {}
        self._waiting: list[tuple[int, int, float]] = []
        self._prices: dict[int, float] = {}  # by number of rows, until more is known
        self._affordable: dict[tuple[int, float], float] = {}  # draft tokens, by number of rows and multiple
        self._units: dict[int, float] = {}
        self._rows = 1
        self._steps = 0
        self._largest = 0  # most tokens in a step, of rows and drafts

    def observe(self, rows: int, drafted: int, seconds: float) -> None:
        """Note a step that verified one token of ``rows`` rows each and ``drafted`` draft tokens, in ``seconds``.

        Steps with prompt tokens, and times in which the engine had nothing to do, are not to be given.
        """
        self._waiting.append((rows, drafted, seconds))
        if len(self._waiting) >= min(_TOGETHER, 1 + self._steps // 16):
            self._take_in()

    def cost(self, rows: int) -> float:
        """Return the present price in a batch of ``rows`` rows, as a share of a step.

        A measured one is from LOWEST_COST to HIGHEST_COST.
        """
        if self.given is not None:
            return self.given
        price = self._prices.get(rows)
        if price is None:
            price = self._prices[rows] = self._price(rows)
        return price

    def affordable_tokens(self, rows: int) -> float:
        """Return how many draft tokens fit into a step of ``rows`` rows by STEP_MULTIPLE.

        A step of a seconds without drafts, to which a draft token adds b seconds, may hold d tokens where
        a + b * d = STEP_MULTIPLE * a. By the price, b * rows / a, that is (STEP_MULTIPLE - 1) * rows / price.
        """
        if self.given is not None:
            return (STEP_MULTIPLE - 1.0) * rows / self.given
        return self.tokens_within(rows, AIMED_MULTIPLE)

    def tokens_within(self, rows: int, multiple: float) -> float:
        """Return how many draft tokens keep a step of ``rows`` rows within ``multiple`` times one without drafts.

        That is ``multiple - 1`` tokens a row until it was measured what they take. From then on it is the tokens of a
        usual step and what fits into the time left by a cautious slope. A usual deviation is left free, so that most
        steps stay within the limit and not half of them. The cautious slope is a posterior mean too, but of a prior
        by which a draft token is as dear as a row, plus a standard deviation of what is not known yet. A line says
        little about what lies far beyond the measured steps (on CPUs the time grows faster): at most _GROWTH times the
        most draft tokens measured are allowed.
        """
        tokens = self._affordable.get((rows, multiple))
        if tokens is None:
            tokens = self._affordable[rows, multiple] = self._tokens_within(rows, multiple)
        return tokens

    def row_seconds(self, rows: int) -> float | None:
        """Return the seconds that stand for one of ``rows`` rows in a step without drafts; None: not measured yet."""
        unit = self._units.get(rows)
        if unit is None:
            batch = self._nearest(rows)
            if batch is None:
                return None
            unit = self._units[rows] = batch.base(self._slope(batch)[0]) / rows
        return unit

    def stats(self) -> dict[str, Any]:
        """Return the present estimate as JSON, for as many rows as the latest step had.

        ``given``: the price that was set; ``cost``: the present one, as a share of a step; ``evidence``: 0 (all of it
        is the default) to 1 (all of it was measured); ``rows``; ``ms_per_draft_token``; ``ms_per_step``: of a step
        beside its draft tokens; ``steps``: how many were taken in.
        """
        self._take_in()
        batch = self._nearest(self._rows)
        slope, evidence = self._slope(batch) if batch is not None else (0.0, 0.0)
        return {
            "given": self.given,
            "cost": self.cost(self._rows),
            "evidence": evidence,
            "rows": self._rows,
            "ms_per_draft_token": 1e3 * slope,
            "ms_per_step": 1e3 * batch.base(slope) if batch is not None else 0.0,
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
            batch = self._batches.get(key)
            if batch is None:
                batch = self._batches[key] = _Batch(key)
            if rows + drafted > self._largest:
                # The first step of a size pays for memory, and on GPUs for kernels, that later ones find there.
                self._largest = rows + drafted
                batch.most = max(batch.most, drafted)
                continue
            if key not in slopes:
                slopes[key] = self._slope(batch)[0] if batch.levels else 0.0
            batch.learn(drafted, seconds, slopes[key], self._steps)
        self._prices.clear()
        self._affordable.clear()
        self._units.clear()

    def _price(self, rows: int) -> float:
        batch = self._nearest(rows)
        if batch is None:
            return self._default
        slope, _ = self._slope(batch)
        return min(max(slope * rows / batch.base(slope), LOWEST_COST), HIGHEST_COST)

    def _tokens_within(self, rows: int, multiple: float) -> float:
        tokens = 0.0
        batch = self._nearest(rows)
        if batch is not None:
            usual, unit = batch.usual, batch.usual.seconds / batch.rows
            base = usual.base(self._slope(batch)[0])
            plain = min(batch.levels[False].seconds, base) if False in batch.levels else base
            mean, _, deviation = self._posterior(batch, unit, unit)
            slope = max(mean, 0.0) + deviation
            left = multiple * plain - usual.seconds - usual.noise
            tokens = (usual.drafted + left / slope) * rows / batch.rows
            most = max(known.most * _alike(rows, known.rows) for known in self._batches.values())
            tokens = min(tokens, _GROWTH * most)
        return max(tokens, (multiple - 1.0) * rows)

    def _slope(self, batch: _Batch) -> tuple[float, float]:
        """Seconds that one more draft token takes, and how much of that is evidence (0 to 1)."""
        guess = self._default * batch.seconds / batch.rows
        # The guess may be wrong by as much again, and by more with many rows, where a token can cost anything up to 1.
        slope, evidence, _ = self._posterior(batch, guess, guess * batch.rows**0.5)
        return slope, evidence

    def _posterior(self, batch: _Batch, guess: float, deviation: float) -> tuple[float, float, float]:
        """Return the slope, how much of it is evidence (0 to 1), and its standard deviation, by a normal prior."""
        dd = dt = 0.0
        for other in self._batches.values():
            level = other.levels.get(True)
            if level is not None:
                level.forget(self._steps)
                alike = _alike(batch.rows, other.rows) ** 3
                dd += alike * level.dd
                dt += alike * level.dt
        noise = _DEVIATIONS * batch.usual.noise
        # So much evidence, as a sum of squares of d, weighs as much as the guess:
        trust = (noise / deviation) ** 2
        return (dt + trust * guess) / (dd + trust), dd / (dd + trust), noise / (dd + trust) ** 0.5

    def _nearest(self, rows: int) -> _Batch | None:
        known = self._batches.get(_bucket(rows))
        if known is not None and known.levels:
            return known
        settled = [batch for batch in self._batches.values() if batch.levels]
        return min(settled, key=lambda batch: abs(batch.rows - rows)) if settled else None


def _alike(rows: int, other: int) -> float:
    """Return how alike two numbers of rows are: 1 where they are equal."""
    return min(rows, other) / max(rows, other)


def _bucket(rows: int) -> int:
    """Numbers of rows that are taken together: exact below 16, then to four significant bits."""
    shift = max(0, rows.bit_length() - 4)
    return rows >> shift << shift
