"""A session's history is never silently lost: outages, gaps, and two clients on one session."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import unquote

import openai
import pytest

from agentspec import (
    AgentClient,
    AsyncAgentClient,
    Gap,
    InvalidInputError,
    Session,
    SessionConflictError,
    Stage,
    StoreError,
    StoreUnavailableError,
)
from agentspec.cache.store import MessageRecord, NewEntry, Store, encode, open_store
from agentspec.client.outbox import NAMESPACE, Outbox, read_session
from agentspec.client.session_log import ClientView, Said
from agentspec.testing.redis_server import RedisServer

from .fake_server import FakeServer
from .stores import FailingStore


def connect(server: FakeServer, store: Store | str, **options: Any) -> AgentClient:
    return AgentClient(base_url=server.url, model="small", store=store, **options)


def contents(session: Session) -> list[str]:
    return [message["content"] for message in session.messages]


def stored(store: Store, session: str = "s") -> list[tuple[int, str]]:
    return [(position, message["content"]) for position, message in read_session(store, session).history]


def wait_until_stored(store: Store, count: int, session: str = "s") -> None:
    deadline = time.monotonic() + 180
    while len(read_session(store, session).history) < count:
        assert time.monotonic() < deadline, stored(store, session)
        time.sleep(0.01)


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
        session.chat("two")  # the session is none the worse for it
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
        client.session("s").chat("one")  # nobody holds this session any more
        with monkeypatch.context() as patch, pytest.raises(StoreUnavailableError, match="wait to be written"):
            patch.setattr("agentspec.client.store_log.FLUSH_TIMEOUT_S", 0.2)
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
    assert len(gaps) == 1 and positions[-1] == 32  # what is on its way when the store fails may stand in front
    assert 10 < gaps[0][1] < 33
    warnings = [record.getMessage() for record in caplog.records]
    assert sum("their sessions will show gaps" in warning for warning in warnings) == 1


@pytest.fixture
def with_gaps() -> Store:
    """A session of positions 2, 3 and 6."""
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


# --- Two clients on one session


def test_the_second_client_gets_a_conflict_before_anything_is_sent(server: FakeServer) -> None:
    store = open_store("memory://")
    with connect(server, store) as first, connect(server, store) as second:
        first.session("s").chat("one")
        mine, theirs = second.session("s"), first.session("s")
        mine.load()
        theirs.chat("two")
        for _ in range(2):
            with pytest.raises(SessionConflictError, match=r"fork\(\).*reload\(\)"):
                mine.chat("three")
        with pytest.raises(SessionConflictError):
            mine.stream("three").until_done()
        with pytest.raises(SessionConflictError):
            mine.add({"role": "user", "content": "three"})
        assert len(server.chats) == 2
        branch = mine.fork()
        branch.chat("three")
        assert contents(branch) == ["one", "answer 1", "three", "answer 3"]
        mine.reload()
        mine.chat("three")
        assert contents(mine) == ["one", "answer 1", "two", "answer 2", "three", "answer 4"]
        with pytest.raises(SessionConflictError):
            theirs.chat("four")
    assert [position for position, _ in stored(store)] == list(range(6))


def test_a_session_that_the_store_has_lost_is_not_put_down_to_another_client_alone(server: FakeServer) -> None:
    store = open_store("memory://")
    with connect(server, store) as client:
        session = client.session("s")
        session.chat("one")
        wait_until_stored(store, 2)
        store.erase_session(NAMESPACE, "s", mark=False)  # as Redis does that is restarted empty
        with pytest.raises(SessionConflictError, match="or the store has lost some") as caught:
            session.chat("two")
        assert "erased it" in str(caught.value)
        branch = session.fork()
        branch.chat("three")
        assert contents(branch) == ["one", "answer 1", "two", "answer 2", "three", "answer 3"]
        session.reload()
        assert session.messages == []


def test_both_at_once(server: FakeServer) -> None:
    """The second answer comes too late to be stored. The session keeps it, so that a fork goes on from it."""
    store = open_store("memory://")
    server.hold = threading.Event()
    with connect(server, store) as first, connect(server, store) as second:
        sessions = [first.session("s"), second.session("s")]
        errors: list[SessionConflictError] = []

        def converse(session: Session, text: str) -> None:
            try:
                session.chat(text)
            except SessionConflictError as error:
                errors.append(error)

        threads = [threading.Thread(target=converse, args=item) for item in zip(sessions, "ab", strict=True)]
        for thread in threads:
            thread.start()
        while len(server.chats) < 2:
            time.sleep(0.01)
        server.hold.set()
        for thread in threads:
            thread.join()
        assert len(errors) == 1
        assert len(stored(store)) == 2
        (loser,) = (session for session in sessions if contents(session)[0] != stored(store)[0][1])
        assert len(loser.fork("branch").messages) == 2


async def test_a_conflict_with_asyncio(server: FakeServer) -> None:
    store = open_store("memory://")
    async with (
        AsyncAgentClient(base_url=server.url, model="small", store=store) as first,
        AsyncAgentClient(base_url=server.url, model="small", store=store) as second,
    ):
        mine, theirs = first.session("s"), second.session("s")
        await asyncio.gather(mine.load(), theirs.load())
        await mine.chat("one")
        with pytest.raises(SessionConflictError):
            await theirs.chat("two")
        with pytest.raises(SessionConflictError):
            await theirs.stream("two").until_done()
        assert (await theirs.fork("branch")).messages == []
        await theirs.reload()
        await theirs.chat("two")
        assert len(theirs.messages) == 4


def test_an_append_whose_answer_was_lost_is_no_conflict(server: FakeServer) -> None:
    class Forgetful(FailingStore):
        def append(self, *args: Any, **options: Any) -> Any:
            super().append(*args, **options)
            if self.failing:
                raise StoreUnavailableError("append: the answer was lost")

    store = Forgetful()
    with connect(server, store) as client:
        session = client.session("s")
        session.chat("one")
        store.failing = {"answers"}
        session.chat("two")
        store.failing = set()
        wait_until_stored(store, 4)
        session.chat("three")
    assert [position for position, _ in stored(store)] == list(range(6))


def test_a_slow_store_slows_one_call_at_most(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.client.outbox.WAIT_S", 2.0)
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


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def test_a_record_that_a_store_brings_back_is_read_once(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/h.db")
    said = [{"role": "user", "content": text} for text in ("a", "b", "b", "c")]
    entries = [NewEntry("s", encode(MessageRecord("s", message, 0.0, at))) for at, message in enumerate(said)]
    store.append(NAMESPACE, [*entries[:3], *entries[1:]])
    assert stored(store) == [(0, "a"), (1, "b"), (2, "b"), (3, "c")]
    assert read_session(store, "s").next_position == 4
    store.close()


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_two_processes_on_one_session(
    server: FakeServer, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each process goes on until a conflict, then reloads: nothing is lost, and nobody's turn is torn apart."""
    url = f"sqlite:///{tmp_path / 's.db'}"
    if kind == "redis":
        url = request.getfixturevalue("redis_server").url
    name = f"s-{uuid.uuid4().hex}"
    script = f"""
        import pathlib, sys, time
        from agentspec import AgentClient, SessionConflictError
        from agentspec.client import outbox
        outbox.WAIT_S = 20.0  # on a busy machine a slow append must not pass for a store that is away
        conflicts = 0
        ready = [pathlib.Path({str(tmp_path)!r}, who) for who in "ab"]
        with AgentClient(base_url={server.url!r}, model="small", store={url!r}, speculation=False) as client:
            session = client.session({name!r})
            session.load()  # so that whoever says something second has a conflict
            pathlib.Path({str(tmp_path)!r}, sys.argv[1]).touch()
            while not all(path.exists() for path in ready):
                time.sleep(0.01)
            for number in range(15):
                while True:
                    try:
                        session.chat(f"{{sys.argv[1]}}-{{number}}")
                        break
                    except SessionConflictError:
                        conflicts += 1
                        session.reload()
        print(conflicts)
    """
    processes = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), who], stdout=subprocess.PIPE, text=True)
        for who in "ab"
    ]
    conflicts = [int(process.communicate(timeout=600)[0]) for process in processes]
    assert sum(conflicts) > 0
    store = open_store(url)
    history = stored(store, name)
    store.close()
    assert [position for position, _ in history] == list(range(60))
    asked = [content for _, content in history[::2]]
    for who in "ab":
        assert [content for content in asked if content.startswith(who)] == [f"{who}-{number}" for number in range(15)]
    assert all(content.startswith("answer") for _, content in history[1::2])


# --- Erasure


def test_clear_erases_the_servers_copy_too(server: FakeServer) -> None:
    store = open_store("memory://")
    with connect(server, store) as client:
        session = client.session("a/b ü")
        session.chat("one")
        session.clear()
        assert session.messages == []
        server.erasing = [404, 405]  # the server has forgotten it already, or cannot erase
        session.clear()
        session.clear()
    assert server.erased == ["a/b ü"] * 3
    assert stored(store, "a/b ü") == []


def salts_of_erasures(server: FakeServer) -> list[str | None]:
    asked = [request for request in server.received if request.method == "DELETE"]
    return [request.headers.get("x-cache-salt") for request in asked]


def test_clear_erases_the_sessions_of_all_cache_salts(server: FakeServer) -> None:
    """Each salt makes another session of the same id on the server."""
    with connect(server, "memory://") as client:
        session = client.session("s")
        session.chat("one", extra_body={"cache_salt": "mine"})
        session.chat("two", extra_body={"cache_salt": "mine"})
        session.chat("three")
        server.erasing = [404]  # nothing was said without a salt
        session.clear(cache_salts=["größer als 9"])
    assert salts_of_erasures(server) == [None, "gr%C3%B6%C3%9Fer%20als%209", "mine"]
    assert server.erased == ["s"] * 3


async def test_clear_erases_the_sessions_of_all_cache_salts_with_asyncio(server: FakeServer) -> None:
    async with AsyncAgentClient(base_url=server.url, model="small", store="memory://") as client:
        session = client.session("s")
        await session.chat("one", extra_body={"cache_salt": "mine"})
        await session.clear()
    assert salts_of_erasures(server) == [None, "mine"]


def test_clear_erases_what_its_loops_said_in_other_sessions(server: FakeServer) -> None:
    with connect(server, "memory://") as client:
        session = client.session("s")
        session.best_of("count", 2, lambda reply: 1.0)
        session.pipeline("count", [Stage("plan", "Plan it:"), Stage("write", "Write it:")])
        used = {chat.headers["x-session-id"] for chat in server.chats}
        session.clear()
    assert set(server.erased) == used | {"s"} and len(used) == 4
    assert {name.rpartition(".")[2] for name in used if name.startswith("s.")} >= {"1", "2"}


def test_clear_leaves_a_session_alone_whose_name_a_loop_might_choose(server: FakeServer) -> None:
    with connect(server, "memory://") as client:
        client.session("s.1").chat("my own")
        session = client.session("s")
        session.best_of("count", 2, lambda reply: 1.0)
        session.clear()
        assert "s.1" not in server.erased and "s" in server.erased
        assert contents(client.session("s.1")) == ["my own", "answer 1"]


@pytest.mark.parametrize("end", ["close", "use"])
def test_what_is_added_before_a_session_is_read_is_stored_behind_it(
    server: FakeServer, tmp_path: Path, end: str
) -> None:
    """Nobody holds the session meanwhile."""
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


def test_sessions_of_loops_are_remembered_up_to_a_limit(server: FakeServer) -> None:
    with connect(server, "memory://") as client:
        conversation = client.session("s")._conversation
        for number in range(10_000):
            conversation.add_helper(f"helper {number}")
        conversation.add_helper("helper 9500")
    assert len(conversation.helpers) == 1_000
    assert {"helper 9001", "helper 9500", "helper 9999"} < set(conversation.helpers)


def test_clear_asks_no_server_that_cannot_know_the_session(server: FakeServer, plain_server: FakeServer) -> None:
    for fake, tags in ((plain_server, "auto"), (server, "off")):
        with connect(fake, "memory://", session_tags=tags) as client:
            session = client.session("s")
            session.chat("one")
            session.clear()
            assert session.messages == []
        assert fake.erased == []


def test_clear_that_the_server_refuses_changes_nothing(server: FakeServer) -> None:
    with connect(server, "memory://", max_retries=0) as client:
        session = client.session("s")
        session.chat("one")
        server.erasing = [403, 500]
        with pytest.raises(openai.PermissionDeniedError):
            session.clear()
        with pytest.raises(openai.InternalServerError):
            session.clear()
        assert contents(session) == ["one", "answer 1"]
        session.clear()
        assert session.messages == []


async def test_clear_with_asyncio(server: FakeServer) -> None:
    store = open_store("memory://")
    async with AsyncAgentClient(base_url=server.url, model="small", store=store, max_retries=0) as client:
        session = client.session("s")
        await session.chat("one")
        server.erasing = [500]
        with pytest.raises(openai.InternalServerError):
            await session.clear()
        assert len(session.messages) == 2
        await session.clear()
        assert session.messages == []
    assert server.erased == ["s", "s"]
    assert stored(store) == []


def test_clear_of_an_unreachable_server_says_so(server: FakeServer) -> None:
    with connect(server, "memory://", max_retries=0) as client:
        session = client.session("s")
        session.add({"role": "user", "content": "one"})
        server.close()
        with pytest.raises(openai.APIConnectionError):
            session.clear()
        assert contents(session) == ["one"]


def test_ids_of_new_sessions_cannot_be_guessed(server: FakeServer) -> None:
    with connect(server, "memory://") as client:
        names = [client.session().id for _ in range(100)]
        names += [client.session("s").fork().id for _ in range(10)]
    assert len(set(names)) == 110
    for name in names:
        assert uuid.UUID(hex=name.removeprefix("session-")).version == 4  # 122 random bits


@pytest.mark.parametrize("name", [".", ".."])
def test_dots_as_an_id_are_a_session_as_others_are(server: FakeServer, name: str) -> None:
    with AgentClient(base_url=server.url, model="small", store=None) as client:
        session = client.session(name)
        assert session.prime(["a text"]) == 1
        session.clear()
    assert server.erased == [name]
    paths = [request.path for request in server.received if request.method in ("PUT", "DELETE")]
    assert [unquote(path) for path in paths] == [f"/v1/agentspec/sessions/{name}"] * 2
