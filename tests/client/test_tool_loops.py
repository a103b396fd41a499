"""Test run_tools: what the model is told of its tools, and what each call results in."""

from __future__ import annotations

import contextvars
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

from agentspec import AgentClient, AsyncAgentClient, InvalidInputError

from .fake_server import FakeServer
from .loop_runs import add, calls, roles


def fail() -> None:
    raise ValueError("out of paper")


def find_first() -> str:
    return next(name for name in ("a.txt", "b.txt") if name == "c.txt")


def list_files() -> str:
    """List files, one of which has a name that is not UTF-8."""
    return b"caf\xe9.txt".decode(errors="surrogateescape")


def open_file() -> str:
    """Open that file."""
    raise FileNotFoundError(list_files())


def list_folder() -> list[str]:
    """List a folder with that file."""
    return [list_files(), "b.txt"]


class WordlessError(Exception):
    """Have no text that could be told."""

    def __str__(self) -> str:
        raise TypeError("no text")


def fail_without_words() -> str:
    raise WordlessError


class TestTools:
    def test_an_error_without_a_text_is_told_by_its_name(self, run: Any, server: FakeServer) -> None:
        server.answers = [calls(("fail_without_words", "{}")), {"content": "done"}]
        result, messages = run("run_tools", "go", [fail_without_words])
        assert (result.stopped, result.text) == ("done", "done")
        assert messages[2]["content"] == "error: WordlessError: "

    @pytest.mark.parametrize("tool", [list_files, open_file, list_folder])
    def test_what_no_request_can_carry_is_written_out(self, run: Any, server: FakeServer, tool: Any) -> None:
        server.answers = [calls((tool.__name__, "{}")), {"content": "done"}]
        result, messages = run("run_tools", "go", [tool])
        assert (result.stopped, result.text) == ("done", "done")
        assert "caf\\udce9.txt" in messages[2]["content"]

    def test_runs_calls_until_the_model_answers(self, run: Any, server: FakeServer) -> None:
        server.answers = [calls(("add", '{"a": 2, "b": 3}'), ("add", '{"a": 2}')), {"content": "5 and 3"}]
        result, messages = run("run_tools", "add", [add])
        assert (result.stopped, result.text) == ("done", "5 and 3")
        assert [run.answer for run in result.attempts[0].tools] == ["5", "3"]
        assert roles(messages) == ["user", "assistant", "tool", "tool", "assistant"]
        described = server.chats[0].body["tools"][0]["function"]
        assert described["name"] == "add" and described["description"] == "Add two numbers."
        assert described["parameters"]["required"] == ["a"]
        assert described["parameters"]["properties"]["b"]["default"] == 1

    @pytest.mark.parametrize(
        ("call", "said"),
        [
            (("fail", "{}"), "out of paper"),
            (("find_first", "{}"), "StopIteration"),
            (("add", '{"a": "two"}'), "valid integer"),
            (("add", '{"a": 2, "c": 2}'), "Extra inputs"),
            (("add", '{"a": 2'), "Invalid JSON"),
            (("subtract", "{}"), "no tool 'subtract'; there are: add, fail, find_first"),
        ],
    )
    def test_tells_the_model_what_went_wrong(self, run: Any, server: FakeServer, call: Any, said: str) -> None:
        server.answers = [calls(call), {"content": "sorry"}]
        result, messages = run("run_tools", "add", [add, fail, find_first])
        assert result.stopped == "done"
        assert result.attempts[0].tools[0].error is not None
        assert messages[2]["content"].startswith("error: ") and said in messages[2]["content"]

    def test_parameters_may_have_the_names_of_pydantics_methods(self, run: Any, server: FakeServer) -> None:
        def tool(_x: int, model_dump: int, model_extra: int = 3, schema: int = 4) -> list[int]:
            return [_x, model_dump, model_extra, schema]

        server.answers = [calls(("tool", '{"_x": 1, "model_dump": 2, "schema": 5}')), {"content": "done"}]
        result, _ = run("run_tools", "go", [tool])
        assert result.attempts[0].tools[0].answer == "[1,2,3,5]"
        described = server.chats[0].body["tools"][0]["function"]["parameters"]
        assert list(described["properties"]) == ["_x", "model_dump", "model_extra", "schema"]
        assert described["required"] == ["_x", "model_dump"]

    def test_a_parameter_that_json_cannot_hold_is_refused(self, run: Any) -> None:
        def tool(call: Callable[[], int]) -> int:
            return call()

        with pytest.raises(InvalidInputError, match="tools: tool: its parameters cannot be described"):
            run("run_tools", "go", [tool])

    @pytest.mark.parametrize("annotation", ["pytest.nothing", "a text", "1 / 0"])
    def test_an_annotation_that_cannot_be_read_names_its_tool(self, run: Any, annotation: str) -> None:
        def tool(word: str) -> str:
            return word

        tool.__annotations__["word"] = annotation
        with pytest.raises(InvalidInputError, match="tools: tool: its parameters cannot be described"):
            run("run_tools", "go", [tool])

    def test_leaves_no_call_unanswered_when_its_attempts_are_over(self, run: Any, server: FakeServer) -> None:
        server.answers = [calls(("add", '{"a": 2}'))]
        result, messages = run("run_tools", "add", [add], attempts=1)
        assert result.stopped == "attempts" and roles(messages) == ["user", "assistant", "tool"]

    def test_tools_know_the_context_of_their_caller(self, run: Any, server: FakeServer) -> None:
        """Tracing keeps a span there, and web frameworks keep the request."""
        who = contextvars.ContextVar("who", default="nobody")

        def name_caller() -> str:
            return who.get()

        server.answers = [calls(("name_caller", "{}"), ("name_caller", "{}")), {"content": "done"}]
        token = who.set("ann")
        result, _ = run("run_tools", "who?", [name_caller])
        who.reset(token)
        assert [tool.answer for tool in result.attempts[0].tools] == ["ann", "ann"]

    def test_at_most_at_once_tools_run_together(self, run: Any, server: FakeServer) -> None:
        running, most, lock, two = 0, 0, threading.Lock(), threading.Barrier(2)

        def work() -> str:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            two.wait(30)  # another one runs by now, however slow its thread is
            time.sleep(0.05)
            with lock:
                running -= 1
            return "ok"

        server.answers = [calls(*[("work", "{}")] * 6), {"content": "done"}]
        run("run_tools", "work", [work], at_once=2)
        assert most == 2

    @pytest.mark.parametrize("tools", [[], [lambda: 1], [add, add], [print]])
    def test_refuses_what_cannot_be_a_tool(self, run: Any, tools: Any) -> None:
        with pytest.raises(InvalidInputError, match=r"^tools"):
            run("run_tools", "add", tools)


CALLED = calls(("add", '{"a": 2}'), ("fail", "{}"))
"""An answer whose tools never ran, or never ended: the process was killed."""


def killed(session: Any) -> None:
    """Let a session end with that answer."""
    session.add({"role": "user", "content": "add"})
    session.add({"role": "assistant", "content": None, **CALLED})


class TestCallsWithoutAnAnswer:
    @pytest.mark.parametrize("task", ["go on", None])
    @pytest.mark.parametrize("answered", [False, True])
    def test_are_answered_by_the_next_loop(self, server: FakeServer, task: str | None, answered: bool) -> None:
        with AgentClient(base_url=server.url, model="small", store=None) as client:
            session = client.session("s")
            killed(session)
            if answered:
                session.tool_result("call-0", "3")
            server.answers = [calls(("add", '{"a": 3}')), {"content": "done"}]
            assert session.run_tools(task, [add]).text == "done"
            said = [message["content"] for message in session.messages if message["role"] == "tool"]
            unknown = "error: no answer is known; the tool may have run"
            assert said == ["3" if answered else unknown, unknown, "4"]
            assert session.chat("go on").text

    async def test_are_answered_in_asyncio(self, server: FakeServer) -> None:
        async with AsyncAgentClient(base_url=server.url, model="small", store=None) as client:
            session = client.session("s")
            killed(session)
            assert (await session.run_tools("go on", [add])).done
            assert roles(session.messages) == ["user", "assistant", "tool", "tool", "user", "assistant"]

    def test_stay_open_if_the_loops_call_fails(self, server: FakeServer) -> None:
        with AgentClient(base_url=server.url, model="small", store=None, max_retries=0) as client:
            session = client.session("s")
            killed(session)
            server.failures = [500]
            assert session.run_tools("go on", [add]).stopped == "error"
            assert roles(session.messages) == ["user", "assistant"]

    @pytest.mark.parametrize(
        "call",
        [
            lambda session: session.chat("go on"),
            lambda session: session.stream("go on").until_done(),
        ],
    )
    def test_are_named_where_a_server_takes_no_message_behind_them(self, server: FakeServer, call: Any) -> None:
        remedy = "call-1' of 'fail'): answer each with tool_result(), let"
        with AgentClient(base_url=server.url, model="small", store=None) as client:
            session = client.session("s")
            killed(session)
            with pytest.raises(openai.BadRequestError) as refused:
                call(session)
            assert remedy in refused.value.__notes__[-1]
            for new in (None, {"role": "tool", "tool_call_id": "call-0", "content": "3"}):
                with pytest.raises(InvalidInputError, match=re.escape(remedy)):
                    session.chat(new)  # it would let the model go on although a call is open
            assert roles(session.messages) == ["user", "assistant"]
            session.tool_result("call-0", "3")
            assert session.chat({"role": "tool", "tool_call_id": "call-1", "content": "no paper"}).text

    def test_further_up_are_left_to_the_server(self, server: FakeServer) -> None:
        """Some servers take them, and no answer reaches them any more."""
        with AgentClient(base_url=server.url, model="small", store=None) as client:
            session = client.session("s")
            killed(session)
            session.add({"role": "user", "content": "never mind"})
            with pytest.raises(openai.BadRequestError):
                session.chat("go on")

    def test_are_answered_in_a_fork_that_their_tool_makes(self, server: FakeServer) -> None:
        def ask() -> str:
            fork = session.fork()
            assert session.fork(at=-1).messages == []
            assert fork.chat("What do you think?").text
            return ", ".join(roles(fork.messages))

        server.answers = [calls(("ask", "{}"), ("add", '{"a": 2}'))]
        with AgentClient(base_url=server.url, model="small", store=None) as client:
            session = client.session("s")
            result = session.run_tools("go", [ask, add])
        assert result.attempts[0].tools[0].answer == "user, assistant, tool, tool, user, assistant"

    def test_stay_open_in_a_fork_of_a_session_whose_caller_answers_them(self, server: FakeServer) -> None:
        with AgentClient(base_url=server.url, model="small", store=None) as client:
            session = client.session("s")
            killed(session)
            fork = session.fork()
            for call in ("call-0", "call-1"):
                fork.tool_result(call, "3")
            assert fork.chat().text
