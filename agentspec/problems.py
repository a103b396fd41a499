"""Read the problems of a rollout, or the prompts of a training, from JSON lines or parquet."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentspec.errors import InvalidInputError, first_line
from agentspec.identifiers import check_session_id
from agentspec.json_lines import read_objects

_PROMPTS = ("prompt", "messages", "prompt_token_ids")
_CHATS = ("prompt", "messages")
_MEDIA = ("images", "videos")
"""Columns of TRL's and verl's files with the images and videos that a prompt is about."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Hold one problem.

    prompt: a text, a chat as a list of messages, or token ids. fields: the other fields of its line, passed through to
    its samples and to the reward function. place: its file and line, for errors.
    """

    id: str
    prompt: str | list[dict[str, Any]] | list[int]
    fields: dict[str, Any] = field(default_factory=dict)
    place: str = field(default="", compare=False)

    @property
    def is_chat(self) -> bool:
        """Return whether the prompt is a list of messages."""
        return isinstance(self.prompt, list) and bool(self.prompt) and isinstance(self.prompt[0], dict)

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that the chat template writes into the prompt; None without any, or without messages.

        The field ``tools`` holds them as a list of objects, or as its JSON, as in TRL's files. Raises InvalidInputError
        for anything else.
        """
        tools = self.fields.get("tools") if self.is_chat else None
        if isinstance(tools, str):
            with suppress(ValueError, RecursionError):
                tools = json.loads(tools)
        if tools in (None, "", []):
            return None
        if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
            return tools
        raise InvalidInputError(
            '"tools" go into the chat template: give a list of objects as in OpenAI\'s API, or its JSON, or name the '
            "field otherwise"
        )


def read_problems(path: Path, *, named: bool = True) -> list[Problem]:
    """Read all problems of a file: ``.parquet``, or JSON lines for any other name, which may be compressed by gzip.

    A problem has an "id" (a string or a number, once in the file) and a "prompt" (a text, or messages as verl writes
    them), "messages" or "prompt_token_ids". "tools" beside messages go into the chat template. named: whether an "id"
    is needed; if not, a problem without one gets "prompt-" and its number in the file, from 1.

    Raises InvalidInputError that names the line and the field.
    """
    if not (path.is_file() or path.is_fifo()):  # a shell's <(head problems.jsonl) is a pipe
        what = "is a folder" if path.is_dir() else "is a device" if path.exists() else "no such file"
        raise InvalidInputError(f"{path}: {what}; give a file of problems, .jsonl or .parquet")
    problems: dict[str, Problem] = {}
    rows = _parquet_rows(path) if path.suffix.lower() == ".parquet" else _json_rows(path)
    for number, (place, row) in enumerate(rows, 1):
        if not named and row.get("id") is None:
            row["id"] = f"prompt-{number}"
        problem = _problem(place, row)
        if problem.id in problems:
            raise InvalidInputError(f"{place}: id {problem.id!r} stands there twice; give each problem its own")
        problems[problem.id] = problem
    if not problems:
        raise InvalidInputError(f"{path}: holds no {'problem' if named else 'prompt'}")
    return list(problems.values())


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((f"{path}, line {number}", row) for number, row in read_objects(path))


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise InvalidInputError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except (ArrowException, OSError, ValueError, OverflowError) as error:  # the last two: Python lacks the value
        raise InvalidInputError(f"{path}: cannot be read as parquet ({first_line(error)})") from None
    for number, row in enumerate(rows, 1):
        chats = {name: _without_nulls(row[name], "content") for name in _CHATS if name in row}
        tools = {"tools": _without_nulls(row["tools"])} if "tools" in row else {}
        yield f"{path}, row {number}", row | chats | tools


def _without_nulls(value: Any, kept: str | None = None) -> Any:
    """Return messages or tools without the nulls that parquet adds, where each has the fields of all.

    Chat templates would take them for tool calls, or for arguments of a tool. kept: the field of a message that may be
    null; nothing below a message may.
    """
    if isinstance(value, list):
        return [_without_nulls(each, kept) for each in value]
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None or name == kept}
    return value


def _problem(place: str, row: dict[str, Any]) -> Problem:
    identifier = row.get("id")
    if type(identifier) is int:
        identifier = str(identifier)
    if not isinstance(identifier, str):
        given = "has none" if identifier is None else f"got {identifier!r:.40}"
        raise InvalidInputError(
            f'{place}: needs "id", a string or a whole number, and {given}; give each problem its own, which names its '
            "samples in every run"
        )
    for name in _MEDIA:
        if row.get(name):
            raise InvalidInputError(
                f'{place}: "{name}" would not reach the model, which is given text alone; leave the problem out, or '
                "name the field otherwise if no prompt is about it"
            )
    prompts = [name for name in _PROMPTS if row.get(name) is not None]
    if len(prompts) != 1:
        names = ", ".join(f'"{name}"' for name in _PROMPTS)
        raise InvalidInputError(f"{place}: needs one of {names}, has {', '.join(prompts) or 'none'}")
    prompt = _prompt(f'{place}: "{prompts[0]}"', prompts[0], row[prompts[0]])
    rest = {name: value for name, value in row.items() if name not in ("id", prompts[0])}
    problem = Problem(check_session_id(identifier, f"{place}: id"), prompt, rest, place)
    try:
        _check_text('"tools"', problem.tools)
    except InvalidInputError as error:
        raise InvalidInputError(f"{place}: {error}") from None
    return problem


def _prompt(place: str, name: str, prompt: Any) -> Any:
    """Return a prompt, with the text parts of messages joined. Raises InvalidInputError for any other value."""
    _check_text(place, prompt)
    if isinstance(prompt, str) and name == "prompt":
        if prompt:
            return prompt
    elif isinstance(prompt, list) and prompt:
        numbers = all(type(token) is int and token >= 0 for token in prompt)
        if name == "prompt_token_ids" and numbers:
            return prompt
        if numbers:
            raise InvalidInputError(f'{place} holds token ids, which go into "prompt_token_ids"')
        if name != "prompt_token_ids" and all(isinstance(message, dict) and "role" in message for message in prompt):
            return [_message(f"{place}, message {number}", each) for number, each in enumerate(prompt, 1)]
    raise InvalidInputError(f"{place} is neither a text nor messages nor token ids, or it is empty")


def _check_text(place: str, value: Any) -> None:
    """Raise InvalidInputError for half of a surrogate pair, before vLLM starts: the tokenizer would speak of types."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise InvalidInputError(f"{place} holds half of a surrogate pair, which is no text; remove it") from None


def _message(place: str, message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(message["role"], str):
        raise InvalidInputError(f"{place}: its role is a text, such as user")
    if content is None and not (message.get("tool_calls") or message.get("function_call")):
        raise InvalidInputError(f"{place}: needs a content")
    if content is None or isinstance(content, str):
        return message
    parts = content if isinstance(content, list) else [None]
    texts = [str(part["text"]) for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts):
        raise InvalidInputError(
            f"{place}: its content is neither a text nor a list of text parts, and nothing else reaches the model; "
            "leave the problem out or change it"
        )
    return {**message, "content": "\n".join(texts)}  # vLLM joins them so, too, for templates that take a text
