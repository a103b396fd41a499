"""Keep a session's messages and allow one call at a time, for Session and AsyncSession. Does no network I/O."""

from __future__ import annotations

import copy
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

from agentspec.client.history.erasure_list import ErasureList, ToErase
from agentspec.client.history.reservation import Reservation, UndoneIfInterrupted, busy_error
from agentspec.client.history.session_log import ClientView, Said, SessionLog, Stored, conflict_error
from agentspec.client.history.tool_calls import calls_left_open, given_up, open_calls_remedy, refuse_other_than_open
from agentspec.errors import InvalidInputError, InvalidSessionError, StoreError
from agentspec.identifiers import helpers_of

logger = logging.getLogger(__name__)

OnUnavailable: TypeAlias = Literal["raise", "empty"]
"""What to do if a session's stored messages cannot be read: raise the error, or start with an empty history."""
_REFUSED = (400, 422)  # HTTP statuses of a request that a server does not take


class Turn(NamedTuple):
    """Hold one call: the messages to send, and the function that stores the answer and returns the whole history.

    The history's messages must not be changed.
    """

    messages: list[dict[str, Any]]
    commit: Callable[[dict[str, Any]], list[dict[str, Any]]]


class Gap(NamedTuple):
    """Describe a gap in a session: `lost` messages are missing just before `session.messages[before]`."""

    before: int
    lost: int


class Conversation:
    """Keep a history that grows by whole turns, so that a call that fails leaves it unchanged.

    id: the session's id; "" for calls without a session.
    parent: id of the session that started it.
    loaded: whether the stored messages have been read; True for a new session, which has none.
    unsaved: set of the conversations that have messages to store once the stored ones have been read. This one enters
        and leaves it by itself.
    erasures: list of the other sessions that the server has to erase with this one.
    """

    def __init__(
        self,
        session: str,
        log: SessionLog,
        *,
        group: str | None = None,
        parent: str | None = None,
        new: bool = False,
        unsaved: set[Conversation] | None = None,
        erasures: ErasureList | None = None,
    ) -> None:
        self.id = session
        self.group = group
        self.parent = parent
        self._helpers_begin, self._helper_numbers = helpers_of(session), itertools.count(1)
        self.loaded = new
        self.resumed = 0  # messages that came from the store
        self.server_told = False  # whether the server was primed with those messages
        self._log = log
        self._erasures = ErasureList() if erasures is None else erasures
        self._unsaved = set[Conversation]() if unsaved is None else unsaved
        self._history: list[Said] = []
        self._next_position = 0
        self._view = ClientView(session)
        # Reentrant, because the garbage collector may close a stream in a thread that holds the lock.
        self._guard = threading.RLock()
        self._load_lock = threading.Lock()
        # Weak, so that a call that Ctrl-C kept from releasing its reservation holds no session.
        self._reserved_by: weakref.ref[Reservation] | None = None

    @property
    def _reservation(self) -> Reservation | None:
        """Return the reservation of the session; None if it is free."""
        return None if self._reserved_by is None else self._reserved_by()

    @_reservation.setter
    def _reservation(self, reservation: Reservation | None) -> None:
        self._reserved_by = None if reservation is None else weakref.ref(reservation)

    def load(self, on_unavailable: OnUnavailable = "raise") -> None:
        """Read the stored messages, once, and put them before those added already. May block.

        Raises StoreError if they cannot be read, unless ``on_unavailable`` is "empty".
        """
        with self._load_lock:
            if self.loaded:
                return
            try:
                stored = self._read()
            except StoreError as error:
                if on_unavailable == "raise":
                    raise
                logger.warning("agentspec: %s; it starts without them", error)
                stored = None
            with self._guard:
                added = self._messages()
                self._replace_history(stored)
                self._append(added)
        self._report_gaps()

    def reload(self) -> None:
        """Read the stored messages again, and drop messages that are not stored. May block. Raises StoreError."""
        with self._load_lock, self.reserved():
            stored = self._read()
            with self._guard:
                self._replace_history(stored)
        self._report_gaps()

    def check(self) -> None:
        """Raise SessionConflictError if another client wrote to the session. Blocks for 0.1 s at most."""
        self._log.check(self._view)

    def confirm(self) -> None:
        """Wait until the latest turn is stored, 0.1 s at most. Raises SessionConflictError if it cannot be."""
        self._log.confirm(self._view)

    def messages(self) -> list[dict[str, Any]]:
        """Return a copy of the history."""
        with self._guard:
            return copy.deepcopy(self._messages())

    def _messages(self) -> list[dict[str, Any]]:
        """Return the history's own messages, which must not be changed."""
        return [message for _, message in self._history]

    def gaps(self) -> list[Gap]:
        """Return where messages are missing in the history."""
        with self._guard:
            positions = [-1, *(position for position, _ in self._history), self._next_position]
        lost = [after - before - 1 for before, after in itertools.pairwise(positions)]
        return [Gap(index, count) for index, count in enumerate(lost) if count]

    def add(self, messages: Sequence[dict[str, Any]], *, answered: str | None = None) -> None:
        """Append messages between calls. answered: id of the tool call that they answer.

        Raises SessionBusyError during a call, SessionConflictError, and InvalidInputError if no call waits for such an
        answer. A session that is not loaded takes any answer, because its stored messages may have the call.
        """
        with self._guard, self.undone_if_interrupted():
            self._refuse_if_busy()
            if self._view.conflict:
                raise conflict_error(self.id)
            if answered is not None and self.loaded:
                refuse_other_than_open(self.id, self._messages(), answered)
            self._append(messages)

    def change_last(self, change: Callable[[dict[str, Any]], Sequence[dict[str, Any]]]) -> dict[str, Any] | None:
        """Replace the latest message by those that ``change`` makes of it, here and in the store. May block.

        Returns the former message, or None if there is none. The store does it in one step. Raises StoreError and
        SessionConflictError. Nothing has changed then, unless the store has made the change and its answer was lost.
        """
        with self._load_lock, self.reserved():
            with self._guard:
                if not self._history:
                    return None
                position, last = self._history[-1]
            said = [Said(position + i, message) for i, message in enumerate(change(copy.deepcopy(last)))]
            self._log.rewrite(self._view, position, said)
            with self._guard:
                self._history[-1:] = said
                self._next_position = position + len(said)
                self.resumed = min(self.resumed, len(self._history))
            return last

    def forget(self, erased: ToErase) -> None:
        """Remove all messages, stored ones first. May block. Raises StoreError, and then keeps the messages here.

        erased: what the server has erased besides.
        """
        with self._load_lock:
            self._log.remove(self.id)
            with self._guard:
                self._replace_history(Stored())
        self._erasures.remove(self.id, erased)

    def to_erase(self) -> ToErase:
        """Return what the server has to erase besides the session."""
        return ToErase(self._erasures.salts(self.id), self.helpers)

    def new_helper(self) -> str:
        """Return the id of a new session for a loop of this one, to be erased with it. The latest are remembered."""
        helper = f"{self._helpers_begin}.{next(self._helper_numbers)}"
        self._erasures.add_helper(self.id, helper)
        return helper

    def add_salt(self, cache_salt: str) -> None:
        """Note a salt that a call sends. It makes another session on the server, which is erased with this one."""
        if self.id:
            self._erasures.add_salt(self.id, cache_salt)

    @property
    def helpers(self) -> list[str]:
        """Return the ids of the sessions that loops have used in this client, oldest first."""
        return self._erasures.helpers(self.id)

    @property
    def cache_salts(self) -> list[str]:
        """Return the salts that calls of this session and of its helpers have sent in this client."""
        return [salt for session in (self.id, *self.helpers) for salt in self._erasures.salts(session)]

    def copy_to(self, other: Conversation, turns: int | None = None) -> None:
        """Copy the history, or its first turns, to another, loaded conversation, and become its parent.

        turns: number of first turns to copy; a negative number leaves out that many of the last; None: all. Blocks
        while a long history is stored. Raises InvalidSessionError if the other is not empty, SessionBusyError if it is
        in a call, and InvalidInputError if there are fewer turns.
        """
        with self._guard:
            history, next_position = copy.deepcopy(self._history), self._next_position
            holder = self._reservation
        if turns is not None:
            history = _first_turns(history, turns)
            next_position = history[-1].position + 1 if history else 0
        if holder is not None and holder.tools_run:  # the answers of the tools that run reach only this session
            for answer in given_up(calls_left_open([message for _, message in history])):
                history.append(Said(next_position, answer))
                next_position += 1
        with other._guard:
            if other is not self:
                other._refuse_if_busy()  # its call would add an answer that was given without these messages
            if other._history or other is self:
                raise InvalidSessionError(f"new_id: session {other.id!r} has messages already; take another id")
            other._history, other._next_position = history, next_position
            other._save(history)
            if next_position > (history[-1].position + 1 if history else 0):  # a gap at the end
                other._log.append(other._view, [], cut=next_position)
            other.parent, other.group = self.id, other.group if self.group is None else self.group
        other._log.wait_for_room()

    @contextmanager
    def turn(
        self, new: Sequence[dict[str, Any]], reservation: Reservation | None = None, keep_for: Reservation | None = None
    ) -> Generator[Turn, None, None]:
        """Reserve the session for one call that sends the history and ``new``. reservation: as for `reserved`.

        ``Turn.commit`` stores ``new`` and the answer together. If the answer calls tools, the session then stays
        reserved for `keep_for` until `answer_calls(keep_for)`. Such a loop also answers the calls that nobody has
        answered, as after a kill, as not known: no tool may run twice. In front of other messages it is the server that
        takes or refuses such calls; its refusal gets the remedy as a note. Raises SessionBusyError during another call,
        and InvalidInputError if there is nothing to send, or only answers to some of the calls.
        """
        with self.reserved(reservation):
            left = calls_left_open(self._messages(), new)
            if left and keep_for is not None:
                new, left = [*given_up(left), *new], {}
            sent = [*self._messages(), *new]
            if not sent:
                raise InvalidInputError(f"content: session {self.id!r} is empty, so a first message is needed")
            if left and all(message["role"] == "tool" for message in new):
                raise InvalidInputError(f"content: {open_calls_remedy(self.id, left)}")
            try:
                yield Turn(sent, lambda message: self._commit([*new, message], keep_for))
            except Exception as error:
                if left and getattr(error, "status_code", None) in _REFUSED:
                    error.add_note(f"agentspec: {open_calls_remedy(self.id, left)}")
                raise

    @contextmanager
    def reserved(self, reservation: Reservation | None = None) -> Generator[None, None, None]:
        """Reserve the session while the block runs, or until `release(reservation)`, so that no call begins.

        reservation: None makes a new one. Raises SessionBusyError if the session is reserved already.
        """
        reservation = reservation or Reservation()
        try:
            with self._guard:
                self._refuse_if_busy()
                self._reservation = reservation
            yield
        finally:
            self.release(reservation)

    def undone_if_interrupted(self) -> UndoneIfInterrupted:
        """Take back the block's messages if it is cancelled or gets Ctrl-C. Use it while no other call may begin."""
        with self._guard:
            return UndoneIfInterrupted(partial(self._undo, len(self._history), self._next_position, self._reservation))

    def _undo(self, messages: int, position: int, reservation: Reservation | None) -> None:
        """Go back to a history of so many messages, whose next one has this position, and to this reservation."""
        with self._guard:
            self._reservation = reservation  # no loop has to answer calls that were taken back
            if self._next_position > position or len(self._history) > messages:
                del self._history[messages:]
                self._next_position = position
                if self.loaded:
                    self._log.append(self._view, [], cut=position)

    def release(self, reservation: Reservation) -> None:
        """End this reservation, unless it has ended."""
        with self._guard:
            if self._reservation is reservation:
                self._reservation = None

    def answer_calls(self, kept_for: Reservation, answers: Mapping[int, str], otherwise: str) -> None:
        """Append the answers to the latest message's tool calls, and end the reservation that `turn` left for them.

        kept_for: that reservation. If it does not hold the session, because the model called no tools, this does
            nothing.
        answers: the answers by the call's index.
        otherwise: the answer to the other calls.

        Appends after a conflict, too, as a turn does, so that no call stays unanswered. If Ctrl-C cuts it off, call it
        again: repeated messages are read once.
        """
        with self._guard:
            if self._reservation is not kept_for:
                return
            at = next(at for at, said in reversed(list(enumerate(self._history))) if said.message.get("tool_calls"))
            position, message = self._history[at]
            said: list[Said] = []
            for index, call in enumerate(message["tool_calls"]):
                answer = {"role": "tool", "tool_call_id": call["id"], "content": answers.get(index, otherwise)}
                said.append(Said(position + 1 + index, answer))
            self._history[at + 1 :] = said
            self._next_position = position + 1 + len(said)
            self._save(said)
            self._reservation = None

    def _read(self) -> Stored:
        try:
            return self._log.read(self.id)
        except Exception as error:  # a store may raise anything
            kind = type(error) if isinstance(error, StoreError) else StoreError
            raise kind(
                f"session {self.id!r}: its stored messages cannot be read, and nothing was sent ({error}). Try again,"
                ' or take an empty history knowingly: client.session(id, on_unavailable="empty")'
            ) from error

    def _report_gaps(self) -> None:
        for before, lost in self.gaps():
            logger.warning(
                "agentspec: session %r: the store has lost %d messages before message %d", self.id, lost, before
            )

    def _replace_history(self, stored: Stored | None) -> None:
        """Replace the history by the stored one; by an empty one for None, which stands for an unknown one."""
        self._view = ClientView(self.id, known=False) if stored is None else ClientView(self.id, stored.last)
        stored = stored or Stored()
        self._history, self._next_position = list(stored.history), stored.next_position
        self.resumed = len(self._history)
        self._unsaved.discard(self)
        self.loaded = True

    def _commit(self, messages: Sequence[dict[str, Any]], keep_for: Reservation | None) -> list[dict[str, Any]]:
        with self._guard:
            self._append(messages)
            if keep_for is not None and messages[-1].get("tool_calls"):
                self._reservation = keep_for
            return self._messages()

    def _append(self, messages: Sequence[dict[str, Any]]) -> None:
        said = [Said(self._next_position + i, message) for i, message in enumerate(copy.deepcopy(list(messages)))]
        self._history += said
        self._next_position += len(said)
        if self.loaded:
            self._save(said)
        elif said:
            self._unsaved.add(self)

    def _save(self, said: list[Said]) -> None:
        if said:
            self._log.append(self._view, said)

    def _refuse_if_busy(self) -> None:
        if (holder := self._reservation) is not None:
            raise busy_error(self.id, holder, self._messages())


def _first_turns(history: list[Said], turns: int) -> list[Said]:
    if isinstance(turns, bool) or not isinstance(turns, int):
        raise InvalidInputError(f"at: a number of turns is needed, not {turns!r}")
    roles = ["assistant", *(said.message["role"] for said in history)]
    begins = [at for at, (before, role) in enumerate(itertools.pairwise(roles)) if role == "user" != before]
    kept = turns if turns >= 0 else len(begins) + turns
    if not 0 <= kept <= len(begins):
        raise InvalidInputError(f"at: the session has {len(begins)} turns, and no {turns}")
    return history if kept == len(begins) else history[: begins[kept]]
