"""Turn a call's arguments into the OpenAI client's: options, and session tags that fit the server.

This module does no I/O.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import openai

from agentspec.client.answers.formats import check_response_format, has_loose_tools, json_schema_format
from agentspec.client.answers.reply import ParsedT, Reply
from agentspec.client.history.conversation import Conversation
from agentspec.client.history.reservation import Reservation
from agentspec.client.messages import Content, as_messages, as_sent, shown
from agentspec.client.option_checks import check_headers, check_mapping, check_retries, check_timeout
from agentspec.client.predictions import as_prediction, check_predict, likely_answer, openai_refuses
from agentspec.client.session_naming import EXTENSION, NAMINGS, SessionTags, spelled_here
from agentspec.errors import ConfigurationError, InvalidInputError, StoreUnavailableError
from agentspec.identifiers import to_header, to_path
from agentspec.protocol import FIGURES_HEADER, ROUTE, SALT_HEADER

logger = logging.getLogger(__name__)

Speculating: TypeAlias = bool | Literal["summary", "detailed"]
"""The client's option `speculation`; True is "summary"."""

ResponseFormat: TypeAlias = type[ParsedT] | Mapping[str, object] | None
"""Type of `response_format`: a pydantic model, the API's own format, or None."""

MODELS_PATH = "/models"
PROBE_PATH = f"/{ROUTE}"
"""Path below the base URL that only a server with the extension has."""
TIMEOUT_S = 2.0
"""Timeout of a query to the extension, in seconds."""
RETRY_AFTER_S = 30.0
"""Pause after a probe that failed, in seconds."""
ERASURE_S, ERASURE_PAUSE_S = 30.0, 0.5
"""Longest time for which an erasure is repeated while some text is left, and the pause between, in seconds."""
KEEP_FOR = "_keep_for"
"""Option of a loop's call: the reservation for which its turn keeps the session."""

_OPENAI_HOST = "api.openai.com"
_PASSING = frozenset({408, 429})
_OUR_OPTIONS = frozenset({"max_retries", "predict", KEEP_FOR})
_REMEDIES = {
    "messages": "pass them as the first argument; a session adds its own history to them",
    "stream": "use stream(...)",
}


class Call:
    """Hold one chat call. Raises InvalidInputError for messages or options that cannot be sent.

    session, group, parent: tags of the call; None: no tag.
    turn: context that reserves the session and has the messages to send; enter it once.
    reservation: the turn's reservation.
    options: options of the OpenAI client's call, without agentspec's.
    predict: whether to predict the answer.
    cache_salt: the salt that the call sends, if any.
    begin: time by `time.monotonic` at which the call was made and, once its request is built, that of the request.
    """

    def __init__(
        self, conversation: Conversation, content: Content | None, response_format: Any, options: Mapping[str, Any]
    ) -> None:
        for name, remedy in _REMEDIES.items():
            if name in options:
                raise InvalidInputError(f"{name}: not an option here; {remedy}")
        self.session = conversation.id or None
        self.group = conversation.group
        self.parent = conversation.parent
        for name in ("extra_body", "extra_headers", "extra_query"):
            check_mapping(name, options.get(name))
        check_headers("extra_headers", options.get("extra_headers") or {})
        body: Mapping[str, Any] = options.get("extra_body") or {}
        check_mapping("extra_body: vllm_xargs", body.get("vllm_xargs"))
        check_response_format(response_format)
        check_timeout(options.get("timeout"))
        check_retries(options.get("max_retries"))
        if isinstance(tools := options.get("tools"), list | tuple) and any(map(callable, tools)):
            raise InvalidInputError("tools: chat() takes tools in the API's form; run_tools() takes functions")
        salt = body.get("cache_salt")
        self.cache_salt = salt if isinstance(salt, str) else None
        self._conversation = conversation
        messages = [] if content is None else as_messages(content)
        self.reservation = Reservation()
        self.turn = conversation.turn(messages, self.reservation, keep_for=options.get(KEEP_FOR))
        self.response_format = response_format
        self.begin = time.monotonic()
        self.options = {name: value for name, value in options.items() if name not in _OUR_OPTIONS}
        self.predict = check_predict(options.get("predict"))
        self.max_retries: int | None = options.get("max_retries")
        if "prediction" in options:
            self.options["prediction"] = as_prediction(options["prediction"])
        if self.cache_salt is not None:
            conversation.add_salt(self.cache_salt)

    @property
    def resumed(self) -> int:
        """Return how many of the session's messages came from the store. Read it once the session is loaded."""
        return self._conversation.resumed

    @property
    def model_class(self) -> type[Any] | None:
        """Return the pydantic model into which the OpenAI client parses the answer, or None."""
        return None if has_loose_tools(self.options.get("tools")) else self.answer_class

    @property
    def answer_class(self) -> type[Any] | None:
        """Return the pydantic model for the answer, or None."""
        return self.response_format if isinstance(self.response_format, type) else None


class RequestBuilder:
    """Build a client's requests from its settings and from what it knows about its server.

    extension: whether the server has agentspec's extension. The answer to a probe is final. If the probe fails (no
        connection, 5xx), the client assumes no extension and probes again RETRY_AFTER_S seconds later.
    token_ids: whether to ask servers for the token ids of prompts and answers, which vLLM sends.
    thoughts: whether to send back what a reasoning model thought.
    host: name of the server's host; OpenAI's API refuses thoughts.

    Raises ConfigurationError for a setting that cannot work.
    """

    def __init__(
        self,
        model: str,
        session_tags: SessionTags,
        speculation: Speculating,
        *,
        token_ids: bool = False,
        thoughts: bool = True,
        host: str = "",
    ) -> None:
        if not isinstance(model, str) or not model:
            raise ConfigurationError("model: the name of the served model is needed, as GET /v1/models lists it")
        if session_tags not in get_args(SessionTags):
            raise ConfigurationError(
                f"session_tags: one of {', '.join(get_args(SessionTags))} is needed, not {session_tags!r}"
            )
        if not isinstance(speculation, bool) and speculation not in ("summary", "detailed"):
            raise ConfigurationError(f"speculation: True, False or 'detailed' is needed, not {speculation!r}")
        if not isinstance(thoughts, bool):
            raise ConfigurationError(f"thoughts: True or False is needed, not {shown(thoughts)}")
        self.model = model
        self.extension = False
        self._session_tags = session_tags
        self._speculation = "summary" if speculation is True else speculation or None
        self._token_ids = token_ids
        self.contexts: dict[str, int | None] = {}  # by model: the length of its context, once its server was asked
        self._of_openai = host == _OPENAI_HOST or host.endswith(f".{_OPENAI_HOST}")  # such as eu.api.openai.com
        self._thoughts = thoughts and not self._of_openai
        self._ask_at = 0.0
        self._refused: int | None = None  # status with which a gateway has refused the probe

    @property
    def takes_predictions(self) -> bool:
        """Return whether the server takes predictions, as far as is known: one with the extension, or OpenAI's API."""
        return self.extension or self._of_openai or NAMINGS[self._session_tags].predictions

    def needs_probe(self, call: Call) -> bool:
        """Return whether to probe the server for the extension before building this call."""
        tagged = call.session is not None or call.group is not None
        predicts = call.predict or call.options.get("prediction") is not None
        matters = self._speculation is not None or predicts or (self._session_tags == "auto" and tagged)
        return matters and time.monotonic() >= self._ask_at

    def needs_probe_of_sessions(self) -> bool:
        """Return whether to probe the server before asking for `erasures` or `session_path`."""
        return self._session_tags != "off" and time.monotonic() >= self._ask_at

    def session_path(self, session: str) -> str | None:
        """Return the path of a session on a server with the extension; None if the server keeps no sessions by id.

        Call it after a probe. A server that could not be probed counts as keeping them, so that its error shows.
        """
        return self._path_of(session) if session and self._may_keep_sessions else None

    @property
    def _may_keep_sessions(self) -> bool:
        return self._session_tags != "off" and (self.extension or self._ask_at < float("inf"))

    @staticmethod
    def _path_of(session: str) -> str:
        return f"{PROBE_PATH}/sessions/{to_path(session)}"

    def erasures(self, conversation: Conversation, more: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Yield path and options of each request that erases a session and its helpers on the server.

        Each session takes one request without a cache salt and one for each salt, because a salt makes another session.
        more: salts that other processes have sent. Yields nothing if the server keeps no sessions. Call it after a
        probe. A server that could not be probed counts as keeping them, so that its error shows.
        """
        if isinstance(more, str) or not isinstance(more, Iterable):
            raise InvalidInputError(f"cache_salts: a list of texts is needed, not {shown(more)}")
        if not self._may_keep_sessions:
            if self._refused is not None and self._session_tags != "off":
                logger.warning(
                    "agentspec: session %r: nothing was erased on the server: GET %s was refused with status %d, so it"
                    " counts as a server without the extension. If it has the extension, let its gateway pass this path"
                    " and those below, and make another client",
                    conversation.id,
                    PROBE_PATH,
                    self._refused,
                )
            return
        salts = [salt_headers(salt) for salt in sorted({*conversation.cache_salts, *more}, key=str)]
        for session in (conversation.id, *conversation.helpers):
            yield self._path_of(session), {}
            for headers in salts:
                yield self._path_of(session), {"headers": headers}

    def learn_context(self, model: str, answer: object) -> int | None:
        """Return the length of a model's context, as `context_in` does, and note it unless it may be told later."""
        length = context_in(answer, model)
        if not isinstance(answer, Exception) or isinstance(answer, openai.NotFoundError):
            self.contexts[model] = length
        return length

    def learn(self, answer: object) -> None:
        """Note the result of GET PROBE_PATH: its JSON, or the exception that it raised."""
        passing = isinstance(answer, openai.APIConnectionError) or (
            isinstance(answer, openai.APIStatusError) and (answer.status_code >= 500 or answer.status_code in _PASSING)
        )
        self._refused = None
        if isinstance(answer, openai.AuthenticationError | openai.PermissionDeniedError):
            self._refused = answer.status_code
        self.extension = isinstance(answer, Mapping) and isinstance(answer.get("agentspec"), str)
        self._ask_at = time.monotonic() + RETRY_AFTER_S if passing else float("inf")

    @staticmethod
    def counts_path(reply: Reply[Any]) -> str | None:
        """Return the path of a reply's speculation counts on a server with the extension; None if it has no id."""
        return f"{PROBE_PATH}/requests/{to_path(reply.raw.id)}" if reply.raw.id else None

    def headers(self, conversation: Conversation) -> dict[str, str]:
        """Return the headers that name a session, for requests that a framework makes itself.

        Raises InvalidInputError if sessions are named in the body only, because the framework writes the body.
        """
        naming = NAMINGS[self._session_tags]
        if naming.body is not None and naming.header is None:
            raise InvalidInputError(
                f"openai: session_tags={self._session_tags!r} names a session in the body of a request, which no client"
                f" adds to others' requests: take client.openai, and let the framework send {naming.body!r}"
            )
        request: dict[str, Any] = {}
        naming.tag(request, conversation.id, conversation.parent, None)
        return request.get("extra_headers") or {}

    def build(self, call: Call, messages: Sequence[Mapping[str, Any]], *, stream: bool = False) -> dict[str, Any]:
        """Return the keyword arguments for `chat.completions.create`, `.parse` or `.stream`.

        stream: whether the answer will be streamed. The caller's own options are kept.
        """
        call.begin = time.monotonic()
        sent = [as_sent(message, thoughts=self._thoughts) for message in messages]
        request: dict[str, Any] = {"model": self.model, **call.options, "messages": sent}
        if call.options.get("extra_headers"):
            request["extra_headers"] = spelled_here(call.options["extra_headers"])
        if call.response_format is not None:
            parsed_here = call.answer_class is not None and call.model_class is None
            format_ = json_schema_format(call.answer_class) if parsed_here else call.response_format
            request["response_format"] = format_
        self._predict(request, call)
        naming = EXTENSION if self._session_tags == "auto" and self.extension else NAMINGS[self._session_tags]
        naming.tag(request, call.session, call.parent, call.group)
        if self.extension and self._speculation:
            request["extra_headers"] = {FIGURES_HEADER: self._speculation, **(request.get("extra_headers") or {})}
        if self._token_ids:
            request["extra_body"] = {"return_token_ids": True, **(request.get("extra_body") or {})}
        if stream and self.extension:  # some other servers reject stream_options
            request.setdefault("stream_options", {"include_usage": True})
        return request

    def _predict(self, request: dict[str, Any], call: Call) -> None:
        """Add an automatic prediction to a request if it may have one. Remove any that the server doesn't take."""
        takes = self.takes_predictions and (self.extension or not openai_refuses(request))
        if call.predict and takes and request.get("prediction") is None:
            request["prediction"] = as_prediction(likely_answer(request["messages"]))
        if request.get("prediction") is None or not takes:
            request.pop("prediction", None)
        elif not self.extension and "max_completion_tokens" in request:  # OpenAI refuses it beside a prediction
            request.setdefault("max_tokens", request.pop("max_completion_tokens"))


def context_in(models: object, model: str) -> int | None:
    """Return the length of a model's context, in tokens, of which vLLM and SGLang tell; None if the server doesn't.

    models: the answer of GET /models, or the exception that it raised.
    """
    listed = models.get("data") if isinstance(models, Mapping) else None
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, Mapping) and entry.get("id") == model:
            length = entry.get("max_model_len")
            return length if isinstance(length, int) and length > 0 else None
    return None


def salt_headers(cache_salt: str) -> dict[str, str]:
    """Return the header that gives a cache salt to the extension. Raises InvalidInputError unless it is UTF-8 text."""
    try:
        return {SALT_HEADER: to_header(cache_salt)}
    except (TypeError, UnicodeEncodeError):
        raise InvalidInputError(f"cache_salt: a text in UTF-8 is needed, not {shown(cache_salt)}") from None


def is_erased(answer: object) -> bool:
    """Return whether a server's answer to an erasure says that nothing is left."""
    return not (isinstance(answer, Mapping) and answer.get("complete") is False)


def incomplete_error(session: str) -> StoreUnavailableError:
    """Return the error for a session whose text is still in the server's database."""
    return StoreUnavailableError(
        f"session {session!r}: the server has erased it, but another process still reads the old pages of its database;"
        " call clear() again when that process has ended"
    )


def has_no_such_session(error: openai.APIStatusError) -> bool:
    """Return whether a server's refusal to erase a session means that it has nothing to erase."""
    return error.status_code in (404, 405)
