"""Define the interface between fusion and a draft model, in plain arrays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]

RESTS = -1
"""Stands in place of a number of tokens where a drafter of whole batches does not run at all."""


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


@dataclass(frozen=True, slots=True)
class TokenChoices:
    """Say how many tokens a drafter of whole batches may draft for each row in one step.

    fewest: of a step in which it runs; 0: its first pass has to run, whether it drafts or not. most: 0 if the drafter
    cannot draft in this step (then fewest is 0, too). may_rest: whether it may be left out of this step instead.
    """

    fewest: int
    most: int
    may_rest: bool = False

    @property
    def cheapest(self) -> int:
        """Return the choice that takes the least time: RESTS if it may rest, otherwise the fewest tokens."""
        return RESTS if self.may_rest else self.fewest

    @property
    def others(self) -> range:
        """Return all choices but the least, ascending."""
        return range(self.fewest if self.may_rest else self.fewest + 1, self.most + 1)


class StepModel(Protocol):
    """Run a draft model for one step, at most once.

    ``positions``: n, the most tokens it drafts. ``overlaps``: whether it runs in parallel to the host, so that
    launching it before the suffix index drafts saves time. ``choices``: for a drafter of whole batches, how many tokens
    this step can ask for. None: the model drafts for chosen rows only, and can take and score proposals, which a
    drafter of whole batches cannot.
    """

    @property
    def positions(self) -> int: ...
    @property
    def overlaps(self) -> bool: ...
    @property
    def choices(self) -> TokenChoices | None: ...

    def launch(self, rows: Sequence[int], proposals: Int64) -> Callable[[], ModelDraft]:
        """Start drafting. Returns a function that waits for the answer and returns it.

        rows: [R] rows of the engine's batch, which may repeat. proposals: int64 [R, n], tokens that the model has to
        take and score, then UNFORCED. A drafter of whole batches gets only UNFORCED, in a column for each token to
        draft. Both the call and the returned function may raise the model's errors.
        """
        ...

    def rest(self) -> None:
        """Leave the model out of this step. Call it only if ``choices.may_rest``. May raise the model's errors."""
        ...
