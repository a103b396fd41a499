"""Test calls that wait for the store: cancelled ones leave their session as it was, and functions delay no other."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agentspec import AgentClient, AsyncAgentClient, Stage
from agentspec.client.history.outbox import read_session
from agentspec.client.history.session_log import Said

from .fake_server import FakeServer
from .stores import FailingStore


class Held:
    """Wrap a store's method, so that its calls wait until they may end."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self._method = method

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.begun.set()
        self.may_end.wait(10)
        return self._method(*args, **options)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_that_is_cancelled_while_the_store_writes_leaves_its_session_as_it_was(
    server: FakeServer, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.client.history.outbox.WAIT_S", 5.0)
    store = FailingStore()
    append = Held(store.append)
    async with AsyncAgentClient(base_url=server.url, model="small", store=store) as client:
        session = client.session("s")
        await session.chat("one")
        monkeypatch.setattr(store, "append", append)

        async def call() -> None:
            await (session.stream("two").until_done() if streamed else session.chat("two"))

        task = asyncio.create_task(call())
        await asyncio.to_thread(append.begun.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [message["content"] for message in session.messages] == ["one", "answer 1"]
        append.may_end.set()
        await session.chat("two")
    found = read_session(store, "s")
    assert [said.message["content"] for said in found.history] == ["one", "answer 1", "two", "answer 3"]
    async with AsyncAgentClient(base_url=server.url, model="small", store=store) as client:
        session = client.session("s")
        await session.load()
        assert len(session.messages) == 4 and session.gaps == []


@pytest.mark.parametrize(
    ("change", "waits_in"), [("clear", "erase_session"), ("reload", "read"), ("pop_item", "append")]
)
async def test_a_cancelled_change_ends_before_its_task_does(
    server: FakeServer, change: str, waits_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread makes the change and cannot be cancelled. It must not erase later turns."""
    store = FailingStore()
    held = Held(getattr(store, waits_in))
    async with AsyncAgentClient(base_url=server.url, model="small", store=store) as client:
        session = client.session("s")
        await session.chat("one")
        monkeypatch.setattr(store, waits_in, held)
        task = asyncio.create_task(getattr(session, change)())
        await asyncio.to_thread(held.begun.wait, 10)
        for _ in range(10):  # a second cancellation changes nothing
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        held.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await session.chat("two")
        messages = session.messages
    assert [message["content"] for message in messages] == [
        *{"clear": [], "reload": ["one", "answer 1"], "pop_item": ["one"]}[change],
        *("two", "answer 2"),
    ]
    assert [said.message for said in read_session(store, "s").history] == messages


def test_a_call_that_ctrl_c_ends_while_the_store_writes_leaves_its_session_as_it_was(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FailingStore()
    with AgentClient(base_url=server.url, model="small", store=store) as client:
        session = client.session("s")
        session.chat("one")

        def interrupted() -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(session._conversation, "confirm", interrupted)
            session.chat("two")
        session.chat("two")
    assert [said.message["content"] for said in read_session(store, "s").history] == [
        *("one", "answer 1"),
        *("two", "answer 3"),
    ]


@pytest.mark.parametrize(
    ("loop", "arguments"),
    [("best_of", ("two", 2, lambda reply: 1.0)), ("pipeline", ("two", [Stage("code", "Code:")]))],
)
async def test_a_loop_that_ends_while_the_store_writes_leaves_its_session_as_it_was(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, loop: str, arguments: Any
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    running, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancelled() -> None:
        running.call_soon_threadsafe(task.cancel)
        raise asyncio.CancelledError

    store = FailingStore()
    with AgentClient(base_url=server.url, model="small", store=store) as client:
        session = client.session("s")
        session.chat("one")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(session._conversation, "confirm", interrupted)
            getattr(session, loop)(*arguments)
        assert len(session.messages) == 2 and session.chat("two").text
    async with AsyncAgentClient(base_url=server.url, model="small", store=store) as agents:
        other = agents.session("s")
        await other.load()
        with monkeypatch.context() as patch, pytest.raises(asyncio.CancelledError):
            patch.setattr(other._conversation, "confirm", cancelled)
            await getattr(other, loop)(*arguments)
        task.uncancel()
        assert len(other.messages) == 4 and (await other.chat("three")).text
    assert len(read_session(store, "s").history) == 6


def now() -> str:
    """Return the time."""
    return "noon"


CALL = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}


async def test_tool_calls_whose_turn_was_taken_back_are_not_answered(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's tool calls are in the session only while the store confirms them."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancelled() -> None:
        loop.call_soon_threadsafe(task.cancel)
        raise asyncio.CancelledError

    server.answers = [{"content": None, "tool_calls": [CALL]}]
    with AgentClient(base_url=server.url, model="small", store=FailingStore()) as client:
        session = client.session("s")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(session._conversation, "confirm", interrupted)
            session.run_tools("What time is it?", [now])
        assert session.messages == [] and session.chat("two").text
    server.answers = [{"content": None, "tool_calls": [CALL]}]
    async with AsyncAgentClient(base_url=server.url, model="small", store=FailingStore()) as agents:
        other = agents.session("s")
        with monkeypatch.context() as patch, pytest.raises(asyncio.CancelledError):
            patch.setattr(other._conversation, "confirm", cancelled)
            await other.run_tools("What time is it?", [now])
        task.uncancel()
        assert other.messages == [] and (await other.chat("two")).text


@pytest.mark.parametrize("when", ["at its begin", "before", "after"])
def test_ctrl_c_while_tool_calls_are_answered_leaves_none_unanswered(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    store = FailingStore()
    server.answers = [{"content": None, "tool_calls": [CALL, {**CALL, "id": "d"}]}]
    with AgentClient(base_url=server.url, model="small", store=store) as client:
        session = client.session("s")
        save, answer, interrupts = session._conversation._save, session._conversation.answer_calls, [KeyboardInterrupt]

        def interrupted_at_its_begin(*arguments: Any) -> None:
            if interrupts:
                raise interrupts.pop()
            answer(*arguments)

        def interrupted(said: list[Said]) -> None:
            interrupt = interrupts.pop() if interrupts and said and said[0].message["role"] == "tool" else None
            if interrupt is None or when == "after":
                save(said)
            if interrupt is not None:
                raise interrupt

        if when == "at its begin":
            monkeypatch.setattr(session._conversation, "answer_calls", interrupted_at_its_begin)
        else:
            monkeypatch.setattr(session._conversation, "_save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.run_tools("What time is it?", [now])
        assert session.chat("two").text
        messages = session.messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "user", "assistant"]
    found = read_session(store, "s")
    assert [said.message for said in found.history] == messages and found.next_position == 6


async def test_slow_functions_of_loops_delay_no_other_session(server: FakeServer) -> None:
    started, done = threading.Event(), threading.Event()

    def tool() -> str:
        """Wait."""
        started.set()
        done.wait(30)
        return "done"

    call = {"type": "function", "function": {"name": "tool", "arguments": json.dumps({})}}
    calls = [{**call, "id": f"c{number}"} for number in range(40)]  # more than asyncio has threads
    async with AsyncAgentClient(base_url=server.url, model="small", store="memory://") as client:
        other = client.session("other")
        await other.chat("one")
        server.answers = [{"role": "assistant", "content": None, "tool_calls": calls}]
        loop = asyncio.create_task(client.session("busy").run_tools("go", [tool], at_once=40))
        while not started.is_set():
            await asyncio.sleep(0.01)
        try:
            await asyncio.wait_for(other.chat("two"), 10)
            assert not loop.done()
        finally:
            done.set()
        await loop
