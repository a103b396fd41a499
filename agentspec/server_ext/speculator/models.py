"""Define MLP and LSTM speculators in plain torch: draft models that read the target's hidden state.

Both pass a state from position to position, and a head reads it. The formulas are those of arXiv:2404.19124 (MLP) and
of ArcticTraining (LSTM).
"""

import math
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from agentspec.server_ext.speculator.config import Kind, SpeculatorConfig

EPSILON = 1e-6


class Norm(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Compute LN(x) = w * x / sqrt(mean(x^2) + 1e-6) + b: by root mean square, not centred. x [..., I]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, EPSILON) + self.bias


class SumNormGelu(nn.Module):  # type: ignore[misc]
    """Compute GELU(LN(projected + alpha * embedded)), both [B, I]: one step of an MLP speculator."""

    def __init__(self, size: int, alpha: float) -> None:
        super().__init__()
        self.norm = Norm(size)
        self.alpha = alpha

    def forward(self, projected: Tensor, embedded: Tensor) -> Tensor:
        return functional.gelu(self.norm(torch.add(projected, embedded, alpha=self.alpha)))


class LSTMCell(nn.Module):  # type: ignore[misc]
    """Compute the gates of an LSTM speculator (``sum_lstm`` in ArcticTraining).

    With a = projected + alpha * embedded, in the order forget, input, output, cell::

        c' = c * sig(a_forget) + GELU(LN_cell(a_cell)) * sig(a_input)
        h' = GELU(LN_state(c')) * sig(a_output)
    """

    def __init__(self, size: int, alpha: float) -> None:
        super().__init__()
        self.cell_norm = Norm(size)
        self.state_norm = Norm(size)
        self.alpha = alpha

    def forward(self, projected: Tensor, embedded: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Return h' and c'. projected [B, 4I], embedded [B, I] (one for all gates) or [B, 4I], cell [B, I]."""
        gates = projected.unflatten(-1, (4, -1)) + self.alpha * embedded.unflatten(-1, (-1, cell.shape[-1]))
        forget, update, output, candidate = gates.unbind(-2)
        cell = cell * forget.sigmoid() + functional.gelu(self.cell_norm(candidate)) * update.sigmoid()
        return functional.gelu(self.state_norm(cell)) * output.sigmoid(), cell


class State(NamedTuple):
    """Hold the state that one position passes to the next."""

    hidden: Tensor
    """[B, H] before the first position, [B, I] after it."""
    cell: Tensor | None = None
    """[B, I]; None in an MLP."""


class Speculator(nn.Module, ABC):  # type: ignore[misc]
    """Draft from the target's hidden state.

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
        """Draw random weights to train from, as ArcticTraining does: N(0, 1 / the smaller side)."""
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                nn.init.normal_(module.weight, std=1.0 / math.sqrt(min(module.weight.shape)))
            elif isinstance(module, Norm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)

    def begin(self, hidden: Tensor) -> State:
        """Return the state before the first position.

        hidden [B, H]: the target's, after its final norm, at the position that produced the newest token. Where the
        config says so, it is normalised without weights and divided by sqrt(2).
        """
        if self.config.scale_input:
            hidden = functional.rms_norm(hidden, hidden.shape[-1:], None, EPSILON) / 2.0**0.5
        return State(hidden)

    @abstractmethod
    def advance(self, state: State, tokens: Tensor, k: int) -> State:
        """Return the state of position k. tokens int64 [B]: its input, the newest token or the one drafted before."""

    def logits(self, state: State, k: int) -> Tensor:
        """Return [B, V'], the logits of the token behind the input of position k; columns are rows of the head."""
        return self.heads[self.config.weights_at(k)](state.hidden)

    def forward(self, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
        """Return n logits [N, V'], teacher-forced: hidden [N, H], tokens int64 [N, n].

        ``tokens[:, k]`` is the input of position k, so the labels are the tokens one further.
        """
        state = self.begin(hidden)
        result = []
        for k in range(tokens.shape[1]):
            state = self.advance(state, tokens[:, k], k)
            result.append(self.logits(state, k))
        return result


class MLPSpeculator(Speculator):
    """Compute h_k = GELU(LN_k(P_k h_{k-1} + alpha E_k[t_k])), logits = W_k h_k: IBM's, Arctic's, and ``sum_rnn``.

    ``embeddings``, ``projections``, ``mixes``, ``tails``: one for each set of weights. A ``sum_rnn`` may have several
    layers in each of them; IBM's and Arctic's MLP have one, and their tails are empty.
    """

    def __init__(self, config: SpeculatorConfig) -> None:
        super().__init__(config)
        sets, emb, proj = range(config.weight_sets), config.emb_size, config.proj_size
        self.embeddings = nn.ModuleList(
            _stack(nn.Embedding(config.vocab_size, emb), emb, config.emb_layers) for _ in sets
        )
        self.projections = nn.ModuleList(
            _stack(nn.Linear(config.input_size(k), proj, bias=False), proj, config.proj_layers)
            for k in range(config.projections)
        )
        self.mixes = nn.ModuleList(SumNormGelu(config.inner_sizes[0], config.alpha) for _ in sets)
        self.tails = nn.ModuleList(_tail(config.inner_sizes) for _ in sets)
        self.reset_parameters()

    def advance(self, state: State, tokens: Tensor, k: int) -> State:
        at = self.config.weights_at(k)
        projected = self.projections[self.config.projection_at(k)](state.hidden)
        return State(self.tails[at](self.mixes[at](projected, self.embeddings[at](tokens))))


class LSTMSpeculator(Speculator):
    """Compute a = P h + alpha [z; z; z; z], z = E[token], then an LSTM cell; one set of weights (``sum_lstm``).

    ``projections``: Linear [4I, H] for the first position and [4I, I] for the others, the gates stacked in the order
    forget, input, output, cell. ``embeddings``: one, or four in that order where they are not tied.
    """

    def __init__(self, config: SpeculatorConfig) -> None:
        super().__init__(config)
        inner = config.inner_size
        self.embeddings = nn.ModuleList(
            nn.Embedding(config.vocab_size, inner) for _ in range(1 if config.tie_lstm_embs else 4)
        )
        self.projections = nn.ModuleList(
            nn.Linear(config.input_size(k), 4 * inner, bias=False) for k in range(config.projections)
        )
        self.cell = LSTMCell(inner, config.alpha)
        self.reset_parameters()

    def begin(self, hidden: Tensor) -> State:
        return State(super().begin(hidden).hidden, hidden.new_zeros(*hidden.shape[:-1], self.config.inner_size))

    def advance(self, state: State, tokens: Tensor, k: int) -> State:
        projected = self.projections[self.config.projection_at(k)](state.hidden)
        embedded = [embedding(tokens) for embedding in self.embeddings]
        together = embedded[0] if len(embedded) == 1 else torch.cat(embedded, dim=-1)
        return State(*self.cell(projected, together, state.cell))


def build_speculator(config: SpeculatorConfig) -> Speculator:
    """Return a speculator with random weights, on torch's default device and in its default dtype."""
    kinds: dict[Kind, type[Speculator]] = {"mlp": MLPSpeculator, "lstm": LSTMSpeculator}
    return kinds[config.kind](config)


def _stack(first: nn.Module, size: int, layers: int) -> nn.Sequential:
    """Return ``first`` followed by ``layers`` - 1 times norm, GELU and linear layer, all of width ``size``."""
    behind = ((Norm(size), nn.GELU(), nn.Linear(size, size, bias=False)) for _ in range(layers - 1))
    return nn.Sequential(first, *(module for modules in behind for module in modules))


def _tail(sizes: tuple[int, ...]) -> nn.Sequential:
    """Return the layers behind the first norm and GELU; the last GELU closes the position."""
    layers = ((nn.Linear(before, size, bias=False), Norm(size), nn.GELU()) for before, size in pairwise(sizes))
    return nn.Sequential(*(module for modules in layers for module in modules))
