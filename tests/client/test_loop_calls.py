"""Calls of loops: who may use the session meanwhile, how long they take, and what their answers look like."""

from __future__ import annotations

import email.utils
import threading
import time
from typing import Any

import openai
import pytest

from agentspec import AgentClient, AsyncAgentClient, Budget, SessionBusyError
from agentspec.client.retries import bounded_timeout, pause_before_retry

from .fake_server import FakeServer
from .test_loops import calls, roles


def add(a: int) -> int:
    """Add one."""
    return a + 1


class TestASessionWhoseToolsRun:
    def test_takes_no_other_call(self, server: FakeServer) -> None:
        refused: list[Exception] = []

        def other() -> str:
            for act in (lambda: session.chat("meanwhile"), lambda: session.add({"role": "user", "content": "and"})):
                try:
                    act()
                except SessionBusyError as error:
                    refused.append(error)
            assert session.fork(at=-1).messages == []
            return "out"

        server.answers = [calls(("other", "{}"))]
        with AgentClient(base_url=server.url, model="small", store=None) as client:
            session = client.session("s")
            result = session.run_tools("go", [other])
            assert result.done
            assert result.attempts[0].tools[0].answer == "out"
            assert len(refused) == 2
            assert "its tools are running" in str(refused[0])
            assert roles(session.messages) == ["user", "assistant", "tool", "assistant"]
            assert session.chat("go on").text

    async def test_takes_no_other_call_of_another_task(self, server: FakeServer) -> None:
        async def slow() -> str:
            with pytest.raises(SessionBusyError):
                await session.chat("meanwhile")
            return "out"

        server.answers = [calls(("slow", "{}"))]
        async with AsyncAgentClient(base_url=server.url, model="small", store=None) as client:
            session = client.session("s")
            result = await session.run_tools("go", [slow])
            assert result.done
            assert result.attempts[0].tools[0].error is None
            assert roles(session.messages) == ["user", "assistant", "tool", "assistant"]

    def test_answers_its_calls_if_the_reply_is_lost(self, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        def conflict() -> None:
            raise RuntimeError("conflict")

        server.answers = [calls(("add", '{"a": 2}'))]
        with AgentClient(base_url=server.url, model="small", store=None) as client:
            session = client.session("s")
            monkeypatch.setattr(session._conversation, "confirm", conflict)
            assert session.run_tools("go", [add]).stopped == "error"
            monkeypatch.undo()
            assert session.messages[-1]["content"] == "error: cancelled before it ended"
            assert session.chat("go on").text


class TestABudgetOfSeconds:
    """Without one, and with one that is far away, a call has the same timeout and the same retries."""

    @pytest.mark.parametrize("timeout", [0.3, openai.Timeout(5.0, read=0.3)])
    @pytest.mark.parametrize("of_client", [True, False])
    def test_loosens_no_timeout(self, server: FakeServer, timeout: Any, of_client: bool) -> None:
        server.hold = threading.Event()
        where: dict[str, Any] = {"timeout": timeout}
        with AgentClient(
            base_url=server.url, model="small", store=None, max_retries=0, **(where if of_client else {})
        ) as client:
            begin = time.monotonic()
            options: dict[str, Any] = {} if of_client else where
            result = client.session().refine("go", lambda reply: None, budget=Budget(seconds=60), **options)
            assert time.monotonic() - begin < 5
            server.hold.set()
            assert result.stopped == "error"
            assert isinstance(result.attempts[0].error, openai.APITimeoutError)

    def test_bounds_each_part_of_a_timeout(self) -> None:
        bounded = bounded_timeout(openai.Timeout(None, connect=2.0, read=50.0), 10.0)
        assert isinstance(bounded, openai.Timeout)
        assert (bounded.connect, bounded.read, bounded.write, bounded.pool) == (2.0, 10.0, 10.0, 10.0)
        assert bounded_timeout(None, 10.0) == 10.0
        assert bounded_timeout(3, 10.0) == 3

    @pytest.mark.parametrize("of_call", [True, False])
    def test_leaves_the_retries(self, server: FakeServer, of_call: bool) -> None:
        server.failures = [429, 503]
        retries: dict[str, Any] = {"max_retries": 2}
        with AgentClient(base_url=server.url, model="small", store=None, **({} if of_call else retries)) as client:
            result = client.session().refine(
                "go", lambda reply: None, budget=Budget(seconds=60), **(retries if of_call else {})
            )
            assert (result.stopped, result.spent.requests, len(server.chats)) == ("done", 1, 3)

    async def test_leaves_the_retries_in_asyncio(self, server: FakeServer) -> None:
        server.failures = [429, 503, 500]
        async with AsyncAgentClient(base_url=server.url, model="small", store=None) as client:
            result = await client.session().refine("go", lambda reply: None, budget=Budget(seconds=60))
            assert (result.stopped, len(server.chats)) == ("error", 3)

    def test_ends_where_the_pause_before_a_retry_is_longer(self, server: FakeServer) -> None:
        server.failures = [429]
        server.retry_after = ("Retry-After", "30")
        with AgentClient(base_url=server.url, model="small", store=None) as client:
            begin = time.monotonic()
            result = client.session().refine("go", lambda reply: None, budget=Budget(seconds=5))
            assert (result.stopped, len(server.chats)) == ("error", 1)
            assert time.monotonic() - begin < 4

    def test_retries_no_call_that_the_server_refuses(self, server: FakeServer) -> None:
        server.failures = [400]
        with AgentClient(base_url=server.url, model="small", store=None) as client:
            result = client.session().refine("go", lambda reply: None, budget=Budget(seconds=60))
            assert (result.stopped, len(server.chats)) == ("error", 1)


def test_pauses_before_retries_are_the_openai_clients() -> None:
    def error(status: int, **headers: str) -> openai.APIStatusError:
        request = openai.DefaultHttpxClient().build_request("POST", "http://server/")
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        response = type("Response", (), {"status_code": status, "headers": named, "request": request})()
        return openai.APIStatusError("told", response=response, body=None)

    assert pause_before_retry(error(429, retry_after="2"), 0) == 2.0
    assert pause_before_retry(error(503, retry_after_ms="250"), 0) == 0.25
    assert pause_before_retry(error(429, retry_after="500"), 0) is None
    assert pause_before_retry(error(429, x_should_retry="false"), 0) is None
    assert pause_before_retry(error(400, x_should_retry="true"), 0) is not None
    assert pause_before_retry(error(404), 0) is None
    assert pause_before_retry(ValueError(), 0) is None
    soon = email.utils.formatdate(time.time() + 20)
    assert 10 < (pause_before_retry(error(429, retry_after=soon), 0) or 0) <= 20
    assert (
        [0.37, 0.75, 1.5, 6.0] < [pause_before_retry(error(500), made) or 0 for made in (0, 1, 2, 9)] <= [0.5, 1, 2, 8]
    )
