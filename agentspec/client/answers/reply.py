"""Read the server's answers and their speculation counts."""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import openai
import pydantic
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionMessageToolCallUnion
from typing_extensions import TypeVar

from agentspec.client.messages import assistant_message, encodable
from agentspec.draft_figures import DecodeStep, DraftedToken, DraftRates
from agentspec.errors import AgentSpecError
from agentspec.protocol import FIGURES

ParsedT = TypeVar("ParsedT", default=None)


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
    raw: the OpenAI client's object, with everything else. If n > 1, the fields above are those of its first choice, but
    `usage` and `speculation` add up all choices; for a stream, `raw` has the first choice alone.
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
        return "".join(part["text"] for part in content if isinstance(held(part, "text"), str))
    return content if isinstance(content, str) else ""


def held(part: Any, kind: Any) -> Any:
    """Return the value that a content part of this type holds; None if it has another form."""
    return part[kind] if isinstance(part, dict) and part.keys() == {"type", kind} and part["type"] == kind else None
