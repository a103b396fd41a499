"""Test messages that a session accepts or refuses, and odd answers of servers: the session stays usable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageFunctionToolCall

from agentspec import AgentClient, InvalidInputError
from agentspec.client.messages import as_message

from .fake_server import FakeServer


def connect(server: FakeServer, **options: Any) -> AgentClient:
    return AgentClient(**{"base_url": server.url, "model": "small", "store": None, **options})


def test_text_that_is_not_utf_8_is_refused_before_the_session_has_it(server: FakeServer) -> None:
    with connect(server) as client:
        session = client.session("s")
        for refused in ("caf\udce9", {"role": "user", "content": [{"type": "text", "text": "caf\udce9"}]}):
            with pytest.raises(InvalidInputError, match=r"U\+DCE9 at position 3"):
                session.chat(refused)
        with pytest.raises(InvalidInputError, match="surrogate"):
            session.add({"role": "user", "content": "caf\udce9"})
        assert session.messages == []
        assert session.prime(["caf\udce9"]) == 1
        session.chat("go on", prediction="caf\udce9")


@pytest.mark.parametrize("value", [b"text", {"a", "b"}, float("nan"), Path("notes.txt"), object()])
def test_what_json_cannot_carry_is_refused_before_the_session_has_it(server: FakeServer, value: object) -> None:
    """Otherwise it would be sent, and lost, as no store can hold it."""
    with connect(server) as client:
        session = client.session("s")
        for content in (value, [{"type": "text", "text": value}]):
            with pytest.raises(InvalidInputError, match="no form in JSON"):
                session.add({"role": "user", "content": content})
            with pytest.raises(InvalidInputError, match="no form in JSON"):
                session.chat({"role": "user", "content": content})
        assert session.messages == [] and not server.chats


def test_a_replys_tool_calls_can_be_part_of_a_message(server: FakeServer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    server.answers = [{"tool_calls": [call]}]
    with connect(server, store="auto") as client:
        reply = client.chat("one")
        session = client.session("s")
        session.add({"role": "user", "content": "one"})
        session.add({"role": "assistant", "content": None, "tool_calls": reply.tool_calls})
        session.tool_result(reply.tool_calls[0].id, "done")
        session.chat()
    with connect(server, store="auto") as client:
        assert client.session("s").messages[1] == {"role": "assistant", "content": None, "tool_calls": [call]}
        assert client.session("s").gaps == []


@pytest.mark.parametrize("answer", [None, 5, {"a": 1}, b"done"])
def test_a_tools_answer_is_text(server: FakeServer, answer: Any) -> None:
    with connect(server) as client:
        session = client.session("s")
        session.add({"role": "assistant", "tool_calls": [{"id": "c"}]})
        with pytest.raises(InvalidInputError, match=r"^content: .*json\.dumps"):
            session.tool_result("c", answer)
        session.tool_result("c", [{"type": "text", "text": "done"}])
        assert len(session.messages) == 2


def test_many_open_tool_calls_are_named_in_part(server: FakeServer) -> None:
    with connect(server) as client:
        session = client.session("s")
        named = [{"id": f"c{i}", "type": "custom", "custom": {"name": "run"}} for i in range(5)]
        session.load()
        session.add({"role": "assistant", "tool_calls": [{"id": "c"}, *named, {"id": "c6", "function": "f"}]})
        with pytest.raises(InvalidInputError, match=r"has 'c', 'c0' of 'run', .*, 'c3' of 'run' and 2 more without"):
            session.tool_result("x", "done")
        for call in ("c", "c0", "c1"):
            session.tool_result(call, "done")
        with pytest.raises(InvalidInputError, match="has 'c2' of 'run', 'c3' of 'run', 'c4' of 'run', 'c6' without"):
            session.tool_result("x", "done")


@pytest.mark.parametrize("store", [None, "auto"])
def test_a_tools_answer_to_no_call_leaves_the_session_usable(server: FakeServer, store: Any) -> None:
    """If it became part of the history, the API would refuse every later call."""
    call = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with connect(server, store=store) as client:
        session = client.session("s")
        session.chat("one")
        with pytest.raises(
            InvalidInputError, match=r"^tool_call_id: 'f' is no call of .* has no call without an answer$"
        ):
            session.tool_result("f", "done")
        server.answers = [{"tool_calls": [call]}]
        session.chat("two")
        with pytest.raises(
            InvalidInputError, match=r"^tool_call_id: 'f' is no .* has 'call-1' of 'f' without an answer$"
        ):
            session.tool_result("f", "done")
        session.tool_result("call-1", "done")
        with pytest.raises(
            InvalidInputError, match=r"^tool_call_id: 'call-1' has an answer already; .* no call without"
        ):
            session.tool_result("call-1", "done")
        assert session.chat().text == "answer 3"
        server.answers = [{"tool_calls": [call]}]  # some servers number the calls of each answer anew
        session.chat("three")
    if store is not None:  # in a new process, the earlier turns must be read first
        with connect(server, store=store) as client:
            session = client.session("s")
            session.tool_result("call-1", "done")
            assert session.chat().text == "answer 5"


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_with_halves_of_characters_leaves_the_session_usable(server: FakeServer, streamed: bool) -> None:
    """Some gateways split a character between two chunks."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "\udce9"}'}}
    server.answers = [{"role": "assistant", "content": "\ud83d" + "\ude00 \ud83d", "tool_calls": [call]}]
    with connect(server) as client:
        session = client.session("s")
        reply = session.stream("one").until_done() if streamed else session.chat("one")
        assert reply.message["content"] == "\U0001f600 \\ud83d"
        session.tool_result("c", "done")
        assert session.chat("two").text
        assert session.forecast().calls == 2


@pytest.mark.parametrize("given", [{}, ["call"], "call", {"id": "c"}])
def test_tool_calls_of_another_form_are_named(given: object) -> None:
    """Otherwise every later call of the session would end in an AttributeError."""
    message = {"role": "assistant", "tool_calls": given}
    with pytest.raises(InvalidInputError, match="tool_calls: a list of calls is needed, each a dict, not "):
        as_message(message)


def test_a_tool_call_without_an_id_is_named() -> None:
    function = {"name": "f", "arguments": "{}"}
    call: dict[str, Any] = {"id": None, "type": "function", "function": function}
    message = ChatCompletionMessage.construct(
        role="assistant", content=None, tool_calls=[ChatCompletionMessageFunctionToolCall.construct(**call)]
    )
    with pytest.raises(InvalidInputError, match="tool_calls: each call needs an id"):
        as_message(message)


@pytest.mark.parametrize("message", [{"role": "user", "content": "x", "n": 10**5000}, {"role": "user", "\ud800": "x"}])
def test_what_no_request_can_carry_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"message"):
        as_message(message)
