"""Define the plain data that `SuffixCache` takes and returns."""

from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import accumulate, pairwise
from operator import mul
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import ConfigurationError

SOURCES = ("request", "session", "group", "global", "public", "sibling", "prediction", "model", "quote")
"""Sources of a drafted token; every `sources` array holds indices into this tuple. "sibling": a request of the same
group or session that runs at the same time. "prediction": the response that the request's caller expects. "model":
another drafter's token, merged by `SuffixCache.merge_drafts`. "quote": text that the response may quote."""

MAX_QUOTABLE = 65_536
"""Most tokens of the texts that a response may quote, such as a long prompt's text in several spellings."""

Scope = Literal["tenant", "session", "none"]
"""Texts that a request drafts from and adds to, beside its own. "tenant": its session, group and tenant. "session": its
session and the session's family. "none": none."""

SCOPES: tuple[Scope, ...] = get_args(Scope)
"""All scopes, from the widest to the narrowest."""

DEFAULT_MAX_BYTES = 2**30
"""Budget for all memory of a cache, in bytes."""

Int32Array = NDArray[np.int32]
UInt8Array = NDArray[np.uint8]
UInt64Array = NDArray[np.uint64]
Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Budget:
    """Limit what is held, in tokens and in bytes; None: no limit."""

    tokens: int | None = None
    bytes: int | None = None


HistoryUnit = Literal["weights", "epochs", "tokens"]

_LARGEST_WINDOW = 10**15
HISTORY_UNITS: tuple[HistoryUnit, ...] = get_args(HistoryUnit)
UNIT_NUMBERS = {unit: number for number, unit in enumerate(HISTORY_UNITS, 1)}
"""The core's number of each unit of a history window."""


@dataclass(frozen=True, slots=True)
class HistoryWindow:
    """Limit how long groups and tenants draft from a response: `size` weights, epochs or tokens.

    Weights and epochs: the response was said under one of the newest `size`, the present one included. Tokens: the
    tenant's requests have finished fewer than `size` tokens of responses since. Raises ConfigurationError for a size
    out of range and for another unit.
    """

    size: int
    unit: HistoryUnit

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or not 1 <= self.size <= _LARGEST_WINDOW:
            raise ConfigurationError(f"{self.size!r} {self.unit}: give a whole number from 1 to {_LARGEST_WINDOW}")
        if self.unit not in HISTORY_UNITS:
            raise ConfigurationError(f"{self.size} {self.unit}: give one of {', '.join(HISTORY_UNITS)} as the unit")

    @classmethod
    def parse(cls, text: str) -> "HistoryWindow":
        """Return the window that a text such as "3 epochs" names. Raises ConfigurationError for any other text."""
        number, _, unit = text.strip().partition(" ")
        units = {name.removesuffix("s"): name for name in HISTORY_UNITS} | {name: name for name in HISTORY_UNITS}
        if not number.isascii() or not number.isdigit() or unit.strip() not in units:
            raise ConfigurationError(f"{text!r}: give a number and a unit: 2 weights, 3 epochs or 200000 tokens")
        return cls(int(number), units[unit.strip()])

    def __str__(self) -> str:
        return f"{self.size} {self.unit}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """Hold a token that a source proposes for one position of a draft.

    probability: the probability that it is accepted if the draft before it is. source: one of SOURCES. rank: 0 for the
    source's most frequent successor, 1 for its second, 2 for a resume point's, which continues a copied passage past a
    mismatch. match_length: tokens of context that match. count: occurrences of that context that were examined.
    share: the fraction of them that this token followed.
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
    """Hold one request's draft of k tokens.

    token_ids: int32 [k]. probabilities: float32 [k], the probability that each token is accepted if those before it
    are. sources: uint8 [k], indices into SOURCES. source: name of the first token's source, "" if k is 0.
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
    """Hold the drafts of n requests.

    token_ids: int32 [total]; request i has token_ids[offsets[i]:offsets[i + 1]]. offsets: int32 [n + 1].
    sources: uint8 [total], indices into SOURCES. probabilities: float32 [total], the probability that each token is
    accepted if those before it are. match_lengths: int32 [n], tokens of context that the first token's source matched.
    """

    token_ids: Int32Array
    offsets: Int32Array
    sources: UInt8Array
    probabilities: Float32Array
    match_lengths: Int32Array

    def lists(self) -> list[list[int]]:
        """Return the drafts as one list of token ids for each request."""
        tokens: list[int] = self.token_ids.tolist()
        bounds: list[int] = self.offsets.tolist()
        return [tokens[begin:end] for begin, end in pairwise(bounds)]

    def expected(self) -> list[float]:
        """Return the expected number of accepted tokens of each draft: the sum of its cumulative probabilities."""
        probabilities: list[float] = self.probabilities.tolist()
        bounds: list[int] = self.offsets.tolist()
        return [sum(accumulate(probabilities[begin:end], mul)) for begin, end in pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class StepDrafts(Drafts):
    """Hold the drafts of a step's n requests, and how their previous drafts fared.

    accepted, drafted: int32 [n, len(SOURCES)], tokens of the previous draft that were accepted, and that were verified.
    """

    accepted: Int32Array
    drafted: Int32Array


@cache
def no_drafts(count: int) -> StepDrafts:
    """Return the result of a step in which none of `count` requests has or had a draft. Cached and read-only."""
    none, offsets = np.zeros((count, len(SOURCES)), np.int32), np.zeros(count + 1, np.int32)
    none.flags.writeable = offsets.flags.writeable = False
    sources, probabilities = np.zeros(0, np.uint8), np.zeros(0, np.float32)
    return StepDrafts(np.zeros(0, np.int32), offsets, sources, probabilities, none[:, 0], none, none)


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """Hold what a finished request adds to its session: enough to rebuild the indexes.

    Its prompt is the first `kept` tokens of an earlier context of the session, followed by `prompt_tail`. The session
    finds that context by its hashes `parent` and `block` (`context_hashes`), so turns may be restored in any order.
    """

    tenant: str | None
    session: str | None
    kept: int
    """tokens at the start of the prompt that the session held already; 0 without a session"""
    prompt_tail: Int32Array
    """the rest of the prompt, int32 [P]; without a session only the prompt's end"""
    response: Int32Array
    """int32 [N]"""
    group: str | None = None
    """as given to `start`"""
    scope: Scope = "tenant"
    """as given to `start`"""
    parent: int = 0
    """64-bit hash of the prompt's first `kept` tokens; 0 if there are none. A turn with `kept` but without `parent`
    continues the session's newest turn if the context of that has `kept` tokens; otherwise it stands alone."""
    block: int = 0
    """hash of the prompt's first kept // 64 * 64 tokens; 0 if there are none"""
    writer: str = ""
    """names the turn in the store, with `number`; a cache that holds a turn of this name ignores it; "": no name"""
    number: int = 0
    """the turn's place among those of its writer"""
    owner: str | None = None
    """for whom a session and group count that restoring the turn makes, unless the tenant has an owner of its own
    (`SuffixCache.start`); None: for the tenant"""
    family: str | None = None
    """the root session of its session's family; None: no session started this one"""

    @property
    def record(self) -> int:
        """Return a 64-bit number that stands for writer and number; 0 for a turn without a name."""
        return record_number(self.writer, self.number) if self.writer else 0


def record_number(writer: str, number: int) -> int:
    """Return the 64-bit number, never 0, that stands for the turn `number` of a writer."""
    return int.from_bytes(blake2b(f"{writer}:{number}".encode(), digest_size=8).digest()) or 1


@dataclass(frozen=True, slots=True)
class PublicCounts:
    """Count what the public corpus holds; bytes: its memory. left_out: texts that its limit has no room for."""

    texts: int
    tokens: int
    bytes: int
    left_out: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Hold a cache's sizes.

    tokens: tokens kept of finished requests (`max_tokens` limits them). bytes: all memory of the cache (`max_bytes`
    limits it). pending: tokens not indexed yet. leaving: part of `bytes` that was evicted and not given back yet.
    evictions: sessions, groups and parts of tenants evicted so far.
    """

    tokens: int
    bytes: int
    sessions: int
    requests: int
    tenants: int
    pending: int
    leaving: int
    evictions: int
