"""Define the interface between fusion and a draft model, in plain arrays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FREE = -1
"""Entry of a proposal at which the model takes its own token."""

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ModelDraft:
    """Hold a draft model's answer for R rows, on the host."""

    tokens: Int64
    """[R, n]: the proposal's token if there was one, else the model's"""
    probabilities: NDArray[np.float32]
    """[R, n]: the model's probability of that token"""
    top: Int64
    """[R, n]: the model's most probable token, given the tokens taken before it"""
    top_probabilities: NDArray[np.float32]
    """[R, n]"""


class StepModel(Protocol):
    """Run a draft model for one step, at most once.

    ``positions``: n, the tokens it drafts. ``overlaps``: whether it runs in parallel to the host, so that launching it
    before the suffix index drafts saves time.
    """

    @property
    def positions(self) -> int: ...
    @property
    def overlaps(self) -> bool: ...

    def launch(self, rows: Sequence[int], proposals: Int64) -> Callable[[], ModelDraft]:
        """Start drafting. Returns a function that waits for the answer and returns it.

        rows: [R] rows of the engine's batch, which may repeat. proposals: int64 [R, n], tokens that the model has to
        take and score, then FREE. Both the call and the returned function may raise the model's errors.
        """
        ...
