"""Limit the draft tokens of a step, for all rows together, and keep the most probable ones.

One draft may have MAX_DRAFT tokens, and a batch 256 rows. The least of four limits bounds their sum:

setting    ``step_draft_tokens``.
memory     Each position to verify takes logits, float32 over the vocabulary, in several copies. Positions beyond those
           that the engine has reserved memory for must fit in MEMORY_SHARE of its free memory.
scheduler  vLLM schedules a step's rows in order until ``max_num_batched_tokens`` are spent. Drafts get at most
           SCHEDULER_SHARE of what the rows' own tokens leave, so that later rows and prefills get theirs.
latency    A row whose draft is long delays the rows beside it. With more than one row a step may take at most
           ``longest_step`` times as long as one without drafts, or longer where every row accepts enough of its
           drafts; ``StepCost.affordable_tokens`` says how many tokens fit.

If the drafts exceed the budget, the tokens that are most likely to be accepted stay. That probability is the product
of the probabilities along the draft. It falls along the draft, so the tokens that stay are its beginning. A part of the
budget, EVEN_SHARE, is divided evenly, so that rows with surer drafts don't leave the others nothing but longer steps.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.policy import MAX_DRAFT
from agentspec.cache.types import Drafts, Float32Array, Int32Array

Int64 = NDArray[np.int64]

MEMORY_SHARE = 0.25
"""Share of the free memory that drafts may take. The rest is for requests that ask for logprobs: for these vLLM makes
two more copies of rows x (longest draft + 1) positions, which `row_tokens` limits to _ROW_SHARES times the budget."""
SCHEDULER_SHARE = 0.5
EVEN_SHARE = 0.5
_ROW_SHARES = 4
"""Longest draft of a row, in even shares of the budget."""
_TINY = 1e-30
"""Replacement for a probability of 0, which has no finite logarithm."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Hold the engine's limits on drafts; None: no limit known.

    free_bytes: unclaimed memory of the device. position_bytes: memory that verifying one draft token takes.
    provided_tokens: draft tokens of a step for which the engine has reserved memory. scheduled_tokens: most tokens of
    all rows in a step.
    """

    free_bytes: int | None = None
    position_bytes: int = 1
    provided_tokens: int = 0
    scheduled_tokens: int | None = None

    @property
    def draft_bytes(self) -> int | None:
        """Return the bytes that a step's draft tokens may take beyond the reserved memory; None: not known."""
        return None if self.free_bytes is None else int(MEMORY_SHARE * self.free_bytes)


class DraftBudget:
    """Set the budget of draft tokens of each step, and cut drafts to it. setting: the operator's limit, in tokens."""

    def __init__(self, setting: int, limits: EngineLimits | None = None) -> None:
        self._limits = limits or EngineLimits()
        self._fixed, self._fixed_by = setting, "setting"
        if self._limits.draft_bytes is not None:
            memory = self._limits.draft_bytes // self._limits.position_bytes + self._limits.provided_tokens
            if memory < setting:
                self._fixed, self._fixed_by = max(memory, 1), "memory"
        self._rows = 1
        self._tokens, self.limited_by = self._fixed, self._fixed_by
        self._cut_steps = self._cut_tokens = 0

    def tokens(self, rows: int, affordable: float) -> int:
        """Return how many draft tokens a step of ``rows`` rows may hold.

        affordable: the tokens that the step's time allows, from ``StepCost.affordable_tokens``.
        """
        tokens, limited_by = self._fixed, self._fixed_by
        if self._limits.scheduled_tokens is not None:
            scheduled = max(int(SCHEDULER_SHARE * (self._limits.scheduled_tokens - rows)), 0)
            if scheduled < tokens:
                tokens, limited_by = scheduled, "scheduler"
        if rows > 1 and affordable < tokens:
            tokens, limited_by = int(affordable), "latency"
        self._rows, self._tokens, self.limited_by = rows, tokens, limited_by
        return tokens

    def row_tokens(self, rows: int, budget: int) -> int:
        """Return how many tokens each of the rows may draft: _ROW_SHARES times its even share of the budget.

        This is enough for rows that copy long passages, and `cut` need not discard most of what many rows draft.
        """
        return min(max(1, _ROW_SHARES * budget // max(rows, 1)), MAX_DRAFT) if budget > 0 else 0

    def cut(self, drafts: Drafts, budget: int) -> list[list[int]]:
        """Return the drafts of n rows as lists of token ids, cut to the budget."""
        total = len(drafts.token_ids)
        if total <= budget:
            return drafts.lists()
        lengths = kept_lengths(drafts.offsets, drafts.probabilities, budget)
        self._cut_steps += 1
        self._cut_tokens += total - budget
        tokens: list[int] = drafts.token_ids.tolist()
        begins: list[int] = drafts.offsets.tolist()
        return [tokens[begin : begin + length] for begin, length in zip(begins, lengths.tolist(), strict=False)]

    def stats(self) -> dict[str, Any]:
        """Return the latest step's budget as JSON.

        ``tokens``; ``limited_by``: setting, memory, scheduler or latency; ``rows`` of that step; ``cut_steps`` and
        ``cut_tokens`` since start.
        """
        return {
            "tokens": self._tokens,
            "limited_by": self.limited_by,
            "rows": self._rows,
            "cut_steps": self._cut_steps,
            "cut_tokens": self._cut_tokens,
        }


def kept_lengths(offsets: Int32Array, probabilities: Float32Array, budget: int) -> Int64:
    """Return [n] how many tokens of each draft stay if ``budget`` of all tokens stay.

    EVEN_SHARE of the budget goes to the first tokens of each draft, evenly, and the rest to the most probable tokens.
    offsets: [n + 1]; draft i is tokens offsets[i] to offsets[i + 1]. probabilities: [total], the probability that each
    token is accepted if those before it in its draft are. Among equally probable tokens, those earlier in their drafts
    stay, then those of earlier rows.
    """
    counts = np.diff(offsets)
    rows = np.repeat(np.arange(len(counts)), counts)
    # Cumulative sums of non-positive numbers never rise, so `worth` falls along each draft in spite of rounding errors.
    # Rounding makes numbers equal that differ by such errors alone.
    worth = np.round(_log_accepted(offsets, probabilities, rows), 9)
    depth = np.arange(len(rows)) - offsets[:-1][rows]
    even = int(EVEN_SHARE * budget) // max(int(np.count_nonzero(counts)), 1)
    stay = np.lexsort((depth, -worth, depth >= even))[:budget]
    return np.bincount(rows[stay], minlength=len(counts))


def expected_tokens(drafts: Drafts) -> float:
    """Return how many tokens of these drafts are expected to be accepted, of all rows together."""
    rows = np.repeat(np.arange(len(drafts.offsets) - 1), np.diff(drafts.offsets))
    return float(np.exp(_log_accepted(drafts.offsets, drafts.probabilities, rows)).sum())


def _log_accepted(offsets: Int32Array, probabilities: Float32Array, rows: Int64) -> NDArray[np.float64]:
    """Return [total] the logarithm of the probability that each token is accepted. rows: [total] the token's draft."""
    logs = np.cumsum(np.log(np.maximum(probabilities, _TINY, dtype=np.float64)))
    before = np.concatenate(([0.0], logs))[offsets[:-1][rows]]
    found: NDArray[np.float64] = logs - before
    return found
