"""The errors of agentspec:

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
├── UnknownRequestError (also a KeyError)
├── StoreError
│   ├── StoreUnavailableError
│   └── StoreVersionError
├── SnapshotError
└── RecordError
    ├── CorruptRecordError
    └── RecordVersionError

``agentspec.testing`` adds ServerFailedError and ReplayError. Errors of the model server reach the caller as the OpenAI
client raises them.
"""


class AgentSpecError(Exception):
    """Base class of every error that agentspec raises."""


class ConfigurationError(AgentSpecError, ValueError):
    """A setting, option or URL cannot work. The message names it and the remedy."""


class SpeculatorError(ConfigurationError):
    """A draft model cannot be loaded, or does not fit its target. The message names the field or tensor."""


class StoreURLError(ConfigurationError):
    """The store URL is unknown or malformed."""


class UnsupportedEngineError(ConfigurationError):
    """The engine's version, or a parallelism that it was started with, is not supported."""


class InvalidInputError(AgentSpecError, ValueError):
    """A call cannot take this argument. It has changed nothing."""


class InvalidTokenError(InvalidInputError):
    """A token id has the wrong type or lies outside the vocabulary."""


class InvalidSessionError(InvalidInputError):
    """A session, group or tenant id is empty, too long or not printable."""


class DuplicateRequestError(InvalidInputError):
    """The request id is already running."""


class SessionBusyError(AgentSpecError, RuntimeError):
    """The session is in the middle of another call. Fork it to go on in two directions at once."""


class UnknownRequestError(AgentSpecError, KeyError):
    """The request id is not running."""

    def __str__(self) -> str:  # KeyError would print the repr of its argument
        return str(self.args[0]) if self.args else ""


class StoreError(AgentSpecError):
    """The store could not be reached, read or written."""


class StoreUnavailableError(StoreError):
    """The store does not answer. Trying again later may help."""


class StoreVersionError(StoreError):
    """Another schema version wrote the store."""


class SnapshotError(AgentSpecError):
    """A snapshot of the suffix indexes cannot be written, or is damaged or of another version."""


class RecordError(AgentSpecError):
    """One stored record cannot be used. Readers skip and count it."""


class CorruptRecordError(RecordError):
    """A record's checksum or framing does not hold."""


class RecordVersionError(RecordError):
    """A record has a format that this version does not know."""


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, to quote in a message of ours; its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
