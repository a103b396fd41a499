"""Test tools and response formats: they are passed on unchanged, and kept so that the conversation can go on."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pydantic
import pytest
from pydantic import BaseModel, ConfigDict

from agentspec import AgentClient, AsyncAgentClient, InvalidInputError

from .fake_server import FakeServer

RUN: dict[str, Any] = {
    "type": "function",
    "function": {"name": "run_tests", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "call-1", "type": "function", "function": {"name": "run_tests", "arguments": "{}"}}


def connect(server: FakeServer, **options: Any) -> AgentClient:
    return AgentClient(**{"base_url": server.url, "model": "small", "store": None, "max_retries": 0, **options})


def test_a_tool_call_is_kept_and_answered(plain_server: FakeServer) -> None:
    plain_server.answers = [{"tool_calls": [CALL]}]
    with connect(plain_server) as client:
        session = client.session("s")
        reply = session.chat("Fix it.", tools=[RUN], tool_choice="auto")
        (call,) = reply.tool_calls
        assert reply.text == ""
        assert reply.finish_reason == "tool_calls"
        assert call.type == "function" and call.function.name == "run_tests"
        with pytest.raises(openai.BadRequestError, match="tool calls without an answer"):
            session.chat("And?", tools=[RUN])
        session.tool_result(call.id, "2 passed")
        assert session.chat(tools=[RUN]).text == "answer 3"
        assert session.messages == [
            {"role": "user", "content": "Fix it."},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call-1", "content": "2 passed"},
            {"role": "assistant", "content": "answer 3"},
        ]
    assert plain_server.chats[0].body["tools"] == [RUN]
    assert plain_server.chats[0].body["tool_choice"] == "auto"


def test_openai_messages_can_be_added(plain_server: FakeServer) -> None:
    plain_server.answers = [{"tool_calls": [CALL]}]
    with connect(plain_server) as client:
        reply = client.chat("Fix it.", tools=[RUN])
        session = client.session("s")
        session.add({"role": "user", "content": "Fix it."})
        session.add(reply.raw.choices[0].message)
        assert session.chat({"role": "tool", "tool_call_id": "call-1", "content": "ok"}).text == "answer 2"


class Part(BaseModel):
    type: Literal["text"] = "text"
    text: str


class Message(BaseModel):
    role: Literal["user", "assistant"] = "user"
    content: list[Part] | str | None
    name: str | None = None
    tool_calls: list[Any] | None = None


def test_pydantic_objects_can_be_messages(plain_server: FakeServer) -> None:
    """The OpenAI client takes them, too, but leaves out a role or type that is a default."""
    parts = [{"type": "text", "text": "Fix it."}]
    call = {"id": "call-1", "type": "function", "function": {"name": "run", "arguments": "{}"}}
    with connect(plain_server, store="auto") as client:
        session = client.session("s")
        session.chat(Message(content="Fix it."))
        session.chat([Message(content=[Part(text="Fix it.")]), {"role": "user", "content": [Part(text="Fix it.")]}])
        session.add(Message(role="assistant", content=None, tool_calls=[call]))
        session.tool_result("call-1", "done")
        session.chat()
    sent = plain_server.chats[2].body["messages"]
    assert sent[0] == {"role": "user", "content": "Fix it."}
    assert sent[2] == sent[3] == {"role": "user", "content": parts}
    assert sent[5] == {"role": "assistant", "content": None, "tool_calls": [call]}
    with connect(plain_server, store="auto") as client:
        assert client.session("s").messages[:-1] == sent


class Holder(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    role: str = "user"
    content: Any


@pytest.mark.parametrize("content", [object(), "caf\udce9"])
def test_a_pydantic_object_that_json_cannot_carry_is_refused(server: FakeServer, content: object) -> None:
    with connect(server) as client:
        session = client.session("s")
        with pytest.raises(InvalidInputError, match=r"^message: "):
            session.add(Holder(content=content))
        with pytest.raises(InvalidInputError, match="a pydantic object with a 'role' is needed, not Part"):
            session.add(Part(text="hello"))
        assert session.messages == []


def test_messages_need_a_role_and_results_a_call(server: FakeServer) -> None:
    with connect(server) as client:
        session = client.session("s")
        with pytest.raises(InvalidInputError, match="role"):
            session.add({"content": "hello"})
        with pytest.raises(InvalidInputError, match="tool_call_id"):
            session.tool_result("", "hello")
        assert session.messages == []


class Verdict(BaseModel):
    passed: bool
    reason: str


def test_an_answer_is_read_into_a_model(plain_server: FakeServer) -> None:
    plain_server.answers = [{"content": '{"passed": true, "reason": "ok"}'}]
    with connect(plain_server) as client:
        session = client.session("s")
        reply = session.chat("Judge.", response_format=Verdict)
        assert reply.parsed == Verdict(passed=True, reason="ok")
        assert session.messages[-1] == {"role": "assistant", "content": '{"passed": true, "reason": "ok"}'}
        assert session.chat("Thanks.").parsed is None
    sent = plain_server.chats[0].body["response_format"]
    assert sent["type"] == "json_schema"
    assert sent["json_schema"]["strict"] is True
    assert sent["json_schema"]["schema"]["properties"].keys() == {"passed", "reason"}


def test_an_answer_that_does_not_fit_is_an_error_and_no_turn(plain_server: FakeServer) -> None:
    plain_server.answers = [{"content": '{"passed": "perhaps"}'}, {"content": '{"passed": "perhaps"}'}]
    with connect(plain_server) as client:
        session = client.session("s")
        with pytest.raises(pydantic.ValidationError):
            session.chat("Judge.", response_format=Verdict)
        with pytest.raises(pydantic.ValidationError):
            session.stream("Judge.", response_format=Verdict).until_done()
        assert session.messages == []


def test_other_formats_are_handed_on(plain_server: FakeServer) -> None:
    with connect(plain_server) as client:
        assert client.chat("Judge.", response_format={"type": "json_object"}).parsed is None
    assert plain_server.chats[0].body["response_format"] == {"type": "json_object"}


def test_refusals_are_sent_back_as_refusals(plain_server: FakeServer) -> None:
    plain_server.answers = [{"content": None, "refusal": "No."}]
    with connect(plain_server) as client:
        reply = client.chat("Judge.", response_format=Verdict)
    assert (reply.text, reply.parsed) == ("", None)
    assert reply.message == {"role": "assistant", "content": None, "refusal": "No."}


def double(a: int) -> int:
    """Double a number."""
    return 2 * a


FITS = '{"passed": true, "reason": "ok"}'
CALL_WITH_TEXT = {
    "content": "let me see",
    "tool_calls": [{**CALL, "function": {"name": "double", "arguments": '{"a": 2}'}}],
}


@pytest.mark.parametrize("asyncio", [False, True])
async def test_run_tools_takes_a_response_format(plain_server: FakeServer, asyncio: bool) -> None:
    plain_server.answers = [CALL_WITH_TEXT, {"content": FITS}]
    if asyncio:
        async with AsyncAgentClient(base_url=plain_server.url, model="small", store=None) as agents:
            result = await agents.session("s").run_tools("go", [double], response_format=Verdict)
    else:
        with connect(plain_server) as client:
            result = client.session("s").run_tools("go", [double], response_format=Verdict)
    assert (result.stopped, result.reply.parsed) == ("done", Verdict(passed=True, reason="ok"))
    sent = plain_server.chats[1].body
    assert sent["response_format"]["json_schema"]["schema"]["additionalProperties"] is False
    assert sent["response_format"]["json_schema"]["name"] == "Verdict"
    assert sent["tools"][0]["function"]["name"] == "double"


def test_tools_and_a_response_format_go_together(plain_server: FakeServer) -> None:
    plain_server.answers = [
        {"content": FITS},
        {"content": FITS},
        {"content": FITS},
        {"content": '{"passed": "perhaps"}'},
    ]
    with connect(plain_server) as client:
        session = client.session("s")
        expected = Verdict(passed=True, reason="ok")
        assert session.chat("Judge.", response_format=Verdict, tools=[RUN]).parsed == expected
        with session.stream("Judge.", response_format=Verdict, tools=[RUN]) as stream:
            assert stream.until_done().parsed == expected
        strict = {**RUN, "function": {**RUN["function"], "strict": True}}
        assert session.chat("Judge.", response_format=Verdict, tools=[strict]).parsed == expected
        plain_server.finish_reason = "length"
        with pytest.raises(openai.LengthFinishReasonError):
            session.chat("Judge.", response_format=Verdict, tools=[RUN])
    formats = [chat.body["response_format"] for chat in plain_server.chats]
    assert formats[0] == formats[1] == formats[2]  # the OpenAI client made the last one


@pytest.mark.parametrize("wrong", [list[int], dict, "json", 5, Verdict(passed=True, reason="")])
def test_a_response_format_that_cannot_be_used_is_named(plain_server: FakeServer, wrong: Any) -> None:
    with connect(plain_server) as client, pytest.raises(InvalidInputError, match="response_format: a pydantic model"):
        client.chat("Judge.", response_format=wrong)
    assert plain_server.chats == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_the_old_form_is_kept(plain_server: FakeServer, stream: bool) -> None:
    call = {"name": "run_tests", "arguments": '{"path": "a"}'}
    plain_server.answers = [{"content": None, "function_call": call}]
    plain_server.finish_reason = "function_call"
    with connect(plain_server) as client:
        session = client.session("s")
        functions: list[Any] = [RUN["function"]]
        if stream:
            session.stream("Test.", functions=functions).until_done()
        else:
            session.chat("Test.", functions=functions)
        assert session.messages[-1]["function_call"] == call
        assert session.chat({"role": "function", "name": "run_tests", "content": "ok"}, functions=functions).text
    assert plain_server.chats[1].body["messages"][1]["function_call"] == call
