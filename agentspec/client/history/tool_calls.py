"""Find the tool calls of a history that have no answer, and say what to do about them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentspec.client.messages import shown, shown_calls, tool_calls_in
from agentspec.errors import InvalidInputError

CANCELLED = "error: cancelled before it ended"
"""Answer to a call whose tool did not end."""
_UNKNOWN = "error: no answer is known; the tool may have run"
"""Answer to a call of another process, which was killed while its tools ran, or still runs them."""


def calls_left_open(
    history: Sequence[Mapping[str, Any]], new: Iterable[Mapping[str, Any]] = ()
) -> dict[object, object]:
    """Return the tools' names by the ids of the calls at the end of a history that have no answer.

    new: messages to be added; the answers with which they begin count. Open calls further up are left out, because no
    answer reaches them any more.
    """
    behind = list(itertools.takewhile(_is_answer, reversed(history)))
    latest = history[-len(behind) - 1 :][:1]  # the message before these answers
    return tool_calls_in([*latest, *behind, *itertools.takewhile(_is_answer, new)])[1]


def _is_answer(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "tool")


def given_up(calls: Iterable[object]) -> list[dict[str, Any]]:
    """Return messages that answer the calls with these ids, whose tools' answers nobody will see here."""
    return [{"role": "tool", "tool_call_id": call, "content": _UNKNOWN} for call in calls]


def open_calls_remedy(session: str, calls: Mapping[object, object]) -> str:
    """Return what to do about open calls, behind which many servers take no message. calls: of `calls_left_open`."""
    return (
        f"session {session!r} has tool calls without an answer ({shown_calls(calls)}): answer each with tool_result(),"
        " let run_tools() answer them as not known, or go on before them in a fork(at=-1)"
    )


def refuse_other_than_open(session: str, messages: Iterable[Mapping[str, Any]], tool_call_id: str) -> None:
    """Raise InvalidInputError unless a tool call with this id waits for its answer."""
    known, waiting = tool_calls_in(messages)
    if tool_call_id not in waiting:
        why = "has an answer already" if tool_call_id in known else "is no call of the session"
        rest = f"{shown_calls(waiting)} without an answer" if waiting else "no call without an answer"
        raise InvalidInputError(f"tool_call_id: {shown(tool_call_id)} {why}; session {session!r} has {rest}")
