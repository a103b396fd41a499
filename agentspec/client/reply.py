"""A reply: the server's answer, read once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionMessageToolCallUnion
from typing_extensions import TypeVar

from agentspec.client.messages import assistant_message
from agentspec.client.speculation import Speculation
from agentspec.errors import AgentSpecError

ParsedT = TypeVar("ParsedT", default=None)


@dataclass(frozen=True, slots=True)
class Reply(Generic[ParsedT]):
    """The model's answer to one call.

    text: the answer's text; "" when it has none (tool calls, a refusal).
    message: the answer as a history keeps it, ready to be sent back.
    tool_calls: the calls asked for, as the OpenAI client has them (`call.id`, `call.function.name`, ...).
    parsed: an instance of the `response_format` model that was passed, else None.
    usage: token counts; None where the server sends none.
    speculation: what was drafted and accepted; None without the server's extension.
    session: the id of the session that the call was tagged with, if any.
    raw: the OpenAI client's object, with everything else; with n > 1 the fields above are its first choice.
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


def read_reply(
    raw: ChatCompletion,
    *,
    session: str | None = None,
    speculation: Speculation | None = None,
    parsed: Any = None,
) -> Reply[Any]:
    """Read a completion; `parsed` is for streams, whose message has no parsed value of its own.

    Raises AgentSpecError when the server sent no choice at all.
    """
    if not raw.choices:
        raise AgentSpecError(f"the server's answer {raw.id!r} has no choices; its log should say why")
    choice = raw.choices[0]
    message = choice.message
    return Reply(
        text=message.content or "",
        message=assistant_message(message),
        finish_reason=choice.finish_reason,
        tool_calls=tuple(message.tool_calls or ()),
        parsed=parsed if parsed is not None else getattr(message, "parsed", None),
        usage=raw.usage,
        speculation=speculation,
        session=session,
        raw=raw,
    )
