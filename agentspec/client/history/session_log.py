"""Define the log from which a session is resumed, and the messages in it.

A session talks to its log, not to a store, so a client without a store loads none of the store's modules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentspec.errors import SessionConflictError


class Said(NamedTuple):
    """Hold a message, and how many messages of the session came before it, lost ones included."""

    position: int
    message: dict[str, Any]


@dataclass(slots=True, eq=False)
class ClientView:
    """Hold what one client knows of a session in the store: how far it has read and written.

    last: cursor of the last entry that the client has read or written; None if there was none.
    known: False while the session is unread, because the client has taken its history as empty.
    offset: number of positions before the client's first message.
    conflict: whether another client wrote behind ``last``, so that this one writes no more.
    """

    session: str
    last: str | None = None
    known: bool = True
    offset: int = 0
    conflict: bool = False


@dataclass(frozen=True, slots=True)
class Stored:
    """Hold a session as the store has it. next_position: the position of its next message. last: as in ClientView."""

    history: list[Said] = field(default_factory=list)
    next_position: int = 0
    last: str | None = None


class SessionLog:
    """Store nothing, for `store=None`."""

    keeps = False
    """True if the log can restore a session that is no longer in use."""

    def read(self, session: str) -> Stored:
        """Return the stored session. May block. Raises StoreError if it cannot be read."""
        return Stored()

    def append(self, view: ClientView, said: list[Said], cut: int | None = None) -> None:
        """Queue the messages of one turn. Never blocks, never raises.

        cut: first take back the messages from this position on; None: take back none.
        """

    def rewrite(self, view: ClientView, position: int, said: list[Said]) -> None:
        """Replace the messages from ``position`` on by these, in one step. Blocks until that is stored.

        Raises StoreError, or SessionConflictError if another client wrote to the session; nothing has changed then.
        """

    def check(self, view: ClientView) -> None:
        """Raise SessionConflictError if another client wrote to the session. May block for a moment."""

    def confirm(self, view: ClientView) -> None:
        """Wait a moment for the messages to be stored. Raises SessionConflictError if another client wrote before."""

    def wait_for_room(self) -> None:
        """Wait until the queue is within its limit, so that no message is dropped. Blocks while the store works."""

    def remove(self, session: str) -> None:
        """Remove the session. Blocks until it is removed. Raises StoreError if that fails."""

    def close(self) -> None:
        """Write the queued messages."""


def conflict_error(session: str) -> SessionConflictError:
    """Return the error for a session whose stored messages are not those that the client left there."""
    return SessionConflictError(
        f"session {session!r}: the store has other messages of it than this client: another client has added some or"
        " erased it, or the store has lost some. fork() goes on with the messages known here, in a new session;"
        " reload() drops those that are not stored, and reads the others'"
    )
