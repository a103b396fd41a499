"""From a call's arguments to the OpenAI client's: model, session tags, stream options. Nothing here does I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args
from urllib.parse import quote

from agentspec.cache.identifiers import check_session_id
from agentspec.errors import ConfigurationError, InvalidInputError

SessionTags: TypeAlias = Literal["auto", "header", "body", "off"]

SESSION_HEADER = "X-Session-ID"
_PLAIN = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")


@dataclass(frozen=True, slots=True)
class Call:
    """One chat call as the caller made it, apart from its messages."""

    session: str | None = None
    response_format: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    group: str | None = None

    @property
    def model_class(self) -> type[Any] | None:
        """The pydantic model that the answer is to be read into, if one was asked for."""
        return self.response_format if isinstance(self.response_format, type) else None


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """What a client adds to each of its requests."""

    model: str
    session_tags: SessionTags = "auto"
    speculation: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigurationError("model: the name of the served model is needed, as GET /v1/models lists it")
        if self.session_tags not in get_args(SessionTags):
            raise ConfigurationError(
                f"session_tags: one of {', '.join(get_args(SessionTags))} is needed, not {self.session_tags!r}"
            )

    def needs_probe(self, call: Call) -> bool:
        """Whether this call turns on the server having the extension."""
        tagged = call.session is not None or call.group is not None
        return self.speculation or (self.session_tags == "auto" and tagged)

    def build(
        self, call: Call, messages: Sequence[Mapping[str, Any]], *, extension: bool, stream: bool = False
    ) -> dict[str, Any]:
        """The keyword arguments for `chat.completions.create`, `.parse` or `.stream`.

        `stream` is only set for what `create` needs; what the caller set himself is never overridden.
        """
        options = dict(call.options)
        for name in ("messages", "stream"):
            if name in options:
                raise InvalidInputError(f"{name}: not an option here; {_REMEDIES[name]}")
        request: dict[str, Any] = {"model": self.model, **options, "messages": list(messages)}
        if call.response_format is not None:
            request["response_format"] = call.response_format
        self._tag(request, call, extension)
        if stream and extension:  # some other servers refuse stream_options
            request.setdefault("stream_options", {"include_usage": True})
        return request

    def _tag(self, request: dict[str, Any], call: Call, extension: bool) -> None:
        if call.session is not None and self.session_tags in ("auto", "header"):
            request["extra_headers"] = {
                SESSION_HEADER: header_value(call.session),
                **(request.get("extra_headers") or {}),
            }
        tags = {"session_id": call.session, "group_id": call.group}
        xargs = {name: value for name, value in tags.items() if value is not None}
        if xargs and (self.session_tags == "body" or (self.session_tags == "auto" and extension)):
            body = dict(request.get("extra_body") or {})
            xargs |= body.get("vllm_xargs") or {}
            if call.session is not None:
                body = {"session_id": call.session, **body}
            request["extra_body"] = {**body, "vllm_xargs": xargs}


_REMEDIES = {
    "messages": "pass them as the first argument; a session adds its own history to them",
    "stream": "use stream(...) or chat(..., stream=True)",
}


def header_value(session: str) -> str:
    """The session id as an HTTP header can carry it: percent-encoded UTF-8 outside visible ASCII.

    "%" itself is encoded too, so that two ids never share a value. Ordinary ids are unchanged. The body tag,
    which servers with the extension prefer, always has the id itself.
    """
    return quote(session, safe=_PLAIN)


def checked_id(value: str | None, field: str) -> str | None:
    """The id of a session or group, checked (InvalidSessionError, naming `field`), or None."""
    if value is not None:
        check_session_id(value, field)
    return value
