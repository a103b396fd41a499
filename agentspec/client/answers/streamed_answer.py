"""Put the chunks of a streamed answer together. Does no network I/O."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pydantic
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agentspec.client.answers.reply import content_text, held
from agentspec.errors import AgentSpecError
from agentspec.protocol import FIGURES


class StreamedAnswer:
    """Assemble the chunks of a stream into a completion, with the first choice only.

    The OpenAI client's own class concatenates roles, ids and names, which some servers repeat in every chunk, and
    copies the whole message at each chunk.
    """

    def __init__(self) -> None:
        self._first: ChatCompletionChunk | None = None
        self._contents: list[Any] = []  # texts; from some servers lists of parts
        self._texts: dict[str, list[str]] = {}  # "refusal" and fields that some servers add, "reasoning" say
        self._lists: dict[str, list[Any]] = {}  # likewise, "reasoning_details" say
        self._others: dict[str, Any] = {}  # likewise, "extra_content" say; the latest value
        self._audio: list[Mapping[str, Any]] = []
        self._logprobs: dict[str, list[Any]] = {}
        self._tool_calls: list[_StreamedCall] = []
        self._call_at: dict[int, _StreamedCall] = {}  # by index: the tool call that further chunks continue
        self._function_call: list[Any] = []  # parts of a call that the old option `functions` allows
        self._finish_reason: str | None = None
        self._usage: CompletionUsage | None = None
        self._figures: Any = None
        self._token_ids: list[int] = []

    def add(self, event: Any) -> str:
        """Add a chunk, or an event that holds one, and return its text."""
        chunk = event if isinstance(event, ChatCompletionChunk) else getattr(event, "chunk", None)
        if chunk is None:
            return ""
        self._first = self._first or chunk
        self._usage = chunk.usage or self._usage
        self._figures = (chunk.model_extra or {}).get(FIGURES) or self._figures
        added = ""
        for choice in chunk.choices or ():  # some servers send null, and leave out the index of a single choice
            if choice is None or choice.index:
                continue
            self._finish_reason = choice.finish_reason or self._finish_reason
            if choice.delta is not None:
                added += content_text(choice.delta.content)
                self._token_ids += (choice.model_extra or {}).get("token_ids") or ()
                self._add_delta(choice.delta)
                for name in ("content", "refusal"):
                    if found := getattr(choice.logprobs, name, None):
                        self._logprobs.setdefault(name, []).extend(part.to_dict() for part in found)
        return added

    def _add_delta(self, delta: Any) -> None:
        if delta.content is not None:
            self._contents.append(delta.content)
        if audio := _fields_of(delta, "audio"):
            self._audio.append(audio)
        for name, value in (("refusal", delta.refusal), *(delta.model_extra or {}).items()):
            if isinstance(value, str):
                self._texts.setdefault(name, []).append(value)
            elif isinstance(value, list):
                self._lists.setdefault(name, []).extend(value)
            elif value is not None:
                self._others[name] = value
        if delta.function_call is not None:
            self._function_call.append(delta.function_call)
        for part in delta.tool_calls or ():
            call = self._call_at.get(part.index)
            if call is None or (part.id and call.id not in ("", part.id)):  # some servers give all calls index 0
                call = self._call_at[part.index] = _StreamedCall(part.index)
                self._tool_calls.append(call)
            call.add(part)

    def completion(self) -> ChatCompletion:
        """Return the completion. Raises AgentSpecError if the stream ended too early."""
        if self._first is None:
            raise AgentSpecError(
                "the server's answer is no stream of a chat completion, or ended before it began: try the call again,"
                " or give the address of an OpenAI-compatible API as base_url, such as http://localhost:8000/v1"
            )
        if self._finish_reason is None:
            raise AgentSpecError("the server ended the stream before the answer was complete; try the call again")
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": self._finish_reason,
            "message": self._message(),
            "logprobs": {"content": None, "refusal": None, **self._logprobs} if self._logprobs else None,
        }
        if self._token_ids:
            choice["token_ids"] = self._token_ids
        fields: dict[str, Any] = {
            **self._first.to_dict(warnings=False),  # pydantic warns of parts in the place of OpenAI's text
            "object": "chat.completion",
            "choices": [choice],
            "usage": self._usage.to_dict() if self._usage else None,
            FIGURES: self._figures,
        }
        return ChatCompletion.model_construct(**fields)  # construct without validation, as the OpenAI client does

    def _message(self) -> dict[str, Any]:
        texts = {name: "".join(parts) for name, parts in self._texts.items()}
        message: dict[str, Any] = {
            **self._others,
            **{name: _joined_blocks(pieces) for name, pieces in self._lists.items()},
            **texts,
            "content": _joined_content(self._contents),
            "role": "assistant",
            "refusal": texts.get("refusal") or None,
        }
        if self._audio:
            message["audio"] = _joined_audio(self._audio)
        if self._tool_calls:
            message["tool_calls"] = [
                call.whole() for call in sorted(self._tool_calls, key=lambda call: call.index or 0)
            ]
        if self._function_call:
            message["function_call"] = {
                "name": next((part.name for part in self._function_call if part.name), ""),
                "arguments": "".join(part.arguments or "" for part in self._function_call),
            }
        return message


@dataclass(slots=True)
class _StreamedCall:
    """Hold what has come of a tool call. others: fields that some servers add, "extra_content" say."""

    index: int
    id: str = ""
    kind: str = "function"
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    others: dict[str, Any] = field(default_factory=dict)

    def add(self, part: Any) -> None:
        """Add a chunk's part of the call."""
        self.id = part.id or self.id
        self.others |= {name: value for name, value in (part.model_extra or {}).items() if value is not None}
        self.others.pop("custom", None)
        if custom := _fields_of(part, "custom"):  # a tool whose input is free text
            self.kind = "custom"
            self._add_text(custom.get("name"), custom.get("input"))
        if part.function is not None:
            self._add_text(part.function.name, part.function.arguments)

    def _add_text(self, name: str | None, given: Any) -> None:
        self.name = name or self.name
        self.pieces.append(given if isinstance(given, str) else json.dumps(given) if given else "")

    def whole(self) -> dict[str, Any]:
        """Return the call, as answers that are not streamed have it."""
        text = "input" if self.kind == "custom" else "arguments"
        body = {"name": self.name, text: "".join(self.pieces)}
        return {"id": self.id, "type": self.kind, self.kind: body, **self.others}


def _fields_of(part: Any, name: str) -> Mapping[str, Any]:
    """Return the fields of an object within a chunk's part, which older OpenAI clients have as a dict; {} if none."""
    found = getattr(part, name, None)
    if isinstance(found, pydantic.BaseModel):
        found = found.model_dump(exclude_none=True)
    return found if isinstance(found, Mapping) else {}


def _joined_content(pieces: Sequence[Any]) -> Any:
    """Return a streamed message's content: a text, or a list of parts if a piece has parts; None without pieces."""
    if all(isinstance(piece, str) for piece in pieces):
        return "".join(pieces) if pieces else None
    parts = [[{"type": "text", "text": piece}] if isinstance(piece, str) else piece for piece in pieces]
    return _joined_parts(list(itertools.chain.from_iterable(part for part in parts if isinstance(part, list))))


def _joined_parts(parts: list[Any]) -> list[Any]:
    """Return parts with neighbours of one type joined into one part, in the form {"type": "text", "text": …}."""
    joined: list[Any] = []
    for kind, group in itertools.groupby(parts, lambda part: part.get("type") if isinstance(part, dict) else None):
        pieces = list(group)
        values = [held(piece, kind) for piece in pieces]
        if all(isinstance(value, str) for value in values):
            joined.append({"type": kind, kind: "".join(values)})
        elif all(isinstance(value, list) for value in values):
            joined.append({"type": kind, kind: _joined_parts(list(itertools.chain.from_iterable(values)))})
        else:
            joined += pieces
    return joined


def _joined_blocks(pieces: Sequence[Any]) -> list[Any]:
    """Return blocks, such as OpenRouter's `reasoning_details`, whose pieces have one `index` and `type`.

    Blocks without an index are whole, but for LiteLLM's of type "thinking", which end with a signature. That holds for
    the whole block only, so servers refuse its pieces.
    """
    blocks: list[Any] = []
    for piece in pieces:
        last: Any = blocks[-1] if blocks else None
        if _continues(piece, last):
            texts = {
                name: last[name] + piece[name]
                for name in ("text", "summary", "data", "thinking")
                if isinstance(last.get(name), str) and isinstance(piece.get(name), str)
            }
            last.update({name: value for name, value in piece.items() if value is not None} | texts)
        else:
            blocks.append(dict(piece) if isinstance(piece, Mapping) else piece)
    return blocks


def _continues(piece: Any, block: Any) -> bool:
    if not (isinstance(piece, Mapping) and isinstance(block, Mapping)):
        return False
    if any(piece.get(name) != block.get(name) for name in ("index", "type")):
        return False
    return piece.get("index") is not None or (piece.get("type") == "thinking" and not block.get("signature"))


def _joined_audio(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return an answer's sound: the pieces of its data, each in base64, and of its transcript together."""
    audio = {name: value for piece in pieces for name, value in piece.items() if value is not None}
    data = [piece["data"] for piece in pieces if isinstance(piece.get("data"), str)]
    try:
        audio["data"] = base64.b64encode(b"".join(map(base64.b64decode, data))).decode()
    except ValueError:  # the server divides the text, not the sound
        audio["data"] = "".join(data)
    audio["transcript"] = "".join(piece.get("transcript") or "" for piece in pieces)
    return audio
