"""Read chats as vLLM's server does: the tokenizer, and messages as chat templates take them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def tokenizer_of(engine_client: Any) -> Any:
    """Return the served model's tokenizer, or None where vLLM runs without one (``--skip-tokenizer-init``)."""
    try:
        return engine_client.get_tokenizer()
    except ValueError:
        return None


def templated(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return chat messages in the form in which vLLM's server gives them to a chat template.

    Text parts become one text, arguments of tool calls objects, and thoughts have the names of older templates, too.
    """
    return [_templated(dict(message)) for message in messages]


def _templated(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    texts = [part["text"] for part in content if _is_text(part)] if isinstance(content, list) else []
    if content is None or (texts and len(texts) == len(content)):
        message["content"] = "\n".join(texts)
    thoughts = message.get("reasoning", message.get("reasoning_content"))
    if thoughts is not None:
        message["reasoning"] = message["reasoning_content"] = thoughts
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_templated_call(call) for call in calls]
        if not calls:
            del message["tool_calls"]
    return message


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _templated_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, Mapping) else {}}}
