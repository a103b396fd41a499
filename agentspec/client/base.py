"""Share code between the synchronous and asyncio clients, sessions and streams.

Requests to the extension are written once, as generators of steps that `loops.steps` runs for either client.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

import openai
from openai.types.chat import ChatCompletion

from agentspec.client.answers.record import ReplyRecord
from agentspec.client.answers.reply import ParsedT, Reply, read_reply
from agentspec.client.history.conversation import Conversation, OnUnavailable, Turn
from agentspec.client.history.erasure_list import ErasureList, ToErase
from agentspec.client.history.session_log import SessionLog
from agentspec.client.loops.steps import Apply, Steps
from agentspec.client.messages import Content, MessageLike, as_message, tool_message
from agentspec.client.option_checks import check_timeout
from agentspec.client.priming import Priming, added_by, prime_history, prime_resumed, prime_texts
from agentspec.client.request import (
    ERASURE_PAUSE_S,
    ERASURE_S,
    PROBE_PATH,
    TIMEOUT_S,
    Call,
    RequestBuilder,
    Speculating,
    has_no_such_session,
    incomplete_error,
    is_erased,
    salt_headers,
)
from agentspec.client.session_naming import SessionTags
from agentspec.errors import AgentSpecError, ConfigurationError, InvalidInputError, InvalidSessionError
from agentspec.identifiers import check_ids

if TYPE_CHECKING:
    from agentspec.cache.store import Store
    from agentspec.client.forecast import Forecast, Tokenize

logger = logging.getLogger(__name__)

OpenAIT = TypeVar("OpenAIT", openai.OpenAI, openai.AsyncOpenAI)

StreamItem = str | Reply[Any]
"""Item of a stream's generator: "" once the server has answered, then the text's pieces, last the Reply."""


class ClientBase(Generic[OpenAIT]):
    """Hold the settings and connections of one client."""

    def __init__(
        self,
        connection: OpenAIT,
        model: str,
        store: str | Store | None,
        session_tags: SessionTags,
        speculation: Speculating,
        record: str | Path | None,
        tokenizer: str | Tokenize | None,
        thoughts: bool,
    ) -> None:
        from agentspec.client.forecast import Forecaster  # imported here: it loads numpy

        self._openai: OpenAIT = connection
        check_timeout(connection.timeout)
        if record is not None and speculation:
            speculation = "detailed"
        host = str(connection.base_url.host)
        self._requests = RequestBuilder(
            model,
            session_tags,
            speculation,
            token_ids=tokenizer == "server",
            thoughts=thoughts,
            host=host,
        )
        self._forecaster = Forecaster(tokenizer)
        self._record = None if record is None else ReplyRecord(record)
        self._log = _open_log(store)
        self._owner = [os.getpid()]  # the process that used the client first; until then, the one that made it
        self._used = False
        self._closed = False
        self._conversations = Conversations(self._log)
        self._close_log: Callable[[], object] = weakref.finalize(
            self, _close, self._conversations, self._log, self._owner
        )  # also runs when the interpreter exits

    def __getstate__(self) -> object:
        """Raise AgentSpecError when a client is copied or pickled: the copy would share, or lack, its connections."""
        raise AgentSpecError(
            "a client cannot be copied or pickled: its connections belong to one process, whose threads may share it;"
            " make another one, where it is used"
        )

    @property
    def openai(self) -> OpenAIT:
        """Return the underlying OpenAI client, for calls other than chat."""
        return self._openai

    def _refuse_if_forked(self) -> None:
        """Note the process that uses the client. Raises AgentSpecError in a process that was forked off after that.

        The fork shares its parent's connections, so each would read the other's answers, and it lacks the thread that
        stores messages.
        """
        process = os.getpid()
        if not self._used:
            self._used, self._owner[0] = True, process
        if self._owner[0] != process:
            raise AgentSpecError(
                "the client was used before this process was forked off: make a client in each process"
            )

    def _refuse_if_unusable(self) -> None:
        """Raise AgentSpecError in a forked process, and once the client is closed: no message would be stored."""
        self._refuse_if_forked()
        if self._closed:
            raise AgentSpecError(
                "the client is closed: make another one, whose session(id) goes on where a stored session ended"
            )

    def _finish_call(self, call: Call, turn: Turn, raw: ChatCompletion) -> Reply[Any]:
        """Read the answer to a call, add it to its session, and note it for forecasts and the record."""
        reply = read_reply(raw, call.session, call.answer_class)
        *sent, answer = turn.commit(reply.message)
        self._forecaster.note(call.session, call.group, sent, reply, call.resumed, answer)
        if self._record is not None:
            self._record.add(reply, call.parent, time.monotonic() - call.begin)
        return reply

    def _ask(self, path: str) -> Steps[object]:
        """Query the extension. Returns errors instead of raising them, so that the chat call does not fail."""
        options = {"timeout": TIMEOUT_S, "max_retries": 0}
        try:
            return (yield Apply(self._openai.get, (path,), {"cast_to": object, "options": options}))
        except Exception as error:
            return error

    def _probe_sessions(self) -> Steps[None]:
        """Find out whether the server has the extension, before sessions are erased or primed there."""
        if self._requests.needs_probe_of_sessions():
            self._requests.learn((yield from self._ask(PROBE_PATH)))

    def _erase(self, conversation: Conversation, cache_salts: Sequence[str]) -> Steps[None]:
        """Erase a session on the server. Raises StoreUnavailableError if some text is left there after ERASURE_S."""
        yield from self._probe_sessions()
        until, complete = time.monotonic() + ERASURE_S, True
        for path, options in self._requests.erasures(conversation, cache_salts):
            while not (erased := (yield from self._erase_once(path, options))) and time.monotonic() < until:
                yield Apply(time.sleep, (ERASURE_PAUSE_S,))
            complete = complete and erased
        if not complete:
            raise incomplete_error(conversation.id)

    def _erase_once(self, path: str, options: Any) -> Steps[bool]:
        """Ask the server to erase a session, and return whether nothing of it is left."""
        try:
            return is_erased((yield Apply(self._openai.delete, (path,), {"cast_to": object, "options": options})))
        except openai.APIStatusError as error:
            if not has_no_such_session(error):
                raise
            return True

    def _prime(self, session: str, requests: Iterable[Priming]) -> Steps[int]:
        """Send requests that prime a session, and return how many texts were new. Raises the OpenAI client's errors."""
        added = 0
        if path := self._requests.session_path(session):
            for body, options in requests:
                put = Apply(self._openai.put, (path,), {"cast_to": object, "body": body, "options": options})
                added += added_by((yield put))
        return added

    def _prime_resumed(self, conversation: Conversation, call: Call) -> Steps[None]:
        """Prime the server with a session that this client has resumed, before its first call. Never raises."""
        if not (self._requests.extension and conversation.resumed) or conversation.server_told:
            return
        conversation.server_told = True
        try:
            messages = conversation.messages()[: conversation.resumed]
            yield from self._prime(conversation.id, prime_resumed(messages, call.cache_salt))
        except Exception as error:
            logger.debug("agentspec: session %r: the server cannot be told of it: %s", conversation.id, error)

    def _forecast(self, conversation: Conversation) -> Forecast:
        resumed = conversation.messages()[: conversation.resumed]
        return self._forecaster.forecast(conversation.id, conversation.group, resumed)

    def _connection(self, call: Call) -> OpenAIT:
        """Return the OpenAI client for a call."""
        return self._openai if call.max_retries is None else self._openai.with_options(max_retries=call.max_retries)

    @property
    def model(self) -> str:
        """Return the name of the model that answers calls which name no other."""
        return self._requests.model


class Conversations:
    """Hold a client's conversations by session id. All sessions of an id share one, so only one call runs at a time.

    A conversation stays in memory while it is used, or as long as the client if there is no log to read it from again.
    A conversation without a name is never stored, because no later call could name it.
    """

    def __init__(self, log: SessionLog) -> None:
        self._log = log
        self._erasures = ErasureList()
        self._lock = threading.Lock()
        self._known: MutableMapping[str, Conversation] = weakref.WeakValueDictionary() if log.keeps else {}
        self._unnamed: MutableMapping[str, Conversation] = weakref.WeakValueDictionary()
        self._unsaved: set[Conversation] = set()  # keeps them alive: their messages are nowhere else

    def save(self) -> None:
        """Store messages that were added to sessions before these were read. May block. Logs those that are lost."""
        for conversation in list(self._unsaved):
            try:
                conversation.load()
            except Exception as error:  # a store may raise anything; the other sessions must still be saved
                logger.warning("agentspec: messages added to session %r are lost: %s", conversation.id, error)

    def get(self, session: str | None, group: str | None, parent: str | None = None) -> Conversation:
        """Return the conversation of this id; without an id, a new one. A group or parent replaces the former one.

        Raises InvalidSessionError for an unusable id.
        """
        _check_ids(session, group, parent)
        with self._lock:
            found = None if session is None else self._known.get(session) or self._unnamed.get(session)
            if session is None:
                name = f"session-{uuid.uuid4().hex}"
                found = self._unnamed[name] = self._new(name, SessionLog(), new=True)
            elif found is None:
                found = self._known[session] = self._new(session, self._log, unsaved=self._unsaved)
            if group is not None:
                found.group = group
            if parent is not None:
                found.parent = parent
            return found

    def unkept(self, session: str | None, group: str | None, parent: str | None = None) -> Conversation:
        """Return a conversation for one call, which is not stored. Raises InvalidSessionError for an unusable id."""
        _check_ids(session, group, parent)
        return self._new(session or "", SessionLog(), group=group, parent=parent, new=True)

    def _new(self, session: str, log: SessionLog, **options: Any) -> Conversation:
        return Conversation(session, log, erasures=self._erasures, **options)


class SessionBase:
    """Hold the history of one session, and change it without calling the model."""

    _client: Any

    def __init__(self, conversation: Conversation, on_unavailable: OnUnavailable) -> None:
        if on_unavailable not in get_args(OnUnavailable):
            raise InvalidInputError(f"on_unavailable: 'raise' or 'empty' is needed, not {on_unavailable!r}")
        self._conversation = conversation
        self._on_unavailable = on_unavailable

    def __getstate__(self) -> object:
        """Raise AgentSpecError where a session is copied or pickled."""
        raise AgentSpecError(
            f"session {self.id!r} cannot be copied or pickled: fork() it to go two ways, keep its messages for its"
            " text, or hand on its id, by which client.session(id) goes on with it in another process"
        )

    @property
    def id(self) -> str:
        """Return the session's id, by which the server knows the session and any process can resume it."""
        return self._conversation.id

    @property
    def parent(self) -> str | None:
        """Return the id of the session that started this one, or None. The server drafts from it, too."""
        return self._conversation.parent

    @property
    def group(self) -> str | None:
        """Return the group named for the session, or None: the problem that several sessions answer."""
        return self._conversation.group

    def add(self, message: MessageLike) -> None:
        """Append a message, such as a system message, without calling the model.

        Raises InvalidInputError for a value that is not a message, SessionBusyError during a call, and
        SessionConflictError once another client has added messages.
        """
        self._add([as_message(message)])

    def tool_result(self, tool_call_id: str, content: str | Sequence[Mapping[str, object]]) -> None:
        """Append a tool's answer, a text or a list of content parts. Then call chat() without content to go on.

        Raises InvalidInputError if no call with this id waits for an answer, because servers would refuse every later
        request with such a history. Raises the other errors of `add()`, too.
        """
        self._add([tool_message(tool_call_id, content)], answered=tool_call_id)

    def _add(self, messages: list[dict[str, Any]], *, answered: str | None = None) -> None:
        self._client._refuse_if_unusable()
        self._conversation.add(messages, answered=answered)

    def _forget(self, erased: ToErase) -> None:
        """Erase all that this process and its store hold of the session. May block. Raises StoreError.

        erased: what the server has erased besides.
        """
        self._conversation.forget(erased)
        self._client._forecaster.forget([self.id, *erased.helpers])

    def _refuse_if_unreadable(self) -> None:
        """Raise AgentSpecError in a forked process, and if the session is to be read after its client was closed."""
        if self._conversation.loaded:
            self._client._refuse_if_forked()
        else:
            self._client._refuse_if_unusable()

    def _priming(self, texts: Sequence[str | Path] | None, cache_salt: str | None) -> Iterator[Priming]:
        if cache_salt is not None:
            salt_headers(cache_salt)  # raises InvalidInputError for a value that is no salt
            self._conversation.add_salt(cache_salt)
        if texts is None:
            return prime_history(self._conversation.messages(), cache_salt)
        return prime_texts(texts, cache_salt)

    def _call(self, content: Content | None, response_format: Any, options: Mapping[str, Any]) -> Call:
        self._client._refuse_if_unusable()
        return Call(self._conversation, content, response_format, options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"


class StreamBase(Generic[ParsedT]):
    """Hold the reply that a stream ends with."""

    _reply: Reply[ParsedT] | None = None
    _started = False

    @property
    def reply(self) -> Reply[ParsedT]:
        """Return the whole reply. Raises AgentSpecError unless the stream was read to its end without an error."""
        if self._reply is None:
            raise AgentSpecError("reply: the stream was not read to its end; iterate over it, or call until_done()")
        return self._reply


def _check_ids(session: str | None, group: str | None, parent: str | None) -> None:
    check_ids(session=session, group=group, parent=parent)
    if parent is not None and parent == session:
        raise InvalidSessionError(f"parent: session {session!r} cannot be its own; take another id")


def _open_log(store: str | Store | None) -> SessionLog:
    """Return the log for a client's `store` option.

    A store given by URL is opened now, and may raise StoreURLError or StoreError. The default store, in the user's
    data folder, is opened when the first session needs it. Raises ConfigurationError for any other kind of value.
    """
    if store is None:
        return SessionLog()
    if not isinstance(store, str) and not hasattr(store, "append"):
        raise ConfigurationError(
            "store: 'auto', a URL such as sqlite:///sessions.db, a store object or None is needed, not"
            f" {type(store).__name__}"
        )
    from agentspec.client.history.store_log import StoreLog  # imported here: the store's modules load numpy and SQLite

    return StoreLog.of(store)


def _close(conversations: Conversations, log: SessionLog, owner: list[int]) -> None:
    """Store the messages that wait, and close the log.

    owner: the process that does so, in a list. One that was forked off it lacks the threads that may hold the log's
    locks.
    """
    if os.getpid() == owner[0]:
        conversations.save()
        log.close()
