"""Take OpenAI's Predicted Outputs: a chat completion's ``prediction`` says what its response is expected to be.

    {"messages": [...], "prediction": {"type": "content", "content": "the file as it was"}}

vLLM ignores the field. Here it becomes tokens, and the request, and no other, drafts from them as source
``prediction``. It changes no token of the response. The response's ``usage`` has ``accepted_prediction_tokens`` and
``rejected_prediction_tokens`` (``response_figures``).
"""

import asyncio
import json
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentspec.cache.types import MAX_PREDICTION
from agentspec.errors import InvalidInputError
from agentspec.server_ext.api.session_texts import encode_text
from agentspec.server_ext.vllm_adapter.frontend import engine_of, path_of, predicting, tokenizer_of

_PATH = "/v1/chat/completions"
_FIELD = b'"prediction"'  # text inside of a JSON string has backslashes before the quotes
_LONGEST_TOKEN = 64  # characters that a token has at most, on average over a text that fits


class PredictionMiddleware:
    """Read the predictions of chat completions. An unusable one leads to 400, as with OpenAI."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request. One without a prediction passes unchanged."""
        engine = engine_of(scope["app"]) if scope["type"] == "http" and path_of(scope) == _PATH else None
        if engine is None:
            await self._app(scope, receive, send)
            return
        body, replayed = await _read(receive)
        tokens: list[int] = []
        if _FIELD in body and (tokenizer := tokenizer_of(engine)) is not None:  # without one vLLM answers no chats
            try:
                tokens = await asyncio.to_thread(read_prediction, body, tokenizer)
            except InvalidInputError as error:
                what = {"message": str(error), "type": "BadRequestError", "param": "prediction", "code": 400}
                await JSONResponse({"error": what}, status_code=400)(scope, replayed, send)
                return
        with predicting(tokens):
            await self._app(scope, replayed, send)


def read_prediction(body: bytes, tokenizer: Any) -> list[int]:
    """Return the tokens of the prediction in a request's body; none if there is none, or the body is not JSON.

    tokenizer: the served model's. Raises InvalidInputError, naming the field, for an unusable or too long prediction.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return []  # vLLM says what is wrong
    prediction = request.get("prediction") if isinstance(request, dict) else None
    if prediction is None:
        return []
    text = _text_of(prediction)
    if len(text) <= _LONGEST_TOKEN * MAX_PREDICTION:
        tokens = encode_text(text, tokenizer, "prediction.content")
        if len(tokens) <= MAX_PREDICTION:
            return tokens
    raise InvalidInputError(f"prediction.content: too long; give at most {MAX_PREDICTION} tokens")


def _text_of(prediction: Any) -> str:
    content = prediction.get("content") if isinstance(prediction, dict) else None
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    if not isinstance(content, str) or prediction.get("type", "content") != "content":
        raise InvalidInputError('prediction: give {"type": "content", "content": a text, or text parts}')
    return content


async def _read(receive: Receive) -> tuple[bytes, Receive]:
    """Return a request's body, and what lets the app receive it again."""
    messages: list[Message] = []
    while not messages or (messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False)):
        messages.append(await receive())
    body = b"".join(message.get("body", b"") for message in messages)
    again = iter(messages)

    async def replayed() -> Message:
        message = next(again, None)
        return await receive() if message is None else message

    return body, replayed
