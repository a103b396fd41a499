"""Speculator: the shape that both kinds share. A state is carried from position to position, a head reads it."""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from agentspec.server_ext.speculator.config import SpeculatorConfig
from agentspec.server_ext.speculator.layers import Norm, scale_input


class State(NamedTuple):
    """What a position hands to the next one."""

    hidden: Tensor
    """[B, H] before the first position, [B, I] after it."""
    cell: Tensor | None = None
    """[B, I], of an LSTM alone."""


class Speculator(nn.Module, ABC):  # type: ignore[misc]  # torch is not followed
    """A draft model on top of the target's hidden state.

    ``heads``: one Linear [V', I] where weights are tied, else n. ``draft_vocabulary``: int64 [V'], the target's token
    that each row of a reduced head stands for, or None where the head has all V rows.
    """

    def __init__(self, config: SpeculatorConfig) -> None:
        super().__init__()
        self.config = config
        self.heads = nn.ModuleList(
            nn.Linear(config.inner_size, config.head_rows, bias=False) for _ in range(config.weight_sets)
        )
        vocabulary = torch.arange(config.draft_vocab_size) if config.draft_vocab_size else None
        self.register_buffer("draft_vocabulary", vocabulary)

    def reset_parameters(self) -> None:
        """Random weights to train from, as ArcticTraining draws them: N(0, 1 / the smaller side)."""
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                nn.init.normal_(module.weight, std=1.0 / math.sqrt(min(module.weight.shape)))
            elif isinstance(module, Norm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)

    def begin(self, hidden: Tensor) -> State:
        """The state before the first position.

        hidden [B, H]: the target's, after its final norm, at the position that produced the newest token.
        """
        return State(scale_input(hidden) if self.config.scale_input else hidden)

    @abstractmethod
    def advance(self, state: State, tokens: Tensor, k: int) -> State:
        """The state of position k, given its input ``tokens`` int64 [B]: the newest token, then those drafted."""

    def logits(self, state: State, k: int) -> Tensor:
        """[B, V'] of the token that follows the input of position k; columns are rows of the head."""
        return self.heads[self.config.weights_at(k)](state.hidden)

    def forward(self, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
        """Teacher-forced, for training: hidden [N, H] and tokens int64 [N, n] give n times logits [N, V'].

        ``tokens[:, k]`` is the input of position k, so the labels are the tokens one further.
        """
        state = self.begin(hidden)
        result = []
        for k in range(tokens.shape[1]):
            state = self.advance(state, tokens[:, k], k)
            result.append(self.logits(state, k))
        return result
