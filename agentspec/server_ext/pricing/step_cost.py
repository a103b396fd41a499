"""Measure the price of verifying one more token while serving.

A decode step of B rows that verifies d draft tokens takes about ``a(B) + b(B) * d`` seconds: ``a`` is the time of a
step without drafts, ``b`` the time that each draft token adds. One row's share of the step is ``a(B) / B``. A drafting
policy needs the price of one more token in units of that share::

    cost = b / (a / B) = b * B / a

(A draft of k tokens in one row, e of them expected to be accepted, pays if it raises the tokens per second,
``(1 + e) / (a / B + b * k)``, that is ``(1 + e) / (1 + cost * k)``.) The same token costs more in a larger batch,
because that yields more tokens per second without drafts. If a row costs no more than a draft token, ``a`` is
``fixed + b * B`` and the price is ``b * B / (fixed + b * B)``.

A step with any draft takes extra time, because vLLM's rejection sampler runs and rows differ in length. That time is
not part of a token's price; `decide_to_draft` asks whether a step's drafts earn it. So ``b`` is the slope of a
least-squares line through (d, seconds) of the steps with drafts alone, both relative to their running means over steps
with as many rows.
This also excludes the time of a row itself (attention over its context, sampling) and slow drifts (growing contexts,
other load). ``a`` is the time of a step without its draft tokens: the mean over steps without drafts and steps with
drafts less ``b * d``, weighted by their frequency.

Steps with other numbers of rows count too, the less the more the numbers differ. Old steps are forgotten exponentially.
Until drafts of different lengths were seen, the price is a guess: the default, or in larger batches the formula above
with ``fixed = 100 * b``, ``B / (100 + B)``. (A first batch of 64 rows must not be slower than without drafts where a
token costs as much as a row; where it costs less, that is soon measured.) The estimate is the posterior mean of b under
a normal prior around that guess, so measurements replace the guess as they outweigh the noise. Steps without drafts
also age the measurements, so that a price once measured too high cannot stop drafting for good.

A more cautious estimate limits the duration of a step: see ``affordable_tokens``.
"""

import json
import logging
from dataclasses import dataclass
from typing import Any

from agentspec.cache.policy import DEFAULT_COST
from agentspec.server_ext.pricing.step_times import RowTimes, StepTimes
from agentspec.server_ext.settings import LONGEST_STEP

logger = logging.getLogger(__name__)

LOWEST_COST, HIGHEST_COST = 0.0005, 1.0

LEAST_AIMED_SHARE = 0.75
AIMED_DEVIATIONS = 5.0
"""Usual deviations by which a measured estimate aims below the longest duration, so that most steps stay within it.
It aims at LEAST_AIMED_SHARE of that duration or more, because on a busy machine steps without drafts vary as much."""
_FIRST_PLAIN_EVERY, _PLAIN_EVERY = 4, 128
"""Steps with drafts between two measured steps without: until some are measured, and from then on."""
_DRAFTS_EVERY = 32
"""Steps in a row without drafts, because they would not pay, until one has drafts to measure whether they pay now."""
_TOGETHER = 16
"""Number of steps to learn from together, because learning after each step takes several times as long. The first steps
are learned from sooner."""
_FIXED_ROWS = 100
"""Guess at a step's fixed time, in the time of a row."""
_GROWTH = 2.0
"""Most draft tokens that the latency limit allows, in multiples of the most that a measured step had."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Hold what was measured, or guessed, of steps with some number of rows."""

    cost: float
    """price of verifying one more token, as a share of a step; from LOWEST_COST to HIGHEST_COST where it is measured"""
    row_seconds: float | None
    """seconds of a step without drafts, divided by its rows; None: not measured yet"""
    plain_share: float | None = None
    """duration of a step without drafts, as a share of that of a step with drafts less its draft tokens' time;
    None: drafts are not measured yet"""
    token_share: float = 0.0
    """time that each draft token adds to a step, as a share of the same duration"""


class StepCost:
    """Estimate the price of verifying one more token, and the draft tokens that a step can afford. Does no I/O.

    given: the operator's price, as a share of a step; None: measure it from the durations of decode-only steps.
    longest_step: longest duration of a step with several rows, in multiples of one without drafts; None: no limit.
    """

    def __init__(self, given: float | None = None, longest_step: float | None = LONGEST_STEP) -> None:
        self.given = given
        self._longest_step = longest_step
        self.machine = ""
        """the device and the engine's options that decide how long steps take; prices of others are not taken over"""
        self.version = 0
        """number that changes whenever the prices may have changed"""
        self._row_times: dict[int, RowTimes] = {}  # by number of rows (`_bucket`)
        self._waiting: list[tuple[int, int, float]] = []
        self._prices: dict[int, Prices] = {}  # by number of rows, until more is known
        self._rows = 1
        self._steps = 0
        self._largest = 0  # most tokens in a step, of rows and drafts

    def observe(self, rows: int, drafted: int, seconds: float) -> None:
        """Note a step that verified one token of ``rows`` rows each and ``drafted`` draft tokens, in ``seconds``.

        Leave out steps with prompt tokens and times in which the engine was idle.
        """
        self._waiting.append((rows, drafted, seconds))
        if len(self._waiting) >= min(_TOGETHER, 1 + self._steps // 16):
            self._take_in()

    def at(self, rows: int) -> Prices:
        """Return the current prices in a batch of ``rows`` rows."""
        prices = self._prices.get(rows)
        if prices is None:
            prices = self._prices[rows] = self._prices_at(rows)
        return prices

    def decide_to_draft(self, rows: int, drafted: int, expected: float) -> bool:
        """Decide whether the next step carries its ``drafted`` tokens, ``expected`` of which are likely to be accepted.

        It does if they pay: they raise the tokens per second, (rows + expected) / seconds, in spite of the time that
        any draft adds to a step. It always does where the price is given, and until steps with drafts are measured.
        So that both kinds of steps stay measured, one carries drafts that do not pay after _DRAFTS_EVERY without, and
        one leaves out drafts that pay after _PLAIN_EVERY with, unless they would pay even if they doubled the step.
        """
        prices = self.at(rows)
        if prices.plain_share is None:
            return True
        times = self._row_times[_bucket(rows)]
        needed = rows * (1.0 + prices.token_share * drafted)  # for these drafts, if any draft took nothing by itself
        if prices.plain_share * (rows + expected) < needed:
            return times.take_turn(_DRAFTS_EVERY, drafts=True)
        if 0.5 * (rows + expected) < needed:
            return not times.take_turn(_PLAIN_EVERY, drafts=False)
        return True

    def decide_to_measure_plain(self, rows: int) -> bool:
        """Decide whether the next step of ``rows`` rows leaves out its drafts, so that such steps stay measured.

        Ask only where drafts are cut. If nearly all steps have drafts, one in 128 leaves them out.
        """
        times = self._row_times.get(_bucket(rows))
        if self.given is not None or rows < 2 or times is None or times.with_drafts is None:
            return False
        return times.take_turn(_PLAIN_EVERY if times.plain.steps else _FIRST_PLAIN_EVERY, drafts=False)

    def affordable_tokens(self, rows: int, acceptance_length: float = 1.0) -> float:
        """Return how many draft tokens a step of ``rows`` rows can afford; infinity where the operator wants no limit.

        acceptance_length: the lowest mean acceptance length of a row, which decides how long a step may take.

        If the price is given, d tokens fit where a + b * d = multiple * a: a is the time of a step without drafts, b
        the time of a draft token, and the price is b * rows / a.

        If it is measured, a usual step's draft tokens fit, and as many more as fit into the allowed time beyond such a
        step. At least ``longest_step`` - 1 tokens for each row fit. Until draft tokens are measured, no more do.
        """
        if self._longest_step is None:
            return float("inf")
        multiple = _longest_multiple(self._longest_step, acceptance_length)
        if self.given is not None:
            return (multiple - 1.0) * rows / self.given
        tokens = 0.0
        times = self._nearest(rows)
        if times is not None:
            more = (self._allowed_seconds(times, multiple) - times.usual.seconds) / self._cautious_slope(times)
            tokens = min((times.usual.drafted + more) * rows / times.rows, self._extrapolation_limit(rows))
        return max(tokens, (self._longest_step - 1.0) * rows)

    def stats(self) -> dict[str, Any]:
        """Return the current estimate as JSON, for as many rows as the latest step had.

        ``given``: the operator's price; ``cost``: the current price, as a share of a step; ``evidence``: from 0 (the
        default price) to 1 (a measured price); ``rows``; ``ms_per_draft_token``; ``ms_per_step``: without draft tokens;
        ``steps``: the number of measured steps.
        """
        self._take_in()
        times = self._nearest(self._rows)
        slope, evidence = self._slope(times) if times is not None else (0.0, 0.0)
        return {
            "given": self.given,
            "cost": self.at(self._rows).cost,
            "evidence": evidence,
            "rows": self._rows,
            "ms_per_draft_token": 1e3 * slope,
            "ms_per_step": 1e3 * times.base(slope) if times is not None else 0.0,
            "steps": self._steps,
        }

    def dump(self) -> bytes:
        """Return the measurements, for ``restore`` in another process on the same machine. Any thread may call it."""
        row_times = {rows: times.dump() for rows, times in dict(self._row_times).items()}
        return json.dumps({"machine": self.machine, "steps": self._steps, "batches": row_times}).encode()

    def restore(self, dumped: bytes) -> None:
        """Take over what another process measured on this ``machine``. Logs and ignores what is not from ``dump``.

        The largest step is not taken over, because the memory and the kernels of each size are new in this process.
        """
        try:
            found = json.loads(dumped or b"{}")
            if found and found.get("machine", "") != self.machine:
                logger.info("agentspec: the saved prices of verification are not used: measured with other options")
                return
            row_times = {
                int(rows): RowTimes.restored(int(rows), kept) for rows, kept in found.get("batches", {}).items()
            }
            steps = int(found.get("steps", 0))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("agentspec: the saved prices of verification are not used: %s", error)
            return
        self._row_times, self._steps = row_times, steps
        self._take_in()

    def _take_in(self) -> None:
        """Learn from the steps that wait."""
        waiting, self._waiting = self._waiting, []
        self.version += 1
        slopes: dict[int, float] = {}
        for rows, drafted, seconds in waiting:
            if rows < 1 or not 0.0 < seconds < float("inf"):
                continue
            self._steps += 1
            self._rows = rows
            key = _bucket(rows)
            times = self._row_times.get(key)
            if times is None:
                times = self._row_times[key] = RowTimes(key)
            if rows + drafted > self._largest:
                # The first step of a size also allocates memory and, on GPUs, loads kernels, which later steps reuse.
                self._largest = rows + drafted
                times.most_drafted = max(times.most_drafted, drafted)
                continue
            if key not in slopes:
                slopes[key] = self._slope(times)[0] if times.settled else 0.0
            times.learn(drafted, seconds, slopes[key], self._steps)
        self._prices.clear()

    def _prices_at(self, rows: int) -> Prices:
        """Return the prices in a batch of ``rows`` rows, from the measurements of the nearest number of rows."""
        cost, row_seconds = self._guess(rows), None
        nearest = self._nearest(rows)
        if nearest is not None:
            slope, _ = self._slope(nearest)
            base = nearest.base(slope)
            cost, row_seconds = min(max(slope * rows / base, LOWEST_COST), HIGHEST_COST), base / rows
        times = self._row_times.get(_bucket(rows))
        if self.given is not None or times is None or times.with_drafts is None:
            return Prices(cost if self.given is None else self.given, row_seconds)
        slope, _ = self._slope(times)
        return Prices(cost, row_seconds, times.plain.share(slope), slope / times.with_drafts.base(slope))

    def _slope(self, times: RowTimes) -> tuple[float, float]:
        """Return the seconds that one more draft token takes, and the share of that which is evidence (0 to 1)."""
        cost = self._guess(times.rows)
        drafted = 0.0 if times.with_drafts is None else times.share_with_drafts * times.with_drafts.drafted
        guess = cost * times.seconds / (times.rows + cost * drafted)  # a share of a step without its draft tokens
        slope, evidence, _ = self._posterior(times, guess, guess)  # the guess may be wrong by its own size
        return slope, evidence

    def _allowed_seconds(self, times: RowTimes, multiple: float) -> float:
        """Return how long a step may take: ``multiple`` times one without drafts, less a part that is kept free.

        All durations are means, because on a busy machine single steps without drafts vary as much.
        """
        slope, _ = self._slope(times)
        plain = times.usual.base(slope) * (1.0 if times.with_drafts is None else times.plain.share(slope))
        return _aimed_share(times.usual) * multiple * plain

    def _cautious_slope(self, times: RowTimes) -> float:
        """Return the seconds that one more draft token takes, guessed with care.

        They are a posterior mean, under a prior by which it takes as long as a row, plus its standard deviation. They
        are at most those of a usual step divided by all its tokens, unless the mean alone is more.
        """
        usual = times.usual
        of_row = usual.seconds / times.rows
        mean, _, deviation = self._posterior(times, of_row, of_row)
        of_token = usual.seconds / (times.rows + usual.drafted)  # if a row takes no less than a draft token
        return min(max(mean, 0.0) + deviation, max(mean, of_token))

    def _extrapolation_limit(self, rows: int) -> float:
        """Return _GROWTH times the most draft tokens measured.

        A line says little about steps far beyond these: on CPUs their time grows faster.
        """
        return _GROWTH * max(times.most_drafted * _alike(rows, times.rows) for times in self._row_times.values())

    def _guess(self, rows: int) -> float:
        """Return the price in a batch of ``rows`` rows before anything is measured."""
        return max(DEFAULT_COST, rows / (_FIXED_ROWS + rows))

    def _posterior(self, times: RowTimes, guess: float, deviation: float) -> tuple[float, float, float]:
        """Return the slope under a normal prior, its share of evidence (0 to 1), and its standard deviation."""
        dd = dt = 0.0
        for other in self._row_times.values():
            if other.with_drafts is not None:
                other.with_drafts.forget(self._steps)
                alike = _alike(times.rows, other.rows) ** 3
                dd += alike * other.with_drafts.dd
                dt += alike * other.with_drafts.dt
        noise = times.usual.deviation
        # The guess weighs as much as measurements with this sum of squares of d.
        trust = (noise / deviation) ** 2
        return (dt + trust * guess) / (dd + trust), dd / (dd + trust), noise / (dd + trust) ** 0.5

    def _nearest(self, rows: int) -> RowTimes | None:
        """Return the settled measurements with the number of rows nearest to this one; None: there are none yet."""
        known = self._row_times.get(_bucket(rows))
        if known is not None and known.settled:
            return known
        settled = [times for times in self._row_times.values() if times.settled]
        return min(settled, key=lambda times: abs(times.rows - rows)) if settled else None


def _longest_multiple(longest_step: float, acceptance_length: float) -> float:
    """Return how long a step may take, in multiples of one without drafts. acceptance_length: the lowest of its rows.

    A row that gets about one token a step notices long steps as pauses, so its steps stay within ``longest_step``.
    Where each row gets more, steps may take longer in proportion: the mean time for a token stays within it, too.
    """
    return longest_step * max(1.0, acceptance_length - 0.5)


def _aimed_share(times: StepTimes) -> float:
    """Return the share of the longest duration at which to aim."""
    return max(LEAST_AIMED_SHARE, 1.0 / (1.0 + AIMED_DEVIATIONS * times.deviation / times.seconds))


def _alike(rows: int, other: int) -> float:
    """Return the ratio of the smaller to the larger number of rows."""
    return min(rows, other) / max(rows, other)


def _bucket(rows: int) -> int:
    """Return the bucket of a number of rows: exact below 16, then rounded down to four significant bits."""
    shift = max(0, rows.bit_length() - 4)
    return rows >> shift << shift
