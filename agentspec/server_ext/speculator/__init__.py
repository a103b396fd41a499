"""Draft models that read the target's hidden state: MLP and LSTM speculators. Torch alone: no vLLM, no compiled core.

``config``      what a speculator is, read from every published spelling of config.json
``base``        the common shape: begin, advance, logits; teacher-forced for training
``mlp``, ``lstm``, ``layers``  the two kinds and what they are made of
``layout``      which names their tensors have in published checkpoints
``checkpoint``  loading, from a folder or a hub, and saving
``vocabulary``  a head reduced to the tokens that matter
``draft_loop``  n greedy steps without a synchronisation
"""

from agentspec.server_ext.speculator.base import Speculator, State
from agentspec.server_ext.speculator.checkpoint import build_speculator, load_speculator, save_speculator
from agentspec.server_ext.speculator.config import SpeculatorConfig
from agentspec.server_ext.speculator.draft_loop import DraftedTokens, DraftLoop
from agentspec.server_ext.speculator.lstm import LSTMSpeculator
from agentspec.server_ext.speculator.mlp import MLPSpeculator

__all__ = [
    "DraftLoop",
    "DraftedTokens",
    "LSTMSpeculator",
    "MLPSpeculator",
    "Speculator",
    "SpeculatorConfig",
    "State",
    "build_speculator",
    "load_speculator",
    "save_speculator",
]
