"""Test the client's sessions on a real server: under openai-agents' Runner, primed, and resumed on another server.

Each session's cache salt is its name, so it cannot draft from other sessions.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec import AgentClient, AsyncAgentClient, Reply
from agentspec.testing.server import ModelServer
from demo.tasks import FIRST_HELD_OUT_SEED, make_task

pytestmark = pytest.mark.engine


def options(salt: str) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": 120, "extra_body": {"cache_salt": salt}}


def connect(server: ModelServer, store: str | None = None) -> AgentClient:
    return AgentClient(base_url=server.base_url, model="demo", api_key="none", store=store)


def turns_of(server: ModelServer, session: str, wanted: int = 0) -> int:
    """Return a session's turns in the server's list. They come after the answers, so wait for `wanted` of them."""
    deadline = time.monotonic() + 180
    while True:
        answer = httpx.get(f"{server.base_url}/agentspec/sessions", headers={"X-Cache-Salt": session}, timeout=600)
        turns = {found["id"]: int(found["turns"]) for found in answer.json()["sessions"]}.get(session, 0)
        if turns >= wanted or time.monotonic() > deadline:
            return turns
        time.sleep(0.1)


def from_session(reply: Reply) -> int:
    assert reply.speculation is not None
    return reply.speculation.accepted_by_source["session"]


@pytest.mark.clients
async def test_the_runners_requests_carry_the_sessions_id(priced: ModelServer) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    agents.set_tracing_disabled(True)
    settings = agents.ModelSettings(**options("under-a-runner"))
    agent = agents.Agent(name="coder", model="demo", model_settings=settings)
    async with AsyncAgentClient(base_url=priced.base_url, model="demo", api_key="none", store=None) as client:
        session = client.session("under-a-runner")
        provider = agents.OpenAIProvider(openai_client=session.openai, use_responses=False)
        config = agents.RunConfig(model_provider=provider)
        task = make_task(FIRST_HELD_OUT_SEED + 20).request
        before = priced.stats()["accepted_by_source"]["session"]
        for turns, text in enumerate((task, task), start=1):
            result = await agents.Runner.run(agent, text, session=session, run_config=config)
            assert session.messages[-1]["content"] == result.final_output
            assert turns_of(priced, "under-a-runner", turns) == turns
        assert priced.stats()["accepted_by_source"]["session"] > before


def test_the_first_request_of_a_primed_session_drafts_from_it(priced: ModelServer) -> None:
    task = make_task(FIRST_HELD_OUT_SEED + 21).request

    def ask(name: str, primed: list[str | Path] | None = None) -> Reply:
        with connect(priced) as client:
            session = client.session(name)
            if primed is not None:
                assert session.prime(primed, cache_salt=name) == len(primed)
            return session.chat(task, **options(name))

    without = ask("not-primed")
    primed = ask("primed", [without.text])
    assert primed.text == without.text
    assert from_session(without) == 0 and from_session(primed) > 0
    assert without.speculation is not None and primed.speculation is not None
    assert primed.speculation.steps < without.speculation.steps


def test_a_server_takes_a_history_with_thoughts(priced: ModelServer) -> None:
    signature = {"google": {"thought_signature": "c2lnbmVk"}}
    call = {"id": "call-1", "type": "function", "function": {"name": "run", "arguments": "{}"}}
    thoughts = {"reasoning": "I must.", "reasoning_content": "I must.", "reasoning_details": [{"text": "I must."}]}
    with connect(priced) as client:
        session = client.session("with-thoughts")
        session.add({"role": "user", "content": make_task(FIRST_HELD_OUT_SEED + 22).request})
        session.add({"role": "assistant", **thoughts, "tool_calls": [{**call, "extra_content": signature}]})
        session.tool_result("call-1", "done")
        assert session.prime(cache_salt="with-thoughts") == 1
        assert session.chat(**options("with-thoughts")).finish_reason in ("stop", "length")


def test_a_session_resumed_on_another_server_drafts_from_its_past(
    plain: ModelServer, priced: ModelServer, tmp_path: Path
) -> None:
    store, task = f"sqlite:///{tmp_path}/sessions.db", make_task(FIRST_HELD_OUT_SEED + 22).request
    with connect(plain, store) as client:
        client.session("moved").chat(task, **options("moved"))
    assert not turns_of(priced, "moved")
    with connect(priced, store) as client:
        session = client.session("moved")
        reply = session.chat(task, **options("moved"))
        assert len(session.messages) == 4
    assert from_session(reply) > 0
    assert turns_of(priced, "moved", 2) == 2, "what was said before, and this turn"
