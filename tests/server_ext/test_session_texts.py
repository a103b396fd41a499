"""Test sessions that are primed with texts and messages: who drafts from them, and which fields are refused."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from agentspec.server_ext.vllm_adapter.frontend.chats import templated

from .session_server import ADA, BOB, Server, Start, start
from .test_endpoints import without_tokenizer

__all__ = ["start"]


TEXT = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def server(start: Start) -> Server:
    server = start(ADA, BOB)
    tokenizer = SimpleNamespace(
        encode=lambda text, add_special_tokens: [ord(c) for c in text],
        apply_chat_template=lambda messages, **_: "".join(f"{m['role']}: {m['content']}" for m in messages),
    )
    server.get_tokenizer = lambda: tokenizer
    return server


def put(server: Server, session: str, body: Any, key: str = ADA, **more: Any) -> Any:
    return server.call(key, "PUT", session, content=json.dumps({"version": 1, **body}), **more)


@pytest.mark.parametrize("body", [{"texts": [TEXT]}, {"messages": [{"role": "user", "content": TEXT}]}])
def test_are_drafted_from_by_their_session_alone(server: Server, body: Any) -> None:
    answer = put(server, "one", body)
    assert answer.json() == {"id": "one", "turns": 1, "added": 1}, answer.text
    tokens = [ord(c) for c in TEXT]
    for engine in (0, 1):
        assert server.draws_on(server.identity(ADA, "one"), tokens, engine)
        assert not server.drafts(server.identity(ADA, "two"), tokens, engine)
        assert not server.drafts(server.identity(BOB, "one"), tokens, engine)
    assert put(server, "one", body).json()["added"] == 0
    assert put(server, "twice", {"texts": [TEXT, TEXT]}).json()["added"] == 1
    assert server.erase(ADA, "one").status_code == 200
    assert not server.drafts(server.identity(ADA, "one"), tokens)


def test_only_a_new_session_is_primed_where_that_is_asked_for(server: Server) -> None:
    only: dict[str, Any] = {"params": {"only_new": "true"}}
    assert put(server, "one", {"texts": ["0123456789"]}, **only).json()["added"] == 1
    assert put(server, "one", {"texts": [TEXT]}, **only).json()["added"] == 0
    server.say(server.identity(ADA, "two"))
    assert put(server, "two", {"texts": [TEXT]}, **only).json()["added"] == 0
    assert put(server, "two", {"texts": [TEXT]}).json()["added"] == 1


def test_a_server_without_a_tokenizer_says_so(server: Server) -> None:
    server.get_tokenizer = without_tokenizer
    answer = put(server, "one", {"texts": [TEXT]})
    assert (answer.status_code, "--skip-tokenizer-init" in answer.json()["detail"]) == (400, True)


def test_messages_without_a_usable_template_count_as_their_texts(server: Server) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}, {"content": TEXT}]
    assert put(server, "one", {"messages": messages}).json()["added"] == 1
    assert server.draws_on(server.identity(ADA, "one"), [ord(c) for c in TEXT])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"texts": "abc"}, "texts"),
        ({"texts": [1]}, "texts.0"),
        ({"messages": ["hello"]}, "messages.0"),
        ({"texts": [], "more": 1}, "more"),
        ({"texts": ["\u2603"]}, "turns.0"),
        ({"texts": ["whole", "half a pair: \ud83d"]}, "texts.1"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "messages"),
    ],
)
def test_wrong_ones_are_refused_by_field(server: Server, body: Any, field: str) -> None:
    answer = put(server, "one", body)
    assert answer.status_code == 400 and answer.json()["detail"].startswith(field), answer.text


@pytest.mark.parametrize(
    ("message", "given_to_the_template"),
    [
        ({"content": "a"}, {"content": "a"}),
        ({"content": None}, {"content": ""}),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {"content": "a\nb"}),
        ({"content": [{"type": "image_url"}]}, {"content": [{"type": "image_url"}]}),
        ({"content": "a", "reasoning": "b"}, {"content": "a", "reasoning": "b", "reasoning_content": "b"}),
        ({"content": "a", "reasoning_content": "b"}, {"content": "a", "reasoning": "b", "reasoning_content": "b"}),
        ({"content": "a", "tool_calls": []}, {"content": "a"}),
        ({"content": "a", "tool_calls": [5, {"type": "x"}]}, {"content": "a", "tool_calls": [5, {"type": "x"}]}),
    ],
)
def test_a_template_gets_messages_as_from_vllms_server(message: Any, given_to_the_template: Any) -> None:
    before = json.dumps(message)
    assert templated([message]) == [given_to_the_template] and json.dumps(message) == before


@pytest.mark.parametrize(
    ("arguments", "given_to_the_template"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("", {}), (None, {}), ("{", {}), ("[1]", {})],
)
def test_a_template_gets_the_arguments_of_a_tool_call_as_an_object(arguments: Any, given_to_the_template: Any) -> None:
    """Templates write them as JSON. A text would come out in quotes, and so be no prompt that the model will see."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    ((found,),) = (message["tool_calls"] for message in templated([{"content": "", "tool_calls": [call]}]))
    assert found == {**call, "function": {"name": "f", "arguments": given_to_the_template}}
