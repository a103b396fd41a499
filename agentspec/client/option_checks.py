"""Refuse options that cannot work, by name: errors of the OpenAI client and the HTTP client don't name the option."""

from __future__ import annotations

import datetime
import functools
import inspect
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import openai
import pydantic

from agentspec.client.messages import shown
from agentspec.errors import InvalidInputError

_HEADER_NAME = re.compile(r"[-!#$%&'*+.^_`|~0-9A-Za-z]+")
_HEADER_VALUE = re.compile(r"[!-~]?|[!-~][ \t!-~]*[!-~]")

_TIMEOUTS = ("connect", "read", "write", "pool")
"""Fields of an openai.Timeout."""


def check_timeout(timeout: object) -> None:
    """Raise InvalidInputError, which names the option, for a timeout that the HTTP client would refuse."""
    if isinstance(timeout, openai.NotGiven | openai.Omit):
        return
    parts: Sequence[object]
    if all(hasattr(timeout, name) for name in _TIMEOUTS):  # of HTTPX or HTTPX2; the OpenAI client takes both
        parts = [getattr(timeout, name) for name in _TIMEOUTS]
    else:
        parts = timeout if isinstance(timeout, tuple) and timeout else (timeout,)  # HTTPX takes a tuple, too
    longest = threading.TIMEOUT_MAX
    if not all(part is None or (_is_number(part) and 0 < part <= longest) for part in parts):
        raise InvalidInputError(
            "timeout: a positive number of seconds or an openai.Timeout is needed, not"
            f" {shown(timeout)}; None is no limit"
        )


@contextmanager
def options_named(request: Mapping[str, Any]) -> Iterator[None]:
    """Raise InvalidInputError, which names the option, if the block fails because a value has no form in JSON.

    The OpenAI client's own error names the value's type alone. An error about an option that the OpenAI client doesn't
    have gets a note that says where to put it. request: arguments of the OpenAI client's call.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if unknown := request.keys() - _known_options():
            places = ", ".join(f"{name!r}: …" for name in sorted(unknown))
            error.add_note(
                f"agentspec: an option of the server that OpenAI's API lacks goes into extra_body={{{places}}}"
            )
            raise
        for name, value in request.items():
            if name in ("messages", "timeout", "extra_headers", "extra_query", "response_format"):
                continue
            parts = value.items() if name == "extra_body" and isinstance(value, Mapping) else [("", value)]
            for part, held in parts:
                if not _has_json(held):
                    raise InvalidInputError(
                        f"{name}{part and ': '}{part}: {shown(held)} has no form in JSON; give text without halves of"
                        " surrogate pairs, finite numbers, lists and dicts, such as int() or float() of another"
                        " library's number"
                    ) from error
        raise


@functools.cache
def _known_options() -> frozenset[str]:
    """Return the options of a chat call that the OpenAI client has."""
    return frozenset(inspect.signature(openai.resources.chat.Completions.create).parameters)


def _has_json(value: object) -> bool:
    """Return whether a value has a form in JSON, as far as can be told without asking the OpenAI client."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False, default=_sent).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _sent(value: object) -> object:
    """Return the value that the OpenAI client sends for one that `json` does not know. Raises TypeError for others."""
    if isinstance(value, openai.NotGiven | openai.Omit):
        return None
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, datetime.date):
        return str(value)
    raise TypeError


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_retries(retries: object) -> None:
    """Raise InvalidInputError, which names the option, for retries with which the OpenAI client would fail."""
    given = retries is not None and not isinstance(retries, openai.NotGiven | openai.Omit)
    if given and (not isinstance(retries, int) or isinstance(retries, bool) or retries < 0):
        raise InvalidInputError(f"max_retries: a whole number, 0 at least, is needed, not {shown(retries)}")


def check_headers(option: str, headers: Mapping[object, object]) -> None:
    """Raise InvalidInputError, which names option and header, for headers that the HTTP client would refuse."""
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise InvalidInputError(f"{option}: {shown(name)}: a name of letters, digits and - is needed")
        if not isinstance(value, openai.Omit):
            text = value.decode("latin-1") if isinstance(value, bytes) else value
            check_header_value(f"{option}: {name}", text, "urllib.parse.quote() makes one of any other text")


def check_header_value(name: str, value: object, remedy: str = "strip() what was read from a file") -> None:
    """Raise InvalidInputError, which names the option, for a value that no header can carry. It may be a secret key."""
    if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
        raise InvalidInputError(
            f"{name}: a text of ASCII characters is needed, without line breaks and without spaces around it; {remedy}"
        )


def check_mapping(name: str, given: object) -> None:
    """Raise InvalidInputError, which names the option, unless it is a dict or None."""
    if given is not None and not isinstance(given, Mapping):
        raise InvalidInputError(f"{name}: a dict is needed, not {shown(given)}")
