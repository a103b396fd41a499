"""Test streamed replies."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel

from agentspec import AgentClient, AgentSpecError, InvalidInputError, SessionBusyError
from agentspec.client.answers.reply import read_reply
from agentspec.client.answers.streamed_answer import StreamedAnswer
from tests.store.helpers import wait_until

from .fake_server import FakeServer


def connect(server: FakeServer) -> AgentClient:
    return AgentClient(base_url=server.url, model="small", store=None, max_retries=0)


def test_text_comes_in_pieces_and_the_reply_at_the_end(server: FakeServer) -> None:
    server.counts = {"tokens": 9, "steps": 3, "drafts": 3, "drafted": 8, "accepted": 6}
    with connect(server) as client:
        session = client.session("s")
        stream = session.stream("one")
        with pytest.raises(AgentSpecError, match="until_done"):
            _ = stream.reply
        assert list(stream) == ["ans", "wer", " 1"]
        reply = stream.reply
        assert reply.text == "answer 1"
        assert reply.finish_reason == "stop"
        assert reply.usage is not None and reply.usage.completion_tokens == 3
        assert reply.speculation is not None and reply.speculation.mean_acceptance_length == 3.0
        assert reply.raw.id == "chatcmpl-1"
        assert session.messages == [{"role": "user", "content": "one"}, {"role": "assistant", "content": "answer 1"}]
        assert session.chat("two").text == "answer 2"
    assert server.chats[0].headers["x-session-id"] == "s"


def test_a_plain_server_is_asked_for_nothing_that_it_may_not_know(plain_server: FakeServer) -> None:
    with connect(plain_server) as client:
        reply = client.stream("hello", session="s").until_done()
        assert (reply.text, reply.usage, reply.speculation) == ("answer 1", None, None)
        reply = client.stream("hello", stream_options={"include_usage": True}).until_done()
        assert reply.usage is not None
    assert plain_server.chats[0].body.keys() == {"model", "messages", "stream"}


def test_start_sends_at_once(server: FakeServer) -> None:
    with connect(server) as client:
        stream = client.session("s").stream("one").start()
        assert len(server.chats) == 1
        assert "".join(stream) == "answer 1"
        server.failures = [400]
        with pytest.raises(openai.BadRequestError):
            client.session("s").stream("two").start()
        with pytest.raises(InvalidInputError, match=r"stream\(\.\.\.\)"):
            client.session("s").chat("three", stream=True)


def test_a_stream_left_early_leaves_the_session_as_it_was(server: FakeServer) -> None:
    with connect(server) as client:
        session = client.session("s")
        with session.stream("one") as stream:
            assert next(stream) == "ans"
            with pytest.raises(SessionBusyError, match="stream"):
                session.chat("two")
        assert session.messages == []
        with pytest.raises(AgentSpecError):
            _ = stream.reply
        assert list(stream) == []
        for _ in session.stream("one"):
            break
        gc.collect()
        assert session.chat("two").text == "answer 3"
        assert len(session.messages) == 2


def test_a_stream_is_read_by_one_thread_at_a_time(server: FakeServer) -> None:
    with connect(server) as client, ThreadPoolExecutor(1) as pool:
        session = client.session("s")
        server.hold = threading.Event()
        stream = session.stream("one")
        reader = pool.submit(stream.until_done)
        wait_until(lambda: bool(server.chats))
        for other in (stream.until_done, stream.close, lambda: next(stream)):
            with pytest.raises(AgentSpecError, match=r"another thread is reading the stream.* flag"):
                other()
        server.hold.set()
        assert reader.result(60).text == "answer 1"
        stream.close()
        assert session.chat("two").text == "answer 2"


def test_a_stream_cut_by_the_server_is_an_error_and_no_turn(server: FakeServer) -> None:
    server.broken_stream = True
    with connect(server) as client:
        session = client.session("s")
        with pytest.raises(AgentSpecError, match="ended the stream"):
            session.stream("one").until_done()
        server.broken_stream = False
        assert session.messages == []
        assert session.stream("one").until_done().text == "answer 2"


def test_an_answer_cut_by_its_length_is_a_reply(server: FakeServer) -> None:
    server.finish_reason = "length"
    with connect(server) as client:
        assert client.stream("hello").until_done().finish_reason == "length"


class Point(BaseModel):
    x: int
    y: int


def test_streams_are_parsed(server: FakeServer) -> None:
    server.answers = [{"content": '{"x": 1, "y": 2}'}]
    with connect(server) as client:
        session = client.session("s")
        stream = session.stream("where?", response_format=Point)
        assert "".join(stream) == '{"x": 1, "y": 2}'
        assert stream.reply.parsed == Point(x=1, y=2)
        assert len(session.messages) == 2
    assert server.chats[0].body["response_format"]["json_schema"]["name"] == "Point"


def test_streamed_tool_calls_are_put_together(server: FakeServer) -> None:
    calls = [
        {"id": f"call-{number}", "type": "function", "function": {"name": "run", "arguments": f'{{"n": {number}}}'}}
        for number in range(2)
    ]
    server.answers = [{"tool_calls": calls}]
    with connect(server) as client:
        session = client.session("s")
        stream = session.stream("go", tools=[{"type": "function", "function": {"name": "run"}}])
        assert list(stream) == []
        assert [(call.id, call.type) for call in stream.reply.tool_calls] == [
            ("call-0", "function"),
            ("call-1", "function"),
        ]
        assert stream.reply.message == {"role": "assistant", "content": "", "tool_calls": calls}
        for call in stream.reply.tool_calls:
            session.tool_result(call.id, "done")
        assert session.stream().until_done().text == "answer 2"


def chunk(delta: dict[str, Any], **more: Any) -> ChatCompletionChunk:
    choice = {"index": 0, "delta": delta, "finish_reason": more.pop("finish_reason", None)}
    fields = {"id": "x", "created": 1, "model": "m", "object": "chat.completion.chunk", "choices": [choice], **more}
    return ChatCompletionChunk.model_validate(fields)


def test_servers_may_repeat_roles_ids_and_names_in_every_chunk() -> None:
    answer = StreamedAnswer()
    call = {"index": 0, "id": "call-1", "type": "function"}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    chunks = [
        chunk({"role": "assistant", "content": "a"}),
        chunk({"role": "assistant", "content": "b", "tool_calls": [{**call, "function": {"name": "run"}}]}),
        chunk({"tool_calls": [{**call, "function": {"name": "run", "arguments": "{"}}]}, usage=usage),
        chunk({"tool_calls": [{"index": 0, "id": None, "type": None, "function": {"arguments": "}"}}]}),
        chunk({}, finish_reason="tool_calls"),
    ]
    assert [answer.add(part) for part in chunks] == ["a", "b", "", "", ""]
    completion = answer.completion()
    message = completion.choices[0].message
    assert (message.role, message.content) == ("assistant", "ab")
    assert message.tool_calls is not None
    (tool,) = message.tool_calls
    assert tool.model_dump(exclude_none=True) == {
        "id": "call-1",
        "type": "function",
        "function": {"name": "run", "arguments": "{}"},
    }
    assert completion.usage is not None and completion.usage.total_tokens == 3


def test_a_streams_reply_has_the_reasoning_and_the_log_probabilities() -> None:
    def logprobs(token: str) -> dict[str, Any]:
        return {"content": [{"token": token, "logprob": -0.5, "bytes": None, "top_logprobs": []}], "refusal": None}

    answer = StreamedAnswer()
    answer.add(chunk({"role": "assistant", "content": "", "reasoning": "think"}))
    answer.add(chunk({"reasoning": " hard", "reasoning_content": None}))
    for token in ("a", "b"):
        part = chunk({"content": token})
        choice = {**part.choices[0].to_dict(), "logprobs": logprobs(token)}
        assert answer.add(ChatCompletionChunk.model_validate({**part.to_dict(), "choices": [choice]})) == token
    answer.add(chunk({}, finish_reason="stop"))
    reply = read_reply(answer.completion(), None, None)
    assert reply.raw.choices[0].message.model_extra == {"reasoning": "think hard"}
    found = reply.raw.choices[0].logprobs
    assert found is not None and [part.token for part in found.content or ()] == ["a", "b"]
    assert reply.message == {"role": "assistant", "content": "ab", "reasoning": "think hard"}
