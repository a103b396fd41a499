"""Test AsyncSession as a session of openai-agents: the protocol, and its Runner on a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentspec import AgentSpecError, AsyncAgentClient, InvalidInputError, SessionConflictError, StoreError
from agentspec.cache.store import MemoryStore
from agentspec.client.history.outbox import NAMESPACE
from agentspec.errors import StoreUnavailableError

from .fake_server import FakeServer
from .stores import FailingStore

CALL: dict[str, Any] = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "hello"},
    {
        "type": "message",
        "id": "__fake_id__",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "let me see", "annotations": []}],
    },
    CALL,
    {**CALL, "call_id": "c2"},
    {"type": "function_call_output", "call_id": "c1", "output": "1"},
    {"type": "function_call_output", "call_id": "c2", "output": "2"},
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": "http://x/y.png", "detail": "low"},
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            {"type": "input_file", "file_id": "file-1", "filename": "a.pdf"},
        ],
    },
]


def connect(server: FakeServer, **options: Any) -> AsyncAgentClient:
    return AsyncAgentClient(base_url=server.url, model="small", **{"store": None, **options})


async def test_items_come_back_as_they_were(server: FakeServer, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sessions.db"
    async with connect(server, store=url) as client:
        session = client.session("s")
        await session.add_items(ITEMS[:4])
        await session.add_items(ITEMS[4:])
        assert await session.get_items() == ITEMS
        assert await session.get_items(limit=2) == ITEMS[-2:] and await session.get_items(limit=0) == []
        assert [message["role"] for message in session.messages] == ["user", "assistant", "tool", "tool", "user"]
    async with connect(server, store=url) as client:
        assert await client.session("s").get_items() == ITEMS


async def test_a_tools_image_comes_back_as_it_was(server: FakeServer) -> None:
    """Otherwise a Runner would later send the model the image as the text of a Python list."""
    parts = [
        {"type": "input_text", "text": "the plot"},
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"},
    ]
    output = {"type": "function_call_output", "call_id": "c1", "output": parts}
    async with connect(server) as client:
        session = client.session("s")
        await session.add_items([ITEMS[0], CALL, output])
        assert await session.get_items() == [ITEMS[0], CALL, output]
        image = {"url": "data:image/png;base64,AAAA", "detail": "auto"}
        content = [{"type": "text", "text": "the plot"}, {"type": "image_url", "image_url": image}]
        assert session.messages[-1] == {"role": "tool", "tool_call_id": "c1", "content": content}


async def test_items_with_halves_of_characters_leave_the_session_usable(server: FakeServer) -> None:
    call = {**CALL, "arguments": '{"a": "caf\udce9"}'}
    answer = {"type": "function_call_output", "call_id": CALL["call_id"], "output": "done"}
    async with connect(server) as client:
        session = client.session("s")
        await session.add_items([{"role": "user", "content": "caf\udce9"}, call, answer])
        assert (await session.chat("Go on.")).text
        assert session.messages[0]["content"] == r"caf\udce9"


async def test_a_closed_client_takes_no_items(server: FakeServer) -> None:
    async with connect(server, store=MemoryStore()) as client:
        session = client.session("s")
        await session.add_items(ITEMS[:1])
    with pytest.raises(AgentSpecError, match="the client is closed"):
        await session.add_items(ITEMS[:1])
    assert await session.get_items() == ITEMS[:1]


async def test_popping_removes_the_latest_item_from_the_store_too(server: FakeServer, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sessions.db"
    async with connect(server, store=url) as client:
        session = client.session("s")
        assert await session.pop_item() is None
        await session.add_items(ITEMS[:4])
        assert await session.pop_item() == ITEMS[3]
        assert await session.get_items() == ITEMS[:3]
    async with connect(server, store=url) as client:
        session = client.session("s")
        assert await session.get_items() == ITEMS[:3]
        await session.clear_session()
        assert await session.get_items() == [] and server.erased == ["s"]


async def test_a_popped_item_is_gone_once_pop_item_returns(server: FakeServer) -> None:
    store = FailingStore()
    async with connect(server, store=store) as client:
        session = client.session("s")
        await session.add_items(ITEMS[:4])
        store.delay = 0.05
        assert await session.pop_item() == ITEMS[3]
        assert list(MemoryStore.read(store, NAMESPACE, session="s"))  # a kill now must not lose the session
        store.delay = 0.0
        async with connect(server, store=store) as another:
            assert await another.session("s").get_items() == ITEMS[:3]
        await session.add_items(ITEMS[3:4])
    async with connect(server, store=store) as client:
        resumed = client.session("s")
        assert await resumed.get_items() == ITEMS[:4] and resumed.gaps == []


async def test_an_item_that_the_store_cannot_take_back_stays(server: FakeServer) -> None:
    store = FailingStore()
    async with connect(server, store=store) as client:
        session = client.session("s")
        await session.add_items(ITEMS[:4])
        store.failing = {"append"}
        with pytest.raises(StoreError, match="away"):
            await session.pop_item()
        assert await session.get_items() == ITEMS[:4]
        store.failing = set()
        async with connect(server, store=store) as another:
            assert await another.session("s").get_items() == ITEMS[:4]
            await another.session("s").add_items(ITEMS[:1])
        with pytest.raises(SessionConflictError):
            await session.pop_item()
        assert await session.get_items() == ITEMS[:4]


async def test_an_item_is_taken_back_though_the_answer_of_the_store_was_lost(server: FakeServer) -> None:
    """If the item stayed here, the next turn would be a conflict with another client that doesn't exist."""

    class Forgetful(FailingStore):
        def append(self, *args: Any, **options: Any) -> Any:
            sequences = super().append(*args, **options)
            if lost:
                raise StoreUnavailableError(lost.pop())
            return sequences

    lost: list[str] = []
    store = Forgetful()
    async with connect(server, store=store) as client:
        session = client.session("s")
        await session.add_items(ITEMS[:4])
        lost.append("the answer was lost")
        assert await session.pop_item() == ITEMS[3]
        assert not lost and await session.get_items() == ITEMS[:3]
        await session.add_items(ITEMS[:1])
        async with connect(server, store=store) as another:
            assert await another.session("s").get_items() == [*ITEMS[:3], ITEMS[0]]


async def test_output_items_of_the_api_are_understood(server: FakeServer) -> None:
    async with connect(server) as client:
        session = client.session("s")
        parts = [{"type": "output_text", "text": "hel", "annotations": []}, {"type": "output_text", "text": "lo"}]
        await session.add_items(
            [
                {"type": "reasoning", "id": "r1", "summary": []},
                {"type": "message", "id": "m1", "role": "assistant", "status": "completed", "content": parts},
            ]
        )
        (message,) = session.messages
        assert (message["role"], message["content"]) == ("assistant", "hello")
        with pytest.raises(InvalidInputError, match="computer_call"):
            await session.add_items([{"type": "computer_call"}])


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "user", "content": [{"type": "hologram"}]}, "content 'hologram'"),
        (
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f", "input": "z"}}],
            },
            "a tool call of the type 'custom'",
        ),
        ({"role": "assistant", "content": None, "audio": {"id": "audio-1"}}, "an answer's 'audio'"),
        ({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}, "'function_call'"),
        ({"role": "function", "name": "f", "content": "1"}, "role 'function'"),
    ],
)
async def test_what_has_no_form_as_an_item_is_named(server: FakeServer, message: Any, named: str) -> None:
    async with connect(server) as client:
        session = client.session()
        session.add(message)
        with pytest.raises(InvalidInputError, match=f"items: the session has .*{named}"):
            await session.get_items()


async def test_files_by_url_are_refused(server: FakeServer) -> None:
    async with connect(server) as client:
        session = client.session()
        with pytest.raises(InvalidInputError, match="'input_file' has no form"):
            await session.add_items([{"role": "user", "content": [{"type": "input_file", "file_url": "http://x/a"}]}])


async def test_thoughts_stay_with_the_message_behind_them_and_are_sent_to_no_server(server: FakeServer) -> None:
    """Some services refuse calls of tools without the model's thoughts, or without the signature of a call."""
    thoughts = {"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": "I must add."}]}
    signed = {**CALL, "provider_data": {"model": "m", "thought_signature": "c2lnbmVk"}}
    answer = {"type": "function_call_output", "call_id": "c1", "output": "1"}
    async with connect(server) as client:
        session = client.session("s")
        await session.add_items([ITEMS[0], thoughts, signed, answer, {**thoughts, "id": "r2"}, ITEMS[1]])
        await session.add_items([{**thoughts, "id": "of no message"}, {"role": "user", "content": "more"}])
        await session.chat("and?")
        await session.prime()
        items = await session.get_items()
        assert items[:6] == [ITEMS[0], thoughts, signed, answer, {**thoughts, "id": "r2"}, ITEMS[1]]
        assert [item.get("role") for item in items[6:]] == ["user", "user", "assistant"]
        assert await session.pop_item() == items[-1]
    (primed,) = (request for request in server.received if request.method == "PUT")
    sent = server.chats[0].body["messages"]
    assert primed.body["messages"][: len(sent)] == sent
    assert sent[1] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
    }
    assert sent[3] == {"role": "assistant", "content": "let me see"}


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_the_runner_sends_thoughts_back_from_a_session(server: FakeServer, field: str) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    agents.set_tracing_disabled(True)
    server.answers = [{"content": "one", field: "I must say one."}, {"content": "two"}]
    async with connect(server) as client:
        session = client.session("s")
        provider = agents.OpenAIProvider(openai_client=session.openai, use_responses=False)
        config = agents.RunConfig(model_provider=provider)
        agent = agents.Agent(name="counts", model="deepseek-small")
        for text in ("count", "go on"):
            await agents.Runner.run(agent, text, session=session, run_config=config)
    assert server.chats[1].body["messages"][1] == {"role": "assistant", "content": "one", field: "I must say one."}


async def test_the_runner_takes_a_session(server: FakeServer) -> None:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    agents.set_tracing_disabled(True)

    def add(a: int, b: int) -> int:
        return a + b

    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    texts: list[dict[str, Any]] = [
        {"content": "let me see", "tool_calls": [call]},
        {"content": "5"},
        {"content": "as I said"},
    ]
    server.answers = texts
    async with connect(server) as client:
        session = client.session("s")
        assert isinstance(session, agents.memory.Session)
        provider = agents.OpenAIProvider(openai_client=session.openai, use_responses=False)
        config = agents.RunConfig(model_provider=provider)
        agent = agents.Agent(name="sums", model="small", tools=[agents.function_tool(add)])
        first = await agents.Runner.run(agent, "2 + 3?", session=session, run_config=config)
        assert first.final_output == "5"
        assert [message["role"] for message in session.messages] == ["user", "assistant", "tool", "assistant"]
        await agents.Runner.run(agent, "sure?", session=session, run_config=config)
        assert (await session.chat("and now?")).text == "answer 4"  # both can take turns
    assert {chat.headers["x-session-id"] for chat in server.chats} == {"s"}
    sent = server.chats[2].body["messages"][1]
    assert (sent["content"], sent["tool_calls"][0]["id"]) == ("let me see", "c1")  # one message, as it was answered
    assert [message["role"] for message in server.chats[2].body["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
