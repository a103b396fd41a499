"""DraftPolicy: how long a draft is worth it, from odds of acceptance that are learned while serving.

A draft grows token by token. At each position every source proposes the most frequent successor of its longest
match; a table of odds, counted online, gives each proposal's chance of being accepted, by source, match length,
agreement among the matched places and with the other sources. The likeliest is taken. The draft is cut where it
brings the most expected tokens per unit of work, (1 + sum of cumulative chances) / (1 + cost * length), and left out
where none pays.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass

from agentspec.cache.types import SOURCES
from agentspec.errors import ConfigurationError

LENGTH_BOUNDS = (1, 2, 3, 4, 6, 9, 15, 31)
LENGTHS = len(LENGTH_BOUNDS) + 1
SHAPES = 12
OTHERS = 3
CELLS = len(SOURCES) * LENGTHS * SHAPES * OTHERS
MAX_DRAFT = 128

# Prior log-odds: longer matches and more agreement are likelier to go on.
_PRIOR_LENGTH = (-2.2, -1.4, -0.9, -0.4, 0.1, 0.6, 1.0, 1.5, 2.2)
_PRIOR_SHAPE = (0.0, -0.8, 0.6, -1.8, -1.0, 0.0, 1.0, -2.2, -1.4, -0.6, 0.6, 1.6)
_PRIOR_OTHERS = (0.2, 0.5, -0.2)


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """Settings of the drafting rule.

    cost: price of verifying one more token, as a share of a decode step; higher means shorter drafts.
    max_draft: most tokens in a draft. min_match: shortest context, in tokens, that may be drafted from.
    prior_weight: observations that the prior odds count for. memory: observations of one kind after which the older
    ones count half. Raises ConfigurationError for a value out of range.
    """

    cost: float = 0.02
    max_draft: int = 32
    min_match: int = 1
    prior_weight: float = 8.0
    memory: float = 200.0

    def __post_init__(self) -> None:
        _check("cost", self.cost, 0.0, 10.0)
        _check("max_draft", self.max_draft, 0, MAX_DRAFT)
        _check("min_match", self.min_match, 1, 256)
        _check("prior_weight", self.prior_weight, 0.1, 1e6)
        _check("memory", self.memory, 2.0, 1e12)

    def priors(self) -> list[float]:
        """Prior chance of every cell, in the order of `cell`."""
        return [
            1.0 / (1.0 + math.exp(-(length + shape + others)))
            for _ in SOURCES
            for length in _PRIOR_LENGTH
            for shape in _PRIOR_SHAPE
            for others in _PRIOR_OTHERS
        ]


def cell(source: int, length: int, count: int, winner: int, others: int) -> int:
    """Index of the odds for a proposal: `length` tokens match, `winner` of `count` matched places agree on it.

    others: 0 where no other source proposes anything, 1 where one proposes the same, 2 where all propose another.
    """
    row = (source * LENGTHS + bisect_left(LENGTH_BOUNDS, length)) * SHAPES + _shape(count, winner)
    return row * OTHERS + others


def _shape(count: int, winner: int) -> int:
    if count == 1:
        return 0
    if count == 2:
        return winner
    if count <= 5:
        return 6 if winner == count else 3 if 2 * winner < count else 4 if 4 * winner < 3 * count else 5
    if winner == count:
        return 11
    return 7 if 4 * winner < count else 8 if 2 * winner < count else 9 if 4 * winner < 3 * count else 10


def _check(name: str, value: float, low: float, high: float) -> None:
    kind = int if isinstance(low, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        what = "an integer" if isinstance(low, int) else "a number"
        raise ConfigurationError(f"{name}={value!r}: give {what} from {low:g} to {high:g}")
