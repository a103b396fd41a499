"""Define the data that passes between vLLM's adapter, the drafting engine and fusion."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agentspec.cache import StepDrafts, SuffixCache
from agentspec.cache.policy import MAX_DRAFT
from agentspec.cache.running import BatchHandle
from agentspec.cache.suffix_cache import DEFAULT_WORK_SECONDS
from agentspec.server_ext.figures.response_count import Repetition, ResponseCount
from agentspec.server_ext.figures.traces import Trace
from agentspec.server_ext.identity import Identity

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class NewRequest:
    """Hold a request that is seen for the first time, or for the first time with this prompt.

    prompt: token ids [P]; an array is valid during the step only. end_tokens: tokens that end its response. api_id: the
    id in the API's response, under which its figures are kept; None: the request id. call: tells its API call from
    others with that id. detailed: whether it asked for the sources of its tokens. prediction: tokens that it expects as
    its response. quotable: tokens that its response may quote. repetition: also ends its response; None: none does.
    never_drafted: tokens that its drafts end before, besides ``end_tokens``.
    """

    request_id: str
    prompt: Sequence[int] | Int32
    identity: Identity
    end_tokens: Sequence[int] = ()
    api_id: str | None = None
    call: str = ""
    detailed: bool = False
    prediction: Sequence[int] = ()
    quotable: Sequence[int] | Int32 = ()
    repetition: Repetition | None = None
    never_drafted: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class Batch:
    """Hold the n requests that have a row in a step, in order.

    Most steps have the same rows as the step before. The reader makes a new batch only when rows change, so that
    results which depend on the rows alone are computed once for each batch.
    """

    request_ids: tuple[str, ...]
    rows: Int32
    """[n] row of each request in the engine's token array"""

    def __len__(self) -> int:
        return len(self.request_ids)

    @cached_property
    def places(self) -> dict[str, int]:
        """Return the place of each request in the batch."""
        return {request_id: place for place, request_id in enumerate(self.request_ids)}


@dataclass(slots=True)
class Step:
    """Hold one decode step: n rows that have just got verified tokens.

    The reader may reuse the object for the next step, so it is valid for one call of ``propose``.
    """

    batch: Batch
    started: Sequence[NewRequest]
    """the requests of the batch that are seen for the first time, or with another prompt"""
    tokens: Int32
    """[R, L] the engine's token array, prompt and verified output of each row; read in place"""
    lengths: Int32
    """[n] number of valid tokens of each row"""
    max_draft_tokens: Int32
    """[n] most tokens to draft"""
    num_verified_draft_tokens: Int32
    """[n] number of tokens of the previous draft that were verified"""
    num_draft_tokens: int
    """draft tokens of all rows in the step's forward pass: at least the sum of ``num_verified_draft_tokens``"""
    seconds: float | None = None
    """duration of the step in seconds; None if it also had prompt tokens"""


def spread_drafts(drafts: list[list[int]], rows: Sequence[int], count: int) -> list[list[int]]:
    """Return the drafts of ``count`` rows: the given ones at ``rows``, and empty ones elsewhere."""
    result: list[list[int]] = [[] for _ in range(count)]
    for row, draft in zip(rows, drafts, strict=True):
        result[row] = draft
    return result


class AwaitsVerification(Protocol):
    """Learn from a request's next verified tokens. ``length``: tokens of its text when this object was made."""

    length: int

    def learn(self, verified: Sequence[int]) -> None:
        """Learn from the verified tokens that followed."""


@dataclass(slots=True)
class RunningMean:
    """Keep the mean of ``count`` values, or an exponential moving mean once there are more than the memory."""

    value: float = 0.0
    count: float = 0.0

    def add(self, value: float, memory: float, times: float = 1.0) -> None:
        """Add a value, or the mean of ``times`` values. memory: number of latest values that the mean covers."""
        self.count = min(self.count + times, memory)
        self.value += min(times / self.count, 1.0) * (value - self.value)


@dataclass(slots=True, eq=False)
class AcceptanceLength:
    """Hold the mean acceptance length of a row, in tokens per step.

    The mean covers its steps up to step number ``step``, at which its text had ``length`` tokens.
    """

    length: int
    step: int
    mean: RunningMean = field(default_factory=RunningMean)


@dataclass(slots=True, eq=False)
class RequestState:
    """Hold the state of one running request."""

    request_id: str
    identity: Identity
    response: ResponseCount
    """what its figures count, and its prompt's length"""
    acceptance_length: AcceptanceLength
    not_drafted: frozenset[int] = frozenset()
    """tokens that its drafts end before: those that end its response, and others"""

    # --- Its start in the cache, and its end (`requests.turnover`)

    awaits_start: bool = False
    """whether the cache is yet to start it, so that it gets no drafts"""
    started: bool = False
    """whether the cache has started it; stays false if the start fails"""
    failed: bool = False
    """whether it gets no drafts any more, because of an error or because its tenant was forgotten"""

    # --- For its trace and the step record (`figures.accounts`)

    draft_source: str | None = None
    """source of the first token of its latest draft"""
    draft_ns: int = 0
    """time that its latest draft took, in nanoseconds"""
    trace: Trace | None = None
    """its steps, if it asked for them"""

    # --- What fusion learns

    alternatives: AwaitsVerification | None = None
    """alternatives that fusion scored in the step before"""
    expected_tokens: float = 0.0
    """expected accepted tokens of its latest suffix draft"""
    model_gain: RunningMean = field(default_factory=RunningMean)
    """mean gain by the draft model beyond the usual gain, in tokens (`fusion.scheduler`)"""

    def may_draft(self, token: int) -> bool:
        """Return whether a draft may hold a token."""
        return token not in self.not_drafted

    @property
    def gets_drafts(self) -> bool:
        """Return whether it has started in the cache, and did not fail."""
        return not (self.failed or self.awaits_start)


@dataclass(slots=True, eq=False)
class DraftRows:
    """Hold the n rows of a step that get drafts, for the suffix cache and fusion."""

    states: Sequence[RequestState]
    handle: BatchHandle
    tokens: Int32
    """[R, L] the engine's token array"""
    rows: Int32
    """[n] row of each request in ``tokens``"""
    lengths: Int32
    """[n]"""
    max_draft_tokens: Int32
    """[n]"""
    num_verified_draft_tokens: Int32
    """[n]"""
    work_seconds: float = DEFAULT_WORK_SECONDS
    """CPU seconds for the cache's work beside drafting: indexing and removing what was evicted"""

    def draft(self, cache: SuffixCache, cost: float, most: int = MAX_DRAFT) -> StepDrafts:
        """Pass this step to ``cache``, and return its drafts. cost, most, errors: as in `SuffixCache.step`."""
        return cache.step(
            self.handle,
            self.tokens,
            self.rows,
            self.lengths,
            self.max_draft_tokens,
            self.num_verified_draft_tokens,
            cost=cost,
            work_seconds=self.work_seconds,
            most=most,
        )
