"""Add sessions to the OpenAI client: AgentClient and Session."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import openai
from typing_extensions import Unpack

from agentspec.client.answers.reply import ParsedT, Reply, Speculation, read_speculation
from agentspec.client.answers.streamed_answer import StreamedAnswer
from agentspec.client.answers.streams import ReplyStream
from agentspec.client.base import ClientBase, SessionBase, StreamItem
from agentspec.client.connection import ClientOptions, connect, remedies_noted
from agentspec.client.history.conversation import Conversation, Gap, OnUnavailable
from agentspec.client.loops.session_loops import Loops
from agentspec.client.loops.steps import run_steps
from agentspec.client.messages import Content
from agentspec.client.option_checks import options_named
from agentspec.client.request import PROBE_PATH, Call, ResponseFormat, Speculating
from agentspec.client.session_naming import SessionTags

if TYPE_CHECKING:
    from agentspec.cache.store import Store
    from agentspec.client.forecast import Forecast, Tokenize


class AgentClient(ClientBase[openai.OpenAI]):
    """Chat with any OpenAI-compatible server, in sessions that are stored and that the server can draft from.

    model: name of the served model. A call can name another with `model=`.
    base_url, api_key: as for the OpenAI client. With a `base_url` the key is optional.
    store: where sessions are kept.
        "auto": in a SQLite file in the user's data folder.
        A URL (`sqlite:///…`, `redis://…`, `memory://`) or a store object: there.
        None: in this client's memory only.
    session_tags: how calls name their session to the server. Only the body of a request can name a group.
        "auto": in the header X-Session-ID. For a server with the extension also in the body, as `session_id` and
            `vllm_xargs.session_id`.
        "header", "body": only there, with any server. "off": nowhere.
        "vllm", "sglang", "dynamo", "aibrix", "openai" (`prompt_cache_key`), "litellm": as they read it.
    speculation: whether servers with the extension send `reply.speculation`. "detailed" adds each step's tokens and
        their sources.
    record: file that gets a JSON line for each reply, with its text and its tokens' sources, for `agentspec report`.
    tokenizer: where forecasts get tokens.
        "server": vLLM sends their ids with each answer.
        A tokenizer.json, a model's folder or name, or a function from text to token ids: messages are tokenised here.
        None: an approximation.
    thoughts: whether a reasoning model gets its thoughts back with the history, in the field in which its server sent
        them. Most such models need them between tool calls. OpenAI's API sends none and gets none.
    options: any other option of the OpenAI client, such as timeout, max_retries or http_client.

    Raises ConfigurationError for an option that cannot work, and StoreError if a store given by URL cannot be opened.
    Calls raise the OpenAI client's errors unchanged. A session takes one call at a time. Threads may share a client; a
    forked process must make its own.
    """

    def __init__(
        self,
        *,
        model: str,
        base_url: str | None = None,
        api_key: str | None = None,
        store: str | Store | None = "auto",
        session_tags: SessionTags = "auto",
        speculation: Speculating = True,
        record: str | Path | None = None,
        tokenizer: str | Tokenize | None = None,
        thoughts: bool = True,
        **options: Unpack[ClientOptions],
    ) -> None:
        connection = connect(openai.OpenAI, base_url, api_key, options)
        super().__init__(connection, model, store, session_tags, speculation, record, tokenizer, thoughts)
        self._probe_lock = threading.Lock()

    def session(
        self,
        session_id: str | None = None,
        *,
        group: str | None = None,
        parent: str | None = None,
        on_unavailable: OnUnavailable = "raise",
    ) -> Session:
        """Return the session with this id and its stored messages; without an id, a new session.

        group: the problem that several sessions answer, such as an RL problem. They draft from each other's answers
            first. The group is not stored: name it again in another process, or once no Session of this id is held
            here.
        parent: the session that started this one; see Session.child().
        on_unavailable: what to do if the stored messages cannot be read.
            "raise": raise a StoreError at the first use, before anything is sent.
            "empty": start without them. New messages are stored behind them.

        Sessions of one id and client share their messages, group and parent. A session without an id is kept in memory
        only, as long as it is used. Raises InvalidSessionError for an id that is empty, longer than 256 characters or
        has control characters or line ends.
        """
        return Session(self, self._conversations.get(session_id, group, parent), on_unavailable)

    def chat(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        parent: str | None = None,
        response_format: ResponseFormat[ParsedT] = None,
        **options: Any,
    ) -> Reply[ParsedT]:
        """Make one call with exactly these messages; a string is one user message.

        session, group, parent: tags of the call; it adds nothing to that session's messages.
        The other arguments are those of `Session.chat`.
        """
        unkept = Session(self, self._conversations.unkept(session, group, parent))
        return unkept.chat(messages, response_format=response_format, **options)

    def stream(
        self,
        messages: Content,
        *,
        session: str | None = None,
        group: str | None = None,
        parent: str | None = None,
        response_format: ResponseFormat[ParsedT] = None,
        **options: Any,
    ) -> ReplyStream[ParsedT]:
        """Return the text of one chat() call as an iterator. The request is sent when iteration starts."""
        unkept = Session(self, self._conversations.unkept(session, group, parent))
        return unkept.stream(messages, response_format=response_format, **options)

    def speculation(self, reply: Reply[Any]) -> Speculation | None:
        """Return what was drafted and accepted for a reply; None if the server does not know.

        Servers with the extension send these counts with the reply unless the client's `speculation` is False. If the
        reply has none, this asks the server.
        """
        if reply.speculation is None:
            self._refuse_if_unusable()
        if reply.speculation is not None or (path := self._requests.counts_path(reply)) is None:
            return reply.speculation
        return read_speculation(run_steps(self._ask(path)))

    def close(self) -> None:
        """Write queued messages to the store, and close the connections."""
        self._closed = True
        with ExitStack() as rest:  # closed even if the store's own close raises
            rest.callback(self._openai.close)
            if self._record is not None:
                rest.callback(self._record.close)
            self._close_log()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _probe(self, call: Call) -> None:
        if self._requests.needs_probe(call):
            with self._probe_lock:
                if self._requests.needs_probe(call):
                    self._requests.learn(run_steps(self._ask(PROBE_PATH)))


class Session(SessionBase, Loops):
    """Keep a conversation under its id: each call sends the whole history and appends the reply.

    `AgentClient.session()` makes sessions. A call that fails leaves the history unchanged, so it can be repeated. A
    second call at the same time raises SessionBusyError; `fork()` a session to make two calls at once. Messages are
    stored in the background, and wait while the store is away. If more than 64 MiB wait, the largest turn not counted,
    the session that has most waiting loses its oldest turn, which `gaps` shows.
    """

    _client: AgentClient

    def __init__(
        self, client: AgentClient, conversation: Conversation, on_unavailable: OnUnavailable = "raise"
    ) -> None:
        super().__init__(conversation, on_unavailable)
        self._client = client

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return a copy of the history, oldest first."""
        self.load()
        return self._conversation.messages()

    @property
    def gaps(self) -> list[Gap]:
        """Return where the store has lost messages of the history; empty if it is whole."""
        self.load()
        return self._conversation.gaps()

    def load(self) -> None:
        """Read the stored messages now instead of at the first use."""
        self._refuse_if_unreadable()
        self._conversation.load(self._on_unavailable)

    def chat(
        self, content: Content | None = None, *, response_format: ResponseFormat[ParsedT] = None, **options: Any
    ) -> Reply[ParsedT]:
        """Send the history and `content` (a string is a user message; None sends the history alone).

        response_format: a pydantic model (then `reply.parsed` is an instance) or the API's own format.
        options: any option of `chat.completions.create`, tools included, and these:
            max_retries: the OpenAI client's, for this call.
            prediction: a text that the answer will probably resemble, such as a file that is to be edited (OpenAI's
                Predicted Outputs). Only servers that take predictions get it, and `reply.usage` counts the accepted and
                rejected tokens.
            predict: "auto" predicts the session's last answer if the answers before were edits of each other. Off by
                default, because OpenAI bills rejected tokens.

        Raises InvalidInputError without content behind tool calls that have no answer. With content many servers refuse
        that (BadRequestError), and vLLM takes it.
        Raises StoreError before anything is sent if the session is resumed and its store is away. Raises
        SessionConflictError if another client has added messages or erased the session, or if the store lost it. The
        conflict shows before anything is sent. If both clients called at once, it shows after the answer, which
        `messages` then has. While the store is slow or away, it shows at a later call.
        """
        call = self._call(content, response_format, options)
        self.load()
        with call.turn as turn:
            self._check()
            self._client._probe(call)
            run_steps(self._client._prime_resumed(self._conversation, call))
            completions = self._client._connection(call).chat.completions
            send: Any = completions.create if call.model_class is None else completions.parse
            request = self._client._requests.build(call, turn.messages)
            with options_named(request), remedies_noted(self._client.openai):
                raw = send(**request)
            with self._conversation.undone_if_interrupted():
                reply = self._client._finish_call(call, turn, raw)
                self._confirm()
            return reply

    def stream(
        self, content: Content | None = None, *, response_format: ResponseFormat[ParsedT] = None, **options: Any
    ) -> ReplyStream[ParsedT]:
        """Return the text of one chat() call as an iterator. The request is sent when iteration starts."""
        return ReplyStream(self._items(self._call(content, response_format, options)))

    def reload(self) -> None:
        """Read the stored messages again, those of other clients too, and drop messages that only this client has.

        Raises StoreError if the store cannot be read; the messages here are then unchanged.
        """
        self._client._refuse_if_unusable()
        self._conversation.reload()

    def clear(self, *, cache_salts: Sequence[str] = ()) -> None:
        """Erase all messages: on the server, if it has the extension, and in the client's store.

        The sessions of this client's loops (best_of's answers, a pipeline's stages) are erased, too. So are the
        sessions that a `cache_salt` makes on the server: the client remembers the latest 1,000 salts that its calls
        sent in each of the latest 10,000 sessions.
        cache_salts: further salts, such as those that another process sent.

        An error of the server (openai.APIError) or the store (StoreError) leaves the messages here unchanged; call
        clear() again to erase the rest. StoreUnavailableError: the text is still in the database of the server or of
        this client, because another process reads there. If the server was not asked, because it or a gateway refuses
        to tell of the extension (status 401 or 403), a warning says so.
        """
        self._client._refuse_if_unusable()
        with self._conversation.reserved():
            erased = self._conversation.to_erase()
            with remedies_noted(self._client.openai):
                run_steps(self._client._erase(self._conversation, cache_salts))
            self._forget(erased)

    def prime(self, texts: Sequence[str | Path] | None = None, *, cache_salt: str | None = None) -> int:
        """Let the server draft for this session from texts that it has not seen there. Return how many were new to it.

        texts: strings, and Path objects that name files of UTF-8 text; None: this session's history.
        cache_salt: the salt that the session's calls send, if any.

        A server without the extension gets nothing, and 0 is returned. The server keeps the texts as it keeps the
        session, and clear() erases them, too. No priming is needed for a resumed session: before its first call, the
        client gives its history to a server that doesn't know the session.
        Raises the OpenAI client's errors, and InvalidInputError for a file that cannot be read.
        """
        self._client._refuse_if_unusable()
        self.load()
        run_steps(self._client._probe_sessions())
        requests = list(self._priming(texts, cache_salt))  # all files are read before anything is sent
        with remedies_noted(self._client.openai):
            return run_steps(self._client._prime(self.id, requests))

    def forecast(self) -> Forecast:
        """Return what speculation would bring on this session's calls, and what it brought where the server said so.

        The forecast replays the answers, with those of the client's other sessions, through the cache that servers with
        the extension draft from. It asks no server, so it works with any. Each call is replayed once: about 10 µs a
        token.
        """
        self.load()
        return self._client._forecast(self._conversation)

    def fork(self, new_id: str | None = None, *, at: int | None = None) -> Session:
        """Return a new session that starts with a copy of this one's messages, and is a child of it.

        at: number of turns to copy; None: all; -1: all but the last. A turn begins with a user's message. Without an id
        the new session is kept in memory only. If tools of run_tools() are running, their calls are answered as not
        known in the new session. Raises InvalidSessionError if the session `new_id` already has messages, and
        InvalidInputError if the session has fewer turns.
        """
        self.load()
        other = self._client.session(new_id)
        other.load()
        self._conversation.copy_to(other._conversation, at)
        return other

    def child(self, new_id: str | None = None, *, group: str | None = None) -> Session:
        """Return a new session that this one starts, such as a sub-agent's. It has none of this one's messages.

        The server drafts for it from this session, too. Another process resumes it by its id, and must name the parent,
        which is not stored: `client.session(id, parent=…)`.
        """
        return self._client.session(new_id, group=group, parent=self.id)

    @property
    def openai(self) -> openai.OpenAI:
        """Return an OpenAI client whose requests carry this session's id, for a framework that makes its own calls.

        Raises InvalidInputError if `session_tags` names sessions in the body of requests only, AgentSpecError once the
        client is closed.
        """
        self._client._refuse_if_unusable()
        return self._client.openai.with_options(default_headers=self._client._requests.headers(self._conversation))

    def _check(self) -> None:
        self._conversation.check()

    def _confirm(self) -> None:
        self._conversation.confirm()

    def _items(self, call: Call) -> Generator[StreamItem, None, None]:
        self.load()
        with call.turn as turn:
            self._check()
            self._client._probe(call)
            run_steps(self._client._prime_resumed(self._conversation, call))
            request = self._client._requests.build(call, turn.messages, stream=True)
            completions: Any = self._client._connection(call).chat.completions
            send: Any = completions.stream if call.model_class else partial(completions.create, stream=True)
            answer = StreamedAnswer()
            with options_named(request), remedies_noted(self._client.openai), send(**request) as events:
                yield ""
                for event in events:
                    if text := answer.add(event):
                        yield text
            with self._conversation.undone_if_interrupted():
                reply = self._client._finish_call(call, turn, answer.completion())
                self._confirm()
            yield reply
