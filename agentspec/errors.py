"""Define the errors of agentspec:

AgentSpecError
├── ConfigurationError (also a ValueError)
│   ├── SpeculatorError
│   ├── StoreURLError
│   └── UnsupportedEngineError
├── InvalidInputError (also a ValueError)
│   ├── InvalidTokenError
│   ├── InvalidSessionError
│   └── DuplicateRequestError
├── SessionBusyError (also a RuntimeError)
├── SessionConflictError (also a RuntimeError)
├── UnknownRequestError (also a KeyError)
├── StoreError
│   ├── StoreUnavailableError
│   └── StoreVersionError
├── SnapshotError
├── RolloutError (also a RuntimeError)
└── RecordError
    ├── CorruptRecordError
    └── RecordVersionError

``agentspec.testing`` adds ServerFailedError and ReplayError. Errors of the model server reach the caller as the OpenAI
client raises them.
"""

import sys


class AgentSpecError(Exception):
    """Base class of every error that agentspec raises."""


class ConfigurationError(AgentSpecError, ValueError):
    """Raised for a setting, option or URL that cannot work. The message names it and the remedy."""


class SpeculatorError(ConfigurationError):
    """Raised for a draft model that cannot be loaded or does not fit its target. The message names field or tensor."""


class StoreURLError(ConfigurationError):
    """Raised for an unknown or malformed store URL."""


class UnsupportedEngineError(ConfigurationError):
    """Raised for an engine whose version or kind of parallelism is not supported."""


class InvalidInputError(AgentSpecError, ValueError):
    """Raised for an argument that a call cannot take. The call has changed nothing."""


class InvalidTokenError(InvalidInputError):
    """Raised for a token id of the wrong type or outside the vocabulary."""


class InvalidSessionError(InvalidInputError):
    """Raised for a session, group or tenant id that is empty, too long or not printable."""


class DuplicateRequestError(InvalidInputError):
    """Raised for a new request whose id is already running."""


class SessionBusyError(AgentSpecError, RuntimeError):
    """Raised for a session that is in the middle of another call. Fork it to make two calls at once."""


class SessionConflictError(AgentSpecError, RuntimeError):
    """Raised for a session that another client has changed, or that its store has lost. Reload it, or fork it."""


class UnknownRequestError(AgentSpecError, KeyError):
    """Raised for a request id that is not running."""

    def __str__(self) -> str:  # KeyError.__str__ returns the repr of its argument
        return str(self.args[0]) if self.args else ""


class StoreError(AgentSpecError):
    """Raised when the store could not be reached, read or written."""


class StoreUnavailableError(StoreError):
    """Raised when the store does not answer. A retry may help."""


class StoreVersionError(StoreError):
    """Raised for a store that another schema version wrote."""


class SnapshotError(AgentSpecError):
    """Raised for a snapshot of the suffix indexes that cannot be written, is damaged or is of another version."""


class RolloutError(AgentSpecError, RuntimeError):
    """Raised for a rollout whose engine died, or whose workers don't start or die again and again. Run it again."""


class RecordError(AgentSpecError):
    """Raised for a stored record that cannot be used. Readers skip and count it."""


class CorruptRecordError(RecordError):
    """Raised for a record whose checksum or framing is wrong."""


class RecordVersionError(RecordError):
    """Raised for a record in a format that this version does not know."""


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, to quote it in a message; its type if the text is empty.

    The first line of a pydantic error only counts errors, so return its first error's field and message.
    """
    pydantic = sys.modules.get("pydantic")  # not imported here: it takes long, and draft models do without it
    text = str(error)
    if pydantic is not None and isinstance(error, pydantic.ValidationError):
        first = error.errors(include_url=False)[0]
        text = ": ".join(
            [*filter(None, [".".join(map(str, first["loc"]))]), first["msg"].removeprefix("Value error, ")]
        )
    lines = text.strip().splitlines()
    return lines[0] if lines else type(error).__name__
