"""Test the history of one session without a client: who may change it when, and what is read and stored."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from agentspec.client.history.conversation import Conversation
from agentspec.client.history.reservation import Reservation
from agentspec.client.history.session_log import ClientView, Said, SessionLog, Stored
from agentspec.errors import InvalidInputError, SessionBusyError, StoreUnavailableError


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Log(SessionLog):
    """Hold "one" and "two" of each session. away: whether they cannot be read."""

    def __init__(self) -> None:
        self.away = False
        self.reads = 0
        self.appended: list[dict[str, Any]] = []

    def read(self, session: str) -> Stored:
        self.reads += 1
        time.sleep(0.05)
        if self.away:
            raise StoreUnavailableError("away")
        return Stored([Said(0, user("one")), Said(1, user("two"))], 2)

    def append(self, view: ClientView, said: list[Said], cut: int | None = None) -> None:
        self.appended += [message for _, message in said]


class Recording(SessionLog):
    """Hold what it is given for each session. cuts: what was appended with each of the calls, None for messages."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self.cuts: list[int | None] = []

    def read(self, session: str) -> Stored:
        return self.stored

    def append(self, view: ClientView, said: list[Said], cut: int | None = None) -> None:
        self.cuts.append(cut)


def test_two_threads_that_resume_a_session_read_it_once_and_lose_nothing() -> None:
    log = Log()
    conversation = Conversation("s", log)

    def resume() -> None:
        conversation.load()
        conversation.add([user("more")])

    threads = [threading.Thread(target=resume) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.reads == 1
    assert conversation.messages() == [user("one"), user("two"), user("more"), user("more")]


def test_what_is_added_after_a_reload_is_stored_at_once() -> None:
    log = Log()
    conversation = Conversation("s", log)
    conversation.reload()
    conversation.add([user("more")])
    assert (log.appended, conversation.messages()[2:]) == ([user("more")], [user("more")])


def test_a_session_that_was_cleared_goes_on_though_it_cannot_be_read() -> None:
    log = Log()
    log.away = True
    conversation = Conversation("s", log)
    conversation.forget(conversation.to_erase())
    conversation.load()
    assert conversation.messages() == []


@pytest.mark.parametrize(
    "change", [Conversation.reload, lambda conversation: conversation.change_last(lambda _: [])], ids=["reload", "last"]
)
def test_the_history_stays_during_a_call(change: Callable[[Conversation], object]) -> None:
    conversation = Conversation("s", Log())
    conversation.load()
    with conversation.turn([user("three")]) as turn:
        with pytest.raises(SessionBusyError):
            change(conversation)
        turn.commit({"role": "assistant", "content": "answer"})
    assert len(conversation.messages()) == 4


def test_a_function_that_edits_the_latest_message_in_its_place_changes_a_copy() -> None:
    """Otherwise the message would have changed even if the store then refuses the change."""

    def shortened(message: dict[str, Any]) -> list[dict[str, Any]]:
        message["content"] = message["content"][:1]
        return [message]

    conversation = Conversation("s", SessionLog(), new=True)
    conversation.add([user("one")])
    assert conversation.change_last(shortened) == user("one")
    assert conversation.messages() == [user("o")]


def test_a_message_that_was_taken_back_did_not_come_from_the_store() -> None:
    conversation = Conversation("s", Log())
    conversation.load()
    conversation.change_last(lambda _: [])
    conversation.add([user("new")])
    assert (conversation.resumed, len(conversation.messages())) == (1, 2)


def test_an_interrupted_call_holds_no_session_for_tool_calls_that_were_taken_back() -> None:
    conversation = Conversation("s", SessionLog(), new=True)
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    with (
        pytest.raises(KeyboardInterrupt),
        conversation.turn([user("one")], keep_for=Reservation(tools_run=True)) as turn,
        conversation.undone_if_interrupted(),
    ):
        turn.commit({"role": "assistant", "content": None, "tool_calls": calls})
        raise KeyboardInterrupt
    conversation.add([user("two")])
    assert conversation.messages() == [user("two")]


def test_an_interrupt_that_keeps_a_call_from_ending_frees_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come at any moment, also where the call would free it."""

    def interrupted(reservation: Reservation) -> None:
        raise KeyboardInterrupt

    conversation = Conversation("s", SessionLog(), new=True)
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(conversation, "release", interrupted)
        with conversation.reserved(), pytest.raises(SessionBusyError):
            conversation.add([user("one")])
    conversation.add([user("one")])


def test_an_interrupt_just_before_what_it_would_undo_leaves_the_session_free() -> None:
    """Its traceback holds the block's context, which ends long after the call."""
    conversation = Conversation("s", SessionLog(), new=True)
    reservation = Reservation()
    with contextlib.suppress(KeyboardInterrupt), conversation.turn([user("one")], reservation):
        begun = conversation.undone_if_interrupted()
        begun.__enter__()
        raise KeyboardInterrupt
    conversation.add([user("two")])
    del begun
    conversation.add([user("three")])
    assert conversation.messages() == [user("two"), user("three")]


@pytest.mark.parametrize("loaded", [True, False])
def test_an_interrupt_while_a_message_is_added_takes_it_back(loaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the session here would have a message that the store never gets."""

    append = Conversation._append

    def interrupted(self: Conversation, messages: Any) -> None:
        self.loaded, before = False, self.loaded  # nothing of it comes to the store
        append(self, messages)
        self.loaded = before
        raise KeyboardInterrupt

    log = Recording(Stored([Said(0, user("one"))], 1))
    conversation = Conversation("s", log)
    if loaded:
        conversation.load()
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(Conversation, "_append", interrupted)
        conversation.add([user("two")])
    conversation.load()
    assert conversation.messages() == [user("one")] and log.cuts == ([1] if loaded else [])


def test_an_interrupted_call_that_added_nothing_stores_nothing() -> None:
    log = Recording(Stored())
    conversation = Conversation("s", log, new=True)
    with pytest.raises(KeyboardInterrupt), conversation.reserved(), conversation.undone_if_interrupted():
        raise KeyboardInterrupt
    assert log.cuts == []


def test_what_a_call_added_stays_though_it_then_fails() -> None:
    """The store may have it, as after a conflict."""
    conversation = Conversation("s", SessionLog(), new=True)
    with pytest.raises(ValueError), conversation.reserved(), conversation.undone_if_interrupted():
        conversation._append([user("one")])
        raise ValueError
    assert conversation.messages() == [user("one")]


def test_an_interrupt_while_tool_calls_are_answered_leaves_each_answered_once() -> None:
    class Interrupted(SessionLog):
        def append(self, view: ClientView, said: list[Said], cut: int | None = None) -> None:
            if said[-1].message["role"] == "tool" and not interrupts:
                interrupts.append(said)
                raise KeyboardInterrupt

    interrupts: list[list[Said]] = []
    conversation, loop = Conversation("s", Interrupted(), new=True), Reservation(tools_run=True)
    calls = [{"id": name, "type": "function", "function": {"name": "add", "arguments": "{}"}} for name in "ab"]
    with conversation.turn([user("one")], keep_for=loop) as turn:
        turn.commit({"role": "assistant", "content": None, "tool_calls": calls})
    with pytest.raises(KeyboardInterrupt):
        conversation.answer_calls(loop, {0: "sum"}, "error")
    conversation.answer_calls(loop, {0: "sum"}, "error")
    assert [message["content"] for message in conversation.messages()] == ["one", None, "sum", "error"]
    conversation.add([user("two")])
    assert conversation.gaps() == []


def test_nothing_that_was_added_waits_for_no_read() -> None:
    unsaved: set[Conversation] = set()
    conversation = Conversation("s", Log(), unsaved=unsaved)
    conversation.add([])
    assert not unsaved
    conversation.add([user("one")])
    assert unsaved == {conversation}


def test_messages_of_the_user_in_a_row_begin_one_turn() -> None:
    said = [user("one"), user("more"), {"role": "assistant", "content": "answer"}, user("two")]
    conversation, fork = (Conversation(name, SessionLog(), new=True) for name in ("s", "fork"))
    conversation.add(said)
    conversation.copy_to(fork, 1)
    assert fork.messages() == said[:3]


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_fork_of_the_first_turns_goes_on_without_a_gap(turns: int) -> None:
    said = [message for text in ("one", "two") for message in (user(text), {"role": "assistant", "content": "answer"})]
    conversation, fork = (Conversation(name, SessionLog(), new=True) for name in ("s", "fork"))
    conversation.add(said)
    conversation.copy_to(fork, turns)
    fork.add([user("more")])
    assert (fork.messages(), fork.gaps()) == ([*said[: 2 * turns], user("more")], [])


@pytest.mark.parametrize(
    ("stored", "cuts"),
    [
        (Stored([Said(0, user("one"))], 1), [None]),
        (Stored([Said(0, user("one"))], 2), [None, 2]),
        (Stored([], 1), [1]),
    ],
    ids=["none", "behind a message", "alone"],
)
def test_a_fork_stores_the_gap_at_the_end_if_there_is_one(stored: Stored, cuts: list[int | None]) -> None:
    log = Recording(stored)
    conversation, fork = Conversation("s", log), Conversation("fork", log, new=True)
    conversation.load()
    conversation.copy_to(fork)
    assert log.cuts == cuts


@pytest.mark.parametrize(("count", "end"), [(5, "'4' of 'add' without"), (7, "'4' of 'add' and 2 more without")])
def test_an_error_names_five_waiting_calls_at_most(count: int, end: str) -> None:
    calls = [{"id": str(at), "type": "function", "function": {"name": "add"}} for at in range(count)]
    conversation = Conversation("s", SessionLog(), new=True)
    conversation.add([{"role": "assistant", "content": None, "tool_calls": calls}])
    with pytest.raises(InvalidInputError, match=end):
        conversation.add([{"role": "tool", "tool_call_id": "other", "content": ""}], answered="other")
