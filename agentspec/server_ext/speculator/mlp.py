"""The MLP speculator (IBM's, Arctic's, and ``sum_rnn``)."""

from itertools import pairwise

from torch import Tensor, nn

from agentspec.server_ext.speculator.base import Speculator, State
from agentspec.server_ext.speculator.config import SpeculatorConfig
from agentspec.server_ext.speculator.layers import Norm, SumNormGelu


class MLPSpeculator(Speculator):
    """h_k = GELU(LN_k(P_k h_{k-1} + alpha E_k[t_k])), logits = W_k h_k (arXiv:2404.19124).

    ``embeddings``, ``projections``, ``mixes``, ``tails``: one each for every set of weights. A ``sum_rnn`` may have
    more layers in each of them; IBM's and Arctic's MLP have one, and their tails are empty.
    """

    def __init__(self, config: SpeculatorConfig) -> None:
        super().__init__(config)
        sets = range(config.weight_sets)
        self.embeddings = nn.ModuleList(_deep(nn.Embedding(config.vocab_size, config.emb_size), config) for _ in sets)
        self.projections = nn.ModuleList(
            _deep_projection(config.inner_size if k else config.hidden_size, config) for k in range(config.projections)
        )
        self.mixes = nn.ModuleList(SumNormGelu(config.inner_sizes[0], config.alpha) for _ in sets)
        self.tails = nn.ModuleList(_tail(config.inner_sizes) for _ in sets)
        self.reset_parameters()

    def advance(self, state: State, tokens: Tensor, k: int) -> State:
        at = self.config.weights_at(k)
        projected = self.projections[self.config.projection_at(k)](state.hidden)
        return State(self.tails[at](self.mixes[at](projected, self.embeddings[at](tokens))))


def _deep(embedding: nn.Embedding, config: SpeculatorConfig) -> nn.Sequential:
    return nn.Sequential(embedding, *_more_layers(config.emb_size, config.emb_layers))


def _deep_projection(size: int, config: SpeculatorConfig) -> nn.Sequential:
    first = nn.Linear(size, config.proj_size, bias=False)
    return nn.Sequential(first, *_more_layers(config.proj_size, config.proj_layers))


def _more_layers(size: int, layers: int) -> list[nn.Module]:
    return [module for _ in range(layers - 1) for module in (Norm(size), nn.GELU(), nn.Linear(size, size, bias=False))]


def _tail(sizes: tuple[int, ...]) -> nn.Sequential:
    """Layers behind the first norm and GELU; the last GELU closes the position."""
    return nn.Sequential(
        *(
            module
            for before, size in pairwise(sizes)
            for module in (nn.Linear(before, size, bias=False), Norm(size), nn.GELU())
        )
    )
