"""Plain data that passes between the engine's adapter, the drafting engine and fusion."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.suffix_cache import BatchHandle
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.metrics import RequestFigures

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that is seen for the first time.

    prompt: token ids [P]. end_tokens: those that end its response. api_id: the id under which its figures are asked
    for; None: the request id.
    """

    request_id: str
    prompt: Sequence[int]
    identity: Identity
    end_tokens: Sequence[int] = ()
    api_id: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The n requests that have a row in a step, in order.

    Rows change much more rarely than steps. A reader makes a new batch when they change and hands out the same one
    while they stay, so what depends on the rows alone is worked out once a batch.
    """

    request_ids: tuple[str, ...]
    rows: Int32
    """[n] which row of the engine's token array"""

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass(slots=True)
class Step:
    """One decode step: n rows that have just been given verified tokens.

    Its reader may fill it anew for the next step, so it is good for one call of ``propose``.
    """

    batch: Batch
    started: Sequence[NewRequest]
    """the requests of the batch that are seen for the first time"""
    tokens: Int32
    """[R, L] the engine's token array, prompt and verified output of each row; read in place"""
    lengths: Int32
    """[n] how many tokens of a row are valid"""
    max_draft_tokens: Int32
    """[n] how many tokens may be drafted"""
    num_verified_draft_tokens: Int32
    """[n] how many tokens of the previous draft were really verified"""
    num_draft_tokens: int
    """draft tokens in the step's forward pass, of all rows: at least the sum of ``num_verified_draft_tokens``"""
    seconds: float | None = None
    """how long the step took, if it was one of decoding only, else None"""


class AwaitsVerification(Protocol):
    """What waits for a request's next verified tokens in order to learn from them. ``length``: tokens it had then."""

    length: int

    def learn(self, verified: Sequence[int]) -> None:
        """Learn from the tokens that followed."""


@dataclass(slots=True)
class RunningMean:
    """A mean that forgets: of ``count`` values, or of the latest ones where more were added than its memory holds."""

    value: float = 0.0
    count: float = 0.0

    def add(self, value: float, memory: float) -> None:
        """Take in a value, with a memory of so many."""
        self.count = min(self.count + 1.0, memory)
        self.value += (value - self.value) / self.count


@dataclass(slots=True, eq=False)
class RequestState:
    """All that is remembered of one running request."""

    request_id: str
    identity: Identity
    figures: RequestFigures
    length: int
    """tokens of its text that its figures have taken in"""
    failed: bool = False
    """an error was met with it, so it gets no drafts any more"""
    draft_source: str | None = None
    """where the first token of its latest draft came from, for the step record"""
    draft_ns: int = 0
    """nanoseconds that this draft took, for the step record"""
    alternatives: AwaitsVerification | None = None
    """what fusion weighed in the step before"""
    promised: float = 0.0
    """tokens that its latest suffix draft was expected to bring"""
    model_gain: RunningMean = field(default_factory=RunningMean)
    """how many more tokens than usual the draft model adds to its drafts"""


@dataclass(slots=True, eq=False)
class DraftRows:
    """The n rows of a step that get drafts, in the form that `SuffixCache.step` and fusion take."""

    states: Sequence[RequestState]
    handle: BatchHandle
    tokens: Int32
    """[R, L] the engine's token array"""
    rows: Int32
    """[n] which row of ``tokens``"""
    lengths: Int32
    """[n]"""
    max_draft_tokens: Int32
    """[n]"""
    num_verified_draft_tokens: Int32
    """[n]"""
