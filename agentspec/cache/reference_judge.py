"""What acceptance teaches, in plain Python: the specification of csrc/odds.cpp and csrc/judge.cpp.

Doubles and their order match the native core bit for bit; the judge's weights are stored as 32-bit floats there too.
"""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from agentspec.cache.policy import DraftPolicy

TRAIL = 4  # kind of the trail's proposals; the others have their source's
KINDS = 5
LENGTH_BOUNDS = (1, 2, 3, 4, 6, 9, 15, 31)

# Prior log-odds: longer matches and more agreement are likelier to go on.
_PRIOR_LENGTH = (-2.2, -1.4, -0.9, -0.4, 0.1, 0.6, 1.0, 1.5, 2.2)
_PRIOR_SHAPE = (0.0, -0.8, 0.6, -1.8, -1.0, 0.0, 1.0, -2.2, -1.4, -0.6, 0.6, 1.6)
_SECOND_MINUS, _TRAIL_MINUS = 1.0, 0.5
_LENGTHS, _SHAPES, _RANKS, _DEPTHS = len(_PRIOR_LENGTH), len(_PRIOR_SHAPE), 2, 3
_LEAST = 1e-6  # observations: nothing is certain

_CALM = 2.0  # keeps the first steps of a weight short
_ONES = 2**64 - 1
_K1, _K2 = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93


def cell(kind: int, length: int, count: int, winner: int, second: bool, depth: int) -> int:
    """Index of the odds: `winner` of `count` occurrences are followed by the token, another follows more often."""
    row = (kind * _LENGTHS + bisect_left(LENGTH_BOUNDS, length)) * _SHAPES + _shape(count, winner)
    return (row * _RANKS + second) * _DEPTHS + min(depth, _DEPTHS - 1)


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


def _priors() -> list[float]:
    return [
        1.0 / (1.0 + math.exp(rank * _SECOND_MINUS + (kind == TRAIL) * _TRAIL_MINUS - (length + shape)))
        for kind in range(KINDS)
        for length in _PRIOR_LENGTH
        for shape in _PRIOR_SHAPE
        for rank in range(_RANKS)
        for _ in range(_DEPTHS)
    ]


_PRIORS = _priors()


class Odds:
    """Online odds of acceptance, one tally a cell."""

    def __init__(self, prior_weight: float, memory: float) -> None:
        self._hits = [prior * prior_weight for prior in _PRIORS]
        self._total = [prior_weight] * len(_PRIORS)
        self._memory = memory

    def probability(self, at: int) -> float:
        return self._hits[at] / self._total[at]

    def log_odds(self, at: int) -> float:
        return math.log(max(self._hits[at], _LEAST) / max(self._total[at] - self._hits[at], _LEAST))

    def learn(self, at: int, hit: bool) -> None:
        if self._total[at] >= self._memory:
            self._hits[at] *= 0.5
            self._total[at] *= 0.5
        self._total[at] += 1.0
        if hit:
            self._hits[at] += 1.0

    def to_bytes(self) -> bytes:
        return array("d", [value for pair in zip(self._hits, self._total, strict=True) for value in pair]).tobytes()

    def load(self, data: bytes) -> bool:
        if len(data) != 16 * len(self._hits):
            return False
        values = array("d", data).tolist()
        self._hits, self._total = values[::2], values[1::2]
        return True


class Judge:
    """Online logistic regression over hashed features, AdaGrad; 2**bits weights, each beside its squared errors."""

    def __init__(self, bits: int) -> None:
        self._shift = 64 - bits
        self._weights = array("f", bytes(8 << bits))

    def slot(self, key: int) -> int:
        return (key * _K2 & _ONES) >> self._shift

    def correction(self, slots: Iterable[int]) -> float:
        total = 0.0
        for slot in slots:
            total += self._weights[2 * slot]
        return total

    def learn(self, slots: Sequence[int], error: float, rate: float) -> None:
        weights = self._weights
        for slot in slots:
            weights[2 * slot + 1] += error * error
            weights[2 * slot] += rate * error / math.sqrt(weights[2 * slot + 1] + _CALM)

    def to_bytes(self) -> bytes:
        return self._weights.tobytes()

    def load(self, data: bytes) -> bool:
        if len(data) != 4 * len(self._weights):
            return False
        self._weights = array("f", data)
        return True


def mixed(a: int, b: int) -> int:
    """Well-mixed key of two numbers."""
    z = (a ^ (b * _K1 & _ONES)) * _K2 & _ONES
    return z ^ z >> 32


def token_key(token: int) -> int:
    return (token + 1) * _K1 & _ONES


class Learned:
    """What acceptance taught: one for each tenant, for each session that keeps to itself, for each request that has
    neither."""

    def __init__(self, policy: DraftPolicy, bits: int) -> None:
        self.table = Odds(policy.prior_weight, policy.memory)
        self.judge = Judge(bits)
