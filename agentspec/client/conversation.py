"""Keep a session's messages and allow one call at a time, for Session and AsyncSession. Does no network I/O."""

from __future__ import annotations

import copy
import threading
import uuid
import weakref
from collections.abc import Callable, Generator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from agentspec.cache.identifiers import check_ids
from agentspec.client.session_log import SessionLog
from agentspec.errors import InvalidInputError, InvalidSessionError, SessionBusyError


class Turn(NamedTuple):
    """Hold one call: the messages to send, and the function that stores the assistant's answer."""

    messages: list[dict[str, Any]]
    commit: Callable[[dict[str, Any]], None]


class Conversation:
    """Keep a history that grows by whole turns, so that a call that fails leaves it unchanged.

    id: the session's id; "" for calls without a session. loaded: whether the stored messages have been read; True for
    a new session, which has none.
    """

    def __init__(self, session: str, log: SessionLog, *, group: str | None = None, new: bool = False) -> None:
        self.id = session
        self.group = group
        self._log = log
        self._messages: list[dict[str, Any]] = []
        self._guard = threading.Lock()
        self._load_lock = threading.Lock()
        self._busy = False
        self.loaded = new
        self._saving = True

    def load(self) -> None:
        """Read the stored messages, once, and put them before those added already. May block."""
        with self._load_lock:
            if self.loaded:
                return
            stored = self._log.read(self.id)
            with self._guard:
                # New messages must not follow unread ones, because that would splice two conversations.
                self._saving = stored is not None
                added, self._messages = self._messages, [*(stored or ()), *self._messages]
                self.loaded = True
                self._save(added)

    def messages(self) -> list[dict[str, Any]]:
        """Return a copy of the history."""
        with self._guard:
            return copy.deepcopy(self._messages)

    def add(self, messages: Sequence[dict[str, Any]]) -> None:
        """Append messages between calls. Raises SessionBusyError during a call."""
        with self._guard:
            self._refuse_if_busy()
            self._append(messages)

    def clear(self) -> None:
        """Forget all messages, stored ones first. May block. A StoreError means that nothing was forgotten."""
        with self._load_lock, self._taken():
            self._log.remove(self.id)
            with self._guard:
                self._messages = []
                self.loaded = self._saving = True

    def copy_to(self, other: Conversation) -> None:
        """Copy the history to another, loaded conversation. Raises InvalidSessionError if that is not empty."""
        messages = self.messages()
        with other._guard:
            if other._messages:
                raise InvalidSessionError(f"new_id: session {other.id!r} has messages already; take another id")
            other._append(messages)

    @contextmanager
    def turn(self, new: Sequence[dict[str, Any]]) -> Generator[Turn, None, None]:
        """Reserve the session for one call that sends the history and ``new``.

        ``Turn.commit`` stores ``new`` and the answer together. Raises SessionBusyError during another call, and
        InvalidInputError if there is nothing to send.
        """
        with self._taken():
            sent = [*self._messages, *new]
            if not sent:
                raise InvalidInputError(f"content: session {self.id!r} is empty, so a first message is needed")
            yield Turn(sent, lambda message: self._commit([*new, message]))

    @contextmanager
    def _taken(self) -> Generator[None, None, None]:
        with self._guard:
            self._refuse_if_busy()
            self._busy = True
        try:
            yield
        finally:
            with self._guard:
                self._busy = False

    def _commit(self, messages: Sequence[dict[str, Any]]) -> None:
        with self._guard:
            self._append(messages)

    def _append(self, messages: Sequence[dict[str, Any]]) -> None:
        kept = copy.deepcopy(list(messages))
        self._messages.extend(kept)
        if self.loaded:
            self._save(kept)

    def _save(self, messages: Sequence[dict[str, Any]]) -> None:
        if self._saving and messages:
            self._log.append(self.id, messages)

    def _refuse_if_busy(self) -> None:
        if self._busy:
            raise SessionBusyError(
                f"session {self.id!r} is in a call (or in a stream that is still open): let it end first,"
                " or fork() the session to go two ways at once"
            )


class Conversations:
    """Hold a client's conversations by session id. All sessions of an id share one, so only one call runs at a time.

    With a log, a conversation stays in memory while it is used. Without one, it stays as long as the client.
    """

    def __init__(self, log: SessionLog) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._known: MutableMapping[str, Conversation] = weakref.WeakValueDictionary() if log.keeps else {}

    def get(self, session: str | None, group: str | None) -> Conversation:
        """Return the conversation of this id, or without an id a new one. A group replaces its former group.

        Raises InvalidSessionError for an unusable id.
        """
        check_ids(session=session, group=group)
        with self._lock:
            found = self._known.get(session) if session is not None else None
            if found is None:
                name = f"session-{uuid.uuid4().hex}" if session is None else session
                found = self._known[name] = Conversation(name, self._log, new=session is None)
            if group is not None:
                found.group = group
            return found


def unkept_conversation(session: str | None, group: str | None) -> Conversation:
    """Return a conversation for one call that is not stored. Raises InvalidSessionError for an unusable id."""
    check_ids(session=session, group=group)
    return Conversation(session or "", SessionLog(), group=group, new=True)
