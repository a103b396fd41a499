"""Draft models that read the target's hidden state: MLP and LSTM speculators. Torch alone: no vLLM, no compiled core.

``config``      the shape of a speculator, from every published spelling of config.json
``models``      the MLP and the LSTM, and the layers that they are made of
``checkpoint``  load from a folder or a hub, and save, in the published layouts
``selection``   from a head's logits to tokens, in parts that kernels and tensor-parallel ranks compute
``draft_loop``  n greedy steps for a batch, without a synchronisation
``vocabulary``  a head reduced to the tokens that matter (needs numpy, and the store for counting)
``gpu``         weights in 8 bits; fused kernels and CUDA graphs, compared with plain torch before they are used
"""

from agentspec.server_ext.speculator.checkpoint import load_speculator, save_speculator
from agentspec.server_ext.speculator.config import SpeculatorConfig
from agentspec.server_ext.speculator.draft_loop import DraftLoop
from agentspec.server_ext.speculator.models import (
    LSTMSpeculator,
    MLPSpeculator,
    Speculator,
    State,
    build_speculator,
)
from agentspec.server_ext.speculator.selection import DraftedTokens, Ranks

__all__ = [
    "DraftLoop",
    "DraftedTokens",
    "LSTMSpeculator",
    "MLPSpeculator",
    "Ranks",
    "Speculator",
    "SpeculatorConfig",
    "State",
    "build_speculator",
    "load_speculator",
    "save_speculator",
]
