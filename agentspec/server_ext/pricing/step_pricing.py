"""Say what the drafts of a step may cost, from the durations and accepted tokens of earlier steps.

Needs no engine and does no I/O.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agentspec.cache import StepDrafts
from agentspec.cache.suffix_cache import DEFAULT_WORK_SECONDS
from agentspec.server_ext.pricing.acceptance_length import AcceptanceLengths
from agentspec.server_ext.pricing.draft_budget import DraftBudget, EngineLimits, expected_tokens
from agentspec.server_ext.pricing.step_cost import StepCost
from agentspec.server_ext.pricing.work_time import WorkTime
from agentspec.server_ext.settings import LONGEST_STEP
from agentspec.server_ext.step import AcceptanceLength

_PRICED_STEPS = 16
"""Most steps for which an allowance holds. Then it is computed anew from what the rows accept."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """Hold what a batch's steps may draft.

    cost: price of verifying one more token, as a share of a decode step. tokens: most draft tokens of a step.
    by_latency: whether the duration of steps limits the tokens. row_tokens: most draft tokens of one row. work: CPU
    seconds of a step for work beside drafting (`WorkTime`). All hold while the step cost has this ``version``, and
    before step ``until``.
    """

    cost: float = 0.0
    tokens: int = 0
    by_latency: bool = False
    row_tokens: int = 0
    work: float = DEFAULT_WORK_SECONDS
    version: int = -1
    until: int = 0


class StepPricing:
    """Measure steps, price the next ones, and cut their drafts. The caller numbers the steps.

    given: the operator's price of a token, as a share of a decode step; None: it is measured. step_tokens: the
    operator's limit on the draft tokens of a step. limits: the engine's. longest_step: the operator's limit on the
    duration of a step with several rows, in multiples of one without drafts; None: no limit.
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
        self.work_time = WorkTime()

    def is_valid(self, allowance: Allowance, step: int) -> bool:
        """Return whether the allowance still holds at a step."""
        return allowance.version == self.cost.version and step < allowance.until

    def allow(self, rows: Sequence[tuple[AcceptanceLength, int]], count: int, step: int) -> Allowance:
        """Return what a batch of ``count`` rows may draft from a step on.

        rows: measure and length in tokens of each row that gets drafts.
        """
        prices = self.cost.at(count)
        seconds = None if prices.row_seconds is None else count * prices.row_seconds
        affordable = self.cost.affordable_tokens(count, self.acceptance_lengths.lowest(rows, step, count))
        tokens = self.budget.tokens(count, affordable)
        return Allowance(
            cost=prices.cost,
            tokens=tokens,
            by_latency=self.budget.limited_by == "latency",
            row_tokens=self.budget.row_tokens(len(rows), tokens),
            work=self.work_time.in_step(seconds),
            version=self.cost.version,
            until=step + _PRICED_STEPS,
        )

    def cut(self, drafts: StepDrafts, allowance: Allowance, count: int) -> list[list[int]]:
        """Return the drafts of a batch of ``count`` rows as lists of token ids, cut to the allowance.

        All drafts are left out if they would not earn the time that any draft adds to a step. Where the latency limit
        would cut them, all are left out now and then, so that the duration of a step without drafts stays known.
        """
        total = len(drafts.token_ids)
        if total > allowance.tokens:
            leave_out = allowance.by_latency and self.cost.decide_to_measure_plain(count)
        elif total and self.cost.given is None:
            leave_out = not self.cost.decide_to_draft(count, total, expected_tokens(drafts))
        else:
            leave_out = False
        return [[] for _ in range(len(drafts.offsets) - 1)] if leave_out else self.budget.cut(drafts, allowance.tokens)
