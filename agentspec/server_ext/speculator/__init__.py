"""Run draft models that read the target's hidden state: MLP and LSTM speculators. Needs torch alone.

``config``      the shape of a speculator, from every published spelling of config.json
``models``      the MLP and the LSTM, and their layers
``checkpoint``  load from a folder or a hub, and save, in the published layouts
``selection``   chooses tokens by a head's logits, of which kernels and tensor-parallel ranks compute parts
``draft_loop``  n greedy steps for a batch, without a synchronisation
``vocabulary``  reduces a head to frequent tokens (needs numpy, and the store for counting)
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
