"""Test figures in responses: only for callers who ask, of their own requests, and never instead of a response."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.testclient import TestClient

from agentspec.protocol import FIGURES_HEADER
from agentspec.server_ext.api import response_figures
from agentspec.server_ext.api.response_figures import _as_text
from agentspec.server_ext.identity.callers import Presented
from agentspec.server_ext.vllm_adapter.frontend.senders import presented

from .test_endpoints import EngineClient, Start, bearer, shown, start

__all__ = ["start"]

ASK = {FIGURES_HEADER: "summary"}


def add_chat(server: TestClient, engine: EngineClient, runs: bool = True, sender: Presented | None = None) -> None:
    """Let the server answer chats as vLLM does, all under one id.

    runs: whether the engine has run the request. sender: whose request it is; None: the actual sender's.
    """
    app = server.app
    assert isinstance(app, FastAPI)

    async def chat(body: dict[str, Any]) -> Response:
        now = presented()
        if runs and now is not None:
            engine.ran("r", now if sender is None else replace(sender, call=now.call))
        if body.get("status"):
            return JSONResponse({"error": "no", "id": "r"}, status_code=body["status"])
        if not body.get("stream"):
            return JSONResponse({"id": "r", "choices": [{"message": {"content": "Größe"}}]})

        def chunks() -> Iterator[str]:
            for text in ("Grö", "ße"):
                yield f"data: {json.dumps({'id': 'r', 'object': 'chunk', 'choices': [{'delta': text}]})}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    app.post("/v1/chat/completions")(chat)


def chunks_of(response: Any) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_a_response_has_the_figures_of_its_request(start: Start) -> None:
    server, engine = start()
    add_chat(server, engine)
    plain = server.post("/v1/chat/completions", json={}).json()
    asked = server.post("/v1/chat/completions", json={}, headers=ASK)
    assert int(asked.headers["content-length"]) == len(asked.content)
    figures = server.get("/v1/agentspec/requests/r").json()
    assert asked.json() == {**plain, "agentspec": figures} and "agentspec" not in plain


def test_a_stream_has_them_before_its_end(start: Start) -> None:
    server, engine = start()
    add_chat(server, engine)
    plain = chunks_of(server.post("/v1/chat/completions", json={"stream": True}))
    asked = chunks_of(server.post("/v1/chat/completions", json={"stream": True}, headers=ASK))
    figures = server.get("/v1/agentspec/requests/r").json()
    added = {"id": "r", "object": "chunk", "choices": [], "agentspec": figures}
    assert len(plain) == 3 and asked == [*plain[:-1], added, "[DONE]"]


@pytest.mark.parametrize("body", [{}, {"stream": True}])
def test_a_response_has_the_figures_of_its_own_call_though_a_later_one_has_its_id(
    start: Start, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    """A caller chooses the ids (``X-Request-Id``), and may give one to several calls at once."""
    server, engine = start()
    add_chat(server, engine)
    ran = engine.ran

    def ran_twice(request_id: str, sender: Presented | None) -> None:
        caller = ran(request_id, sender).caller
        later = engine.metrics[0].begin(request_id, caller, "a later call")
        later.tokens = 7

    monkeypatch.setattr(engine, "ran", ran_twice)
    response = server.post("/v1/chat/completions", json=body, headers=ASK)
    assert '"tokens":0' in response.text and '"tokens":7' not in response.text
    assert server.get("/v1/agentspec/requests/r").json()["tokens"] == 7


def test_nobody_is_told_anothers_figures(start: Start) -> None:
    server, engine = start("ada", "bob")
    add_chat(server, engine, sender=shown("ada"))
    for key, told in (("ada", True), ("bob", False)):
        for body in ({}, {"stream": True}):
            response = server.post("/v1/chat/completions", json=body, headers={**ASK, **bearer(key)})
            assert response.status_code == 200 and ("agentspec" in response.text) is told


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"status": 400}])
def test_an_engine_that_is_busy_costs_the_figures_only(
    start: Start, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(response_figures, "_WAIT_SECONDS", 0.05)
    server, engine = start()
    add_chat(server, engine)
    plain = server.post("/v1/chat/completions", json=body)
    engine.delay = 1.0
    asked = server.post("/v1/chat/completions", json=body, headers=ASK)
    assert (asked.status_code, asked.text) == (plain.status_code, plain.text)


def test_an_engine_may_take_seconds_over_a_step(start: Start) -> None:
    server, engine = start()
    add_chat(server, engine)
    engine.delay = 1.5
    assert server.post("/v1/chat/completions", json={}, headers=ASK).json()["agentspec"] is not None


def test_bytes_without_end_that_make_no_character_take_no_more_time_than_others() -> None:
    """A caller can get such bytes by ``allowed_token_ids``."""
    decoded = 0

    def decode(tokens: list[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return bytes(tokens).decode(errors="replace")

    def step(tokens: bytes) -> dict[str, Any]:
        return {"tokens": list(tokens), "sources": [], "rejected": [], "rejected_sources": []}

    shown = _as_text([step(b"ab"), *[step(b"\xff" * 4)] * 1_000, step("é.".encode())], decode)
    assert decoded < 4_000 * 40
    assert shown[0]["tokens"] == ["a", "b"] and shown[1]["tokens"] == [""] * 4
    assert shown[-1]["tokens"][1].endswith("é") and shown[-1]["tokens"][2] == "."
