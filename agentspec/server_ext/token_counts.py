"""How often each token occurs in a stored corpus: what a reduced head is chosen from."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.store import RecordReader, Store, TurnRecord
from agentspec.errors import SpeculatorError

Counts = NDArray[np.int64]

_TOGETHER = 1 << 18
"""Tokens counted in one call: counting makes an array as long as the vocabulary each time."""
_HELD_OUT = 10
"""One session in so many is held out."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Occurrences of each token in some sessions of a log, both int64 [V]."""

    responses: Counts
    prompts: Counts
    """In what prompts added to their sessions."""

    def __add__(self, other: "TokenCounts") -> "TokenCounts":
        return TokenCounts(self.responses + other.responses, self.prompts + other.prompts)


def count_tokens(
    store: Store, namespace: str, vocab_size: int, progress: Callable[[int], None] = lambda turns: None
) -> tuple[TokenCounts, TokenCounts]:
    """Count a log, turn after turn; ``progress`` is told how many were read.

    Returns the counts of nine sessions in ten, and those of the tenth, which show how well a choice from the others
    suits text that it was not made from.

    Raises SpeculatorError for a token outside the vocabulary, StoreError where the store cannot be read.
    """
    counters = [(_Counter(vocab_size), _Counter(vocab_size)) for _ in range(2)]
    turns = 0
    for entry, record in RecordReader().read(store, namespace):
        if isinstance(record, TurnRecord):
            turns += 1
            # a turn of no session is on its own; a session's turns belong together, for they repeat each other
            is_held_out = zlib.crc32((record.session or entry.sequence).encode()) % _HELD_OUT == 0
            responses, prompts = counters[is_held_out]
            responses.add(record.response)
            prompts.add(record.prompt_tail)
            progress(turns)
    rest, held_out = (TokenCounts(responses.total(), prompts.total()) for responses, prompts in counters)
    return rest, held_out


class _Counter:
    def __init__(self, size: int) -> None:
        self._counts = np.zeros(size, dtype=np.int64)
        self._waiting: list[NDArray[np.int32]] = []
        self._length = 0

    def add(self, tokens: NDArray[np.int32]) -> None:
        self._waiting.append(tokens)
        self._length += len(tokens)
        if self._length >= _TOGETHER:
            self.total()

    def total(self) -> Counts:
        tokens = np.concatenate(self._waiting) if self._waiting else np.zeros(0, dtype=np.int32)
        self._waiting, self._length = [], 0
        size = len(self._counts)
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < size):
            raise SpeculatorError(
                f"vocab_size: the store has token {tokens.max()}, the speculator only {size}; "
                "it is not for this target: check --model and the speculator"
            )
        self._counts += np.bincount(tokens, minlength=size)
        return self._counts
