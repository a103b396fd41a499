"""Speculative decoding for LLM agents: drafts from the session's own history, losslessly.

The names here are the public ones. The client's are imported when first used: processes of the engine need only
`agentspec.cache` and `agentspec.server_ext`, and do not load the OpenAI client.
"""
# ruff: noqa: F403, F405

from __future__ import annotations

from typing import TYPE_CHECKING

from agentspec.errors import (
    AgentSpecError,
    ConfigurationError,
    CorruptRecordError,
    DuplicateRequestError,
    InvalidInputError,
    InvalidSessionError,
    InvalidTokenError,
    RecordError,
    RecordVersionError,
    RolloutError,
    SessionBusyError,
    SessionConflictError,
    SnapshotError,
    SpeculatorError,
    StoreError,
    StoreUnavailableError,
    StoreURLError,
    StoreVersionError,
    UnknownRequestError,
    UnsupportedEngineError,
)

if TYPE_CHECKING:
    from agentspec.client import *  # its public names, as `__all__` lists them below

    __version__: str

__all__ = [
    "AgentClient",
    "AgentSpecError",
    "AsyncAgentClient",
    "AsyncReplyStream",
    "AsyncSession",
    "Attempt",
    "Budget",
    "ConfigurationError",
    "CorruptRecordError",
    "DecodeStep",
    "DraftedToken",
    "DuplicateRequestError",
    "Forecast",
    "Gap",
    "InvalidInputError",
    "InvalidSessionError",
    "InvalidTokenError",
    "LoopResult",
    "Progress",
    "RecordError",
    "RecordVersionError",
    "Reply",
    "ReplyStream",
    "RolloutError",
    "Session",
    "SessionBusyError",
    "SessionConflictError",
    "SnapshotError",
    "Speculation",
    "SpeculatorError",
    "Spent",
    "Stage",
    "StoreError",
    "StoreURLError",
    "StoreUnavailableError",
    "StoreVersionError",
    "ToolRun",
    "UnknownRequestError",
    "UnsupportedEngineError",
    "__version__",
]

for _name in __all__:
    if _name in globals():  # tracebacks then show the name that users import
        globals()[_name].__module__ = __name__


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("agentspec")
    except PackageNotFoundError:  # used from a checkout that was never installed
        return "0+unknown"


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = _version()
    elif name in __all__:
        import agentspec.client

        value = getattr(agentspec.client, name)
        value.__module__ = __name__  # every lazily loaded name is a class
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
