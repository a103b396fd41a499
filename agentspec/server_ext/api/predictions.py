"""Take OpenAI's Predicted Outputs: a chat completion's ``prediction`` says what its response is expected to be.

    {"messages": [...], "prediction": {"type": "content", "content": "the file as it was"}}

vLLM ignores the field. Here it becomes tokens, and the request, and no other, drafts from them as source
``prediction``. It changes no token of the response. The response's ``usage`` has ``accepted_prediction_tokens`` and
``rejected_prediction_tokens`` (``response_figures``).
"""

import json
from typing import Any

from agentspec.errors import InvalidInputError
from agentspec.protocol import MAX_PREDICTION
from agentspec.server_ext.api.session_texts import encode_text

_LONGEST_TOKEN = 64  # characters that a token has at most, on average over a text that fits


def read_prediction(body: bytes, tokenizer: Any) -> list[int]:
    """Return the tokens of the prediction in a request's body; [] if it has no prediction or is not JSON.

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
