"""Convert chat messages to plain dicts, for the history and for the next request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import pydantic
from openai.types.chat import ChatCompletionMessage

from agentspec.errors import InvalidInputError

T = TypeVar("T")

THOUGHTS = ("reasoning", "reasoning_content", "reasoning_details", "thinking_blocks", "extra_content")
"""Fields in which servers send a reasoning model's thoughts, or a signature of them, in an answer or a tool call of it.

They are read in the next request: by vLLM and SGLang for the chat templates of such models, and by some services that
refuse tool calls without them.
"""
AGENTS_ITEMS, AGENTS_DATA = "agents_items", "agents_data"
"""Fields of a message, and of its tool calls, that openai-agents wants back from its session. Servers get neither."""
_DEEPEST = 200  # most levels of a message, because recursive functions copy and encode it
_MOST_CALLS = 5  # most tool calls that an error names

MessageLike: TypeAlias = Mapping[str, object] | pydantic.BaseModel
"""One chat message: a dict in the API's form, or a pydantic object, such as the OpenAI client's message."""

Content: TypeAlias = str | MessageLike | Sequence[MessageLike]
"""The content of chat(): a string (one user message), one message, or several."""


def as_messages(content: Content) -> list[dict[str, Any]]:
    """Return each message as a plain dict that shares nothing with the caller's objects.

    Raises InvalidInputError if `content` has none of the forms of `Content`.
    """
    if isinstance(content, str):
        return [as_message({"role": "user", "content": content})]
    if isinstance(content, Mapping | pydantic.BaseModel):
        return [as_message(content)]
    if isinstance(content, Sequence) and content:
        return [as_message(item) for item in content]
    raise InvalidInputError(
        f"content: a string, a message or a non-empty list of messages is needed, not {shown(content)}"
    )


def as_message(message: object) -> dict[str, Any]:
    """Return a copy of one message as a plain dict.

    Raises InvalidInputError if it has no role, or a part that no request can carry: text that is not UTF-8, bytes, a
    tool call of the OpenAI client's message without an id.
    """
    if isinstance(message, ChatCompletionMessage):
        return assistant_message(message)
    fields = _fields(message) if isinstance(message, pydantic.BaseModel) else message
    if not isinstance(fields, Mapping) or not isinstance(fields.get("role"), str):
        raise InvalidInputError(
            f"message: a dict or a pydantic object with a 'role' is needed, not {shown(message)};"
            ' content parts go inside one: {"role": "user", "content": [...]}'
        )
    plain = {_plain(str(key)): _plain(value) for key, value in fields.items()}
    calls = plain.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise InvalidInputError(f"tool_calls: a list of calls is needed, each a dict, not {shown(calls)}")
    return plain


def assistant_message(message: ChatCompletionMessage) -> dict[str, Any]:
    """Return the model's message in the form for the next request.

    The message keeps the fields that the API defines for a request, and THOUGHTS. Strict servers reject the others
    (annotations, nulls); the reply's `raw` has them all.
    """
    kept: dict[str, Any] = {"role": "assistant"}
    if message.content is not None:
        kept["content"] = encodable(message.content)
    elif not message.tool_calls and message.function_call is None:  # the API requires the field in this case
        kept["content"] = None if message.refusal else ""
    if message.refusal:
        kept["refusal"] = encodable(message.refusal)
    if message.audio is not None:
        kept["audio"] = {"id": message.audio.id}
    if message.function_call is not None:  # servers send it for the old option `functions`
        call = message.function_call
        kept["function_call"] = {"name": encodable(call.name or ""), "arguments": encodable(call.arguments or "{}")}
    if message.tool_calls:
        kept["tool_calls"] = [_tool_call(call.model_dump(exclude_none=True)) for call in message.tool_calls]
    return kept | _thoughts(message.model_extra or {})


def as_sent(message: Mapping[str, Any], *, thoughts: bool) -> dict[str, Any]:
    """Return a message of the history as a server gets it. thoughts: whether it takes THOUGHTS."""
    left_out = (AGENTS_ITEMS, AGENTS_DATA, *(() if thoughts else THOUGHTS))
    sent = {name: value for name, value in message.items() if name not in left_out}
    if calls := sent.get("tool_calls"):
        sent["tool_calls"] = [{name: value for name, value in call.items() if name not in left_out} for call in calls]
    return sent


def tool_message(tool_call_id: str, content: str | Sequence[Mapping[str, object]]) -> dict[str, Any]:
    """Return a tool's answer to the call with this id. Raises InvalidInputError without an id, or a text or parts."""
    if not isinstance(tool_call_id, str) or not tool_call_id:
        raise InvalidInputError("tool_call_id: the id of one of the reply's tool_calls is needed")
    if not isinstance(content, str | list | tuple):  # a list holds content parts
        raise InvalidInputError(f"content: the tool's answer is needed as text, not {shown(content)}; use json.dumps()")
    return {
        "role": "tool",
        "tool_call_id": tool_call_id,
        "content": encodable(content) if isinstance(content, str) else _plain(content),
    }


def encodable(text: T) -> T:
    """Return a text with surrogate pairs joined, and with single halves of them written out, such as \\udce9.

    Python makes such halves from bytes that are not UTF-8, as in names of files, and some gateways divide a pair
    between two chunks of a stream. No request can carry a half, so a session that held one could never be sent again. A
    value that is not a string stays as it is.
    """
    if not isinstance(text, str):
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return cast(T, joined.encode("utf-8", "backslashreplace").decode())
    return text


def _plain(value: object, depth: int = 0) -> Any:
    """Return a copy of a message's part, as JSON has it. A pydantic object, such as a tool call, becomes a dict.

    depth: how deep the part lies in its message. Raises InvalidInputError for a value that no request and no store can
    carry: the session would lose it, or become unusable.
    """
    if isinstance(value, str):
        check_text("message", value)
        return value
    if value is None or (isinstance(value, int) and _is_written(value)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if depth > _DEEPEST:
        raise InvalidInputError(
            f"message: it is nested deeper than {_DEEPEST} levels, or holds itself; json.dumps() makes a text of data"
        )
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(part, depth + 1) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, depth + 1) for part in value]
    if isinstance(value, pydantic.BaseModel):
        return _plain(_fields(value), depth + 1)
    raise _no_json(value)


def _is_written(number: int) -> bool:
    """Return whether Python writes a whole number: by default it refuses more than 4,300 digits."""
    try:
        str(number)
    except ValueError:
        return False
    return True


def _fields(value: pydantic.BaseModel) -> dict[str, Any]:
    """Return a pydantic object's fields as JSON has them, without those that are None by default.

    Other defaults stay, because a class of messages may give its role, and a class of parts its type, by default.
    """
    try:
        return {
            **value.model_dump(mode="json", exclude_unset=True),
            **value.model_dump(mode="json", exclude_none=True),
        }
    except ValueError as error:  # a field holds something that pydantic cannot write
        raise _no_json(value) from error


def _no_json(value: object) -> InvalidInputError:
    return InvalidInputError(
        f"message: {shown(value)} has no form in JSON; give text, numbers, lists and dicts (an image as a data: URL)"
    )


def check_text(field: str, value: str) -> None:
    """Raise InvalidInputError for a text that no request can carry: the session would become unusable with it."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"{field}: U+{ord(value[error.start]):04X} at position {error.start} of {shown(value)} is half of a"
            " surrogate pair, which UTF-8 cannot carry: read the text with errors='replace'"
        ) from None


def _thoughts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of an answer's fields that are thoughts."""
    return {name: _encodable_parts(fields[name]) for name in THOUGHTS if fields.get(name) is not None}


def _encodable_parts(value: Any) -> Any:
    """Return a copy of a server's value, whose texts are `encodable`, with null for numbers that JSON lacks."""
    if isinstance(value, Mapping):
        return {encodable(name): _encodable_parts(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_encodable_parts(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return encodable(value)


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    kind = str(call.get("type"))
    if not isinstance(call.get(kind), Mapping):  # some servers leave the type out, or have one of their own
        kind = "function"
    body = {
        key: encodable(value) for key, value in (call.get(kind) or {}).items() if key in ("name", "arguments", "input")
    }
    if kind == "function":
        body.setdefault("arguments", "{}")  # some servers send no arguments, but no server takes a call without them
    if not call.get("id"):
        raise InvalidInputError(f"tool_calls: each call needs an id, which its tool message names, not {shown(call)}")
    return {"id": call["id"], "type": kind, kind: body} | _thoughts(call)


def tool_calls_in(messages: Iterable[Mapping[str, Any]]) -> tuple[set[object], dict[object, object]]:
    """Return the ids of all tool calls, and the tools' names by the ids of calls that wait for an answer."""
    known, waiting = set[object](), dict[object, object]()
    for message in messages:
        if message["role"] == "tool":
            waiting.pop(message.get("tool_call_id"), None)
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                body = call.get("function") or call.get("custom")
                waiting[call.get("id")] = body.get("name") if isinstance(body, dict) else None
                known.add(call.get("id"))
    return known, waiting


def shown_calls(waiting: Mapping[object, object]) -> str:
    """Return how an error names tool calls. waiting: the tools' names, by the calls' ids."""
    calls = [shown(call) if name is None else f"{shown(call)} of {shown(name)}" for call, name in waiting.items()]
    more = len(calls) - _MOST_CALLS
    return ", ".join(calls[:_MOST_CALLS]) + (f" and {more} more" if more > 0 else "")


def shown(value: object) -> str:
    """Return a value as an error quotes it, in 80 characters at most."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
