"""Make an AsyncSession a session of openai-agents, which keeps items of the Responses API.

The session itself keeps chat messages, so that `chat()` and a Runner can take turns in it.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from agentspec.client.messages import AGENTS_DATA, AGENTS_ITEMS, encodable, tool_message
from agentspec.errors import InvalidInputError

_DROPPED = frozenset({"compaction"})
"""Types of items that are left out, because they say nothing to another model."""
_ANSWER = {"type": "message", "id": "__fake_id__", "role": "assistant", "status": "completed"}
"""Item of an answer's text, in the form to which a Runner joins the thoughts before and the calls behind it. The id is
openai-agents' own."""
_TEXTS = frozenset({"input_text", "output_text", "text", "refusal"})
"""Types of parts that become text parts of a chat message."""
_SAME_IN_BOTH = frozenset({"input_audio", "video_url"})
_FILE_FIELDS = ("file_data", "file_id", "filename")


class AgentsSession:
    """Implement the protocol `agents.Session`."""

    session_settings: Any = None
    """The Runner's settings for this session, an `agents.SessionSettings`."""

    # AsyncSession defines these:
    _conversation: Any
    load: Callable[[], Awaitable[None]]
    clear: Callable[[], Awaitable[None]]
    _add: Callable[[list[dict[str, Any]]], None]
    _confirm: Callable[[], Awaitable[None]]
    _wait_to_end: Callable[..., Awaitable[Any]]

    @property
    def session_id(self) -> str:
        """Return the session's id."""
        name: str = self._conversation.id
        return name

    async def get_items(self, limit: int | None = None) -> list[Any]:
        """Return the history as items, oldest first; the latest `limit` of them."""
        await self.load()
        items = [item for message in self._conversation.messages() for item in items_of(message)]
        limit = limit if limit is not None else getattr(self.session_settings, "limit", None)
        return items if limit is None else items[max(0, len(items) - limit) :]

    async def add_items(self, items: list[Any]) -> None:
        """Append items. Raises InvalidInputError for types that chat completions don't have."""
        messages = messages_of(items)
        await self.load()
        self._add(messages)
        await self._confirm()

    async def pop_item(self) -> Any | None:
        """Take back the latest item and return it; None if there is none. Thoughts go with the message behind them.

        No process reads the item again, but its text stays in the store until the session is cleared. Raises
        StoreError, or SessionConflictError if another client wrote to the session; the item is still there then. If
        the connection breaks at this moment, the item may be gone from the store but not from here: the next call then
        raises SessionConflictError, and `reload()` reads what is stored.
        """
        await self.load()
        changed = await self._wait_to_end(self._conversation.change_last, _without_last_item)
        return None if changed is None else items_of(changed)[-1]

    async def clear_session(self) -> None:
        """Erase all items, on the server too."""
        await self.clear()


def _without_last_item(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a message without its last item; an empty list if that was all."""
    calls = message.get("tool_calls") or ()
    if len(calls) > 1:  # items lack some of a message's fields, such as its thoughts
        return [{**message, "tool_calls": calls[:-1]}]
    return messages_of(items_of(message)[:-1])


def items_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a chat message as items: one at least, and one for each tool call.

    Raises InvalidInputError for a message, or a part of one, that a Runner would not send to chat completions again.
    """
    role = message["role"]
    for name in ("audio", "function_call"):
        if message.get(name):
            raise _no_item(f"an answer's {name!r}")
    if role == "function":
        raise _no_item("a message of the role 'function'")
    if role == "tool":
        output = _item_content(message["content"])
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": output}]
    thoughts = copy.deepcopy(message.get(AGENTS_ITEMS) or [])
    calls = [_item_call(call) for call in message.get("tool_calls") or ()]
    content = message.get("content") or message.get("refusal") or ""
    if calls and not content:
        return [*thoughts, *calls]
    content = _item_content(content)
    if not calls and not thoughts:
        return [{"role": role, "content": content}]
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return [*thoughts, {**_ANSWER, "content": [{"type": "output_text", "text": text, "annotations": []}]}, *calls]


def messages_of(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Return items as chat messages. Calls in a row are one message, with the assistant's text before them if any.

    A model's thoughts stay items of the message behind them. Raises InvalidInputError for other items, and parts of
    content, that have no form in chat completions.
    """
    messages: list[dict[str, Any]] = []
    thoughts: list[Any] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item["role"], "content": _content(item["content"])})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if data := item.get("provider_data"):
                call[AGENTS_DATA] = copy.deepcopy(data)
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "reasoning":
            thoughts.append(copy.deepcopy(item))
            continue
        elif kind == "function_call_output":
            messages.append(tool_message(item["call_id"], _content(item["output"])))
        elif kind not in _DROPPED:
            raise InvalidInputError(
                f"items: {kind!r} has no form in chat completions; messages and function calls can be kept"
            )
        if thoughts and messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault(AGENTS_ITEMS, []).extend(thoughts)
        thoughts = []
    return [_encodable(message) for message in messages]


def _encodable(value: Any) -> Any:
    """Return a part of a message with texts that a request can carry (`encodable`)."""
    if isinstance(value, dict):
        return {name: _encodable(part) for name, part in value.items()}
    return [_encodable(part) for part in value] if isinstance(value, list) else encodable(value)


def _content(content: Any) -> Any:
    """Return an item's content as a message's: a string if all parts are text."""
    if isinstance(content, str):
        return content
    parts = [_chat_part(part) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _chat_part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    if kind in _TEXTS:
        return {"type": "text", "text": part.get("text") or part.get("refusal") or ""}
    if kind == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part.get("detail", "auto")}}
    if kind == "input_file" and not part.get("file_url"):
        return {"type": "file", "file": {name: part[name] for name in _FILE_FIELDS if part.get(name)}}
    if kind in _SAME_IN_BOTH:
        return dict(part)
    raise InvalidInputError(
        f"items: content {kind!r} has no form in chat completions; text, image URLs, audio, and files by content or id"
        " can be kept"
    )


def _item_content(content: Any) -> Any:
    """Return a message's content as an item's."""
    return content if isinstance(content, str) else [_item_part(part) for part in content]


def _item_part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    if kind == "image_url":
        return {
            "type": "input_image",
            "image_url": part["image_url"]["url"],
            "detail": part["image_url"].get("detail", "auto"),
        }
    if kind == "file":
        return {"type": "input_file", **part["file"]}
    if kind in _SAME_IN_BOTH:
        return dict(part)
    if kind in ("text", "refusal"):
        return {"type": "input_text", "text": part.get("text") or part.get("refusal") or ""}
    raise _no_item(f"content {kind!r}")


def _item_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if function is None:
        raise _no_item(f"a tool call of the type {call.get('type')!r}")
    name, arguments = function["name"], function["arguments"]
    data = {"provider_data": copy.deepcopy(call[AGENTS_DATA])} if AGENTS_DATA in call else {}
    return {"type": "function_call", "call_id": call["id"], "name": name, "arguments": arguments, **data}


def _no_item(what: str) -> InvalidInputError:
    return InvalidInputError(
        f"items: the session has {what}, which openai-agents doesn't send to chat completions; go on with chat(), or in"
        " another session"
    )
