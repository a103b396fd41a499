"""Define the records of a store: turns on the server's side, messages and cuts on the client's, tombstones on both."""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from agentspec.cache.types import Int32Array, Scope

_TURN_BYTES, _MESSAGE_BYTES = 512, 256  # approximate memory of a record without its tokens or message


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TurnRecord:
    """Hold the new tokens of one finished turn.

    Writer and number identify the turn: applying a record twice does nothing. Its prompt is a context of ``kept``
    tokens that the session had before, followed by ``prompt_tail``. The arrays must not change once the record is
    queued.
    """

    writer: str
    """name of the engine process that said the turn, 16 hexadecimal digits"""
    number: int
    """the turn's place among those of its writer, from 1"""
    session: str = ""
    """key of its session; "" without one"""
    kept: int = 0
    """tokens of the prompt that the session had before"""
    parent: int = 0
    """64-bit hash of the ``kept`` tokens, 0 if there are none"""
    block: int = 0
    """their hash up to the last block boundary within them"""
    prompt_tail: Int32Array
    """token ids, [P]"""
    response: Int32Array
    """token ids, [N]"""
    created: float
    """seconds since the epoch, for people only"""
    tenant: str | None = None
    """tenant whose index shares the turn; None: the tenant of requests without API key, cache salt and adapter"""
    principal: str | None = None
    """who made the request"""
    parent_session: str | None = None
    """the session that started this one"""
    group: str | None = None
    """key of its group, whose sessions draft from each other's responses"""
    session_name: str | None = None
    """the session's name as the caller gave it"""
    group_name: str | None = None
    """the group's name as the caller gave it"""
    scope: Scope = "tenant"
    """texts that the request drafted from"""
    weights: str | None = None
    """version of the model's weights"""
    family: str | None = None
    """key of the root session of its session's family; None: no session started this one"""
    imported: bool = False
    """whether an import appended it, and not its writer"""
    log_owner: str = field(default="", compare=False)
    """for whom its log counts when the store is trimmed (`NewEntry.owner`); not part of the stored record"""

    def __eq__(self, other: object) -> bool:
        names = [field.name for field in fields(self) if field.compare]
        return isinstance(other, TurnRecord) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in names
        )

    __hash__ = None  # type: ignore[assignment]  # arrays inside

    @property
    def shared_by(self) -> str | None:
        """Return the key of the group, or else the family, that drafts from the turn. Stores find the turn by it."""
        return self.group if self.group is not None and self.scope == "tenant" else self.family

    @property
    def tokens(self) -> int:
        """Return how many tokens the record holds."""
        return len(self.prompt_tail) + len(self.response)

    @property
    def size(self) -> int:
        """Return roughly how many bytes the record takes in memory."""
        return _TURN_BYTES + self.prompt_tail.nbytes + self.response.nbytes


@dataclass(frozen=True, slots=True)
class MessageRecord:
    """Hold one message of a session as the client saw it.

    message: a JSON object. created: seconds since the epoch. position: number of the session's messages before it, lost
    ones included, so that readers see what is missing; None: a converted record of an older release.
    """

    session: str
    message: dict[str, Any]
    created: float
    position: int | None = None

    @property
    def size(self) -> int:
        """Return roughly how many bytes the record takes in memory."""
        return _MESSAGE_BYTES + json_size(self.message)


@dataclass(frozen=True, slots=True)
class CutRecord:
    """Hold the position at which a session goes on. Applying a record twice does nothing.

    Messages at this position and behind it were taken back. Messages before it that are not in the store are lost.
    """

    session: str
    position: int
    size: ClassVar[int] = _MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class EraseRecord:
    """Mark that a session was erased. session: its key in the store; its name is not stored."""

    session: str
    size: ClassVar[int] = _MESSAGE_BYTES


Record = TurnRecord | MessageRecord | CutRecord | EraseRecord


def json_size(value: Any) -> int:
    """Estimate the bytes of a JSON value. Raises TypeError for a key that JSON would turn into text."""
    if isinstance(value, str):
        return 5 + len(value)
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"keys must be strings, got {key!r}")
        return 5 + sum(5 + len(key) + json_size(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return 5 + sum(map(json_size, value))
    return 9
