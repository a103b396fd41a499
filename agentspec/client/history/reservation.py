"""Let one call at a time hold a session, and take back what an interrupted call has added to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.client.messages import shown_calls, tool_calls_in
from agentspec.errors import SessionBusyError


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Reservation:
    """Stand for whoever has reserved a session, and keep it: a session refers to it weakly.

    tools_run: True for a loop that answers the model's tool calls.
    """

    tools_run: bool = False


class UndoneIfInterrupted:
    """Call `undo` if the block is cancelled or gets Ctrl-C.

    A class, because the garbage collector may close a generator long after its block, as if that were interrupted then.
    """

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self._undo()


def busy_error(session: str, holder: Reservation, messages: Sequence[Mapping[str, Any]]) -> SessionBusyError:
    """Return the error for a call of a session that another call holds."""
    if holder.tools_run:  # a fork has their calls answered as not known
        return SessionBusyError(
            f"session {session!r} has tool calls without an answer ({shown_calls(tool_calls_in(messages)[1])}), and its"
            " tools are running: let run_tools() end first, or go on before them in a fork(at=-1)"
        )
    return SessionBusyError(
        f"session {session!r} is in a call (or in a stream that is still open): let it end or close() the stream"
        " first, or fork() the session to go two ways at once"
    )
