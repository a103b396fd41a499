"""Define the interface between fusion and a draft model, in plain arrays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]

RESTS = -1
"""Entry of `StepModel.choices` with which a drafter of whole batches does not run at all."""


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

    def finite(self) -> "ModelDraft":
        """Return the answer with probability 0 in place of NaN and infinity, as hidden states may have overflowed."""
        if np.isfinite(self.probabilities).all() and np.isfinite(self.top_probabilities).all():
            return self
        numbers = (np.nan_to_num(each, posinf=0.0) for each in (self.probabilities, self.top_probabilities))
        probabilities, top_probabilities = numbers
        return ModelDraft(self.tokens, probabilities, self.top, top_probabilities)


class StepModel(Protocol):
    """Run a draft model for one step, at most once.

    ``positions``: n, the most tokens it drafts. ``overlaps``: whether it runs in parallel to the host, so that
    launching it before the suffix index drafts saves time.
    ``choices``: None for a model that drafts for chosen rows only and can take and score proposals. A drafter of whole
    batches can do neither. Its ``choices`` are the numbers of tokens that this step can ask for, ascending; the first
    are computed in any case. RESTS comes first if the step may leave the model out. [0]: it cannot run in this step.
    """

    @property
    def positions(self) -> int: ...
    @property
    def overlaps(self) -> bool: ...
    @property
    def choices(self) -> Sequence[int] | None: ...

    def launch(self, rows: Sequence[int], proposals: Int64) -> Callable[[], ModelDraft]:
        """Start drafting. Returns a function that waits for the answer and returns it.

        rows: [R] rows of the engine's batch, which may repeat. proposals: int64 [R, n], tokens that the model has to
        take and score, then UNFORCED. A model with ``choices`` gets only UNFORCED, in a column for each token to draft.
        Both the call and the returned function may raise the model's errors.
        """
        ...

    def rest(self) -> None:
        """Leave the model out of this step, where ``choices`` has RESTS. May raise the model's errors."""
        ...
