"""Replay recorded conversations through the suffix cache to measure drafting without an engine."""

from agentspec.simulate.records import Call, Record, open_tokenizer, read_calls
from agentspec.simulate.replay import Durations, Figures, simulate

__all__ = ["Call", "Durations", "Figures", "Record", "open_tokenizer", "read_calls", "simulate"]
