"""Find the session of an agent in the headers that its client sends by itself.

A client that is not known yet needs a line in ``CLIENTS`` and nothing else.
"""

from dataclasses import dataclass

from agentspec.identifiers import from_header
from agentspec.protocol import PARENT_HEADER, SESSION_HEADER
from agentspec.server_ext.identity.callers import Presented


@dataclass(frozen=True, slots=True)
class ClientHeaders:
    """Name the headers of one client, in lower case. Of several headers, the first that a request has counts.

    session: headers that name the session. parent: headers that name the session that started this one; a value equal
    to the session's own id does not count. final: headers that are "true" or "1" in a session's last request.
    """

    name: str
    session: tuple[str, ...]
    parent: tuple[str, ...] = ()
    final: tuple[str, ...] = ()


CLIENTS = (
    ClientHeaders(
        "Dynamo",
        session=("x-dynamo-session-id",),
        parent=("x-dynamo-parent-session-id",),
        final=("x-dynamo-session-final",),
    ),
    ClientHeaders(  # vLLM's own header, which OpenCode sends, too
        "OpenCode",
        session=(SESSION_HEADER.lower(),),
        parent=(PARENT_HEADER.lower(),),
        final=("x-session-final",),
    ),
    ClientHeaders(
        "Claude Code",
        session=("x-claude-code-agent-id", "x-claude-code-session-id"),
        parent=("x-claude-code-parent-agent-id", "x-claude-code-session-id"),
    ),
    ClientHeaders(
        "Codex",
        session=("thread-id", "session-id"),
        parent=("x-codex-parent-thread-id", "session-id"),
    ),
)
"""All known clients. The first one whose session header a request has counts."""


@dataclass(frozen=True, slots=True)
class AgentSession:
    """Hold what a client's headers say: ids decoded and unchecked. final: the session ends with this request."""

    session: str
    parent: str | None
    final: bool


def agent_session(presented: Presented | None) -> AgentSession | None:
    """Return what the headers of a request say about its session; None if they name none."""
    if presented is None:
        return None
    for client in CLIENTS:
        session = _first(presented, client.session)
        if session is not None:
            parent = _first(presented, client.parent, other_than=session)
            final = (_first(presented, client.final) or "").lower() in ("true", "1")
            return AgentSession(session, parent, final)
    return None


def _first(presented: Presented, names: tuple[str, ...], other_than: str | None = None) -> str | None:
    """Return the first value of these headers that is neither empty nor ``other_than``; None if there is none."""
    values = (from_header(value) for name in names for value in presented.all(name)[:1])
    return next((value for value in values if value and value != other_than), None)
