"""Define, as data, how a request tells each kind of server and gateway to which session it belongs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from agentspec.identifiers import to_header
from agentspec.protocol import FIGURES_HEADER, PARENT_HEADER, SESSION_HEADER

SessionTags: TypeAlias = Literal[
    "auto", "header", "body", "off", "vllm", "sglang", "dynamo", "aibrix", "openai", "litellm"
]


@dataclass(frozen=True, slots=True)
class SessionNaming:
    """Say where a request names its session, and the session that started it.

    header, parent_header: HTTP headers. body: field of the request's body. longest: most characters in this field;
    a longer id is replaced by its hash. xargs: whether `vllm_xargs` names session, parent and group, too. predictions:
    whether the server takes `prediction`; others never see it.
    """

    header: str | None = None
    parent_header: str | None = None
    body: str | None = None
    longest: int = 256
    xargs: bool = False
    predictions: bool = False

    def tag(self, request: dict[str, Any], session: str | None, parent: str | None, group: str | None) -> None:
        """Name session, parent and group in a request. Names that the caller gave itself stay."""
        named = {self.header: session, self.parent_header: parent if session is not None else None}
        headers = {name: to_header(value) for name, value in named.items() if name and value is not None}
        if headers:
            request["extra_headers"] = {**headers, **(request.get("extra_headers") or {})}
        body: dict[str, Any] = dict(request.get("extra_body") or {})
        if self.xargs:
            tags = {"session_id": session, "parent_session_id": parent, "group_id": group}
            xargs = {name: value for name, value in tags.items() if value is not None}
            if xargs:
                body["vllm_xargs"] = {**xargs, **(body.get("vllm_xargs") or {})}
        if self.body is not None and session is not None and self.body not in request:
            fits = len(session) <= self.longest
            body.setdefault(self.body, session if fits else hashlib.sha256(session.encode()).hexdigest())
        if body:
            request["extra_body"] = body


_HEADERS = SessionNaming(SESSION_HEADER, PARENT_HEADER)

NAMINGS: dict[str, SessionNaming] = {
    "auto": _HEADERS,
    "header": _HEADERS,
    "body": SessionNaming(body="session_id", xargs=True),
    "off": SessionNaming(),
    "vllm": SessionNaming(SESSION_HEADER, body="session_id"),
    "sglang": SessionNaming("X-SMG-Routing-Key"),
    "dynamo": SessionNaming("X-Dynamo-Session-ID", "X-Dynamo-Parent-Session-ID"),
    "aibrix": SessionNaming(SESSION_HEADER),
    "openai": SessionNaming(body="prompt_cache_key", longest=64, predictions=True),
    "litellm": SessionNaming("x-litellm-session-id"),
}
"""Namings by the client's option `session_tags`. Another server needs a line here and in SessionTags."""

EXTENSION = SessionNaming(SESSION_HEADER, PARENT_HEADER, body="session_id", xargs=True, predictions=True)
"""Naming of "auto" once the server is known to have the extension. The body has the ids unencoded, and the group."""

_SPELLINGS = {
    name.lower(): name
    for name in (
        FIGURES_HEADER,
        *(name for naming in NAMINGS.values() for name in (naming.header, naming.parent_header)),
    )
    if name is not None
}


def spelled_here(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return a caller's headers, with those that name a session or ask for figures spelled as this client does.

    HTTP ignores the case of names, but older OpenAI clients (2.25) send both spellings, each with its own value.
    """
    return {_SPELLINGS.get(name.lower(), name): value for name, value in headers.items()}
