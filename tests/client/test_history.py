"""Test that a session's history is never silently lost: stores that are away or slow, and gaps."""

from __future__ import annotations

import logging
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from agentspec import AgentClient, AsyncAgentClient, Gap, InvalidInputError, StoreError, StoreUnavailableError
from agentspec.cache.store import MessageRecord, NewEntry, Store, encode, open_store
from agentspec.client.history.conversation import Conversation
from agentspec.client.history.outbox import NAMESPACE, Outbox, read_session
from agentspec.client.history.session_log import ClientView, Said, SessionLog

from .fake_server import FakeServer
from .histories import connect, contents, stored, wait_until_stored
from .stores import FailingStore

# --- A store that is away


@pytest.mark.parametrize("error", [StoreUnavailableError, StoreError])
def test_resuming_while_the_store_is_away_sends_nothing(
    server: FakeServer, error: type[StoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FailingStore()
    with connect(server, store) as client:
        client.session("s").chat("one")
    with connect(server, store) as client:
        session = client.session("s")
        with monkeypatch.context() as patch:
            patch.setattr(FailingStore, "read", lambda *args, **options: (_ for _ in ()).throw(error("away")))
            for use in (
                lambda: session.chat("two"),
                lambda: session.stream("two").until_done(),
                lambda: session.messages,
                lambda: session.gaps,
                lambda: session.fork(),
            ):
                with pytest.raises(error, match=r"nothing was sent.*on_unavailable"):
                    use()
        assert len(server.chats) == 1
        session.chat("two")  # the session goes on as before
        assert contents(session) == ["one", "answer 1", "two", "answer 2"]


async def test_resuming_while_the_store_is_away_sends_nothing_with_asyncio(server: FakeServer) -> None:
    store = FailingStore("read")
    async with AsyncAgentClient(base_url=server.url, model="small", store=store) as client:
        session = client.session("s")
        with pytest.raises(StoreUnavailableError, match="nothing was sent"):
            await session.chat("one")
        with pytest.raises(StoreUnavailableError):
            await session.stream("one").until_done()
        assert not server.chats
        knowingly = client.session("s", on_unavailable="empty")
        await knowingly.chat("one")
        assert [message["content"] for message in knowingly.messages] == ["one", "answer 1"]
        assert knowingly.gaps == []
        store.failing = set()


def test_an_empty_history_is_taken_knowingly_and_written_behind_the_old_one(server: FakeServer) -> None:
    store = FailingStore()
    with connect(server, store) as client:
        client.session("s").chat("one")
    store.failing = {"read", "append"}
    with connect(server, store) as client:
        session = client.session("s", on_unavailable="empty")
        assert session.chat("two").text == "answer 2"
        assert len(server.chats[1].body["messages"]) == 1
        store.failing = set()
        wait_until_stored(store, 4)
        session.chat("three")
        assert contents(session) == ["two", "answer 2", "three", "answer 3"]
        session.reload()
        assert contents(session) == ["one", "answer 1", "two", "answer 2", "three", "answer 3"]
    with connect(server, store) as client:
        assert client.session("s").gaps == []
    assert [position for position, _ in stored(store)] == [0, 1, 2, 3, 4, 5]


def test_the_option_takes_no_other_value(server: FakeServer) -> None:
    with connect(server, "memory://") as client, pytest.raises(InvalidInputError, match="'empty'"):
        client.session("s", on_unavailable="ignore")  # type: ignore[arg-type]


def test_what_was_said_during_an_outage_is_stored_after_it(server: FakeServer) -> None:
    store = FailingStore()
    with connect(server, store) as client:
        session = client.session("s")
        session.chat("one")
        store.failing = {"read", "append"}
        session.chat("two")
        session.add({"role": "user", "content": "aside"})
        session.chat("three")
        store.failing = set()
        session.chat("four")
    said = ["one", "answer 1", "two", "answer 2", "aside", "three", "answer 3", "four", "answer 4"]
    assert stored(store) == list(enumerate(said))


def test_a_session_is_not_resumed_before_this_process_has_written_it(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FailingStore("append")
    with connect(server, store) as client:
        client.session("s").chat("one")  # no object of this session is left
        with monkeypatch.context() as patch, pytest.raises(StoreUnavailableError, match="wait to be written"):
            patch.setattr("agentspec.client.history.store_log.FLUSH_TIMEOUT_S", 0.2)
            client.session("s").chat("two")
        store.failing = set()
        wait_until_stored(store, 2)
        assert contents(client.session("s")) == ["one", "answer 1"]


def test_the_store_may_come_into_being_later(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where the data directory should be")
    with AgentClient(base_url=server.url, model="small") as client:
        session = client.session("s", on_unavailable="empty")
        session.chat("one")
        (tmp_path / "data").unlink()
        session.chat("two")
        name = session.id
    with AgentClient(base_url=server.url, model="small") as client:
        assert len(client.session(name).messages) == 4


# --- Gaps


def test_what_overflows_is_lost_and_the_gap_is_marked(caplog: pytest.LogCaptureFixture) -> None:
    store = FailingStore()
    outbox = Outbox(lambda: store, max_bytes=4_000)
    view = ClientView("s")

    def say(first: int, count: int) -> None:
        for position in range(first, first + count):
            outbox.put(view, [Said(position, {"role": "user", "content": f"{position}" * 200})])

    say(0, 2)
    assert outbox.settle("s", 60.0)
    store.failing = {"append", "read"}
    with outbox.paused("another", 60.0):  # an attempt in between would leave its turn behind a gap of its own
        say(2, 30)
    store.failing = set()
    say(32, 1)
    assert outbox.settle("s", 60.0)
    outbox.close(60.0)
    positions = [position for position, _ in read_session(store, "s").history]
    assert positions[:2] == [0, 1]
    gaps = [(last, first) for last, first in pairwise(positions) if first > last + 1]
    assert len(gaps) == 1 and positions[-1] == 32  # turns under way when the store fails may come first
    assert 10 < gaps[0][1] < 33
    warnings = [record.getMessage() for record in caplog.records]
    assert sum("their sessions will show gaps" in warning for warning in warnings) == 1


@pytest.fixture
def with_gaps() -> Store:
    """Return a store whose session has positions 2, 3 and 6."""
    store = open_store("memory://")
    outbox = Outbox(lambda: store)
    view = ClientView("s")
    for position in (2, 3, 6):
        outbox.put(view, [Said(position, {"role": "user", "content": f"{position}"})])
    outbox.close(60.0)
    return store


def test_a_session_with_gaps_says_so(server: FakeServer, with_gaps: Store, caplog: pytest.LogCaptureFixture) -> None:
    with connect(server, with_gaps) as client:
        session = client.session("s")
        assert contents(session) == ["2", "3", "6"]
        assert session.gaps == [Gap(before=0, lost=2), Gap(before=2, lost=2)]
        session.chat("7")
        assert session.fork("branch").gaps == session.gaps
        session.chat("9")
        assert client.session("whole").gaps == []
    assert [position for position, _ in stored(with_gaps)] == [2, 3, 6, 7, 8, 9, 10]
    with connect(server, with_gaps) as client:
        assert client.session("branch").gaps == [Gap(before=0, lost=2), Gap(before=2, lost=2)]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "agentspec: session 's': the store has lost 2 messages before message 2" in warnings


def test_a_slow_store_slows_one_call_at_most(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.client.history.outbox.WAIT_S", 2.0)
    store = FailingStore()
    with connect(server, store) as client:
        session = client.session("s")
        session.chat("warm")
        store.delay = 4.0
        session.chat("first")
        took = []
        for _ in range(9):
            begin = time.monotonic()
            session.chat("again")
            took.append(time.monotonic() - begin)
        assert median(took) < 1.6  # not the two seconds for which the first one waited
        store.delay = 0.0
        wait_until_stored(store, 22, session.id)


def test_a_record_that_a_store_brings_back_is_read_once(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/h.db")
    said = [{"role": "user", "content": text} for text in ("a", "b", "b", "c")]
    entries = [NewEntry("s", encode(MessageRecord("s", message, 0.0, at))) for at, message in enumerate(said)]
    store.append(NAMESPACE, [*entries[:3], *entries[1:]])
    assert stored(store) == [(0, "a"), (1, "b"), (2, "b"), (3, "c")]
    assert read_session(store, "s").next_position == 4
    store.close()


@pytest.mark.parametrize("end", ["close", "use"])
def test_what_is_added_before_a_session_is_read_is_stored_behind_it(
    server: FakeServer, tmp_path: Path, end: str
) -> None:
    """No object of the session exists meanwhile."""
    url = f"sqlite:///{tmp_path}/sessions.db"
    with connect(server, url) as client:
        client.session("old").chat("one")
    with connect(server, url) as client:
        client.session("old").add({"role": "user", "content": "more"})
        client.session("new").add({"role": "system", "content": "be brief"})
        if end == "use":
            assert contents(client.session("old")) == ["one", "answer 1", "more"]
            client.session("new").chat("hello")
            assert [message["content"] for message in server.chats[-1].body["messages"]] == ["be brief", "hello"]
    with connect(server, url) as client:
        assert contents(client.session("old")) == ["one", "answer 1", "more"]
        assert contents(client.session("new"))[0] == "be brief"


def test_what_was_added_and_cannot_be_stored_is_said(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    store = FailingStore("read")
    with connect(server, store) as client:
        client.session("s").add({"role": "system", "content": "be brief"})
    assert "messages added to session 's' are lost" in caplog.text


# --- Messages that are taken back


def test_messages_may_be_put_in_the_place_of_the_latest_one_and_leave_no_gap() -> None:
    conversation = Conversation("s", SessionLog(), new=True)
    one, two, three = ({"role": "user", "content": each} for each in ("one", "two", "three"))
    conversation.add([one, two])
    for change in ([], [two, three], [three]):
        assert conversation.change_last(lambda _, change=change: change) is not None  # type: ignore[misc]
        assert conversation.gaps() == []
        conversation.add([one])
        assert conversation.gaps() == [] and conversation.messages()[-1] == one
    assert [message["content"] for message in conversation.messages()] == ["one", "two", "three", "three", "one"]


def test_what_an_interrupted_call_added_is_taken_back_in_the_store_too(server: FakeServer, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/sessions.db"
    with connect(server, store) as client:
        session = client.session("s")
        session.chat("one")
        kept = session.messages
        conversation = session._conversation
        with pytest.raises(KeyboardInterrupt), conversation.undone_if_interrupted():
            conversation.add([{"role": "user", "content": "interrupted"}])
            raise KeyboardInterrupt
        assert session.messages == kept
    with connect(server, store) as client:
        assert client.session("s").messages == kept


def test_what_was_added_before_a_session_was_read_waits_until_then_only(server: FakeServer, tmp_path: Path) -> None:
    with connect(server, f"sqlite:///{tmp_path}/sessions.db") as client:
        session = client.session("s")
        session.add({"role": "user", "content": "one"})
        assert len(client._conversations._unsaved) == 1
        assert contents(session) == ["one"]
        assert not client._conversations._unsaved
