"""Measure decode steps while serving, and say what the drafts of the next may cost.

``step_pricing``       StepPricing: what the engine asks, once a step; its parts are
``step_times``         how long steps take, by their numbers of rows and draft tokens
``step_cost``          the price of verifying one more token, and how many a step can afford, from those times
``acceptance_length``  the tokens that a step gives each row; the row that gets fewest limits the duration of steps
``draft_budget``       the least of all limits on a step's draft tokens, and which of them stay
``work_time``          the CPU time of a step for work beside drafting: starts and ends, stored turns, indexing
"""

from agentspec.server_ext.pricing.draft_budget import EngineLimits
from agentspec.server_ext.pricing.step_pricing import Allowance, StepPricing

__all__ = ["Allowance", "EngineLimits", "StepPricing"]
