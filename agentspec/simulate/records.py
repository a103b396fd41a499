"""Read recorded conversations: one JSON object a line, one model call each, in the order in which they ran.

    {"session": "fix-42", "turn": 0, "prompt_token_ids": [...], "response_token_ids": [...]}
    {"session": "fix-42", "turn": 1, "continues": true, "prompt_token_ids": [...], "response_token_ids": [...]}

`turn`, `group` (several runs of one problem) and `tenant` are optional. With `"continues": true` the prompt is only the
part behind the session's previous prompt and response. With a tokenizer, a record may have text (`prompt`, `response`)
in place of token ids. Other fields are ignored, and so are fields that are null.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentspec.cache.arguments import MAX_VOCAB, as_tokens
from agentspec.cache.types import Int32Array
from agentspec.errors import AgentSpecError, ConfigurationError, InvalidInputError, first_line
from agentspec.identifiers import check_ids
from agentspec.json_lines import read_objects, whole

Progress = Callable[[int], None]
Tokenizer = Callable[[str], Sequence[int]]

_HUB_SECONDS = 5.0
"""Longest wait for the hub of models to answer."""
_A_TOKENIZER = "a tokenizer (--tokenizer; for a training, `tokenizer` beside the path in data.sources)"


class Record(BaseModel):
    """Hold the fields of one line of the file."""

    model_config = ConfigDict(strict=True, frozen=True)

    session: str | int
    turn: int = Field(default=0, ge=0)
    group: str | int | None = None
    tenant: str | None = None
    continues: bool = False
    prompt_token_ids: list[int] | None = None
    response_token_ids: list[int] | None = None
    prompt: str | None = None
    response: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """Hold one model call, ready to be replayed. prompt: int32 [P], the whole prompt. response: int32 [R]."""

    line: int
    session: str
    turn: int
    group: str | None
    tenant: str | None
    prompt: Int32Array
    response: Int32Array


def read_calls(
    path: Path,
    *,
    tokenizer: Tokenizer | None = None,
    tenant: str | None = None,
    progress: Progress = lambda read: None,
) -> Iterator[Call]:
    """Yield the file's calls one by one. Only the last text of each session stays in memory.

    A file that gzip compressed is decompressed, whatever its name is. `tenant` replaces the records' own tenants.
    `progress` gets the number of bytes read so far. A last line that a program is still writing is left out, with a
    warning. Raises InvalidInputError, which names file, line and field.
    """
    last: dict[tuple[str | None, str], Int32Array] = {}  # by the record's own tenant and session
    for line, value in read_objects(path, progress, growing=True):
        try:
            record = _record(value)
            call = _call(line, record, tokenizer, tenant, last)
        except AgentSpecError as error:
            raise InvalidInputError(f"{path}, line {line}: {error}") from error
        last[record.tenant, str(record.session)] = np.concatenate([call.prompt, call.response])
        yield call


def open_tokenizer(name: str, option: str = "--tokenizer", revision: str | None = None) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, of a folder that holds one, or of a model that transformers knows.

    Special tokens in the text are encoded as such; none are added. option: the option's name in errors.
    revision: of a model on the hub. Raises ConfigurationError, which says what to install or to give.
    """
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if path.suffix == ".json" and not path.exists():  # otherwise transformers asks the hub for a model of this name
        raise ConfigurationError(f"{option} {name}: no such file; give a tokenizer.json or the folder of a model")
    library = "tokenizers" if file.is_file() else "transformers"
    try:
        if library == "tokenizers":
            from tokenizers import Tokenizer as Fast

            fast: Any = Fast.from_file(str(file))
            return lambda text: list(fast.encode(text, add_special_tokens=False).ids)
        from transformers import AutoTokenizer

        local = not path.exists() and not _answers(name)
        slow: Any = AutoTokenizer.from_pretrained(name, revision=revision, local_files_only=local)
        return lambda text: list(slow.encode(text, add_special_tokens=False))
    except ImportError as error:
        raise ConfigurationError(
            f"{option} needs the package {library}: pip install {library}, or give token ids"
        ) from error
    except Exception as error:  # the libraries raise whatever they like
        raise ConfigurationError(
            f"{option} {name}: cannot be loaded ({first_line(error)}); give a tokenizer.json or the folder of a model"
        ) from error


def _answers(model: str) -> bool:
    """Return whether the hub answers a request about a model.

    This asks once. Without a connection, transformers would repeat its request for most of a minute.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(model, timeout=_HUB_SECONDS)
    except HfHubHTTPError:  # the hub's own error, which transformers explains
        return True
    except Exception:  # the libraries raise whatever they like
        return False
    return True


def _record(value: dict[str, Any]) -> Record:
    if "text" in value and not value.keys() & {"prompt", "prompt_token_ids"}:
        raise InvalidInputError("is of a client's record, which `agentspec report` reads; give the prompts, too")
    values = {name: whole(field) for name, field in value.items() if field is not None}
    try:
        return Record.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name, *rest = first["loc"]  # leave out the names of a union's members
        if first["type"] == "missing":
            raise InvalidInputError(f"{name}: missing; give each conversation an id, a text or a number") from None
        index = "".join(f"[{part}]" for part in rest if isinstance(part, int))
        given = repr(first["input"])
        short = given if len(given) <= 60 else given[:57] + "..."
        raise InvalidInputError(f"{name}{index}: {first['msg']}, got {short}") from None


def _call(
    line: int,
    record: Record,
    tokenizer: Tokenizer | None,
    tenant: str | None,
    last: dict[tuple[str | None, str], Int32Array],
) -> Call:
    session, group = str(record.session), None if record.group is None else str(record.group)
    owner = record.tenant if tenant is None else tenant
    check_ids(session=session, group=group, tenant=owner)
    prompt = _tokens("prompt", record.prompt_token_ids, record.prompt, tokenizer)
    response = _tokens("response", record.response_token_ids, record.response, tokenizer)
    if record.continues:
        before = last.get((record.tenant, session))
        if before is None:
            raise InvalidInputError(
                f"continues: session {session!r} has no earlier record; leave `continues` out and give the whole prompt"
            )
        prompt = np.concatenate([before, prompt])
    if tenant is not None and record.tenant is not None:  # sessions of several tenants may have one name
        session = hashlib.sha256(json.dumps([record.tenant, session]).encode()).hexdigest()
    return Call(line, session, record.turn, group, owner, prompt, response)


def _tokens(name: str, ids: list[int] | None, text: str | None, tokenizer: Tokenizer | None) -> Int32Array:
    if ids is not None:
        return as_tokens(ids, f"{name}_token_ids", MAX_VOCAB)
    if text is None:
        raise InvalidInputError(f"{name}_token_ids: missing; give it, or `{name}` as text and {_A_TOKENIZER}")
    if tokenizer is None:
        raise InvalidInputError(f"{name}: is text; give {_A_TOKENIZER}, or {name}_token_ids in its place")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(f"{name}: holds half of a surrogate pair, which is no text") from None
    try:
        found = tokenizer(text)
    except Exception as error:  # the libraries raise whatever they like
        raise InvalidInputError(f"{name}: the tokenizer refuses it: {first_line(error)}") from error
    return as_tokens(found, name, MAX_VOCAB)
