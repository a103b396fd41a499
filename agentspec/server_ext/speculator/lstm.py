"""The LSTM speculator (``sum_lstm``)."""

import torch
from torch import Tensor, nn

from agentspec.server_ext.speculator.base import Speculator, State
from agentspec.server_ext.speculator.config import SpeculatorConfig
from agentspec.server_ext.speculator.layers import LSTMCell


class LSTMSpeculator(Speculator):
    """a = P h + alpha [z; z; z; z] with z = E[token], then an LSTM cell with norms; one set of weights.

    ``projections``: Linear [4I, H] for the first position and [4I, I] for the others, the gates stacked in the order
    forget, input, output, cell; ``embeddings``: one, or four in that order where they are not tied.
    """

    def __init__(self, config: SpeculatorConfig) -> None:
        super().__init__(config)
        inner = config.inner_size
        self.embeddings = nn.ModuleList(
            nn.Embedding(config.vocab_size, inner) for _ in range(1 if config.tie_lstm_embs else 4)
        )
        self.projections = nn.ModuleList(
            nn.Linear(inner if k else config.hidden_size, 4 * inner, bias=False) for k in range(config.projections)
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
