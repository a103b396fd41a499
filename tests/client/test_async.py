"""Test the async twins: they have the same methods and the same rules."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from typing import Any
from unittest.mock import Mock

import openai
import pytest
from pydantic import BaseModel

from agentspec import (
    AgentClient,
    AgentSpecError,
    AsyncAgentClient,
    AsyncReplyStream,
    AsyncSession,
    InvalidSessionError,
    Reply,
    ReplyStream,
    Session,
    SessionBusyError,
    StoreError,
)
from agentspec.cache.store import open_store
from agentspec.client.agents_session import AgentsSession

from .fake_server import FakeServer


def connect(server: FakeServer, **options: Any) -> AsyncAgentClient:
    return AsyncAgentClient(base_url=server.url, model="small", **{"store": None, **options})


@pytest.mark.parametrize(
    ("sync", "twin"), [(AgentClient, AsyncAgentClient), (Session, AsyncSession), (ReplyStream, AsyncReplyStream)]
)
def test_twins_have_the_same_surface(sync: type, twin: type) -> None:
    def surface(kind: type) -> dict[str, list[str]]:
        members = inspect.getmembers(kind, lambda member: callable(member) or isinstance(member, property))
        return {
            name: list(inspect.signature(member).parameters) if callable(member) else []
            for name, member in members
            if not name.startswith("_") and not hasattr(AgentsSession, name)  # openai-agents is asynchronous
        }

    assert surface(sync) == surface(twin)


async def test_a_conversation(server: FakeServer) -> None:
    server.counts = {"tokens": 3, "steps": 2, "drafts": 2, "drafted": 2, "accepted": 2}
    async with connect(server) as client:
        session = client.session("s")
        session.add({"role": "system", "content": "Be brief."})
        first = await session.chat("one")
        await session.chat("two")
        assert [message["content"] for message in session.messages] == [
            "Be brief.",
            "one",
            "answer 1",
            "two",
            "answer 2",
        ]
        assert first.speculation is not None and first.speculation.mean_acceptance_length == 2.0
        assert (await client.chat("three", session="t")).text == "answer 3"
    assert [chat.headers["x-session-id"] for chat in server.chats] == ["s", "s", "t"]
    assert server.chats[0].body["vllm_xargs"] == {"session_id": "s"}


async def test_connections_are_closed_though_the_store_cannot_be(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(server, store="memory://")
    await client.session("s").chat("one")
    monkeypatch.setattr("agentspec.client.history.outbox.Outbox.close", Mock(side_effect=StoreError("no close")))
    with pytest.raises(StoreError, match="no close"):
        await client.close()
    assert client.openai.is_closed()


async def test_a_fan_out_probes_once(server: FakeServer) -> None:
    async with connect(server) as client:
        sessions = [client.session(f"s{number}") for number in range(12)]
        replies = await asyncio.gather(*(session.chat(session.id) for session in sessions))
        assert [session.messages[0]["content"] for session in sessions] == [session.id for session in sessions]
        assert [session.messages[1]["content"] for session in sessions] == [reply.text for reply in replies]
    assert len(server.probes) == 1


async def test_a_plain_server_gets_nothing_unknown(plain_server: FakeServer) -> None:
    async with connect(plain_server) as client:
        reply = await client.session("s").chat("hello")
        assert (await client.session("s").stream("again").until_done()).text == "answer 2"
    assert reply.speculation is None
    assert plain_server.chats[0].body.keys() == {"model", "messages"}
    assert plain_server.chats[1].body.keys() == {"model", "messages", "stream"}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("call", ["get", "put", "delete"])
async def test_an_exit_while_the_server_is_probed_primed_or_cleared_ends_the_program(
    server: FakeServer, call: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's handler calls sys.exit() wherever the program is."""

    def leave(*_: object, **__: object) -> None:
        raise SystemExit(3)

    client: Any = connect(server) if asynchronous else AgentClient(base_url=server.url, model="small")
    session = client.session()
    if call != "get":
        said = session.chat("one")
        await said if asynchronous else None
    monkeypatch.setattr(client.openai, call, leave)
    with pytest.raises(SystemExit):
        calls = {"get": lambda: session.chat("one"), "put": lambda: session.prime(["text"]), "delete": session.clear}
        done = calls[call]()
        await done if asynchronous else None
    monkeypatch.undo()
    said = session.chat("two")
    await said if asynchronous else None
    closed = client.close()
    await closed if asynchronous else None


async def test_streams(server: FakeServer) -> None:
    async with connect(server) as client:
        session = client.session("s")
        stream = session.stream("one")
        with pytest.raises(AgentSpecError, match="until_done"):
            _ = stream.reply
        assert [text async for text in stream] == ["ans", "wer", " 1"]
        assert stream.reply.usage is not None
        async with session.stream("two") as stream:
            assert await anext(stream) == "ans"
            with pytest.raises(SessionBusyError):
                await session.chat("three")
        assert len(session.messages) == 2
        assert "".join([text async for text in session.stream("two")]) == "answer 3"
        assert "".join([text async for text in client.stream("three")]) == "answer 4"
        assert len(session.messages) == 4


async def test_a_stream_left_early_frees_the_session_at_once(server: FakeServer) -> None:
    async with connect(server) as client:
        session = client.session("s")
        async for _ in session.stream("one"):
            break
        assert (await session.chat("two")).text == "answer 2"
        try:
            async for _ in session.stream("three"):
                raise ValueError("of the caller")
        except ValueError:
            assert (await session.chat("four")).text == "answer 4"
        kept = session.stream("five")
        async for _ in kept:
            break
        with pytest.raises(SessionBusyError):
            await session.chat("six")
        del kept
        async with session.stream("seven") as stream:  # the earlier stream ends now, and must not free the session
            await asyncio.sleep(0.1)
            with pytest.raises(SessionBusyError):
                await session.chat("eight")
            assert (await stream.until_done()).text == "answer 6"
        assert [message["content"] for message in session.messages[::2]] == ["two", "four", "seven"]


class Point(BaseModel):
    x: int
    y: int


async def test_formats_and_tools(server: FakeServer) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "run", "arguments": "{}"}}
    point = {"content": '{"x": 1, "y": 2}'}
    server.answers = [point, point, {"tool_calls": [call]}]
    async with connect(server) as client:
        session = client.session("s")
        assert (await session.chat("where?", response_format=Point)).parsed == Point(x=1, y=2)
        assert (await session.stream("where?", response_format=Point).until_done()).parsed == Point(x=1, y=2)
        reply = await session.chat("go", tools=[{"type": "function", "function": {"name": "run"}}])
        session.tool_result(reply.tool_calls[0].id, "done")
        assert (await session.chat()).text == "answer 4"


async def test_failures_leave_the_history_and_retries_are_openais(server: FakeServer) -> None:
    server.failures = [400, 429]
    async with connect(server) as client:
        session = client.session("s")
        with pytest.raises(openai.BadRequestError):
            await session.chat("one")
        assert session.messages == []
        assert (await session.chat("one")).text == "answer 3"
        assert len(session.messages) == 2


async def own_chat(server: FakeServer) -> Reply[None]:
    async with connect(server) as client:
        return await client.chat("one")


def test_a_client_is_refused_in_another_event_loop(server: FakeServer) -> None:
    """Otherwise calls would fail with "Event loop is closed", by a connection of the earlier loop."""
    client = connect(server)
    session = client.session("s")
    assert asyncio.run(session.chat("one")).text == "answer 1"
    for _ in range(2):
        with pytest.raises(AgentSpecError, match=r"make a client in each asyncio\.run"):
            asyncio.run(session.chat("two"))
    assert len(session.messages) == 2
    unmeasured = asyncio.run(own_chat(server))
    for call in (session.clear, functools.partial(client.speculation, unmeasured)):
        with pytest.raises(AgentSpecError, match=r"make a client in each asyncio\.run"):
            asyncio.run(call())
    assert len(session.messages) == 2 and server.erased == []


async def test_a_stream_is_read_by_one_task_at_a_time(server: FakeServer) -> None:
    async with connect(server) as client:
        session = client.session("s")
        server.hold = threading.Event()
        stream = session.stream("one")
        reader = asyncio.create_task(stream.until_done())
        while not server.chats:
            await asyncio.sleep(0.01)
        for other in (stream.until_done, stream.close, lambda: anext(stream)):
            with pytest.raises(AgentSpecError, match=r"another task is reading the stream.* cancel\(\)"):
                await other()
        server.hold.set()
        assert (await reader).text == "answer 1"
        await stream.close()
        assert (await session.chat("two")).text == "answer 2"


async def test_a_cancelled_call_frees_the_session(server: FakeServer) -> None:
    server.hold = threading.Event()
    async with connect(server) as client:
        session = client.session("s")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.chat("one"), 0.2)
        server.hold.set()
        assert session.messages == []
        await session.chat("two")
        assert session.messages[0]["content"] == "two"
        assert len(session.messages) == 2


async def test_sessions_are_resumed_forked_and_cleared(server: FakeServer) -> None:
    store = open_store("memory://")
    async with connect(server, store=store) as client:
        await client.session("s").chat("one")
        await client.session("s").chat("two")
    async with connect(server, store=store) as client:
        session = client.session("s")
        with pytest.raises(AgentSpecError, match=r"await session\.load"):
            _ = session.messages
        session.add({"role": "user", "content": "three"})
        await session.load()
        contents = [message["content"] for message in session.messages]
        assert contents == ["one", "answer 1", "two", "answer 2", "three"]
        branch = await session.fork("branch")
        assert branch.messages == session.messages
        await session.clear()
        assert session.messages == []
    with AgentClient(base_url=server.url, model="small", store=store) as client:
        assert client.session("s").messages == []
        assert [message["content"] for message in client.session("branch").messages] == contents


async def test_groups_travel_with_sessions_and_calls(server: FakeServer) -> None:
    async with connect(server) as client:
        session = client.session("sample-1", group="problem-7")
        await session.chat("one")
        assert (await session.fork("sample-2")).group == "problem-7"
        await client.chat("one", group="problem-7")
        await client.stream("one", session="sample-3", group="problem-7").until_done()
        with pytest.raises(InvalidSessionError, match=r"^group: "):
            client.session("s", group="")
    sessions = [{"session_id": "sample-1"}, {}, {"session_id": "sample-3"}]
    assert [chat.body["vllm_xargs"] for chat in server.chats] == [{**tag, "group_id": "problem-7"} for tag in sessions]
