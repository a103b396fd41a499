"""Check response formats, and send a pydantic model's schema where the OpenAI client won't: beside loose tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import openai
import pydantic

from agentspec.client.messages import shown
from agentspec.errors import InvalidInputError


def check_response_format(given: object) -> None:
    """Raise InvalidInputError, which names the option, for a format that the OpenAI client would refuse."""
    if given is None or isinstance(given, Mapping | openai.NotGiven | openai.Omit):
        return
    model = isinstance(given, type) and (issubclass(given, pydantic.BaseModel) or hasattr(given, "__pydantic_config__"))
    if not model:
        raise InvalidInputError(
            f"response_format: a pydantic model or the API's own form, a dict, is needed, not {shown(given)};"
            " for a list, give a model with a field that holds it"
        )


def has_loose_tools(tools: object) -> bool:
    """Return whether a call has tools that aren't strict, beside which the OpenAI client parses no answer."""
    return isinstance(tools, list | tuple) and any(not _is_strict(tool) for tool in tools)


def json_schema_format(model: Any) -> dict[str, Any]:
    """Return a pydantic model as a response format in the API's form."""
    described: Any = model if issubclass(model, pydantic.BaseModel) else pydantic.TypeAdapter(model)
    function: Any = openai.pydantic_function_tool(described, name=model.__name__)["function"]
    schema = {"name": model.__name__, "schema": function["parameters"], "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _is_strict(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and function.get("strict") is True
