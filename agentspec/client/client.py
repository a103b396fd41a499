"""AgentClient: the OpenAI client, with sessions."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Literal, Self, overload

import openai
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from typing_extensions import Unpack

from agentspec.cache.store import Store
from agentspec.client.accumulate import Accumulator, parse_text
from agentspec.client.conversation import Conversations, Turn, stateless_turn
from agentspec.client.extension import PROBE_PATH, TIMEOUT_S, Extension, counts_path
from agentspec.client.messages import Content
from agentspec.client.options import ClientOptions, credentials
from agentspec.client.reply import ParsedT, Reply, read_reply
from agentspec.client.request import Call, RequestSettings, SessionTags, checked_id
from agentspec.client.session import Session
from agentspec.client.session_log import open_log
from agentspec.client.speculation import Speculation, read_speculation
from agentspec.client.streams import Item, ReplyStream


class AgentClient:
    """Chat with any OpenAI-compatible server, in sessions that are kept and that the server can draft from.

    base_url, api_key: as the OpenAI client takes them; for a `base_url` of one's own no key is needed.
    model: the served model's name; a call can take another with `model=`.
    store: where sessions are kept: "auto" (a SQLite file in the user's data directory), a URL
        (`sqlite:///…`, `redis://…`, `memory://`), a store object, or None for this client's memory only.
    session_tags: how calls tell the server their session. "auto": the header X-Session-ID, and the body's
        `session_id` and `vllm_xargs.session_id` where the server has the extension; "header" and "body": only
        that, whatever the server; "off": not at all. A group has no header: it goes with the body's tags only.
    speculation: whether `reply.speculation` is filled; takes one small request more where the extension is.
    options: every other option of the OpenAI client (timeout, max_retries, http_client, ...).

    Raises ConfigurationError for an option that cannot work, StoreError when a store given by URL cannot be
    opened. Errors of the server reach the caller as the OpenAI client raises them. Safe to share by threads;
    one session takes one call at a time.
    """

    def __init__(
        self,
        *,
        model: str,
        base_url: str | None = None,
        api_key: str | None = None,
        store: str | Store | None = "auto",
        session_tags: SessionTags = "auto",
        speculation: bool = True,
        **options: Unpack[ClientOptions],
    ) -> None:
        self._settings = RequestSettings(model, session_tags, speculation)
        self._openai = openai.OpenAI(**credentials(base_url, api_key), **options)
        self._extension = Extension()
        self._probe_lock = threading.Lock()
        self._log = open_log(store)
        self._conversations = Conversations(self._log)
        self._closing = weakref.finalize(self, self._log.close)  # also when the interpreter exits

    @property
    def openai(self) -> openai.OpenAI:
        """The OpenAI client below, for everything that is not chat."""
        return self._openai

    @property
    def model(self) -> str:
        """The model that calls go to unless they name another."""
        return self._settings.model

    def session(self, session_id: str | None = None, *, group: str | None = None) -> Session:
        """The session with this id, with the messages that the store has of it; a new one without an id.

        group: what several sessions answer, an RL problem for instance; they draft from each other's answers first.
        It is not stored: name it again in another process.
        Sessions of one id and client share their messages and their group. Raises InvalidSessionError for an id
        that is empty, longer than 256 characters or has control characters.
        """
        return Session(self, self._conversations.get(checked_id(session_id, "session"), checked_id(group, "group")))

    @overload
    def chat(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        stream: Literal[False] = False,
        response_format: type[ParsedT],
        **options: Any,
    ) -> Reply[ParsedT]: ...
    @overload
    def chat(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        stream: Literal[False] = False,
        response_format: Mapping[str, object] | None = None,
        **options: Any,
    ) -> Reply: ...
    @overload
    def chat(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        stream: Literal[True],
        response_format: type[ParsedT],
        **options: Any,
    ) -> ReplyStream[ParsedT]: ...
    @overload
    def chat(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        stream: Literal[True],
        response_format: Mapping[str, object] | None = None,
        **options: Any,
    ) -> ReplyStream: ...
    def chat(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        stream: bool = False,
        response_format: Any = None,
        **options: Any,
    ) -> Reply[Any] | ReplyStream[Any]:
        """One call whose messages the caller gives wholly; a string is one user message.

        `session` and `group` only tag it: nothing is added to that session's kept messages.
        `response_format`: a pydantic model (then `reply.parsed` is an instance) or what the API takes.
        `options`: any option of `chat.completions.create`, tools included.
        """
        call = Call(checked_id(session, "session"), response_format, options, checked_id(group, "group"))
        turn = nullcontext(stateless_turn(messages))
        return self._stream(turn, call).start() if stream else self._chat(turn, call)

    @overload
    def stream(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        response_format: type[ParsedT],
        **options: Any,
    ) -> ReplyStream[ParsedT]: ...
    @overload
    def stream(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        response_format: Mapping[str, object] | None = None,
        **options: Any,
    ) -> ReplyStream: ...
    def stream(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        response_format: Any = None,
        **options: Any,
    ) -> ReplyStream[Any]:
        """chat() as an iterator of text; the request is sent when iteration starts."""
        call = Call(checked_id(session, "session"), response_format, options, checked_id(group, "group"))
        return self._stream(nullcontext(stateless_turn(messages)), call)

    def close(self) -> None:
        """Write out what is queued for the store, and close the connections."""
        self._closing()
        self._openai.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _chat(self, turn: AbstractContextManager[Turn], call: Call) -> Reply[Any]:
        with turn as current:
            extension = self._probed(call)
            request = self._settings.build(call, current.messages, extension=extension)
            completions = self._openai.chat.completions
            send: Any = completions.create if call.model_class is None else completions.parse
            raw: ChatCompletion = send(**request)
            reply = read_reply(raw, session=call.session)
            current.commit(reply.message)
            return dataclasses.replace(reply, speculation=self._counts(raw.id, extension))

    def _stream(self, turn: AbstractContextManager[Turn], call: Call) -> ReplyStream[Any]:
        return ReplyStream(self._items(turn, call))

    def _items(self, turn: AbstractContextManager[Turn], call: Call) -> Generator[Item, None, None]:
        with turn as current:
            extension = self._probed(call)
            request = self._settings.build(call, current.messages, extension=extension, stream=True)
            answer = Accumulator()
            with self._chunks(request, call) as chunks:
                yield ""
                for chunk in chunks:
                    if text := answer.add(chunk):
                        yield text
            raw = answer.completion()
            reply = read_reply(raw, session=call.session, parsed=parse_text(raw, call.model_class))
            current.commit(reply.message)
            yield dataclasses.replace(reply, speculation=self._counts(raw.id, extension))

    @contextmanager
    def _chunks(self, request: dict[str, Any], call: Call) -> Generator[Iterable[ChatCompletionChunk], None, None]:
        completions: Any = self._openai.chat.completions
        if call.model_class is None:
            with completions.create(**request, stream=True) as stream:
                yield stream
        else:
            with completions.stream(**request) as events:
                yield (event.chunk for event in events if event.type == "chunk")

    def _probed(self, call: Call) -> bool:
        if not self._settings.needs_probe(call):
            return False
        with self._probe_lock:
            if self._extension.due():
                try:
                    self._extension.answered(self._get(PROBE_PATH))
                except Exception as error:  # no probe may cost the call that it is for
                    self._extension.failed(error)
            return self._extension.present

    def _counts(self, request_id: str, extension: bool) -> Speculation | None:
        if not (extension and self._settings.speculation):
            return None
        try:
            return read_speculation(self._get(counts_path(request_id)))
        except Exception:  # the reply is there; its counts are not worth losing it
            return None

    def _get(self, path: str) -> object:
        return self._openai.get(path, cast_to=object, options={"timeout": TIMEOUT_S, "max_retries": 0})
