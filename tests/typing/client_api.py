"""Use the public API's types as its users do. mypy checks this file; nothing runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import openai
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from agentspec import (
    AgentClient,
    AsyncAgentClient,
    AsyncReplyStream,
    AsyncSession,
    Forecast,
    LoopResult,
    Reply,
    ReplyStream,
    Session,
    Speculation,
    __version__,
)


class Verdict(BaseModel):
    passed: bool


def sync(client: AgentClient) -> None:
    session = client.session("fix-42")
    assert_type(session, Session)
    reply = session.chat("hello")
    assert_type(reply, Reply)
    assert_type(reply.text, str)
    assert_type(reply.parsed, None)
    assert_type(reply.message, dict[str, Any])
    assert_type(reply.usage, CompletionUsage | None)
    assert_type(reply.raw, ChatCompletion)
    assert_type(reply.speculation, Speculation | None)
    if reply.speculation is not None:
        assert_type(reply.speculation.mean_acceptance_length, float)
        assert_type(reply.speculation.accepted_by_source, dict[str, int])
    assert_type(session.chat("judge", response_format=Verdict), Reply[Verdict])
    assert_type(session.chat("judge", response_format=Verdict).parsed, Verdict | None)
    assert_type(session.chat("judge", response_format={"type": "json_object"}).parsed, None)
    stream = session.stream("judge", response_format=Verdict)
    for text in stream:
        assert_type(text, str)
    assert_type(stream.reply.parsed, Verdict | None)
    for call in reply.tool_calls:
        if call.type == "function":
            assert_type(call.function.name, str)
            session.tool_result(call.id, "done")
            session.tool_result(call.id, [{"type": "text", "text": "done"}])
    assert_type(session.chat(), Reply)
    assert_type(session.messages, list[dict[str, Any]])
    assert_type(session.fork(), Session)
    assert_type(session.forecast(), Forecast)
    assert_type(session.prime(["a text", Path("setup.py")]), int)
    assert_type(session.forecast().measured, Speculation | None)
    assert_type(session.forecast().tokens_per_step, float)
    messages: list[dict[str, str]] = [{"role": "user", "content": "hello"}]
    assert_type(client.chat(messages, session="fix-42", temperature=0.5), Reply)
    assert_type(client.session("sample-1", group="problem-7").group, str | None)
    assert_type(client.chat("hello", group="problem-7"), Reply)
    assert_type(client.stream("hello"), ReplyStream)
    assert_type(client.stream("judge", response_format=Verdict), ReplyStream[Verdict])
    assert_type(session.stream("judge", response_format={"type": "json_object"}).reply.parsed, None)
    assert_type(client.openai, openai.OpenAI)


def critic(reply: Reply[Verdict]) -> str | None:
    return None if reply.parsed and reply.parsed.passed else "again"


def loops(session: Session) -> None:
    result = session.refine("judge", critic, response_format=Verdict)
    assert_type(result, LoopResult[Verdict])
    assert_type(result.reply.parsed, Verdict | None)
    assert_type(session.refine("hello", lambda reply: None), LoopResult)
    assert_type(session.best_of("hello", 3, lambda reply: 1.0).text, str)
    assert_type(session.run_tools("hello", [critic]), LoopResult)


async def async_loops(session: AsyncSession) -> None:
    async def reward(reply: Reply) -> float:
        return 0.0

    assert_type(await session.refine("judge", critic, response_format=Verdict), LoopResult[Verdict])
    assert_type(await session.best_of("hello", 3, reward), LoopResult)


async def twins(client: AsyncAgentClient) -> None:
    session = client.session("fix-42")
    assert_type(session, AsyncSession)
    assert_type(await session.chat("hello"), Reply)
    assert_type((await session.chat("judge", response_format=Verdict)).parsed, Verdict | None)
    assert_type(client.stream("judge", response_format=Verdict), AsyncReplyStream[Verdict])
    assert_type(client.openai, openai.AsyncOpenAI)
    async for text in session.stream("hello"):
        assert_type(text, str)
    assert_type(await session.fork("other"), AsyncSession)
    assert_type(await session.forecast(), Forecast)
    assert_type(await client.chat("hello"), Reply)
    assert_type(client.session("sample-1", group="problem-7").group, str | None)
    assert_type(await client.chat("judge", group="problem-7", response_format=Verdict), Reply[Verdict])


AgentClient(
    model="small",
    base_url="http://localhost:8000/v1",
    store="sqlite:///sessions.db",
    timeout=5.0,
    max_retries=1,
    http_client=openai.DefaultHttpxClient(),
)
AgentClient(model="small", tokenizer=lambda text: [ord(c) for c in text])
AsyncAgentClient(model="small", store=None, http_client=openai.DefaultAsyncHttpxClient())
assert_type(__version__, str)

AgentClient(model="small", session_tags="cookie")  # type: ignore[arg-type]
AgentClient(model="small", retries=3)  # type: ignore[call-arg]
AgentClient(model="small").chat(42)  # type: ignore[arg-type]
AgentClient(model="small").session("sample-1", "problem-7")  # type: ignore[call-arg]
