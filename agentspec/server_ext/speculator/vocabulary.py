"""Reduce a speculator's head to a draft vocabulary: the tokens that are frequent in a tenant's responses.

Most of what a draft reads from memory is the head (V x I weights for each position), and a few ten thousand tokens make
up nearly all of one tenant's responses (FR-Spec, arXiv:2502.14856, keeps the most frequent ones of a general corpus).
The draft model then drafts no other token. Verification and the suffix index do not change.

Count the tokens of a stored corpus, choose the vocabulary by these counts, and prune the head to it.
"""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentspec.cache.store import RecordReader, Store, TurnRecord
from agentspec.errors import ConfigurationError, SpeculatorError, first_line
from agentspec.server_ext.speculator.models import Speculator, build_speculator

Counts = NDArray[np.int64]

_COUNTED_TOGETHER = 1 << 18
"""Tokens counted in one call, because each call makes an array as long as the vocabulary."""
_HELD_OUT = 10
"""Number of sessions of which one is held out."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Count how often each token occurs in some sessions of a log, both int64 [V]."""

    responses: Counts
    prompts: Counts
    """Counts in the new part of each prompt, which the session did not contain before."""

    def __add__(self, other: "TokenCounts") -> "TokenCounts":
        return TokenCounts(self.responses + other.responses, self.prompts + other.prompts)


def count_tokens(
    store: Store, namespace: str, vocab_size: int, progress: Callable[[int], None] = lambda turns: None
) -> tuple[TokenCounts, TokenCounts]:
    """Return the token counts of a log's sessions: of nine in ten, and of the held-out tenth.

    The tenth shows how well a vocabulary that is chosen from the others suits other text. progress:
    called with the number of turns read. Raises SpeculatorError for a token outside the vocabulary, StoreError where
    the store cannot be read.
    """
    counters = [(_Counter(vocab_size), _Counter(vocab_size)) for _ in range(2)]
    turns = 0
    for entry, record in RecordReader().read(store.read(namespace)):
        if isinstance(record, TurnRecord):
            turns += 1
            # A session's turns stay together, because they repeat each other.
            is_held_out = zlib.crc32((record.session or entry.sequence).encode()) % _HELD_OUT == 0
            responses, prompts = counters[is_held_out]
            responses.add(record.response)
            prompts.add(record.prompt_tail)
            progress(turns)
    rest, held_out = (TokenCounts(responses.total(), prompts.total()) for responses, prompts in counters)
    return rest, held_out


def special_tokens(
    model: str, tokenizer: str, *, revision: str | None = None, tokenizer_revision: str | None = None
) -> set[int]:
    """Return the ids of the tokenizer's special tokens and of the model's ends of text. Raises ConfigurationError.

    tokenizer_revision None: ``revision``, as in vLLM.
    """
    try:
        from transformers import AutoTokenizer, GenerationConfig
    except ImportError as error:
        raise ConfigurationError(
            "special tokens are read with the package transformers: pip install transformers"
        ) from error
    try:
        loaded: Any = AutoTokenizer.from_pretrained(tokenizer, revision=tokenizer_revision or revision)
    except Exception as error:  # transformers raises many kinds of errors
        raise ConfigurationError(
            f"tokenizer {tokenizer}: cannot be loaded ({first_line(error)}); "
            "give --model and --tokenizer as the server has them"
        ) from error
    found = set(loaded.all_special_ids)
    found.update(token for token, added in loaded.added_tokens_decoder.items() if added.special)
    try:
        ends = GenerationConfig.from_pretrained(model, revision=revision).eos_token_id
    except OSError:  # not every model has that file
        ends = None
    found.update([ends] if isinstance(ends, int) else ends or [])
    return found


def choose_vocabulary(responses: Tensor, prompts: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """Return the ``size`` tokens that matter most, int64 [size] in ascending order.

    responses, prompts: int64 [V], how often each token was generated, and how often it was in prompts. Tokens in
    ``always`` come first, then the most frequent in responses; ties go to the more frequent in prompts, then to the
    lower id, which byte-pair encodings give to the more common token. Raises SpeculatorError for an impossible size.
    """
    vocab = len(responses)
    special = torch.tensor(sorted({token for token in always if 0 <= token < vocab}), dtype=torch.int64)
    if not max(1, len(special)) <= size < vocab:
        raise SpeculatorError(
            f"size: {max(1, len(special))} (special tokens, always kept) to {vocab - 1} (the vocabulary has {vocab}) "
            f"expected, got {size}"
        )
    order = torch.argsort(prompts, descending=True, stable=True)
    rank = responses.clone()
    rank[special] = responses.max() + 1
    order = order[torch.argsort(rank[order], descending=True, stable=True)]
    return order[:size].sort().values


def prune_head(speculator: Speculator, keep: Tensor) -> Speculator:
    """Return the speculator with only the head's rows in ``keep``, int64 [V'] of distinct target tokens.

    It shares all other weights with the given one; embeddings stay whole, because any token may be the input. Logits
    are [B, V'], probabilities are relative to the kept tokens, and ``draft_vocabulary`` maps rows to target tokens.
    Raises SpeculatorError for tokens outside the vocabulary or twice, and for a speculator that is already reduced.
    """
    config = speculator.config
    if speculator.draft_vocabulary is not None:
        raise SpeculatorError("draft_vocab_size: the speculator's head is already reduced; prune the original one")
    keep = keep.to(torch.int64)
    inside = keep.numel() > 0 and bool((keep >= 0).all()) and bool((keep < config.vocab_size).all())
    if not inside or keep.unique().numel() != keep.numel():
        raise SpeculatorError(f"keep: distinct tokens from 0 to {config.vocab_size - 1} expected")
    with torch.device("meta"):
        pruned = build_speculator(replace(config, draft_vocab_size=keep.numel()))
    state = dict(speculator.state_dict())
    for name in state:
        if name.startswith("heads."):
            state[name] = state[name][keep.to(state[name].device)]
    state["draft_vocabulary"] = keep.to(state["heads.0.weight"].device)
    pruned.load_state_dict(state, assign=True)
    pruned.train(speculator.training).requires_grad_(False)
    return pruned


class _Counter:
    def __init__(self, size: int) -> None:
        self._counts = np.zeros(size, dtype=np.int64)
        self._waiting: list[NDArray[np.int32]] = []
        self._length = 0

    def add(self, tokens: NDArray[np.int32]) -> None:
        self._waiting.append(tokens)
        self._length += len(tokens)
        if self._length >= _COUNTED_TOGETHER:
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
