"""Turn texts and messages that a client gives for a session into turns, in the tokens of the model that is served."""

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field

from agentspec.errors import InvalidInputError
from agentspec.server_ext.vllm_adapter.frontend.chats import templated

logger = logging.getLogger("vllm.agentspec")

_NO_HASH = "0" * 16

FormatVersion = Annotated[int, Field(ge=1, le=1)]
"""Version of an import: 1. A `Literal` would also take ``true`` and ``1.0``, which are equal to it."""


class SessionTexts(BaseModel):
    """Hold text that a session is to draft from although it was not said on this server.

    messages: a conversation, as chat completions take it. texts: other texts, such as files.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    version: FormatVersion
    messages: Annotated[list[dict[str, Any]], FailFast()] = []
    texts: Annotated[list[str], FailFast()] = []


def turns_of(given: SessionTexts, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yield a turn, in the form of an export, for the conversation and for each text. Empty texts give none.

    tokenizer: the served model's (`encode`, `apply_chat_template`). A turn is named by its tokens, so one that is given
    again changes nothing. Raises InvalidInputError, naming the field, for a text that cannot be tokenized.
    """
    texts = [("messages", _rendered(given.messages, tokenizer))] if given.messages else []
    texts += [(f"texts.{i}", text) for i, text in enumerate(given.texts)]
    for field, text in texts:
        tokens = encode_text(text, tokenizer, field)
        if tokens:
            name = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
            yield {
                "writer": name,
                "number": 1,
                "kept": 0,
                "parent": _NO_HASH,
                "block": _NO_HASH,
                "prompt": [],
                "response": tokens,
                "created": time.time(),
            }


def encode_text(text: str, tokenizer: Any, field: str) -> list[int]:
    """Return the tokens of a text, without special ones.

    Raises InvalidInputError, naming the field, for half of a surrogate pair: JSON can spell it (``\\ud83d`` alone), but
    no character is made of it, so tokenizers refuse the text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"{field}: half of a surrogate pair (U+{ord(text[error.start]):04X}) at position {error.start}; remove it"
        ) from None
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []


def _rendered(messages: list[dict[str, Any]], tokenizer: Any) -> str:
    """Return a conversation as the model reads it; without a usable chat template, its messages' contents by line."""
    try:
        return str(tokenizer.apply_chat_template(templated(messages), tokenize=False, add_generation_prompt=False))
    except Exception as error:  # a template raises whatever it likes, e.g. for roles that it doesn't know
        logger.debug("agentspec: a session is primed without the chat template: %s", error)
        return "\n".join(_said(message) for message in messages)


def _said(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
