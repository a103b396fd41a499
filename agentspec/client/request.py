"""From a call's arguments to the OpenAI client's: options, session tags, and whether the server has the extension.

Nothing here does I/O.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, get_args
from urllib.parse import quote

import openai

from agentspec.client.conversation import Conversation
from agentspec.client.messages import Content, as_messages
from agentspec.client.reply import ParsedT, Reply
from agentspec.errors import ConfigurationError, InvalidInputError

SessionTags: TypeAlias = Literal["auto", "header", "body", "off"]

ResponseFormat: TypeAlias = type[ParsedT] | Mapping[str, object] | None
"""What `response_format` takes: a pydantic model, what the API takes, or None."""

SESSION_HEADER = "X-Session-ID"
PROBE_PATH = "/agentspec"
TIMEOUT_S = 2.0
"""Limit for a question to the extension."""
RETRY_AFTER_S = 30.0

_PASSING = frozenset({408, 429})
_PLAIN = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")
_REMEDIES = {
    "messages": "pass them as the first argument; a session adds its own history to them",
    "stream": "use stream(...) or chat(..., stream=True)",
}


class ConnectionOptions(TypedDict, total=False):
    """The OpenAI client's own options, which both clients hand on untouched; so are options not listed here."""

    organization: str | None
    project: str | None
    timeout: float | openai.Timeout | None
    max_retries: int
    default_headers: Mapping[str, str] | None
    default_query: Mapping[str, object] | None


class ClientOptions(ConnectionOptions, total=False):
    """Options of AgentClient."""

    http_client: openai.DefaultHttpxClient | None


class AsyncClientOptions(ConnectionOptions, total=False):
    """Options of AsyncAgentClient."""

    http_client: openai.DefaultAsyncHttpxClient | None


def credentials(base_url: str | None, api_key: str | None) -> dict[str, Any]:
    """Return base_url and api_key for the OpenAI client, which reads its environment variables where they are None.

    A server of one's own usually has no key, while the OpenAI client insists on one.
    """
    own_server = base_url is not None or bool(os.environ.get("OPENAI_BASE_URL"))
    if api_key is None and own_server and not os.environ.get("OPENAI_API_KEY"):
        api_key = "EMPTY"
    return {"base_url": base_url, "api_key": api_key}


class Call:
    """One chat call as the caller made it. Raises InvalidInputError for messages or options that cannot be sent."""

    def __init__(
        self, conversation: Conversation, content: Content | None, response_format: Any, options: Mapping[str, Any]
    ) -> None:
        for name, remedy in _REMEDIES.items():
            if name in options:
                raise InvalidInputError(f"{name}: not an option here; {remedy}")
        self.session = conversation.id or None
        self.group = conversation.group
        self.turn = conversation.turn([] if content is None else as_messages(content))
        self.response_format = response_format
        self.options = options

    @property
    def model_class(self) -> type[Any] | None:
        """The pydantic model that the answer is to be read into, if one was asked for."""
        return self.response_format if isinstance(self.response_format, type) else None


class RequestBuilder:
    """Makes a client's requests: from its settings, and from what it knows of its server.

    extension: whether agentspec's extension runs there. A server that answers the probe has answered for good. One
    that could not be asked (no connection, 5xx) is taken to have none and is asked again RETRY_AFTER_S seconds later.

    Raises ConfigurationError for a setting that cannot work.
    """

    def __init__(self, model: str, session_tags: SessionTags, speculation: bool) -> None:
        if not isinstance(model, str) or not model:
            raise ConfigurationError("model: the name of the served model is needed, as GET /v1/models lists it")
        if session_tags not in get_args(SessionTags):
            raise ConfigurationError(
                f"session_tags: one of {', '.join(get_args(SessionTags))} is needed, not {session_tags!r}"
            )
        self.model = model
        self.extension = False
        self._session_tags = session_tags
        self._speculation = speculation
        self._ask_at = 0.0

    def needs_probe(self, call: Call) -> bool:
        """Return whether the server must be asked for the extension before this call is built."""
        tagged = call.session is not None or call.group is not None
        matters = self._speculation or (self._session_tags == "auto" and tagged)
        return matters and time.monotonic() >= self._ask_at

    def learn(self, answer: object) -> None:
        """Take in what GET PROBE_PATH gave: JSON, or the exception that it raised."""
        passing = isinstance(answer, openai.APIConnectionError) or (
            isinstance(answer, openai.APIStatusError) and (answer.status_code >= 500 or answer.status_code in _PASSING)
        )
        self.extension = isinstance(answer, Mapping) and isinstance(answer.get("agentspec"), str)
        self._ask_at = time.monotonic() + RETRY_AFTER_S if passing else float("inf")

    def counts_path(self, reply: Reply[Any]) -> str | None:
        """Return where the server tells of a reply's speculation; None where it does not, or nobody wants to know."""
        if not (self.extension and self._speculation):
            return None
        return f"{PROBE_PATH}/requests/{quote(reply.raw.id, safe='')}"

    def build(self, call: Call, messages: Sequence[Mapping[str, Any]], *, stream: bool = False) -> dict[str, Any]:
        """Return the keyword arguments for `chat.completions.create`, `.parse` or `.stream`.

        stream: whether the answer will be streamed. What the caller set stays as it is.
        """
        request: dict[str, Any] = {"model": self.model, **call.options, "messages": list(messages)}
        if call.response_format is not None:
            request["response_format"] = call.response_format
        self._tag(request, call)
        if stream and self.extension:  # some other servers refuse stream_options
            request.setdefault("stream_options", {"include_usage": True})
        return request

    def _tag(self, request: dict[str, Any], call: Call) -> None:
        """Name the session and the group in the header and the body.

        Every server accepts the header, and vLLM reads it. The body has the id itself, which a header cannot always
        carry, twice: vLLM's own field, and in `vllm_xargs` beside the group for releases without that field.
        """
        if call.session is not None and self._session_tags in ("auto", "header"):
            headers = request.get("extra_headers") or {}
            request["extra_headers"] = {SESSION_HEADER: header_value(call.session), **headers}
        tags = {"session_id": call.session, "group_id": call.group}
        xargs = {name: value for name, value in tags.items() if value is not None}
        if xargs and (self._session_tags == "body" or (self._session_tags == "auto" and self.extension)):
            body = dict(request.get("extra_body") or {})
            xargs |= body.get("vllm_xargs") or {}
            if call.session is not None:
                body = {"session_id": call.session, **body}
            request["extra_body"] = {**body, "vllm_xargs": xargs}


def header_value(session: str) -> str:
    """Return a session id as an HTTP header can carry it: percent-encoded UTF-8 outside visible ASCII.

    "%" itself is encoded too, so that two ids never share a value. Ordinary ids are unchanged. The body, which servers
    with the extension prefer, always has the id itself.
    """
    return quote(session, safe=_PLAIN)
