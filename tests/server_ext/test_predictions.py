"""Test OpenAI's Predicted Outputs on the server: how a prediction reaches the engine, and what usage says of it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient

from agentspec.cache import SOURCES
from agentspec.protocol import MAX_PREDICTION
from agentspec.server_ext.api import request_bodies
from agentspec.server_ext.api.predictions import read_prediction
from agentspec.server_ext.identity import IDENTITY_KEY, PREDICTION_KEY, RequestTagger
from agentspec.server_ext.identity.callers import Presented
from agentspec.server_ext.vllm_adapter.frontend import senders

from .test_endpoints import VOCABULARY, EngineClient, Start, bearer, start
from .test_response_figures import ASK, chunks_of

__all__ = ["start"]

TEXT = "def f(): ..."
PREDICTION = {"type": "content", "content": TEXT}
PREDICTED = SOURCES.index("prediction")
USAGE = {"prompt_tokens": 1, "completion_tokens": 9, "total_tokens": 10}
DETAILS = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2}


def serve(start: Start, *keys: str) -> tuple[TestClient, EngineClient, list[Any]]:
    """Return a server whose chats note their body and their request's extra_args, and answer as vLLM does."""
    server, engine = start(*keys)
    engine.get_tokenizer = lambda: SimpleNamespace(  # type: ignore[attr-defined]
        encode=lambda text, add_special_tokens: [ord(c) for c in text]
    )
    app, seen = server.app, []
    assert isinstance(app, FastAPI)

    async def chat(request: Request) -> Response:
        body = await request.json()
        sender = senders.presented()
        assert sender is not None
        seen.append((body, engine.tagger.tag(body.get("vllm_xargs"), sender).get(PREDICTION_KEY)))
        figures = engine.metrics[0].begin("r", engine.ran("r", sender).caller, sender.call)
        figures.drafted[PREDICTED], figures.accepted[PREDICTED] = 7, 5
        engine.metrics[0].end(figures)
        answer = {"id": "r", "choices": [], "usage": {**USAGE, **body.get("usage", {})}}

        def chunks() -> Iterator[str]:
            yield f"data: {json.dumps({'id': 'r', 'choices': [{'delta': 'x'}]})}\n\n"
            yield f"data: {json.dumps(answer, separators=(',', ':'))}\n\n"
            yield "data: [DONE]\n\n"

        if body.get("stream"):
            return StreamingResponse(chunks(), media_type="text/event-stream")
        return Response(json.dumps(answer), media_type="application/json")

    app.post("/v1/chat/completions")(chat)
    return server, engine, seen


@pytest.mark.parametrize(
    "content", [TEXT, [{"type": "text", "text": TEXT[:3]}, {"type": "text", "text": TEXT[3:]}]], ids=["text", "parts"]
)
@pytest.mark.parametrize("headers", [{}, ASK])
def test_it_reaches_the_engine_and_usage_has_its_figures(start: Start, content: Any, headers: dict[str, str]) -> None:
    server, _, seen = serve(start)
    body = {"messages": [], "prediction": {"type": "content", "content": content}}
    answer = server.post("/v1/chat/completions", json=body, headers=headers)
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert answer.json()["usage"] == {**USAGE, "completion_tokens_details": DETAILS}
    assert ("agentspec" in answer.json()) is bool(headers)
    assert seen == [(body, [ord(c) for c in TEXT])]
    plain = server.post("/v1/chat/completions", json={"messages": []}, headers=headers).json()
    assert plain["usage"] == USAGE and seen[1] == ({"messages": []}, None)


@pytest.mark.parametrize("predicts", [True, False])
async def test_a_body_is_held_once_while_it_is_answered(
    start: Start, monkeypatch: pytest.MonkeyPatch, predicts: bool
) -> None:
    """An answer may take minutes, and a body with images many megabytes."""
    server, _, _ = serve(start)
    read, freed = request_bodies._read, threading.Event()

    class Body(bytes):
        def __del__(self) -> None:
            freed.set()

    async def noted(receive: Any) -> Any:
        body, replayed = await read(receive)
        return Body(body), replayed

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        for part in parts:
            assert await receive() == part
        assert await asyncio.to_thread(freed.wait, 20)

    monkeypatch.setattr(request_bodies, "_read", noted)
    body = json.dumps({"messages": [], **({"prediction": PREDICTION} if predicts else {})}).encode()
    parts = [
        {"type": "http.request", "body": body[:9], "more_body": True},
        {"type": "http.request", "body": body[9:], "more_body": False},
    ]
    arriving = iter(parts)

    async def receive() -> Any:
        return next(arriving)

    async def send(_: Any) -> None:
        raise AssertionError("an error was sent")

    scope = {"type": "http", "path": "/v1/chat/completions", "headers": [], "app": server.app}
    await request_bodies.BodyMiddleware(answer)(scope, receive, send)


def test_a_tokenizer_that_fails_costs_no_answer(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Tokenizers of some models refuse texts with special tokens. The chat must be answered, as vLLM does."""
    server, engine, seen = serve(start)
    engine.get_tokenizer = lambda: SimpleNamespace(encode=lambda *_, **__: 1 // 0)  # type: ignore[attr-defined]
    body = {"messages": [], "prediction": PREDICTION}
    with caplog.at_level("ERROR", "vllm.agentspec"):
        answers = [server.post("/v1/chat/completions", json=body) for _ in range(2)]
    assert [(answer.status_code, answer.json()["usage"]) for answer in answers] == [(200, USAGE)] * 2
    assert seen == [(body, None)] * 2
    assert caplog.text.count("cannot be read; such requests draft without it") == 1


def test_what_lies_behind_a_stop_text_is_not_accepted(start: Start) -> None:
    """vLLM finds stop texts in the API server, after the engine has accepted the tokens behind them."""
    server, _, _ = serve(start)
    body = {"messages": [], "prediction": PREDICTION, "usage": {"completion_tokens": 4}}
    usage = server.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 3}


@pytest.mark.parametrize("details", [{"reasoning_tokens": 3}, None])
def test_other_details_of_usage_stay(start: Start, details: dict[str, int] | None) -> None:
    server, _, _ = serve(start)
    body = {"messages": [], "prediction": PREDICTION, "usage": {"completion_tokens_details": details}}
    usage = server.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["completion_tokens_details"] == {**(details or {}), **DETAILS}


@pytest.mark.parametrize("headers", [{}, ASK])
def test_a_stream_has_them_in_its_usage(start: Start, headers: dict[str, str]) -> None:
    server, _, _ = serve(start)
    body = {"messages": [], "stream": True, "prediction": PREDICTION}
    chunks = chunks_of(server.post("/v1/chat/completions", json=body, headers=headers))
    assert chunks[1]["usage"] == {**USAGE, "completion_tokens_details": DETAILS}
    assert chunks[-1] == "[DONE]" and len(chunks) == 3 + bool(headers)


@pytest.mark.parametrize(
    ("prediction", "field"),
    [
        ("text", "prediction:"),
        ({"type": "content"}, "prediction:"),
        ({"type": "other", "content": "x"}, "prediction:"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction:"),
        ({"type": "content", "content": [5]}, "prediction:"),
        ({"type": "content", "content": "x" * (MAX_PREDICTION + 1)}, "prediction.content:"),
        ({"type": "content", "content": "half a pair: \ud83d"}, "prediction.content:"),
        ({"type": "content", "content": "x" * (64 * MAX_PREDICTION + 1)}, "prediction.content:"),
    ],
)
def test_an_unusable_one_is_refused_by_field(start: Start, prediction: Any, field: str) -> None:
    server, _, seen = serve(start)
    body = json.dumps({"messages": [], "prediction": prediction})
    answer = server.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400 and not seen
    assert answer.json()["error"]["message"].startswith(field) and answer.json()["error"]["param"] == "prediction"


def test_tokens_that_the_model_lacks_are_left_out(start: Start) -> None:
    """A tokenizer may know more, such as placeholders of images. One of these must not cost the request all drafts."""
    server, _, seen = serve(start)
    text = f"{TEXT[:3]}{chr(VOCABULARY)}{TEXT[3:]}"
    body = {"messages": [], "prediction": {"type": "content", "content": text}}
    assert server.post("/v1/chat/completions", json=body).status_code == 200
    assert [found for _, found in seen] == [[ord(c) for c in TEXT]]


@pytest.mark.parametrize("body", [b'{"prediction": ', b'["prediction"]', b'{"prediction": null}', b"[" * 100_000])
def test_other_bodies_are_left_to_vllm(body: bytes) -> None:
    assert read_prediction(body, None) == []


def test_it_says_nothing_to_other_callers_and_cannot_be_forged(start: Start) -> None:
    server, _, seen = serve(start, "ada", "bob")
    body = {"messages": [], "prediction": PREDICTION}
    assert server.post("/v1/chat/completions", json=body).status_code == 401
    server.post("/v1/chat/completions", json=body, headers=bearer("ada"))
    forged = {"messages": [], "vllm_xargs": {PREDICTION_KEY: [1, 2], IDENTITY_KEY: ["x"]}}
    server.post("/v1/chat/completions", json=forged, headers=bearer("bob"))
    assert [found for _, found in seen] == [[ord(c) for c in TEXT], None]


def test_the_next_request_has_none_of_it(start: Start) -> None:
    _, engine = start()
    tagger: RequestTagger = engine.tagger
    with senders.drafting_from([1, 2], np.zeros(0, np.int32)):
        assert tagger.tag({}, senders.presented())[PREDICTION_KEY] == [1, 2]
    assert PREDICTION_KEY not in tagger.tag({}, senders.presented())
    assert PREDICTION_KEY not in tagger.tag({}, Presented(()))
