"""The errors that agentspec raises, as one tree (``agentspec.testing`` adds ServerFailedError and ReplayError to it).

    AgentSpecError
    ├── ConfigurationError          a setting, option or URL that cannot work (also a ValueError)
    │   ├── SpeculatorError         a draft model that cannot be loaded, or does not fit its target
    │   ├── StoreURLError           the store URL is unknown or malformed
    │   └── UnsupportedEngineError  this vLLM version, or a parallelism it was started with
    ├── InvalidInputError           an argument of a call (also a ValueError)
    │   ├── InvalidTokenError       a token id outside the vocabulary, or of the wrong type
    │   ├── InvalidSessionError     a session or tenant id that is too long or not printable
    │   └── DuplicateRequestError   a request id that is already running
    ├── SessionBusyError            the session's conversation is in the middle of another call (also a RuntimeError)
    ├── UnknownRequestError         a request id that is not running (also a KeyError)
    ├── StoreError                  the store could not be reached, read or written
    │   ├── StoreUnavailableError   it does not answer; trying again later may help
    │   └── StoreVersionError       the store's file was written by another schema version
    ├── SnapshotError               a snapshot of the trees cannot be written or read
    └── RecordError                 one stored record cannot be used; it is skipped
        ├── CorruptRecordError      checksum or framing does not hold
        └── RecordVersionError      written in a format this version does not know

Errors of the model server reach the caller as the OpenAI client raises them.
"""


class AgentSpecError(Exception):
    """The root of agentspec's errors."""


class ConfigurationError(AgentSpecError, ValueError):
    """A setting, option or URL that cannot work; the message names it and the remedy."""


class SpeculatorError(ConfigurationError):
    """A draft model that cannot be loaded, or does not fit its target; the message names the field or tensor."""


class StoreURLError(ConfigurationError):
    """The store URL is unknown or malformed."""


class UnsupportedEngineError(ConfigurationError):
    """The engine's version or its parallel layout is not supported."""


class InvalidInputError(AgentSpecError, ValueError):
    """An argument that a call cannot take; nothing was changed."""


class InvalidTokenError(InvalidInputError):
    """A token id of the wrong type or outside the vocabulary."""


class InvalidSessionError(InvalidInputError):
    """A session, group or tenant id that is empty, too long or not printable."""


class DuplicateRequestError(InvalidInputError):
    """The request id is already running."""


class SessionBusyError(AgentSpecError, RuntimeError):
    """A session can make one call at a time; fork it to go on in two directions at once."""


class UnknownRequestError(AgentSpecError, KeyError):
    """The request id is not running."""

    def __str__(self) -> str:  # KeyError would print the repr of its argument
        return str(self.args[0]) if self.args else ""


class StoreError(AgentSpecError):
    """The store could not be reached, read or written."""


class StoreUnavailableError(StoreError):
    """The store does not answer; trying again later may help."""


class StoreVersionError(StoreError):
    """The store was written by another schema version."""


class SnapshotError(AgentSpecError):
    """A snapshot of the trees cannot be written, or is damaged or of another version."""


class RecordError(AgentSpecError):
    """One stored record cannot be used; readers skip it and count it."""


class CorruptRecordError(RecordError):
    """A record's checksum or framing does not hold."""


class RecordVersionError(RecordError):
    """A record in a format that this version does not know."""


def first_line(error: BaseException) -> str:
    """What a library's error says first, for a message of ours; its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
