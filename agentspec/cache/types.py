"""The plain data that goes into and comes out of `SuffixCache`."""

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from operator import mul
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

SOURCES = ("request", "session", "group", "global", "model")
"""Where a drafted token can come from; the index is the value in every `sources` array. "model": another drafter's
token, taken in by `SuffixCache.offer`."""

MODEL = SOURCES.index("model")

Scope = Literal["tenant", "session", "none"]
"""What a request draws on beside its own text, and gives to: its session, group and tenant; its session; nothing."""

SCOPES: tuple[Scope, ...] = get_args(Scope)
"""From the widest to the narrowest."""

Int32Array = NDArray[np.int32]
UInt8Array = NDArray[np.uint8]
Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be held, in tokens and in bytes; None: no limit."""

    tokens: int | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One token that a source proposes for one position of a draft.

    probability: that it is accepted, given that the draft before it is. source: one of SOURCES. rank: 0 for
    the source's most frequent successor, 1 for its second, 2 for the place after the last matched one, continued past
    a mismatch. match_length: tokens of context that match. count: occurrences of that context that were looked at.
    share: the part of them that this token followed.
    """

    token: int
    probability: float
    source: str
    rank: int
    match_length: int
    count: int
    share: float


@dataclass(frozen=True, slots=True)
class Draft:
    """One request's draft of k tokens.

    token_ids: int32 [k]. probabilities: float32 [k], that the token is accepted given that those before
    it are. sources: uint8 [k], indices of SOURCES. source: name of the first token's source, "" where k is 0.
    match_length: tokens of context that the first token's source matched.
    """

    token_ids: Int32Array
    probabilities: Float32Array
    sources: UInt8Array
    match_length: int

    @property
    def source(self) -> str:
        return SOURCES[int(self.sources[0])] if len(self.sources) else ""


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of n requests.

    token_ids: int32 [total]; request i has token_ids[offsets[i]:offsets[i + 1]]. offsets: int32 [n + 1].
    sources: uint8 [total], indices of SOURCES. probabilities: float32 [total], that the token is accepted
    given that those before it are. match_lengths: int32 [n], tokens of context that the first token's source matched.
    """

    token_ids: Int32Array
    offsets: Int32Array
    sources: UInt8Array
    probabilities: Float32Array
    match_lengths: Int32Array

    def lists(self) -> list[list[int]]:
        """Return the drafts as one list of token ids a request."""
        tokens: list[int] = self.token_ids.tolist()
        bounds: list[int] = self.offsets.tolist()
        return [tokens[begin:end] for begin, end in pairwise(bounds)]

    def expected(self) -> list[float]:
        """Return how many tokens of each draft should be accepted: the sum of their cumulative probabilities."""
        probabilities: list[float] = self.probabilities.tolist()
        bounds: list[int] = self.offsets.tolist()
        return [sum(accumulate(probabilities[begin:end], mul)) for begin, end in pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class StepDrafts(Drafts):
    """The drafts of a step's n requests, and how their previous drafts fared.

    accepted, drafted: int32 [n, len(SOURCES)], tokens of the previous draft that were accepted, and verified at all.
    """

    accepted: Int32Array
    drafted: Int32Array


@cache
def no_drafts(count: int) -> StepDrafts:
    """Return a step of `count` requests without drafts, and without any before it. Cached and read-only."""
    none, offsets = np.zeros((count, len(SOURCES)), np.int32), np.zeros(count + 1, np.int32)
    none.flags.writeable = offsets.flags.writeable = False
    sources, probabilities = np.zeros(0, np.uint8), np.zeros(0, np.float32)
    return StepDrafts(np.zeros(0, np.int32), offsets, sources, probabilities, none[:, 0], none, none)


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """What one finished request adds to its session: all that is needed to rebuild the indexes.

    kept: tokens at the start of the session's previous context that this prompt repeats, so that the prompt is
    previous_context[:kept] + prompt_tail. prompt_tail, response: int32 arrays. Without a session, kept is 0 and
    prompt_tail is only the end of the prompt. group, scope: what the request was started with.
    """

    tenant: str | None
    session: str | None
    kept: int
    prompt_tail: Int32Array
    response: Int32Array
    group: str | None = None
    scope: Scope = "tenant"


@dataclass(frozen=True, slots=True)
class CacheStats:
    """tokens: held for sessions, groups and tenants (what `max_tokens` limits). bytes: of all indexes, running requests
    included; what was learned about drafts, 2 MB a tenant, is not. pending: tokens that are held but not indexed yet.
    """

    tokens: int
    bytes: int
    sessions: int
    requests: int
    tenants: int
    pending: int
