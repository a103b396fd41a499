"""One session's messages and the rule of turns. No network; Session and AsyncSession stand on it."""

from __future__ import annotations

import copy
import threading
import uuid
import weakref
from collections.abc import Callable, Generator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from agentspec.client.messages import Content, as_messages
from agentspec.client.session_log import NoLog, SessionLog
from agentspec.errors import InvalidInputError, InvalidSessionError, SessionBusyError


@dataclass(frozen=True, slots=True)
class Turn:
    """One call: the messages to send, and what to do with the assistant's message when it is there."""

    messages: list[dict[str, Any]]
    commit: Callable[[dict[str, Any]], None]


def stateless_turn(content: Content) -> Turn:
    """A turn that no session remembers."""
    return Turn(as_messages(content), lambda message: None)


class Conversation:
    """A history that grows by whole turns: a call that fails leaves it as it was."""

    def __init__(self, session: str, log: SessionLog, *, new: bool = False) -> None:
        self.id = session
        self.group: str | None = None
        self._log = log
        self._messages: list[dict[str, Any]] = []
        self._guard = threading.Lock()
        self._load_lock = threading.Lock()
        self._busy = False
        self._loaded = new
        self._saving = True

    @property
    def loaded(self) -> bool:
        """Whether the stored messages have been read."""
        return self._loaded

    def load(self) -> None:
        """Read the stored messages, once; what was added before goes behind them. May block."""
        with self._load_lock:
            if self._loaded:
                return
            stored = self._log.read(self.id)
            with self._guard:
                # Unread messages must not be followed by new ones: that would splice two conversations.
                self._saving = stored is not None
                added, self._messages = self._messages, [*(stored or ()), *self._messages]
                self._loaded = True
                self._save(added)

    def messages(self) -> list[dict[str, Any]]:
        """A copy of the history."""
        with self._guard:
            return copy.deepcopy(self._messages)

    def add(self, messages: Sequence[dict[str, Any]]) -> None:
        """Append messages between calls; SessionBusyError during one."""
        with self._guard:
            self._refuse_if_busy()
            self._append(messages)

    def clear(self) -> None:
        """Forget all messages, stored ones first. May block; on a StoreError nothing is forgotten."""
        with self._load_lock, self._taken():
            self._log.remove(self.id)
            with self._guard:
                self._messages = []
                self._loaded = self._saving = True

    def copy_to(self, other: Conversation) -> None:
        """Append the history to a loaded, empty conversation; InvalidSessionError when it is not empty."""
        messages = self.messages()
        with other._guard:
            if other._messages:
                raise InvalidSessionError(f"new_id: session {other.id!r} has messages already; take another id")
            other._append(messages)

    @contextmanager
    def turn(self, content: Content | None) -> Generator[Turn, None, None]:
        """Take the session for one call. Its messages are kept, all at once, when the turn is committed.

        Raises SessionBusyError while another call is under way, and InvalidInputError with nothing to send.
        """
        new = [] if content is None else as_messages(content)
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
        if self._loaded:
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
    """One client's conversations by session id: two takers of one id share it, so that the rule of turns holds.

    With a log, one lives while somebody uses it; without, this is the only place that remembers it.
    """

    def __init__(self, log: SessionLog) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._known: MutableMapping[str, Conversation] = {} if isinstance(log, NoLog) else weakref.WeakValueDictionary()

    def get(self, session: str | None, group: str | None = None) -> Conversation:
        """The conversation of this id, or a new one under an id that is nobody's; a group takes its old one's place."""
        with self._lock:
            found = self._known.get(session) if session is not None else None
            if found is None:
                name = f"session-{uuid.uuid4().hex}" if session is None else session
                found = self._known[name] = Conversation(name, self._log, new=session is None)
            if group is not None:
                found.group = group
            return found
