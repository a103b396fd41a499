"""Draft from suffix indexes of running requests, their sessions, groups and tenant. Needs neither torch nor vLLM.

The package imports SuffixCache, and with it the compiled core, on first use. The client needs only the types and the
store, so it runs without the core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentspec.cache.policy import DraftPolicy
from agentspec.cache.types import (
    SCOPES,
    SOURCES,
    Budget,
    CacheStats,
    Candidate,
    Draft,
    Drafts,
    FinishedTurn,
    HistoryWindow,
    Scope,
    StepDrafts,
)

if TYPE_CHECKING:
    from agentspec.cache.core import context_hashes
    from agentspec.cache.suffix_cache import SuffixCache

__all__ = [
    "SCOPES",
    "SOURCES",
    "Budget",
    "CacheStats",
    "Candidate",
    "Draft",
    "DraftPolicy",
    "Drafts",
    "FinishedTurn",
    "HistoryWindow",
    "Scope",
    "StepDrafts",
    "SuffixCache",
    "context_hashes",
]


def __getattr__(name: str) -> object:
    if name not in ("SuffixCache", "context_hashes"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agentspec.cache import core, suffix_cache

    globals()[name] = getattr(core if name == "context_hashes" else suffix_cache, name)
    return globals()[name]
