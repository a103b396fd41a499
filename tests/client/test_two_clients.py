"""Test two clients on one session: the second to append gets a conflict, and no turn is torn apart."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentspec import AsyncAgentClient, Reply, Session, SessionConflictError, Stage, StoreUnavailableError
from agentspec.cache.store import open_store
from agentspec.client.history.outbox import NAMESPACE
from agentspec.testing.redis_server import RedisServer

from .fake_server import FakeServer
from .histories import connect, contents, stored, wait_until_stored
from .stores import FailingStore


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


@pytest.mark.parametrize(
    ("loop", "arguments"), [("best_of", (2, lambda reply: 1.0)), ("pipeline", ([Stage("plan", "Plan:")],))]
)
def test_a_loop_of_the_second_client_gets_a_conflict_before_anything_is_sent(
    server: FakeServer, loop: str, arguments: Any
) -> None:
    store = open_store("memory://")
    with connect(server, store) as first, connect(server, store) as second:
        mine = second.session("s")
        mine.load()
        first.session("s").chat("one")
        with pytest.raises(SessionConflictError):
            getattr(mine, loop)("two", *arguments)
    assert len(server.chats) == 1


def test_a_loop_during_which_another_client_writes_gets_a_conflict(server: FakeServer) -> None:
    store = open_store("memory://")
    with connect(server, store) as first, connect(server, store) as second:
        mine, theirs = second.session("s"), first.session("s")

        def meanwhile(reply: Reply) -> float:
            theirs.chat("meanwhile")
            return 1.0

        with pytest.raises(SessionConflictError):
            mine.best_of("one", 1, meanwhile)
        again = second.session("t")
        theirs = first.session("t")
        critic = lambda reply: None if meanwhile(reply) else "again"  # noqa: E731
        with pytest.raises(SessionConflictError):
            again.pipeline("one", [Stage("plan", "Plan:", critic=critic)])


def test_a_session_that_the_store_has_lost_is_not_put_down_to_another_client_alone(server: FakeServer) -> None:
    store = open_store("memory://")
    with connect(server, store) as client:
        session = client.session("s")
        session.chat("one")
        wait_until_stored(store, 2)
        store.erase_session(NAMESPACE, "s", mark=False)  # as a Redis server that restarts empty
        with pytest.raises(SessionConflictError, match="or the store has lost some") as caught:
            session.chat("two")
        assert "erased it" in str(caught.value)
        branch = session.fork()
        branch.chat("three")
        assert contents(branch) == ["one", "answer 1", "two", "answer 2", "three", "answer 3"]
        session.reload()
        assert session.messages == []


def test_both_at_once(server: FakeServer) -> None:
    """The second answer comes too late to be stored. Its session keeps it, so a fork can go on from it."""
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


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_two_processes_on_one_session(
    server: FakeServer, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each process goes on until a conflict, then reloads. Nothing is lost, and no turn is torn apart."""
    url = f"sqlite:///{tmp_path / 's.db'}"
    if kind == "redis":
        url = request.getfixturevalue("redis_server").url
    name = f"s-{uuid.uuid4().hex}"
    script = f"""
        import pathlib, sys, time
        from agentspec import AgentClient, SessionConflictError
        from agentspec.client.history import outbox
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
