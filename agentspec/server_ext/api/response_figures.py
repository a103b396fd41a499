"""Put a request's speculation figures into its response, for clients that ask for them in a header.

``X-Agentspec-Figures: summary`` adds the field ``agentspec`` to a response in JSON, and a chunk with this field before
the end of a stream: the object that ``GET /v1/agentspec/requests/{id}`` answers. Where there are no figures, because
the engine is busy or does not draft, the response is passed on as it is. ``detailed`` adds the field ``detail``: each
step's tokens as text, where they came from, and the drafted ones that were rejected. A server without a tokenizer
leaves it out.

A request with a prediction is told in ``usage`` how many of its tokens were accepted and rejected, with or without the
header.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentspec.protocol import FIGURES, FIGURES_HEADER
from agentspec.server_ext.figures.metrics import of_one_call
from agentspec.server_ext.figures.traces import steps_of
from agentspec.server_ext.identity.callers import NOBODY, shows_admin_key
from agentspec.server_ext.vllm_adapter.frontend.chats import tokenizer_of
from agentspec.server_ext.vllm_adapter.frontend.engine_calls import ask_engines, engine_of, tagger_of
from agentspec.server_ext.vllm_adapter.frontend.response_lengths import response_lengths_of
from agentspec.server_ext.vllm_adapter.frontend.senders import BATCH, path_of, presented

logger = logging.getLogger("vllm.agentspec")


_PATHS = ("/v1/chat/completions", BATCH, "/v1/completions")
_WAIT_SECONDS = 5.0
"""Longest wait for an engine. It answers between two steps; on a CPU a full batch of prompts may take seconds."""
_CONTEXT = 8
"""Number of tokens before another that may change its text, by a leading space or as parts of one character."""
_INCOMPLETE_CONTEXT = 2 * _CONTEXT
"""Number of these tokens while no character is complete. A limit, because a response may never complete one."""
_INCOMPLETE = "\ufffd"
_END_OF_STREAM = b"data: [DONE]\n\n"


async def figures_of(engine: Any, request_id: str, call: str | None = None) -> dict[str, Any] | None:
    """Return the figures of one request, or None if it is another principal's, unknown or forgotten.

    engine: vLLM's EngineClient. call: tells API calls with this id apart (`Presented.call`); None: the one that began
    last. Raises TimeoutError after five seconds, and the engine's own errors.
    """
    sender = presented()
    admin = shows_admin_key(sender)
    caller = tagger_of(engine).callers.caller_of(sender).principal
    if caller == NOBODY and not admin:
        return None
    async with asyncio.timeout(_WAIT_SECONDS):
        if lengths := response_lengths_of(engine):
            await lengths.told()
        answers = await ask_engines(engine, "request", request_id, caller=caller, admin=admin, call=call)
    if not answers:
        return None
    answer = of_one_call(answers)
    if "detail" in answer:
        packed, tokenizer = answer.pop("detail"), tokenizer_of(engine)
        if tokenizer is not None:
            answer["detail"] = await asyncio.to_thread(lambda: _as_text(steps_of(packed), tokenizer.decode))
    return answer


def _as_text(steps: list[dict[str, Any]], decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
    """Return a trace's steps (`steps_of`) with texts instead of token ids; None for a token that is not told."""
    before: list[int] = []
    shown = []
    for step in steps:
        texts, after = _pieces(before, step["tokens"], decode)
        context = before + step["tokens"][: len(step["sources"])]
        told = [token for token in step["rejected"] if token >= 0]
        rejected = iter(_pieces(context[-_CONTEXT:], told, decode)[0])
        shown.append(
            {
                **step,
                "tokens": texts,
                "rejected": [next(rejected) if token >= 0 else None for token in step["rejected"]],
            }
        )
        before = after
    return shown


def _pieces(before: list[int], tokens: list[int], decode: Callable[[list[int]], str]) -> tuple[list[str], list[int]]:
    """Return the text that each token adds behind `before`, and the context of the tokens that follow.

    A character that several tokens make counts as the last one's.
    """
    texts = []
    for token in tokens:
        known, whole = decode(before).rstrip(_INCOMPLETE), decode([*before, token])
        if whole.endswith(_INCOMPLETE):
            texts.append("")
        else:
            texts.append(whole[len(known) :])
        before = [*before, token][-(_CONTEXT if texts[-1] else _INCOMPLETE_CONTEXT) :]
    return texts, before


class FiguresMiddleware:
    """Add figures to the responses of requests that ask for them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request. Responses to requests that ask for no figures pass unchanged."""
        if scope["type"] == "http" and path_of(scope) in _PATHS:
            asked = FIGURES_HEADER in Headers(scope=scope)
            engine = engine_of(scope["app"]) if asked or _predicts() else None
            if engine is not None:
                send = _Response(engine, send, asked).pass_on
        await self._app(scope, receive, send)


def _predicts() -> bool:
    sender = presented()
    return sender is not None and bool(sender.prediction)


class _Response:
    """Pass a response on, with its request's figures.

    asked: whether the request asked for all figures; if not, only those of its prediction go into ``usage``.
    """

    def __init__(self, engine: Any, send: Send, asked: bool) -> None:
        self._engine = engine
        self._asked = asked
        self._predicts = _predicts()
        self._send = send
        self._held: Message | None = None
        """start of a response in JSON, whose body is collected in ``_body``; None: the response is not held back"""
        self._body = b""
        self._streams = False
        """whether the response is a stream, whose pieces are sent as they come"""
        self._first: dict[str, Any] | None = None

    async def pass_on(self, message: Message) -> None:
        """Send a message of the response, or hold it back until the figures are known."""
        if message["type"] == "http.response.start" and message["status"] == 200:
            content = Headers(raw=message["headers"]).get("content-type", "").partition(";")[0]
            self._streams = content == "text/event-stream"
            if content == "application/json":
                self._held = message
                return
        elif message["type"] == "http.response.body" and self._held is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_json(self._held)
            return
        elif message["type"] == "http.response.body" and self._streams:
            message = {**message, "body": await self._with_chunk(message.get("body", b""))}
        await self._send(message)

    async def _send_json(self, start: Message) -> None:
        """Send a response that was held back, with its figures if there are any."""
        answer = _parsed(self._body)
        figures = await self._figures(answer)
        if figures is not None:
            self._add_usage(answer, figures)
            shown = {**answer, FIGURES: figures} if self._asked else answer
            self._body = json.dumps(shown, ensure_ascii=False, separators=(",", ":")).encode()
        set_length(start, self._body)
        await self._send(start)
        await self._send({"type": "http.response.body", "body": self._body})

    async def _with_chunk(self, body: bytes) -> bytes:
        """Return a piece of a stream, with a prediction's figures in ``usage`` and all figures before the end."""
        if self._first is None and body.startswith(b"data: {"):
            self._first = _parsed(body[len(b"data: ") :].partition(b"\n\n")[0])
        if self._predicts and b'"choices":[]' in body and body.startswith(b"data: {") and body.endswith(b"}\n\n"):
            last = _parsed(body[len(b"data: ") :])
            if (figures := await self._figures(last)) is not None:
                self._add_usage(last, figures)
                return b"data: " + json.dumps(last, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
        if not body.endswith(_END_OF_STREAM) or not self._asked:
            return body
        figures = await self._figures(self._first or {})
        if figures is None or self._first is None:
            return body
        kept = {key: self._first[key] for key in ("id", "object", "created", "model") if key in self._first}
        chunk = json.dumps({**kept, "choices": [], FIGURES: figures}, ensure_ascii=False, separators=(",", ":"))
        return body.removesuffix(_END_OF_STREAM) + b"data: " + chunk.encode() + b"\n\n" + _END_OF_STREAM

    def _add_usage(self, answer: dict[str, Any], figures: dict[str, Any]) -> None:
        """Enter the accepted and the rejected tokens of a prediction as OpenAI's API does."""
        usage = answer.get("usage")
        if not self._predicts or not isinstance(usage, dict):
            return
        drafted, accepted = (figures[f"{what}_by_source"].get("prediction", 0) for what in ("drafted", "accepted"))
        if isinstance(told := usage.get("completion_tokens"), int):
            accepted = min(accepted, told)  # some may lie behind a stop text
        usage["completion_tokens_details"] = {
            **(usage.get("completion_tokens_details") or {}),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }

    async def _figures(self, answer: dict[str, Any]) -> dict[str, Any] | None:
        """Return the figures of the request that this JSON answers; None if there are none."""
        request_id = answer.get("id")
        if not isinstance(request_id, str):
            return None
        sender = presented()
        try:
            return await figures_of(self._engine, request_id, None if sender is None else sender.call)
        except Exception:  # the response is worth more than its figures
            logger.debug("agentspec: no figures of %s", request_id, exc_info=True)
            return None


def set_length(start: Message, body: bytes) -> None:
    """Let the start of a response say how long its body is."""
    length = (b"content-length", str(len(body)).encode())
    start["headers"] = [*(item for item in start["headers"] if item[0] != length[0]), length]


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
