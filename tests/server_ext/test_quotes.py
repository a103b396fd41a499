"""Test what a response may quote: which texts, how they are spelled, what is remembered, how they reach the engine."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from agentspec.cache.types import MAX_QUOTABLE
from agentspec.server_ext.api import quotes
from agentspec.server_ext.api.quotes import Form, Quotes, may_quote, quotable_texts, spellings
from agentspec.server_ext.identity import PREDICTION_KEY, QUOTABLE_KEY
from agentspec.server_ext.vllm_adapter.frontend import senders

from .test_endpoints import VOCABULARY, Start, bearer, start

__all__ = ["start"]

FILE = 'def f(x):\n    return "é" + x\n'
SPELLED = json.dumps(FILE, ensure_ascii=False)[1:-1]
WORDS = "some words,\nsome more words\n"
NUMBERED = "".join(f"{i:6}\t{line}\n" for i, line in enumerate(FILE.splitlines(), 1))
NUMBERS = ("     {}\t", "{}\t", "    {}→", "0000{}| ", "{}:", "{}-", "L{}:")
PLAIN, JSON, PATCH, PATCH_CALL = Form(), Form(json=True), Form(patch=True), Form(json=True, patch=True)
TOOLS = [{"type": "function", "function": {"name": "edit"}}]
SAYS = {"role": "user", "content": "Fix it. Answer with a ```diff."}
RESULT = {"role": "tool", "tool_call_id": "1", "content": FILE}
BODY = {"messages": [RESULT], "tools": TOOLS}


class Tokenizer:
    """Encode each character as one token, and count the characters encoded."""

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        self.encoded += len(text)
        return [ord(c) for c in text]


def read(body: Any, most: int = MAX_QUOTABLE) -> str:
    return "".join(map(chr, Quotes(Tokenizer(), most).read(json.dumps(body).encode(), "")))


PARTS = [{"type": "text", "text": FILE}, {"type": "image_url", "image_url": {"url": "x\n" * 20}}]


@pytest.mark.parametrize(
    "body",
    [
        BODY,
        {"messages": [{"role": "user", "content": FILE}], "tools": TOOLS, "tool_choice": "auto"},
        {"messages": [{"role": "user", "content": PARTS}], "tools": TOOLS, "tool_choice": {"type": "auto"}},
        {"messages": [RESULT], "response_format": {"type": "json_schema", "json_schema": {}}},
        {"input": [RESULT], "text": {"format": {"type": "json_schema", "schema": {}}}},
        {"messages": [RESULT], "output_config": {"format": {"type": "json_schema", "schema": {}}}},
        {"messages": [RESULT], "structured_outputs": {"json": {"type": "object"}}},
        {"messages": [RESULT], "structured_outputs": {"json_object": True}},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": PARTS}]}], "tools": TOOLS},
        {"messages": [{"role": "assistant", "content": FILE}, {"role": "user", "content": "Save it."}], "tools": TOOLS},
        {"input": [{"role": "assistant", "content": [{"type": "output_text", "text": FILE}]}], "tools": TOOLS},
        {"input": FILE, "tools": TOOLS},
        {"input": [{"type": "function_call_output", "call_id": "1", "output": FILE}], "tools": TOOLS},
    ],
    ids=[
        *("tool", "user", "parts", "json", "json in responses", "anthropic's json", "vllm's json", "any json"),
        *("anthropic", "said", "said in responses", "text", "responses"),
    ],
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
        {"input": [RESULT], "text": {"format": {"type": "text"}}},
        {"messages": [RESULT], "output_config": {"effort": "low"}},
        {"messages": [RESULT], "structured_outputs": {"regex": "[a-z]+"}},
        {"messages": [{"role": "developer", "content": FILE}, {"role": "system", "content": FILE}], "tools": TOOLS},
        {"messages": [{"role": "assistant", "content": json.dumps({"f": FILE})}], "tools": TOOLS},
        {"messages": [{"role": "assistant", "content": f"```diff\n{FILE}```"}], "tools": TOOLS},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"arguments": FILE}]}], "tools": TOOLS},
        {"messages": [{"role": "assistant", "content": FILE}]},
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
    assert len(Quotes(Tokenizer(), 9).read(body, "")) == 0


STRINGS = "".join(f'"\\n{i} and so many others"' for i in range(14_000))


@pytest.mark.parametrize(
    "text", ['"\\' * 100_000, "'" * 200_000, "it's " * 40_000, "[" * 200_000, "1\t\n" * 70_000, STRINGS]
)
def test_no_text_takes_more_time_than_its_length_explains(text: str) -> None:
    began = time.process_time()
    spellings(text, PATCH_CALL)
    assert time.process_time() - began < 2


def test_of_a_spelling_that_is_longer_than_its_text_no_more_becomes_tokens_than_can_be_quoted() -> None:
    tokenizer = Tokenizer()
    body = {"messages": [{"role": "tool", "content": "\0" * 600}], "tools": TOOLS}
    assert len(Quotes(tokenizer, 100).read(json.dumps(body).encode(), "")) == 100
    assert tokenizer.encoded == 600  # JSON spells it in 3,600 characters


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_of_lines_are_left_out(number: str) -> None:
    text = "\n".join(number.format(i) + line for i, line in enumerate(FILE.splitlines(), 1))
    assert spellings(text, PLAIN) == [FILE.rstrip("\n")]
    assert spellings(text, JSON) == [SPELLED.removesuffix("\\n"), FILE.rstrip("\n")]
    wrapped = f"<file>\n{text}\n</file>\n\n"
    assert spellings(wrapped, JSON) == [f"<file>\\n{SPELLED}</file>\\n\\n", f"<file>\n{FILE}</file>\n\n"]


def test_code_that_only_begins_with_numbers_now_and_then_keeps_them() -> None:
    text = "x = {\n1:2,\n5:6,\n}\n"
    assert spellings(text, PLAIN) == []
    assert spellings(text, JSON) == [json.dumps(text)[1:-1]]


def test_of_a_result_that_is_json_its_long_strings_are_taken() -> None:
    def read_from(result: Any, **options: Any) -> list[str]:
        return spellings(json.dumps(result, **options), JSON)

    assert read_from({"output": FILE, "metadata": {"exit_code": 0}}, ensure_ascii=False) == [FILE]
    assert read_from({"output": FILE}) == [SPELLED, FILE]  # the result has \u00e9 where a response has é
    assert read_from([{"a": {"b": NUMBERED}}, WORDS], ensure_ascii=False) == [SPELLED, FILE, WORDS]
    assert spellings(f"Result: {{'output': {FILE!r}, 'code': 0}}", JSON) == [SPELLED, FILE]
    assert spellings(repr({"a": FILE + "\x1b it's", "b": 1}), JSON)[1] == FILE + "\x1b it's"
    code = "import re\nWORD = re.compile('a long word in code\\\\n')\nNAMES = []\nfor name in NAMES:\n    print(name)\n"
    assert spellings(code, JSON) == [json.dumps(code)[1:-1]]
    package = json.dumps({"name": "a", "version": "1.0.0"}, indent=1)
    assert spellings(package, JSON) == [json.dumps(package)[1:-1]]
    assert spellings("[" * 100_000, JSON) == spellings("{not JSON}", JSON) == []
    assert spellings(json.dumps({"output": FILE}), PLAIN) == [FILE]


def test_patches_quote_lines_behind_their_signs() -> None:
    text = "def f():\n    return 100\n"
    minus, space = "-def f():\n-    return 100\n-", " def f():\n     return 100\n "
    assert spellings(text, PATCH) == [minus, space]
    as_json = [json.dumps(spelling)[1:-1] for spelling in (minus, space, text)]
    assert spellings(text, PATCH_CALL) == as_json
    numbered = "     1\tdef f():\n     2\t    return 100\n"
    assert spellings(numbered, PATCH) == [minus, space, text]
    assert spellings(numbered, PATCH_CALL) == [*as_json, text]
    in_json = {"role": "tool", "content": json.dumps({"output": text})}
    assert read({"messages": [SAYS, in_json]}) == minus + space + text
    assert spellings("one line", PATCH) == spellings("one line", PATCH_CALL) == []


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({"messages": [RESULT]}, PLAIN),
        ({"messages": [RESULT], "tools": TOOLS}, JSON),
        ({"messages": [SAYS, RESULT]}, PATCH),
        ({"messages": [{"role": "system", "content": [{"type": "text", "text": "--- a/x"}]}, RESULT]}, PATCH),
        ({"instructions": "Write a unified diff.", "input": FILE}, PATCH),
        ({"messages": [RESULT], "tools": [{"type": "function", "function": {"name": "apply_patch"}}]}, PATCH_CALL),
        ({"system": "Use ```patch", "messages": [], "tools": TOOLS}, PATCH_CALL),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"arguments": "*** Begin Patch"}]}], "tools": TOOLS},
            PATCH_CALL,
        ),
        ({"messages": [{"role": "tool", "content": "diff --git a b"}], "tools": TOOLS}, JSON),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "--- a/x"}]}]}, PLAIN),
        ({"input": [{"type": "function_call_output", "output": "diff --git a b"}]}, PLAIN),
        ({"messages": 7, "input": None, "tools": 1}, JSON),
        (None, PLAIN),
        ([SAYS], PLAIN),
    ],
)
def test_the_form_of_the_response_is_read_from_the_request(body: Any, form: Form) -> None:
    assert Form.of(body) == form
    assert may_quote(json.dumps(body).encode()) or form == PLAIN


def test_a_chat_without_tools_quotes_what_was_shown_with_numbers() -> None:
    said = [{"role": "user", "content": text} for text in (FILE, NUMBERED, FILE)]
    assert read({"messages": said}) == FILE
    assert read({"messages": said, "tools": TOOLS}) == SPELLED + FILE + SPELLED


@pytest.mark.parametrize("ascii_only", [True, False])
def test_which_bodies_are_read(ascii_only: bool) -> None:
    def worth_it(content: str, **body: Any) -> bool:
        text = json.dumps({"messages": [{"role": "user", "content": content}], **body}, ensure_ascii=ascii_only)
        return may_quote(text.encode())

    assert worth_it("", tools=TOOLS) and worth_it("", response_format={})
    assert worth_it("", text={"format": {}}) and worth_it("", structured_outputs={"json": {}})
    assert all(worth_it("\n".join(number.format(i) + "x" for i in (8, 9, 10))) for number in NUMBERS)
    assert not any(map(worth_it, ("one", FILE, "a list:\n1. one\n2. two", '"tools"')))


def test_of_too_much_the_newest_texts_stay_in_order() -> None:
    texts = [f"{i}" * 40 + "\n" for i in range(6)]
    body = {"messages": [{"role": "tool", "content": text} for text in [*texts, texts[5]]], "tools": TOOLS}
    spelled = [json.dumps(text)[1:-1] for text in texts]
    assert read(body) == "".join(spelled)
    assert read(body, 100) == spelled[3][:16] + spelled[4] + spelled[5]
    assert read(body, 0) == ""
    huge = {"messages": [{"role": "tool", "content": "ab\n" * 10**6}], "tools": TOOLS}
    assert len(read(huge, 1000)) == 1000


def test_a_conversation_costs_what_is_new_in_it() -> None:
    tokenizer = Tokenizer()
    reader = Quotes(tokenizer, MAX_QUOTABLE)
    messages: list[dict[str, str]] = []
    for turn in range(1, 20):
        messages.append({"role": "tool", "content": f"{turn}\n" * 50})
        found = reader.read(json.dumps({"messages": messages, "tools": TOOLS}).encode(), "")
        assert tokenizer.encoded == len(found) == (reader.held_bytes - turn * quotes._ENTRY_BYTES) / 4


def test_what_is_remembered_of_one_caller_makes_nothing_faster_for_another(start: Start) -> None:
    server, engine = start("ada", "bob")
    tokenizer = Tokenizer()
    engine.get_tokenizer = lambda: tokenizer  # type: ignore[attr-defined]
    seen = note_quotable(server)

    def encoded(key: str, **more: Any) -> int:
        before = tokenizer.encoded
        server.post("/v1/chat/completions", json={**BODY, **more}, headers=bearer(key))
        return tokenizer.encoded - before

    salts = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}]
    whole = len(SPELLED)
    assert [encoded(key, **salt) for key in ("ada", "bob") for salt in salts] == [whole] * 6
    assert [encoded(key, **salt) for key in ("ada", "bob") for salt in salts] == [0] * 6
    assert len(seen) == 12
    assert len(set(seen)) == 1


def test_without_keys_all_callers_are_one_and_what_was_said_is_remembered(start: Start) -> None:
    server, engine = start()
    tokenizer = Tokenizer()
    engine.get_tokenizer = lambda: tokenizer  # type: ignore[attr-defined]
    for _ in range(2):
        server.post("/v1/chat/completions", json=BODY)
        assert tokenizer.encoded == len(SPELLED)


def test_nothing_is_remembered_of_a_caller_that_cannot_be_told_apart(start: Start) -> None:
    server, engine = start(principal_header="X-Principal")
    tokenizer = Tokenizer()
    engine.get_tokenizer = lambda: tokenizer  # type: ignore[attr-defined]
    seen = note_quotable(server)
    for times in (1, 2):
        server.post("/v1/chat/completions", json=BODY)
        assert tokenizer.encoded == times * len(SPELLED)
    assert seen == [seen[0]] * 2


def test_what_is_remembered_is_bounded_at_ten_times_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotes, "_KEPT_BYTES", 81_600)
    reader = Quotes(Tokenizer(), 500)
    for turn in range(1000):
        body = {"messages": [{"role": "tool", "content": f"{turn:06}\n" * 13}], "tools": TOOLS}
        assert len(reader.read(json.dumps(body).encode(), "")) == 13 * 8
        assert reader.held_bytes <= 81_600
    assert reader.held_bytes == 81_600 == len(reader._known) * (4 * 13 * 8 + quotes._ENTRY_BYTES)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_they_reach_the_engine_of_their_request_alone_and_cannot_be_forged(start: Start, path: str) -> None:
    server, engine = start("ada")
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [ord(c) for c in text])
    engine.get_tokenizer = lambda: tokenizer  # type: ignore[attr-defined]
    seen: list[tuple[dict[str, Any], dict[str, Any]]] = []

    async def answer(request: Request) -> dict[str, Any]:
        body = await request.json()
        seen.append((body, engine.tagger.tag(body.get("vllm_xargs"), senders.presented())))
        return {"id": "r"}

    assert isinstance(server.app, FastAPI)
    server.app.post(path)(answer)
    both = {**BODY, "prediction": {"type": "content", "content": "abc"}}
    forged = {"messages": [], "vllm_xargs": {QUOTABLE_KEY: b"1234".hex()}}
    shown = {"messages": [{"role": "user", "content": NUMBERED}]}
    bodies = [BODY, both, forged, {"messages": [RESULT]}, shown]
    for body in bodies:
        assert server.post(path, json=body, headers=bearer("ada")).status_code == 200
    assert [body for body, _ in seen] == bodies
    told, plain = (np.array([ord(c) for c in text], np.int32).tobytes() for text in (SPELLED, FILE))
    is_chat = path == "/v1/chat/completions"
    assert [extra.get(QUOTABLE_KEY) for _, extra in seen] == [told, None if is_chat else told, None, None, plain]
    predicted = [None, [97, 98, 99] if is_chat else None, None, None, None]
    assert [extra.get(PREDICTION_KEY) for _, extra in seen] == predicted


def note_quotable(server: TestClient) -> list[bytes]:
    """Let a server answer chats. Return a list that gets what each of them may quote."""
    seen: list[bytes] = []

    async def answer() -> dict[str, Any]:
        sender = senders.presented()
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


def test_tokens_that_the_model_lacks_are_left_out(start: Start) -> None:
    server, engine = start()
    engine.get_tokenizer = lambda: Tokenizer()  # type: ignore[attr-defined]
    seen = note_quotable(server)
    said = {"role": "user", "content": FILE + chr(VOCABULARY)}
    assert server.post("/v1/chat/completions", json={"messages": [said], "tools": TOOLS}).status_code == 200
    assert "".join(map(chr, np.frombuffer(seen[0], np.int32))) == SPELLED


def test_a_tokenizer_that_fails_costs_no_answer(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server, engine = start()
    engine.get_tokenizer = lambda: SimpleNamespace(encode=lambda *_, **__: 1 // 0)  # type: ignore[attr-defined]
    seen = note_quotable(server)
    with caplog.at_level("ERROR", "vllm.agentspec"):
        assert [server.post("/v1/chat/completions", json=BODY).status_code for _ in range(3)] == [200] * 3
    assert seen == [b""] * 3
    assert caplog.text.count("what responses may quote cannot be read") == 1


def test_texts_are_told_apart_from_instructions() -> None:
    said = [{"role": role, "content": f"{role}\n" * 9} for role in ("system", "user", "assistant", "tool", "developer")]
    assert quotable_texts({"messages": said}, JSON) == ["user\n" * 9, "assistant\n" * 9, "tool\n" * 9]


def test_parts_in_parts_are_read_in_their_order_however_deep() -> None:
    """From Python 3.12 on, JSON is parsed to a greater depth than Python functions may recurse."""
    parts: Any = "deepest\n" * 9
    for _ in range(5_000):
        parts = [{"type": "tool_result", "content": parts}]
    said = [{"text": "first\n" * 9, "content": "second\n" * 9}, *parts, {"text": "last\n" * 9}]
    found = quotable_texts({"messages": [{"role": "user", "content": said}]}, JSON)
    assert found == ["first\n" * 9, "second\n" * 9, "deepest\n" * 9, "last\n" * 9]
