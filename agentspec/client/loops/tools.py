"""Describe Python functions to the model as tools, and call them as the model asks."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import pydantic
import pydantic_core
from openai.types.chat import ChatCompletionMessageToolCallUnion

from agentspec.client.messages import encodable, shown
from agentspec.errors import InvalidInputError

Tool: TypeAlias = Callable[..., object]
"""A function that the model may call. In an asyncio loop it may be asynchronous."""


class ToolRun(NamedTuple):
    """Hold one tool call: its id, the tool's name, its arguments as the model wrote them, and the answer that it got.

    error: the error that the tool raised, or that kept it from being called; `answer` then tells the model.
    """

    id: str
    tool: str
    arguments: str
    answer: str
    error: Exception | None = None


class ToolBox:
    """Hold tools by name. Raises InvalidInputError for functions that cannot be described."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools: dict[str, Tool] = {}
        self._models: dict[str, type[pydantic.BaseModel]] = {}
        self._schemas: dict[str, dict[str, Any]] = {}
        if not isinstance(tools, Iterable):
            raise InvalidInputError(f"tools: a list of functions is needed, not {shown(tools)}")
        for tool in tools:
            name = getattr(tool, "__name__", None)
            if not callable(tool) or not name or name == "<lambda>" or name in self._tools:
                raise InvalidInputError(f"tools: functions with names of their own are needed, not {tool!r}")
            self._tools[name] = tool
            self._models[name], self._schemas[name] = _parameters(name, tool)
        if not self._tools:
            raise InvalidInputError("tools: at least one function is needed; chat() calls the model without")

    def described(self) -> list[dict[str, Any]]:
        """Return the tools in the API's form."""
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": inspect.getdoc(tool) or "",
                    "parameters": self._schemas[name],
                },
            }
            for name, tool in self._tools.items()
        ]

    def prepare(self, call: ChatCompletionMessageToolCallUnion) -> Callable[[], object]:
        """Return the call as a function without arguments, asynchronous if the tool is.

        Raises InvalidInputError for an unknown tool, and pydantic.ValidationError for arguments that do not fit.
        """
        name, arguments = named(call)
        if getattr(call, "function", None) is None or name not in self._tools:
            raise InvalidInputError(f"no tool {name!r}; there are: {', '.join(self._tools)}")
        tool, checked = self._tools[name], self._models[name].model_validate_json(arguments or "{}")
        fields = type(checked).model_fields
        values = {str(fields[key].alias): getattr(checked, key) for key in checked.model_fields_set}
        return functools.partial(tool, **values)


def named(call: ChatCompletionMessageToolCallUnion) -> tuple[str, str]:
    """Return the tool's name and its arguments, as the model wrote them. Some servers leave out the type of a call."""
    function = getattr(call, "function", None)
    if function is not None:
        given: Any = function.arguments or "{}"
        return function.name, given if isinstance(given, str) else json.dumps(given)  # some servers send an object
    custom = getattr(call, "custom", None)
    return ("", "") if custom is None else (custom.name, custom.input)


def answer_text(value: object) -> str:
    """Return a tool's result as text: strings as they are, everything else as JSON."""
    if isinstance(value, str):
        return encodable(value)
    try:
        return pydantic_core.to_json(value, fallback=str).decode()
    except pydantic_core.PydanticSerializationError:  # half of a surrogate pair, as in a file's name
        plain = pydantic_core.to_jsonable_python(value, fallback=str, inf_nan_mode="null")
        return encodable(json.dumps(plain, ensure_ascii=False))


def _parameters(name: str, tool: Tool) -> tuple[type[pydantic.BaseModel], dict[str, Any]]:
    """Return a model of a function's parameters, and its JSON schema.

    The model's fields have made-up names, because a pydantic field may not have the name of a model's method, nor begin
    with "_". Raises InvalidInputError if the parameters cannot be described or given by name.
    """
    fields: dict[str, Any] = {}
    try:
        signature = inspect.signature(tool, eval_str=True)
    except Exception as error:  # C functions may have no signature; annotations in quotes may raise anything when read
        raise InvalidInputError(f"tools: {name}: its parameters cannot be described: {error}") from error
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InvalidInputError(f"tools: {name}({parameter}): each parameter needs a name of its own")
        kind = Any if parameter.annotation is parameter.empty else parameter.annotation
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[f"p{len(fields)}"] = (kind, pydantic.Field(default, alias=parameter.name))
    try:
        model = pydantic.create_model(name, __config__=pydantic.ConfigDict(extra="forbid"), **fields)
        return model, model.model_json_schema()
    except (pydantic.errors.PydanticUserError, NameError) as error:
        raise InvalidInputError(f"tools: {name}: its parameters cannot be described: {error}") from error
