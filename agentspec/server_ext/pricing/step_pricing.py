"""Say what the drafts of a step may cost, from what earlier steps took and gave. Needs no engine and does no I/O."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from agentspec.cache import StepDrafts
from agentspec.cache.suffix_cache import DEFAULT_WORK_SECONDS
from agentspec.server_ext.pricing.acceptance_length import AcceptanceLengths
from agentspec.server_ext.pricing.draft_budget import DraftBudget, EngineLimits, expected_tokens
from agentspec.server_ext.pricing.step_cost import StepCost
from agentspec.server_ext.settings import LONGEST_STEP
from agentspec.server_ext.step import AcceptanceLength

_WORK_SHARE = 0.02
"""Most CPU time that work beside drafting takes of a decode step, as a share of its duration."""
_PRICED_STEPS = 16
"""Most steps until an allowance follows what the rows accept."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """Hold what a batch's steps may draft.

    cost: price of verifying one more token, as a share of a decode step. tokens: most draft tokens of a step.
    by_latency: whether the duration of steps is what limits them. row_tokens: most draft tokens of one row. work: CPU
    time for what waits beside drafting, in seconds a step. All hold for this version of the step cost, and before step
    ``until``.
    """

    cost: float = 0.0
    tokens: int = 0
    by_latency: bool = False
    row_tokens: int = 0
    work: float = DEFAULT_WORK_SECONDS
    version: int = -1
    until: int = 0


class StepPricing:
    """Measure steps, price the next ones, and cut their drafts. Steps are numbered by the caller.

    given: the operator's price of a token, as a share of a decode step; None: it is measured. step_tokens: the
    operator's limit on the draft tokens of a step. limits: the engine's. longest_step: the operator's limit on the
    duration of a step with several rows, in multiples of one without drafts; None: none.
    """

    def __init__(
        self,
        given: float | None,
        step_tokens: int,
        limits: EngineLimits | None = None,
        longest_step: float | None = LONGEST_STEP,
    ) -> None:
        self.cost = StepCost(given, longest_step)
        self.budget = DraftBudget(step_tokens, limits)
        self.acceptance_lengths = AcceptanceLengths()
        self._called = 0.0  # when `tick` was called last
        self._elapsed = 0.0  # seconds between its last two calls
        self._usual = 0.0  # seconds between calls, of late; pauses and prompts weigh little. 0.0: not known yet

    def tick(self) -> None:
        """Note the time at which a step ends."""
        now = time.perf_counter()
        if self._called:
            self._elapsed = now - self._called
            usual = self._usual or self._elapsed
            self._usual = usual + 0.1 * (min(self._elapsed, 2.0 * usual) - usual)
        self._called = now

    def latest_work(self) -> float:
        """Return the CPU time for what waits beside drafting after the step that ended last, in seconds."""
        return _work_in(self._elapsed)

    def is_valid(self, allowance: Allowance, step: int) -> bool:
        """Return whether the allowance still holds at a step."""
        return allowance.version == self.cost.version and step < allowance.until

    def allow(self, rows: Sequence[tuple[AcceptanceLength, int]], count: int, step: int) -> Allowance:
        """Return what a batch of ``count`` rows may draft from a step on.

        rows: measure and length in tokens of each row that gets drafts.
        """
        prices = self.cost.at(count)
        seconds = self._usual if prices.row_seconds is None else count * prices.row_seconds
        affordable = self.cost.affordable_tokens(count, self.acceptance_lengths.lowest(rows, step, count))
        tokens = self.budget.tokens(count, affordable)
        return Allowance(
            cost=prices.cost,
            tokens=tokens,
            by_latency=self.budget.limited_by == "latency",
            row_tokens=self.budget.most(len(rows), tokens),
            work=_work_in(seconds) if seconds else DEFAULT_WORK_SECONDS,
            version=self.cost.version,
            until=step + _PRICED_STEPS,
        )

    def cut(self, drafts: StepDrafts, allowance: Allowance, count: int) -> list[list[int]]:
        """Return the drafts of a batch of ``count`` rows as lists of token ids, cut to the allowance.

        All are left out where they would not earn what a step takes for having any; and now and then where they would
        be cut, so that the duration of a step without any is known.
        """
        total = len(drafts.token_ids)
        if total > allowance.tokens:
            leave_out = allowance.by_latency and self.cost.should_measure_plain(count)
        elif total and self.cost.given is None:
            leave_out = not self.cost.pays(count, total, expected_tokens(drafts))
        else:
            leave_out = False
        return [[] for _ in range(len(drafts.offsets) - 1)] if leave_out else self.budget.cut(drafts, allowance.tokens)


def _work_in(seconds: float) -> float:
    """Return the CPU time for what waits beside drafting in a step of so many seconds."""
    return min(_WORK_SHARE * seconds, DEFAULT_WORK_SECONDS)
