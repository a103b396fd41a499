"""Test servers that leave out parts of OpenAI's API: the answer is used if possible, or an error says what is wrong."""

from __future__ import annotations

import warnings
from typing import Any

import pydantic
import pytest
from openai.types.chat import ChatCompletionChunk

from agentspec import AgentClient, AgentSpecError, Budget
from agentspec.client.answers.reply import read_reply
from agentspec.client.answers.streamed_answer import StreamedAnswer

from .fake_server import FakeServer


@pytest.fixture
def client(plain_server: FakeServer) -> AgentClient:
    return AgentClient(base_url=plain_server.url, model="small", store=None, max_retries=0)


def answer_with(server: FakeServer, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """Let the server send this answer, or its usual one with these fields."""
    usual = server.answer
    monkeypatch.setattr(server, "answer", lambda number: usual(number) | answer if isinstance(answer, dict) else answer)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("<html>Sign in</html>", "base_url"),
        ([1], "base_url"),
        ({"choices": None, "error": {"message": "no credits"}}, "no credits"),
        ({"choices": [None]}, "no message"),
        ({"choices": [{"index": 0, "finish_reason": "stop", "message": None}]}, "no message"),
    ],
)
def test_what_is_no_answer_says_why(
    client: AgentClient, plain_server: FakeServer, monkeypatch: pytest.MonkeyPatch, answer: Any, message: str
) -> None:
    answer_with(plain_server, monkeypatch, answer)
    with pytest.raises(AgentSpecError, match=message):
        client.chat("one")


@pytest.mark.parametrize("name", [None, ""])
def test_an_answer_without_an_id_has_no_figures(
    client: AgentClient, plain_server: FakeServer, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    answer_with(plain_server, monkeypatch, {"id": name})
    assert client.speculation(client.chat("one")) is None


@pytest.mark.parametrize("usage", [{"prompt_tokens": 3}, {"prompt_tokens": None, "completion_tokens": None}])
def test_a_budget_counts_what_an_answer_may_have_taken_if_its_usage_is_not_told(
    client: AgentClient, plain_server: FakeServer, monkeypatch: pytest.MonkeyPatch, usage: dict[str, Any]
) -> None:
    answer_with(plain_server, monkeypatch, {"usage": usage})
    result = client.session().refine("one", lambda reply: None, budget=Budget(tokens=100))
    assert result.done and result.spent.tokens == 100


@pytest.mark.parametrize(
    "call",
    [
        {"type": "function", "function": {"name": "now", "arguments": None}},
        {"function": {"name": "now", "arguments": "{}"}},
    ],
)
def test_a_tool_call_without_type_or_arguments_is_run(
    client: AgentClient, plain_server: FakeServer, call: dict[str, Any]
) -> None:
    def now() -> str:
        return "noon"

    plain_server.answers = [{"content": None, "tool_calls": [{"id": "c", **call}]}]
    session = client.session()
    result = session.run_tools("What time is it?", [now])
    assert result.done and result.attempts[0].tools[0].answer == "noon"
    assert session.messages[1]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", [{"id": ""}, {"id": None}, {}, {"id": "now"}])
def test_a_tool_call_without_an_id_of_its_own_gets_one(
    client: AgentClient, plain_server: FakeServer, name: dict[str, Any], streamed: bool
) -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": "{}"}, **name}
    plain_server.answers = [{"content": None, "tool_calls": [call, call]}]
    session = client.session()
    reply = session.stream("one").until_done() if streamed else session.chat("one")
    first, second = (call.id for call in reply.tool_calls)
    assert first and second and first != second
    session.tool_result(first, "noon")
    session.tool_result(second, "noon")
    assert session.chat().text == "answer 2"


def test_a_tool_call_of_nothing_is_told_to_the_model(client: AgentClient, plain_server: FakeServer) -> None:
    def now() -> str:
        return "noon"

    plain_server.answers = [{"content": None, "tool_calls": [{"id": "c", "type": "function"}]}]
    result = client.session().run_tools("What time is it?", [now])
    assert result.done and "no tool" in result.attempts[0].tools[0].answer


def test_content_in_parts_and_arguments_as_an_object_stay_as_they_are(
    client: AgentClient, plain_server: FakeServer
) -> None:
    parts = [{"type": "text", "text": "hi"}]
    plain_server.answers = [{"content": parts}]
    assert client.chat("one").message == {"role": "assistant", "content": parts}


THINKING = [
    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
    {"type": "text", "text": '{"a": 1}'},
]


class Answer(pydantic.BaseModel):
    a: int


def test_the_text_of_content_in_parts_is_that_of_its_text_parts(client: AgentClient, plain_server: FakeServer) -> None:
    plain_server.answers = [{"content": THINKING}]
    assert client.chat("one").text == '{"a": 1}'


def test_streamed_content_in_parts_is_put_together() -> None:
    answer = StreamedAnswer()
    pieces: list[Any] = [
        [{"type": "thinking", "thinking": [{"type": "text", "text": "h"}]}],
        [{"type": "thinking", "thinking": [{"type": "text", "text": "m"}]}],
        [{"type": "text", "text": '{"a"'}],
        ": 1}",
        [],
        [5],
        [{"type": "image_url", "image_url": {"url": "data:"}}],
    ]
    texts = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for piece in pieces:
            choice = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
            texts.append(answer.add(ChatCompletionChunk.construct(None, id="x", choices=[choice])))
        last = {"index": 0, "delta": None, "finish_reason": "stop"}
        answer.add(ChatCompletionChunk.construct(None, id="x", choices=[last]))
        reply = read_reply(answer.completion(), None, Answer)
    assert texts == ["", "", '{"a"', ": 1}", "", "", ""]
    assert reply.message["content"] == [*THINKING, 5, {"type": "image_url", "image_url": {"url": "data:"}}]
    assert (reply.text, reply.parsed) == ('{"a": 1}', Answer(a=1))


def test_chunks_without_choices_or_delta_are_passed_over() -> None:
    answer = StreamedAnswer()
    for choices in (
        None,
        [None],
        [{"index": 0, "delta": None}],
        [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}],
    ):
        answer.add(ChatCompletionChunk.construct(None, id="x", choices=choices))
    assert answer.completion().choices[0].message.content == "hi"


def test_streams_may_leave_out_the_numbers_of_choices_and_tool_calls() -> None:
    answer = StreamedAnswer()
    for call in (
        {"id": "a", "function": {"name": "f", "arguments": {"x": 1}}},
        {"id": "b", "function": {"name": "g", "arguments": "[]"}},
    ):
        choices = [{"delta": {"content": "hi", "tool_calls": [call]}}]
        assert answer.add(ChatCompletionChunk.construct(None, id="x", choices=choices)) == "hi"
    answer.add(ChatCompletionChunk.construct(None, id="x", choices=[{"delta": {}, "finish_reason": "tool_calls"}]))
    calls: Any = answer.completion().choices[0].message.tool_calls
    assert [(call.id, call.function.name, call.function.arguments) for call in calls] == [
        ("a", "f", '{"x": 1}'),
        ("b", "g", "[]"),
    ]


def test_what_is_no_stream_says_why(
    client: AgentClient, plain_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.client.fake_server.chunks_of", lambda answer, usage: [])
    with pytest.raises(AgentSpecError, match="base_url"):
        client.stream("one").until_done()


def test_streamed_tool_calls_that_have_one_number_stay_apart() -> None:
    answer = StreamedAnswer()
    for call in (
        {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{"}},
        {"index": 0, "id": "a", "function": {"name": None, "arguments": "}"}},
        {"index": 0, "id": "b", "function": {"name": "g", "arguments": "[]"}},
    ):
        choice = {"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}
        answer.add(ChatCompletionChunk.construct(None, id="x", choices=[choice]))
    last = {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    answer.add(ChatCompletionChunk.construct(None, id="x", choices=[last]))
    calls: Any = answer.completion().choices[0].message.tool_calls
    assert [(call.id, call.function.name, call.function.arguments) for call in calls] == [
        ("a", "f", "{}"),
        ("b", "g", "[]"),
    ]
