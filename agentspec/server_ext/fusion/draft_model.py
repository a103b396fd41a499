"""Say what fusion asks of a draft model, and what it is told: plain arrays, whatever the model is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FREE = -1
"""In a proposal: the model takes its own token here."""

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ModelDraft:
    """A draft model's answer for R of its rows, on the host."""

    tokens: Int64
    """[R, n]: the proposal's token where there was one, else the model's"""
    probabilities: NDArray[np.float32]
    """[R, n]: the model's probability of that token"""
    top: Int64
    """[R, n]: the model's likeliest token, given the tokens taken before it"""
    top_probabilities: NDArray[np.float32]
    """[R, n]"""


class StepModel(Protocol):
    """A draft model as it can be asked in one step, once.

    ``positions``: n, the tokens it drafts. ``overlaps``: whether it works beside the host, so that it is worth
    launching before the suffix index is asked.
    """

    @property
    def positions(self) -> int: ...
    @property
    def overlaps(self) -> bool: ...

    def launch(self, rows: Sequence[int], proposals: Int64) -> Callable[[], ModelDraft]:
        """Begin to draft. The answer is waited for by calling the result.

        rows: [R] the engine's batch rows, which may repeat. proposals: int64 [R, n], tokens that the model is to take
        and score, FREE from where on it goes its own way. Raises whatever the model raises, here or in the result.
        """
        ...
