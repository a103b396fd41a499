"""Test children and forks of sessions, and how servers and gateways are told of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from agentspec import AgentClient, AgentSpecError, AsyncAgentClient, InvalidInputError
from agentspec.client.session_naming import NAMINGS, SessionTags

from .fake_server import FakeServer


def connect(server: FakeServer, **options: Any) -> AgentClient:
    return AgentClient(base_url=server.url, model="small", **{"store": None, **options})


def test_a_child_names_its_parent_and_has_none_of_its_messages(server: FakeServer) -> None:
    with connect(server) as client:
        session = client.session("s")
        session.chat("one")
        child = session.child("sub-agent")
        assert (child.id, child.parent, child.messages) == ("sub-agent", "s", [])
        child.chat("two")
        grandchild = child.child()
        grandchild.stream("three").until_done()
        assert client.session("sub-agent").parent == "s"
    assert server.chats[1].headers["x-parent-session-id"] == "s"
    assert server.chats[1].body["vllm_xargs"] == {"session_id": "sub-agent", "parent_session_id": "s"}
    assert server.chats[2].headers["x-parent-session-id"] == "sub-agent"
    assert "x-parent-session-id" not in server.chats[0].headers


def test_a_call_may_name_a_parent(server: FakeServer) -> None:
    with connect(server) as client:
        client.chat("hello", session="s", parent="root")
    assert server.chats[0].headers["x-parent-session-id"] == "root"


@pytest.mark.parametrize(
    ("at", "kept"), [(None, 3), (3, 3), (2, 2), (1, 1), (0, 0), (-1, 2), (-3, 0)], ids=lambda value: str(value)
)
def test_a_fork_starts_at_a_turn(server: FakeServer, at: int | None, kept: int) -> None:
    with connect(server) as client:
        session = client.session("s")
        session.add({"role": "system", "content": "Be brief."})
        for text in ("one", "two", "three"):
            session.chat(text)
        fork = session.fork("other", at=at)
        assert fork.messages == session.messages[: 1 + 2 * kept]
        assert fork.parent == "s" and len(session.messages) == 7 and fork.gaps == []
        fork.chat("on")


@pytest.mark.parametrize("at", [2, -2])
def test_a_fork_at_a_turn_that_is_not_there(server: FakeServer, at: int) -> None:
    with connect(server) as client:
        session = client.session("s")
        session.chat("one")
        with pytest.raises(InvalidInputError, match=r"^at: the session has 1 turns"):
            session.fork(at=at)


def test_a_fork_at_a_turn_is_whole_in_another_process(server: FakeServer, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sessions.db"
    with connect(server, store=url) as client:
        session = client.session("s")
        session.chat("one")
        session.chat("two")
        session.fork("other", at=1).chat("three")
    with connect(server, store=url) as client:
        resumed = client.session("other")
        assert [message["content"] for message in resumed.messages] == ["one", "answer 1", "three", "answer 3"]
        assert resumed.gaps == []


def test_only_named_sessions_are_kept(server: FakeServer, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sessions.db"
    with connect(server, store=url) as client:
        unnamed, named = client.session(), client.session("named")
        for session in (unnamed, named, named.fork(), named.child()):
            session.chat("one")
        assert client.session(unnamed.id).messages == unnamed.messages
    with connect(server, store=url) as client:
        assert client.session(unnamed.id).messages == []
        assert len(client.session("named").messages) == 2


@pytest.mark.parametrize(
    ("tags", "headers", "body"),
    [
        ("vllm", {"x-session-id": "s"}, {"session_id": "s"}),
        ("sglang", {"x-smg-routing-key": "s"}, {}),
        ("dynamo", {"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "root"}, {}),
        ("aibrix", {"x-session-id": "s"}, {}),
        ("openai", {}, {"prompt_cache_key": "s"}),
        ("litellm", {"x-litellm-session-id": "s"}, {}),
    ],
)
def test_presets_name_the_session_as_each_server_reads_it(
    server: FakeServer, tags: SessionTags, headers: dict[str, str], body: dict[str, str]
) -> None:
    with connect(server, session_tags=tags, speculation=False) as client:
        client.session("s", parent="root").chat("hello")
    (chat,) = server.chats
    named = {name: value for name, value in chat.headers.items() if value in ("s", "root")}
    assert named == headers
    assert {name: chat.body[name] for name in chat.body.keys() - {"model", "messages"}} == body
    assert not server.probes


def test_every_preset_is_an_option() -> None:
    assert set(NAMINGS) == set(SessionTags.__args__)  # type: ignore[attr-defined]


def test_openai_gets_the_hash_of_an_id_that_is_too_long_for_it(server: FakeServer) -> None:
    name = "s" * 65
    with connect(server, session_tags="openai") as client:
        client.chat("hello", session=name)
    assert server.chats[0].body["prompt_cache_key"] == hashlib.sha256(name.encode()).hexdigest()


@pytest.mark.parametrize("given", [{"prompt_cache_key": "mine"}, {"extra_body": {"prompt_cache_key": "mine"}}])
def test_a_callers_own_key_of_openais_cache_stays(server: FakeServer, given: dict[str, Any]) -> None:
    with connect(server, session_tags="openai") as client:
        client.chat("hello", session="s", **given)
    assert server.chats[0].body["prompt_cache_key"] == "mine"


async def test_requests_of_a_framework_carry_the_session(server: FakeServer) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    with connect(server) as client:
        session = client.session("s", parent="root")
        session.openai.chat.completions.create(model="small", messages=messages)
    async with AsyncAgentClient(base_url=server.url, model="small", store=None) as agents:
        other = agents.session("t")
        await other.openai.chat.completions.create(model="small", messages=messages)
    for closed in (session, other):
        with pytest.raises(AgentSpecError, match="the client is closed"):
            _ = closed.openai
    assert [chat.headers["x-session-id"] for chat in server.chats] == ["s", "t"]
    assert server.chats[0].headers["x-parent-session-id"] == "root"
