"""What a tool call may quote: which texts, how they are spelled, what is remembered, and how they reach the engine."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from agentspec.cache.types import MAX_PREDICTION
from agentspec.server_ext.api import quotes
from agentspec.server_ext.api.quotes import Quotes, quotable_texts, spelled
from agentspec.server_ext.identity import PREDICTION_KEY, QUOTABLE_KEY
from agentspec.server_ext.vllm_adapter import frontend

from .test_endpoints import Start, bearer, start

__all__ = ["start"]

FILE = 'def f(x):\n    return "é" + x\n'
SPELLED = json.dumps(FILE, ensure_ascii=False)[1:-1]
TOOLS = [{"type": "function", "function": {"name": "edit"}}]
RESULT = {"role": "tool", "tool_call_id": "1", "content": FILE}
BODY = {"messages": [RESULT], "tools": TOOLS}


class Tokenizer:
    """One token a character; counts what it encodes."""

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        self.encoded += len(text)
        return [ord(c) for c in text]


def read(body: Any, most: int = MAX_PREDICTION) -> str:
    return "".join(map(chr, Quotes(Tokenizer(), most).read(json.dumps(body).encode())))


PARTS = [{"type": "text", "text": FILE}, {"type": "image_url", "image_url": {"url": "x\n" * 20}}]


@pytest.mark.parametrize(
    "body",
    [
        BODY,
        {"messages": [{"role": "user", "content": FILE}], "tools": TOOLS, "tool_choice": "auto"},
        {"messages": [{"role": "user", "content": PARTS}], "tools": TOOLS, "tool_choice": {"type": "auto"}},
        {"messages": [RESULT], "response_format": {"type": "json_schema", "json_schema": {}}},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": PARTS}]}], "tools": TOOLS},
        {"input": FILE, "tools": TOOLS},
        {"input": [{"type": "function_call_output", "call_id": "1", "output": FILE}], "tools": TOOLS},
    ],
    ids=["tool", "user", "parts", "json", "anthropic", "text", "responses"],
)
def test_texts_of_every_api_are_read(body: Any) -> None:
    assert read(body) == SPELLED


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [RESULT]},
        {**BODY, "tools": []},
        {**BODY, "tool_choice": "none"},
        {**BODY, "tool_choice": {"type": "none"}},
        {"messages": [RESULT], "response_format": {"type": "text"}},
        {"messages": [{"role": "assistant", "content": FILE}, {"role": "system", "content": FILE}], "tools": TOOLS},
        {"input": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": FILE}]}], "tools": TOOLS},
        {"messages": [{"role": "tool", "content": "one line that JSON spells as it is"}], "tools": TOOLS},
        {"messages": [{"role": "tool", "content": 'a "word"'}], "tools": TOOLS},
        {"messages": [{"role": "tool", "content": "\ud83d half a pair\n of surrogates"}], "tools": TOOLS},
        {"messages": [None, 7, {"role": "tool", "content": {"a": 1}}], "tools": TOOLS},
        {"messages": None, "input": 7, "tools": TOOLS},
        {"tools": TOOLS},
        [TOOLS],
    ],
)
def test_where_nothing_is_to_be_quoted_nothing_is_read(body: Any) -> None:
    assert read(body) == ""


@pytest.mark.parametrize("body", [b'{"tools": ', b"[" * 100_000 + b'"tools"'])
def test_other_bodies_are_left_to_vllm(body: bytes) -> None:
    assert len(Quotes(Tokenizer(), 9).read(body)) == 0


@pytest.mark.parametrize("number", ["     {}\t", "{}\t", "    {}→", "0000{}| ", "{}:", "L{}:"])
def test_numbers_of_lines_are_left_out(number: str) -> None:
    lines = FILE.splitlines()
    numbered = "\n".join(number.format(i) + line for i, line in enumerate(lines, 1))
    assert spelled(numbered) == SPELLED.removesuffix("\\n")
    assert spelled(f"<file>\n{numbered}\n</file>\n\n") == f"<file>\\n{SPELLED}</file>\\n\\n"


def test_code_that_only_begins_with_numbers_now_and_then_keeps_them() -> None:
    text = "x = {\n1:2,\n5:6,\n}\n"
    assert spelled(text) == json.dumps(text)[1:-1]


def test_of_too_much_the_newest_texts_stay_in_order() -> None:
    texts = [f"{i}" * 40 + "\n" for i in range(6)]
    body = {"messages": [{"role": "tool", "content": text} for text in [*texts, texts[5]]], "tools": TOOLS}
    whole = "".join(map(spelled, texts))
    assert read(body) == whole
    assert read(body, 100) == spelled(texts[3])[:16] + spelled(texts[4]) + spelled(texts[5])
    assert read(body, 0) == ""
    huge = {"messages": [{"role": "tool", "content": "ab\n" * 10**6}], "tools": TOOLS}
    assert len(read(huge, 1000)) == 1000


def test_a_conversation_costs_what_is_new_in_it() -> None:
    tokenizer = Tokenizer()
    reader = Quotes(tokenizer, MAX_PREDICTION)
    messages: list[dict[str, str]] = []
    for turn in range(1, 20):
        messages.append({"role": "tool", "content": f"{turn}\n" * 50})
        found = reader.read(json.dumps({"messages": messages, "tools": TOOLS}).encode())
        assert tokenizer.encoded == len(found) == (reader.held_bytes - turn * quotes._ENTRY_BYTES) / 4


def test_what_is_remembered_is_bounded_at_ten_times_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotes, "_KEPT_BYTES", 67_200)
    reader = Quotes(Tokenizer(), 500)
    for turn in range(1000):
        body = {"messages": [{"role": "tool", "content": f"{turn:06}\n" * 13}], "tools": TOOLS}
        assert len(reader.read(json.dumps(body).encode())) == 13 * 8
        assert reader.held_bytes <= 67_200
    assert reader.held_bytes == 67_200 == len(reader._known) * (4 * 13 * 8 + quotes._ENTRY_BYTES)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_they_reach_the_engine_of_their_request_alone_and_cannot_be_forged(start: Start, path: str) -> None:
    server, engine = start("ada")
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [ord(c) for c in text])
    engine.get_tokenizer = lambda: tokenizer  # type: ignore[attr-defined]
    seen: list[tuple[dict[str, Any], dict[str, Any]]] = []

    async def answer(request: Request) -> dict[str, Any]:
        body = await request.json()
        seen.append((body, engine.tagger.tag(body.get("vllm_xargs"), frontend.presented())))
        return {"id": "r"}

    assert isinstance(server.app, FastAPI)
    server.app.post(path)(answer)
    both = {**BODY, "prediction": {"type": "content", "content": "abc"}}
    forged = {"messages": [], "vllm_xargs": {QUOTABLE_KEY: b"1234".hex()}}
    for body in (BODY, both, forged, {"messages": [RESULT]}):
        assert server.post(path, json=body, headers=bearer("ada")).status_code == 200
    assert [body for body, _ in seen] == [BODY, both, forged, {"messages": [RESULT]}]
    told = np.array([ord(c) for c in SPELLED], np.int32).tobytes()
    is_chat = path == "/v1/chat/completions"
    assert [extra.get(QUOTABLE_KEY) for _, extra in seen] == [told, None if is_chat else told, None, None]
    assert [extra.get(PREDICTION_KEY) for _, extra in seen] == [None, [97, 98, 99] if is_chat else None, None, None]


def note_quotable(server: TestClient) -> list[bytes]:
    """Let a server answer chats. Returns what each of them may quote, as they come."""
    seen: list[bytes] = []

    async def answer() -> dict[str, Any]:
        sender = frontend.presented()
        assert sender is not None
        seen.append(sender.quotable)
        return {"id": "r"}

    assert isinstance(server.app, FastAPI)
    server.app.post("/v1/chat/completions")(answer)
    return seen


@pytest.mark.parametrize("settings", [{"quote_tokens": 0}, {"enabled": False}])
def test_settings_switch_it_off(start: Start, settings: dict[str, Any]) -> None:
    server, engine = start()
    engine.get_tokenizer = lambda: Tokenizer()  # type: ignore[attr-defined]
    engine.vllm_config.additional_config = {"agentspec": settings}
    seen = note_quotable(server)
    server.post("/v1/chat/completions", json=BODY)
    assert seen == [b""]


def test_a_tokenizer_that_fails_costs_no_answer(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server, engine = start()
    engine.get_tokenizer = lambda: SimpleNamespace(encode=lambda *_, **__: 1 // 0)  # type: ignore[attr-defined]
    seen = note_quotable(server)
    with caplog.at_level("ERROR", "vllm.agentspec"):
        assert [server.post("/v1/chat/completions", json=BODY).status_code for _ in range(3)] == [200] * 3
    assert seen == [b""] * 3
    assert caplog.text.count("what tool calls may quote cannot be read") == 1


def test_texts_are_told_apart_from_instructions() -> None:
    said = [{"role": role, "content": f"{role}\n" * 9} for role in ("system", "user", "assistant", "tool", "developer")]
    assert quotable_texts({"messages": said, "tools": TOOLS}) == ["user\n" * 9, "tool\n" * 9]
