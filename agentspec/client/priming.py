"""Build the requests that give a server texts to draft from before a session's first call. Does no network I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agentspec.client.messages import as_sent, encodable, shown
from agentspec.client.request import TIMEOUT_S, salt_headers
from agentspec.errors import InvalidInputError
from agentspec.protocol import IMPORT_PART_BYTES, MAX_IMPORT_TURNS

_MEDIA = re.compile("image|audio|video|file")  # in the type of a content part


class Priming(NamedTuple):
    """Hold one request: its body, and the OpenAI client's options."""

    body: dict[str, Any]
    options: dict[str, Any]


def prime_texts(texts: Sequence[str | Path], cache_salt: str | None) -> Iterator[Priming]:
    """Yield requests that prime a session with texts, and with the texts of the files that paths name.

    Raises InvalidInputError for a file that cannot be read as UTF-8.
    """
    if isinstance(texts, str | Path) or not isinstance(texts, Iterable):
        raise InvalidInputError("texts: give a list, whose strings are texts and whose Path objects name files")
    part: list[str] = []
    size = 0
    for text in map(_read, texts):
        length = len(json.dumps(text, ensure_ascii=False).encode())  # JSON's escapes count in a body's limit, too
        if part and (size + length > IMPORT_PART_BYTES or len(part) == MAX_IMPORT_TURNS):
            yield _request({"texts": part}, cache_salt)
            part, size = [], 0
        part.append(text)
        size += length
    if part:
        yield _request({"texts": part}, cache_salt)


def prime_history(messages: Sequence[Mapping[str, Any]], cache_salt: str | None) -> Iterator[Priming]:
    """Yield the request that primes a session with its messages; none if there are none.

    The parts for images, sounds and files stay, as chat templates mark their places, but their data does not: it is no
    text, and could exceed what a server takes.
    """
    if messages:
        sent = [_without_data(as_sent(message, thoughts=True)) for message in messages]
        yield _request({"messages": sent}, cache_salt)


def prime_resumed(messages: Sequence[Mapping[str, Any]], cache_salt: str | None) -> Iterator[Priming]:
    """Yield the request that primes a server with a resumed session if it doesn't know the session.

    A call waits for it, so it has a short timeout, no retries, and no long text.
    """
    for body, options in prime_history(messages, cache_salt):
        if len(json.dumps(body)) <= IMPORT_PART_BYTES:  # the text comes with the call anyway
            yield Priming(body, {**options, "params": {"only_new": True}, "timeout": TIMEOUT_S, "max_retries": 0})


def added_by(answer: object) -> int:
    """Return how many of the texts were new to the server."""
    return int(answer.get("added", 0)) if isinstance(answer, Mapping) else 0


def _without_data(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose parts for images, sounds and files have empty texts in the place of their data."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    return {**message, "content": [_emptied(part) if _is_medium(part) else part for part in parts]}


def _is_medium(part: object) -> bool:
    return isinstance(part, Mapping) and _MEDIA.search(str(part.get("type"))) is not None


def _emptied(value: Any) -> Any:
    """Return a value with empty texts in the place of all its texts, but for types."""
    if isinstance(value, Mapping):
        return {name: part if name == "type" else _emptied(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_emptied(part) for part in value]
    return "" if isinstance(value, str) else value


def _request(content: dict[str, Any], cache_salt: str | None) -> Priming:
    options = {} if cache_salt is None else {"headers": salt_headers(cache_salt)}
    return Priming({"version": 1, **content}, options)


def _read(text: str | Path) -> str:
    if isinstance(text, str):
        return encodable(text)
    if not isinstance(text, Path):
        raise InvalidInputError(f"texts: strings, and Path objects that name files, are needed, not {shown(text)}")
    try:
        with text.open(encoding="utf-8", newline="") as file:  # its line ends are a part of the text
            return file.read()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        raise InvalidInputError(f"texts: {text} cannot be read as UTF-8 text: {error}") from error
