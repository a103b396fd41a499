"""A draft vocabulary: a head that has only the rows of the tokens that a tenant's answers are made of.

The head is most of what a draft reads from memory (V x I weights a position), and a few ten thousand tokens are nearly
all that one tenant's model says (FR-Spec, arXiv:2502.14856, keeps the most frequent ones of a general corpus). A token
outside is never drafted by the model; verification and the suffix trees know nothing of it.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from agentspec.errors import SpeculatorError
from agentspec.server_ext.speculator.base import Speculator
from agentspec.server_ext.speculator.checkpoint import build_speculator


def choose_vocabulary(responses: Tensor, prompts: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """The ``size`` tokens that matter most, int64 [size] in ascending order.

    responses, prompts: int64 [V], how often each token was generated and was in prompts. First come those in
    ``always``, then the most frequent ones in responses, ties by prompts and then by the lower id, which byte-pair
    encodings give to the more common token. Raises SpeculatorError for a size that cannot be.
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


def prune(speculator: Speculator, keep: Tensor) -> Speculator:
    """The same speculator with only the head's rows in ``keep``, int64 [V'] of distinct target tokens.

    All other weights are shared with the given one; embeddings stay whole, for any token may be the input. Logits are
    then [B, V'], probabilities are among the tokens kept, and ``draft_vocabulary`` maps rows to target tokens.
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
