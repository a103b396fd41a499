"""What to draft from: suffix trees over running requests, their sessions and their tenant. No torch, no vLLM."""

from agentspec.cache.policy import DraftPolicy
from agentspec.cache.suffix_cache import SuffixCache, native_available
from agentspec.cache.types import (
    SCOPES,
    SOURCES,
    Budget,
    CacheStats,
    Candidate,
    Draft,
    Drafts,
    FinishedTurn,
    Scope,
    StepDrafts,
)

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
    "Scope",
    "StepDrafts",
    "SuffixCache",
    "native_available",
]
