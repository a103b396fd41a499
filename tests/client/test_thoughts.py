"""Test what servers add to an answer and need back with the next call: thoughts, their signatures, sounds."""

from __future__ import annotations

import base64
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage

from agentspec import AgentClient, ConfigurationError
from agentspec.client.answers.reply import read_reply
from agentspec.client.answers.streamed_answer import StreamedAnswer
from agentspec.client.messages import as_sent, assistant_message
from agentspec.client.request import Call, RequestBuilder

from .fake_server import FakeServer
from .test_streams import chunk

CALL = {"id": "call-1", "type": "function", "function": {"name": "run", "arguments": '{"n": 1}'}}
SIGNED = {**CALL, "extra_content": {"google": {"thought_signature": "c2lnbmVk"}}}
BLOCKS = [
    {"type": "reasoning.text", "index": 0, "text": "I must run it."},
    {"type": "reasoning.encrypted", "index": 1, "data": "b3BhcXVl"},
]

THINKING = [
    {"type": "thinking", "thinking": "I must run it.", "signature": "c2lnbmVk"},
    {"type": "redacted_thinking", "data": "b3BhcXVl"},
    {"type": "thinking", "thinking": "Now.", "signature": "YWdhaW4="},
]
"""Blocks of Claude's thoughts, as LiteLLM gives them. Claude refuses tool calls without them."""


def client_of(server: FakeServer, **options: Any) -> AgentClient:
    return AgentClient(base_url=server.url, model="small", store=None, max_retries=0, **options)


def whole(stream: StreamedAnswer, finish_reason: str = "stop") -> dict[str, Any]:
    """Return the message for the next request that a stream ends with."""
    stream.add(chunk({}, finish_reason=finish_reason))
    return read_reply(stream.completion(), None, None).message


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "answer",
    [
        {"content": "so", "reasoning": "I must say so."},
        {"content": None, "reasoning_content": "I must run it.", "tool_calls": [CALL]},
        {"content": None, "reasoning_details": BLOCKS, "tool_calls": [CALL]},
        {"content": None, "reasoning_content": "I must run it.", "thinking_blocks": THINKING, "tool_calls": [CALL]},
        {"content": None, "tool_calls": [SIGNED]},
        {"content": "so", "reasoning": None, "reasoning_content": None},
    ],
)
def test_thoughts_go_back_in_the_field_in_which_they_came(
    server: FakeServer, answer: dict[str, Any], streamed: bool
) -> None:
    server.answers = [answer]
    with client_of(server) as client:
        session = client.session("s")
        reply = session.stream("go").until_done() if streamed else session.chat("go")
        for call in reply.tool_calls:
            session.tool_result(call.id, "done")
        session.chat(None if reply.tool_calls else "and?")
    sent = server.chats[1].body["messages"][1]
    expected = {name: value for name, value in answer.items() if value is not None}
    if streamed and "content" not in expected:
        expected["content"] = ""
    assert sent == {"role": "assistant", **expected}


def test_a_stored_session_keeps_its_thoughts(server: FakeServer, tmp_path: Any) -> None:
    server.answers = [{"content": "so", "reasoning": "I must say so."}]
    store = f"sqlite:///{tmp_path}/sessions.db"
    for text in ("go", "and?"):
        with AgentClient(base_url=server.url, model="small", store=store) as client:
            client.session("s").chat(text)
    assert server.chats[1].body["messages"][1]["reasoning"] == "I must say so."


def test_no_thoughts_are_sent_where_the_client_says_so(server: FakeServer) -> None:
    server.refuses_thoughts = True
    server.answers = [{"content": None, "reasoning": "I must run it.", "tool_calls": [SIGNED]}]
    with client_of(server, thoughts=False) as client:
        session = client.session("s")
        session.chat("go")
        session.tool_result("call-1", "done")
        session.chat()
        assert session.messages[1]["reasoning"] == "I must run it."
    assert server.chats[1].body["messages"][1] == {"role": "assistant", "tool_calls": [CALL]}
    with pytest.raises(ConfigurationError, match="thoughts: True or False is needed, not 'no'"):
        client_of(server, thoughts="no")


def test_a_server_that_refuses_thoughts_is_told_apart(server: FakeServer) -> None:
    server.refuses_thoughts = True
    server.answers = [{"content": "so", "reasoning": "I must say so."}]
    with client_of(server) as client:
        session = client.session("s")
        session.chat("go")
        with pytest.raises(openai.BadRequestError) as refused:
            session.chat("and?")
    assert "thoughts=False" in refused.value.__notes__[0]


@pytest.mark.parametrize(("host", "sent"), [("api.openai.com", False), ("localhost", True)])
def test_openais_own_api_gets_no_thoughts(server: FakeServer, host: str, sent: bool) -> None:
    message = {"role": "assistant", "content": "so", "reasoning": "I must say so."}
    with client_of(server) as client:
        call = Call(client.session("s")._conversation, "and?", None, {})
        request = RequestBuilder("small", "off", False, host=host).build(call, [message])
    assert ("reasoning" in request["messages"][0]) is sent
    assert message["reasoning"] == "I must say so."


def test_blocks_of_thoughts_that_were_streamed_in_pieces_are_whole_again() -> None:
    stream = StreamedAnswer()
    for piece in (
        {"type": "reasoning.text", "index": 0, "text": "I must", "signature": None},
        {"type": "reasoning.text", "index": 0, "text": " run it."},
        {"type": "reasoning.text", "index": 0, "signature": "c2lnbmVk"},
        {"type": "reasoning.text", "index": 1, "text": "Then"},
        {"type": "reasoning.summary", "index": 1, "summary": "Run"},
        {"type": "reasoning.summary", "text": "whole"},
        {"type": "reasoning.summary", "text": "whole, too"},
        "odd",
    ):
        stream.add(chunk({"reasoning_details": [piece]}))
    assert whole(stream)["reasoning_details"] == [
        {"type": "reasoning.text", "index": 0, "text": "I must run it.", "signature": "c2lnbmVk"},
        {"type": "reasoning.text", "index": 1, "text": "Then"},
        {"type": "reasoning.summary", "index": 1, "summary": "Run"},
        {"type": "reasoning.summary", "text": "whole"},
        {"type": "reasoning.summary", "text": "whole, too"},
        "odd",
    ]


def test_claudes_thoughts_that_litellm_streams_in_pieces_are_whole_again() -> None:
    stream = StreamedAnswer()
    for piece in (
        {"type": "thinking", "thinking": "I must", "signature": None},
        {"type": "thinking", "thinking": " run it.", "signature": None},
        {"type": "thinking", "thinking": "", "signature": "c2lnbmVk"},
        {"type": "redacted_thinking", "data": "b3BhcXVl"},
        {"type": "thinking", "thinking": "Now."},
        {"type": "thinking", "signature": "YWdhaW4="},
    ):
        stream.add(chunk({"thinking_blocks": [piece]}))
    assert whole(stream)["thinking_blocks"] == THINKING


def test_thoughts_that_no_request_can_carry_are_written_out() -> None:
    stream = StreamedAnswer()
    stream.add(chunk({"content": "so", "reasoning": "half \udce9", "reasoning_details": [{"text": "\udce9"}]}))
    message = whole(stream)
    assert (message["reasoning"], message["reasoning_details"]) == ("half \\udce9", [{"text": "\\udce9"}])


def test_streamed_calls_of_a_tool_with_free_text_are_put_together(server: FakeServer) -> None:
    call = {"id": "call-1", "type": "custom", "custom": {"name": "code", "input": "print(1)"}}
    server.answers = [{"content": None, "tool_calls": [call]}]
    with client_of(server) as client:
        session = client.session("s")
        reply = session.stream("go").until_done()
        assert (reply.tool_calls[0].type, session.messages[1]["tool_calls"]) == ("custom", [call])


def test_a_call_of_a_type_that_is_not_known_keeps_its_function() -> None:
    call: Any = openai.BaseModel.construct(None, **{**CALL, "type": "tool"})
    raw = ChatCompletionMessage.model_construct(role="assistant", content=None, tool_calls=[call])
    assert assistant_message(raw)["tool_calls"] == [CALL]


@pytest.mark.parametrize("divided", ["sound", "text"])
def test_a_streamed_sound_is_put_together(divided: str) -> None:
    sound = bytes(range(256))
    text = base64.b64encode(sound).decode()
    pieces = [base64.b64encode(part).decode() for part in (sound[:100], sound[100:])]
    stream = StreamedAnswer()
    stream.add(chunk({"audio": {"id": "audio-1", "transcript": "good "}}))
    for piece in pieces if divided == "sound" else (text[:101], text[101:]):
        stream.add(chunk({"audio": {"data": piece}}))
    stream.add(chunk({"audio": {"transcript": "day", "expires_at": 9}}))
    stream.add(chunk({}, finish_reason="stop"))
    reply = read_reply(stream.completion(), None, None)
    audio: Any = reply.raw.choices[0].message.audio
    assert (audio.data, audio.transcript, audio.expires_at) == (text, "good day", 9)
    assert reply.message == {"role": "assistant", "content": "", "audio": {"id": "audio-1"}}


def test_a_message_without_thoughts_is_a_copy() -> None:
    message = {"role": "assistant", "content": None, "reasoning": "I must run it.", "tool_calls": [SIGNED]}
    assert as_sent(message, thoughts=True) == message
    assert as_sent(message, thoughts=False) == {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert message["tool_calls"] == [SIGNED]
