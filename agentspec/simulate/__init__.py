"""Replay recorded conversations through the suffix cache, without an engine: what drafting would bring."""

from agentspec.simulate.records import Call, Record, open_tokenizer, read_calls
from agentspec.simulate.replay import Durations, Figures, simulate

__all__ = ["Call", "Durations", "Figures", "Record", "open_tokenizer", "read_calls", "simulate"]
