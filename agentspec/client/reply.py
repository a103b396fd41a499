"""Read the server's answers, streamed ones included, and their speculation counts."""

from __future__ import annotations

import itertools
import json
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import openai
import pydantic
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageToolCallUnion
from typing_extensions import TypeVar

from agentspec.client.messages import assistant_message, encodable
from agentspec.draft_figures import DecodeStep, DraftedToken, DraftRates
from agentspec.errors import AgentSpecError

ParsedT = TypeVar("ParsedT", default=None)

FIGURES = "agentspec"
"""Field of a response, or of a stream's last chunk, that has the extension's figures."""


@dataclass(frozen=True, slots=True)
class Speculation(DraftRates):
    """Count what was drafted and accepted for one request. All counts are tokens, except `steps` and `drafts`.

    drafted: tokens that were drafted and verified. accepted: drafted tokens that were accepted.
    steps: decode steps of the target model. drafts: steps that verified a draft. tokens: length of the reply.
    accepted_by_source, drafted_by_source: the totals by the source of the token: "request", "session", "group",
        "global", "public" (the operator's corpus), "sibling" (a request of the same group or session that runs at the
        same time), "prediction" (the text that the call predicted), "quote" (a text of the prompt, spelled as answers
        spell it) or "model" (a draft model).
    detail: the decode steps of the reply, for a client with `speculation="detailed"`; otherwise empty.
    """

    drafted: int
    accepted: int
    steps: int
    drafts: int
    tokens: int
    accepted_by_source: dict[str, int]
    drafted_by_source: dict[str, int]
    detail: tuple[DecodeStep, ...] = ()

    @property
    def mean_acceptance_length(self) -> float:
        """Return the mean tokens of a step with a draft, as vLLM counts them: 1 + accepted / drafts."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0


_COUNTS = ("drafted", "accepted", "steps", "drafts", "tokens")


def read_speculation(answer: object) -> Speculation | None:
    """Read the extension's counts of one request. Returns None for anything else, so that no reply is lost."""
    if not isinstance(answer, Mapping):
        return None
    try:
        return Speculation(
            **{name: int(answer[name]) for name in _COUNTS},
            accepted_by_source=_by_source(answer.get("accepted_by_source")),
            drafted_by_source=_by_source(answer.get("drafted_by_source")),
            detail=tuple(_read_step(step) for step in answer.get("detail") or ()),
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def total_speculation(parts: Sequence[Speculation]) -> Speculation:
    """Return the sum of several requests' figures, without their steps."""
    sums = {name: sum(getattr(part, name) for part in parts) for name in _COUNTS}
    return Speculation(
        **sums,
        accepted_by_source=_total(part.accepted_by_source for part in parts),
        drafted_by_source=_total(part.drafted_by_source for part in parts),
    )


def _total(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for part in parts:
        total.update(part)
    return dict(total)


def _read_step(step: Any) -> DecodeStep:
    tokens = itertools.zip_longest(step["tokens"], step["sources"])
    rejected = zip(step["rejected"], step["rejected_sources"], strict=True)
    return DecodeStep(tuple(itertools.starmap(DraftedToken, tokens)), tuple(itertools.starmap(DraftedToken, rejected)))


def _by_source(value: Any) -> dict[str, int]:
    return {str(source): int(count) for source, count in (value or {}).items()}


@dataclass(frozen=True, slots=True)
class Reply(Generic[ParsedT]):
    """Hold the model's answer to one call.

    text: the answer's text; "" if it has none (tool calls, a refusal). If a server sends parts, their texts are joined.
    message: the answer as a message of the history, ready for the next request.
    tool_calls: the OpenAI client's objects (`call.id`, `call.function.name`, ...).
    parsed: an instance of the `response_format` model that was passed, else None.
    usage: token counts; None if the server sends none.
    speculation: what was drafted and accepted; None from a server without the extension.
    session: the id of the session that the call was tagged with, if any.
    raw: the OpenAI client's object, with everything else. If n > 1, the fields above are those of its first choice; for
    a stream, `raw` has this choice alone.
    """

    text: str
    message: dict[str, Any]
    finish_reason: str | None
    tool_calls: tuple[ChatCompletionMessageToolCallUnion, ...]
    parsed: ParsedT | None
    usage: CompletionUsage | None
    speculation: Speculation | None
    session: str | None
    raw: ChatCompletion


def read_reply(raw: ChatCompletion, session: str | None, model_class: type[Any] | None) -> Reply[Any]:
    """Read a completion. If `model_class` is given and the answer calls no tool, parse its text as an instance.

    Raises AgentSpecError if the server sent no choice, pydantic.ValidationError if the text does not fit, and
    openai.LengthFinishReasonError if it was cut.
    """
    if not isinstance(raw, ChatCompletion):  # the OpenAI client returns an answer that is not a JSON object as it is
        raise AgentSpecError(
            "the server's answer is no chat completion: give the address of an OpenAI-compatible API as base_url, such"
            " as http://localhost:8000/v1"
        )
    if not raw.choices:
        error = (raw.model_extra or {}).get("error")  # some gateways send errors with status 200
        why = f": {error}" if error else "; its log should say why"
        raise AgentSpecError(f"the server's answer {raw.id!r} has no choices{why}")
    choice = raw.choices[0]
    message = getattr(choice, "message", None)
    if message is None:
        raise AgentSpecError(f"the server's answer {raw.id!r} has no message; its log should say why")
    ids = set[str]()
    for call in message.tool_calls or ():
        if not getattr(call, "id", None) or call.id in ids:  # some servers send no ids, or the tool's name as each id
            call.id = f"call-{uuid.uuid4().hex}"  # the tool's answer needs one of its own
        ids.add(call.id)
    parsed = getattr(message, "parsed", None)  # a streamed message has none
    text = content_text(message.content)
    if parsed is None and model_class is not None and text and not (message.refusal or message.tool_calls):
        if choice.finish_reason == "length":
            raise openai.LengthFinishReasonError(completion=raw)
        parsed = pydantic.TypeAdapter(model_class).validate_json(text)
    return Reply(
        text=encodable(text),
        message=assistant_message(message),
        finish_reason=choice.finish_reason,
        tool_calls=tuple(message.tool_calls or ()),
        parsed=parsed,
        usage=raw.usage,
        speculation=read_speculation((raw.model_extra or {}).get(FIGURES)),
        session=session,
        raw=raw,
    )


def content_text(content: object) -> str:
    """Return a content's text: the joined text parts if a server sends parts, as Mistral's API does with reasoning."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(_held(part, "text"), str))
    return content if isinstance(content, str) else ""


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
        values = [_held(piece, kind) for piece in pieces]
        if all(isinstance(value, str) for value in values):
            joined.append({"type": kind, kind: "".join(values)})
        elif all(isinstance(value, list) for value in values):
            joined.append({"type": kind, kind: _joined_parts(list(itertools.chain.from_iterable(values)))})
        else:
            joined += pieces
    return joined


def _held(part: Any, kind: Any) -> Any:
    """Return the value that a part of this type holds; None if it has another form."""
    return part[kind] if isinstance(part, dict) and part.keys() == {"type", kind} and part["type"] == kind else None


class StreamedAnswer:
    """Assemble the chunks of a stream into a completion, with the first choice only.

    The OpenAI client's own class concatenates roles, ids and names, which some servers repeat in every chunk, and
    copies the whole message at each chunk.
    """

    def __init__(self) -> None:
        self._first: ChatCompletionChunk | None = None
        self._contents: list[Any] = []  # texts; from some servers lists of parts
        self._texts: dict[str, list[str]] = {}  # "refusal" and fields that some servers add, "reasoning" say
        self._logprobs: dict[str, list[Any]] = {}
        self._tool_calls: list[dict[str, Any]] = []
        self._call_at: dict[int, dict[str, Any]] = {}  # by index: the tool call that further chunks continue
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
        for name, text in (("refusal", delta.refusal), *(delta.model_extra or {}).items()):
            if isinstance(text, str):
                self._texts.setdefault(name, []).append(text)
        if delta.function_call is not None:
            self._function_call.append(delta.function_call)
        for part in delta.tool_calls or ():
            call = self._call_at.get(part.index)
            if call is None or (part.id and call["id"] not in ("", part.id)):  # some servers give all calls index 0
                call = self._call_at[part.index] = {"id": "", "name": "", "arguments": [], "index": part.index}
                self._tool_calls.append(call)
            call["id"] = part.id or call["id"]
            if part.function is not None:
                call["name"] = part.function.name or call["name"]
                given = part.function.arguments or ""  # some servers send an object
                call["arguments"].append(given if isinstance(given, str) else json.dumps(given))

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
            **texts,
            "content": _joined_content(self._contents),
            "role": "assistant",
            "refusal": texts.get("refusal") or None,
        }
        if self._tool_calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": "".join(call["arguments"])},
                }
                for call in sorted(self._tool_calls, key=lambda call: call["index"] or 0)
            ]
        if self._function_call:
            message["function_call"] = {
                "name": next((part.name for part in self._function_call if part.name), ""),
                "arguments": "".join(part.arguments or "" for part in self._function_call),
            }
        return message
