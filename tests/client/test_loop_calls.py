"""Calls of loops: who may use the session meanwhile, how long they take, and what their answers look like."""

from __future__ import annotations

import pytest

from agentspec import AgentClient, AsyncAgentClient, SessionBusyError

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
            return "out"

        server.answers = [calls(("other", "{}"))]
        with AgentClient(base_url=server.url, model="small", store=None) as client:
            session = client.session("s")
            assert session.run_tools("go", [other]).done
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
