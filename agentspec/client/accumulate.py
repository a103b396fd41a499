"""Chunks of a streamed answer, put together into the completion they make up."""

from __future__ import annotations

from typing import Any

import pydantic
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion_chunk import ChoiceDeltaToolCall

from agentspec.errors import AgentSpecError


class Accumulator:
    """Takes in chunks in constant time each; only the first choice is put together."""

    def __init__(self) -> None:
        self._first: ChatCompletionChunk | None = None
        self._content: list[str] | None = None
        self._refusal: list[str] | None = None
        self._tool_calls: dict[int, _ToolCall] = {}
        self._finish_reason: str | None = None
        self._usage: CompletionUsage | None = None

    def add(self, chunk: ChatCompletionChunk) -> str:
        """Take in one chunk; returns the text that it adds ("" for none)."""
        self._first = self._first or chunk
        self._usage = chunk.usage or self._usage
        text = ""
        for choice in chunk.choices:
            if choice.index != 0:
                continue
            delta = choice.delta
            self._finish_reason = choice.finish_reason or self._finish_reason
            if delta.content is not None:
                text += delta.content
                self._content = self._content or []
                self._content.append(delta.content)
            if delta.refusal is not None:
                self._refusal = self._refusal or []
                self._refusal.append(delta.refusal)
            for part in delta.tool_calls or ():
                self._tool_calls.setdefault(part.index, _ToolCall()).add(part)
        return text

    def completion(self) -> ChatCompletion:
        """The completion so far; AgentSpecError when the stream ended before its end."""
        if self._first is None or self._finish_reason is None:
            raise AgentSpecError("the server ended the stream before the answer was complete; try the call again")
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._content is None else "".join(self._content),
            "refusal": "".join(self._refusal) if self._refusal else None,
        }
        if self._tool_calls:
            message["tool_calls"] = [self._tool_calls[index].read() for index in sorted(self._tool_calls)]
        choice = {"index": 0, "finish_reason": self._finish_reason, "message": message, "logprobs": None}
        fields: dict[str, Any] = {
            **self._first.to_dict(),
            "object": "chat.completion",
            "choices": [choice],
            "usage": self._usage.to_dict() if self._usage else None,
        }
        return ChatCompletion.model_construct(**fields)  # unvalidated, as the OpenAI client reads its answers


class _ToolCall:
    def __init__(self) -> None:
        self._id = ""
        self._name = ""
        self._arguments: list[str] = []

    def add(self, part: ChoiceDeltaToolCall) -> None:
        self._id = part.id or self._id
        if part.function is not None:
            self._name = part.function.name or self._name
            self._arguments.append(part.function.arguments or "")

    def read(self) -> dict[str, Any]:
        function = {"name": self._name, "arguments": "".join(self._arguments)}
        return {"id": self._id, "type": "function", "function": function}


def parse_text(completion: ChatCompletion, model_class: type[Any] | None) -> Any:
    """The streamed text as an instance of `model_class`; None without one, or for tool calls and refusals.

    Raises pydantic.ValidationError when the text does not fit, as the OpenAI client's own `parse` does.
    """
    message = completion.choices[0].message
    if model_class is None or message.refusal or not message.content:
        return None
    return pydantic.TypeAdapter(model_class).validate_json(message.content)
