"""Recorded conversations replayed through the cache, without an engine: what drafting would bring for your traffic."""

from agentspec.simulate.figures import Figures
from agentspec.simulate.records import Call, Record, read_calls
from agentspec.simulate.replay import simulate

__all__ = ["Call", "Figures", "Record", "read_calls", "simulate"]
