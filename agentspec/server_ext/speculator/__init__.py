"""Draft models that read the target's hidden state: MLP and LSTM speculators. Torch alone: no vLLM, no compiled core.

``config``      what a speculator is, read from every published spelling of config.json
``base``        the common shape: begin, advance, logits; teacher-forced for training
``mlp``, ``lstm``, ``layers``  the two kinds and what they are made of
``layout``      which names their tensors have in published checkpoints
``checkpoint``  loading, from a folder or a hub, and saving
``vocabulary``  a head reduced to the tokens that matter
``draft_loop``  n greedy steps without a synchronisation, and the switches of what makes them fast:
``fp8``         weights in 8 bits
``parallel``    a head that the ranks of a tensor-parallel server share
``graphs``      the whole loop recorded as CUDA graphs
``fused``, ``kernels``  what lies between the matrix products, and the head's product, in Triton
``selection``   from logits, or parts of them, to tokens
"""

from agentspec.server_ext.speculator.base import Speculator, State
from agentspec.server_ext.speculator.checkpoint import build_speculator, load_speculator, save_speculator
from agentspec.server_ext.speculator.config import SpeculatorConfig
from agentspec.server_ext.speculator.draft_loop import DraftedTokens, DraftLoop
from agentspec.server_ext.speculator.lstm import LSTMSpeculator
from agentspec.server_ext.speculator.mlp import MLPSpeculator
from agentspec.server_ext.speculator.parallel import Ranks

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
