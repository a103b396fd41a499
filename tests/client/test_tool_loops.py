"""Test run_tools: what the model is told of its tools, and what each call results in."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from agentspec import InvalidInputError

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
