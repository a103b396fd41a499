"""Test calls of loops: who may use the session meanwhile, how long they take, and what their answers look like."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import openai
import pytest

from agentspec import AgentClient, AsyncAgentClient, Budget, InvalidInputError, SessionBusyError
from agentspec.client.loops.budget import bounded_timeout, call_limits

from .fake_server import FakeServer
from .loop_runs import calls, roles


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
            assert "without an answer ('call-0' of 'other'), and its tools are running" in str(refused[0])
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


def sent_limits(server: FakeServer) -> list[int | None]:
    """Return the most tokens that each call has asked for."""
    return [chat.body.get("max_completion_tokens", chat.body.get("max_tokens")) for chat in server.chats]


class TestABudgetOfMoreTokensThanAServerGives:
    """Test calls without a limit of the caller's, which ask for all that the budget has left."""

    @pytest.mark.parametrize(
        "why",
        [
            "max_tokens is too large: {0}. This model supports at most 1000 completion tokens",
            "Invalid 'max_completion_tokens': integer above maximum value. Expected a value <= 1000.",
            "Invalid max_tokens value, the valid range of max_tokens is [1, 1000]",
            "`max_completion_tokens` must be less than or equal to `1000`",
        ],
    )
    def test_asks_again_without_a_limit(
        self, run: Any, server: FakeServer, why: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """OpenAI's API tells nobody how long an answer of a model may be."""

        def refusal(body: dict[str, Any]) -> str | None:
            limit = body.get("max_completion_tokens", 0)
            return why.format(limit) if limit > 1_000 else None

        monkeypatch.setattr(server, "refusal", refusal)
        server.finish_reason = "length"
        server.answers = [{"content": "one"}, calls(("add", '{"a": 1}')), {"content": "two"}]
        result, _ = run("refine", "count", lambda reply: None, budget=Budget(tokens=4_000))
        assert (result.stopped, result.spent.requests, result.spent.tokens) == ("done", 1, 3)
        result, messages = run("run_tools", "count", [add], budget=Budget(tokens=1_003))
        assert (result.stopped, result.text, result.spent.requests) == ("tokens", "two", 2)
        assert roles(messages) == ["user", "assistant", "tool", "assistant"]
        assert sent_limits(server) == [4_000, None, 1_003, None, 1_000]

    def test_counts_the_prompt_where_it_shares_the_context(self, run: Any, server: FakeServer) -> None:
        server.max_model_len = 2048
        for tokens, limits in ((4_096, [None, None]), (2_047, [1_023, 2_044, None])):
            server.received.clear()
            result, _ = run("best_of", "count", 2, lambda reply: 1.0, budget=Budget(tokens=tokens), at_once=1)
            assert (result.stopped, result.spent.tokens) == ("done", 6)
            assert sent_limits(server) == limits

    def test_keeps_the_error_of_a_limit_that_the_caller_gave(self, run: Any, server: FakeServer) -> None:
        server.max_model_len = 2048
        result, _ = run("refine", "count", lambda reply: None, budget=Budget(tokens=4_000), max_tokens=2_048)
        assert result.stopped == "error" and sent_limits(server) == [2048]

    def test_names_the_option_of_servers_that_lack_the_newer_one(
        self, run: Any, server: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        unknown = {"detail": [{"loc": ["body", "max_completion_tokens"], "msg": "Extra inputs are not permitted"}]}
        monkeypatch.setattr(server, "refusal", lambda body: (422, unknown) if "max_completion_tokens" in body else None)
        result, _ = run("refine", "count", lambda reply: None, budget=Budget(tokens=9))
        assert result.attempts[0].reason.endswith("give max_tokens=…") and sent_limits(server) == [9]
        result, _ = run("refine", "count", lambda reply: None, budget=Budget(tokens=9), max_tokens=20)
        assert result.done and sent_limits(server) == [9, 9]


class TestABudgetOfSeconds:
    """Test budgets of seconds. With a large one, a call has the same timeout and retries as without."""

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

    @pytest.mark.parametrize("timeout", [math.nan, "3", [], 1e300, 0])
    def test_refuses_what_is_no_timeout(self, run: Any, server: FakeServer, timeout: Any) -> None:
        """The budget's own timeout took its place."""
        for budget in (None, Budget(seconds=5)):
            with pytest.raises(InvalidInputError, match=r"^timeout: "):
                run("refine", "go", lambda reply: None, timeout=timeout, budget=budget)
        assert not server.chats

    @pytest.mark.parametrize("of_call", [True, False])
    def test_leaves_the_retries(self, server: FakeServer, of_call: bool) -> None:
        server.failures = [429, 503]
        retries: dict[str, Any] = {"max_retries": 2}
        with AgentClient(base_url=server.url, model="small", store=None, **({} if of_call else retries)) as client:
            result = client.session().refine(
                "go", lambda reply: None, budget=Budget(seconds=3_600), **(retries if of_call else {})
            )
            assert (result.stopped, result.spent.requests, len(server.chats)) == ("done", 1, 3)

    async def test_leaves_the_retries_in_asyncio(self, server: FakeServer) -> None:
        server.failures = [429, 503, 500]
        async with AsyncAgentClient(base_url=server.url, model="small", store=None) as client:
            result = await client.session().refine("go", lambda reply: None, budget=Budget(seconds=3_600))
            assert (result.stopped, len(server.chats)) == ("error", 3)

    @pytest.mark.parametrize(
        ("timeout", "retries"),
        [(600.0, 0), (None, 0), (10.0, 2), (openai.Timeout(10.0, connect=2.0), 2), (20.0, 1), (40.0, 0), (1.0, 5)],
    )
    def test_leaves_as_many_retries_as_surely_fit(self, timeout: Any, retries: int) -> None:
        with openai.OpenAI(base_url="http://localhost:1/v1", api_key="none", max_retries=5) as connection:
            limits = call_limits({"timeout": timeout}, connection, 60.0)
            assert limits["max_retries"] == retries
            assert call_limits({"timeout": timeout, "max_retries": 1}, connection, 60.0)["max_retries"] == min(
                1, retries
            )
