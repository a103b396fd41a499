"""Read two sources of drafts from a request's body: its prediction, and the texts that its response may quote."""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import numpy as np
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentspec.errors import InvalidInputError
from agentspec.server_ext.api.predictions import read_prediction
from agentspec.server_ext.api.quotes import Quotes, may_quote
from agentspec.server_ext.identity.callers import NOBODY, shows_admin_key
from agentspec.server_ext.settings import load_settings
from agentspec.server_ext.step import Int32
from agentspec.server_ext.vllm_adapter.frontend.chats import tokenizer_of
from agentspec.server_ext.vllm_adapter.frontend.engine_calls import engine_of, tagger_of
from agentspec.server_ext.vllm_adapter.frontend.senders import drafting_from, path_of, presented

logger = logging.getLogger("vllm.agentspec")

_CHAT = "/v1/chat/completions"
_QUOTING = (_CHAT, "/v1/responses", "/v1/messages")
_PREDICTION = b'"prediction"'  # text inside of a JSON string has backslashes before the quotes
_NOTHING: tuple[Sequence[int], Int32] = ((), np.zeros(0, np.int32))


class BodyMiddleware:
    """Read the bodies of chats. Answers 400 to an unusable prediction, as OpenAI does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._failed = False
        # One thread, as vLLM has for its prompts. More would wait for the tokenizer, and take threads from others.
        self._thread = ThreadPoolExecutor(1, "agentspec-bodies")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request. One without a prediction and without anything to quote passes unchanged."""
        engine = engine_of(scope["app"]) if scope["type"] == "http" and path_of(scope) in _QUOTING else None
        if engine is None:
            await self._app(scope, receive, send)
            return
        body, replayed = await _read(receive)
        predicts = _PREDICTION in body and path_of(scope) == _CHAT
        given = _NOTHING
        if predicts or may_quote(body):
            try:
                state, loop = scope["app"].state, asyncio.get_running_loop()
                run = copy_context().run
                given = await loop.run_in_executor(self._thread, run, self._drafts_from, state, engine, body, predicts)
            except InvalidInputError as error:
                what = {"message": str(error), "type": "BadRequestError", "param": "prediction", "code": 400}
                await JSONResponse({"error": what}, status_code=400)(scope, replayed, send)
                return
        del body  # the app has its own copy, and its answer may take minutes
        with drafting_from(*given):
            await self._app(scope, replayed, send)

    def _drafts_from(self, state: Any, engine: Any, body: bytes, predicts: bool) -> tuple[Sequence[int], Int32]:
        """Return the tokens of the prediction in a body; if there are none, the tokens that the response may quote.

        state: the app's, which holds what is remembered. Raises InvalidInputError for an unusable prediction.
        """
        tokenizer = tokenizer_of(engine)
        if tokenizer is None:  # vLLM answers no chats then
            return _NOTHING
        known = engine.vllm_config.model_config.get_vocab_size()  # a tokenizer may have more: placeholders of images
        quotes: Quotes | None = getattr(state, "agentspec_quotes", None)
        if quotes is None:
            settings = load_settings(engine.vllm_config.additional_config)
            quotes = Quotes(tokenizer, settings.quote_tokens if settings.enabled else 0)
            state.agentspec_quotes = quotes
        try:
            if predicts and (prediction := read_prediction(body, tokenizer)):
                return [token for token in prediction if token < known], _NOTHING[1]
            quotable = quotes.read(body, _owner(engine))
            return (), quotable[quotable < known]
        except InvalidInputError:
            raise
        except Exception:  # a tokenizer may raise anything, and vLLM may answer all the same
            if not self._failed:
                self._failed = True
                what = "predictions or what responses may quote cannot be read"
                logger.exception("agentspec: %s; such requests draft without it", what)
            return _NOTHING


def forget_quotable(state: Any, engine: Any) -> None:
    """Forget the texts remembered of the caller of this request; those of all callers, if it is the administrator."""
    quotes: Quotes | None = getattr(state, "agentspec_quotes", None)
    if quotes is None:
        return
    if shows_admin_key(presented()):
        quotes.forget_all()
    elif (owner := _owner(engine)) is not None:
        quotes.forget(owner)


def _owner(engine: Any) -> str | None:
    """Return the principal of the caller; "" where all callers are one, None where it is not known."""
    principal = tagger_of(engine).callers.caller_of(presented()).principal
    return None if principal == NOBODY else principal or ""


async def _read(receive: Receive) -> tuple[bytes, Receive]:
    """Return a request's body, and a function with which the app receives it again."""
    messages = deque[Message]()
    while not messages or (messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False)):
        messages.append(await receive())
    body = b"".join(message.get("body", b"") for message in messages)

    async def replayed() -> Message:
        return messages.popleft() if messages else await receive()

    return body, replayed
