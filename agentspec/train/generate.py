"""Answer prompts with the target in offline vLLM, and write them to a file of recorded calls."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from agentspec.errors import ConfigurationError, InvalidInputError, first_line
from agentspec.identifiers import check_session_id
from agentspec.json_lines import read_objects
from agentspec.server_ext.vllm_adapter.offline import OfflineEngine
from agentspec.server_ext.vllm_adapter.startup.launch import refusals
from agentspec.train.config import Model, PromptsSource

_TOGETHER = 64
"""Prompts that vLLM answers between two writes to the file."""


class _Prompt(NamedTuple):
    """Hold a prompt: its line in the file, what the line says, and the session that its answer becomes."""

    line: int
    fields: dict[str, Any]
    session: str


def answer_prompts(source: PromptsSource, model: Model, out: Path, progress: Callable[[int, int], None]) -> None:
    """Write an answer to every prompt into ``out``, in the format of ``agentspec simulate``.

    Prompts that ``out`` has answers to are skipped, so a run that was cut off goes on; vLLM is started only if answers
    are missing. Sampled answers depend on the seed in ``engine`` (default 0) and on where a run was cut off, not on the
    training's seed, because trainings with other seeds share them. ``progress`` gets the number of answers done and of
    all. Raises InvalidInputError that names file and line of a prompt that cannot be used, before any is answered, and
    ConfigurationError if vLLM cannot be imported or refuses ``engine``.
    """
    prompts = list(_read(source.path))
    if not prompts:
        raise InvalidInputError(f'{source.path}: holds no prompt; give JSON lines with "messages" or "prompt"')
    done = _answered(out)
    progress(done, len(prompts))
    if done >= len(prompts):
        return
    engine = _engine(source, model, done)
    try:
        asked = [_tokens(engine, source.path, prompt) for prompt in prompts]
        for at in range(done, len(prompts), _TOGETHER):
            part = slice(at, at + _TOGETHER)
            answers = _ask(engine, source, prompts[part], asked[part])
            _append(out, answers)
            progress(at + len(answers), len(prompts))
    finally:
        engine.close()  # frees the device's memory


def _read(path: Path) -> Iterator[_Prompt]:
    for count, (number, prompt) in enumerate(read_objects(path), 1):
        place = f"{path}, line {number}"
        if not (_is_chat(prompt) or isinstance(prompt.get("prompt"), str)):
            raise InvalidInputError(f'{place}: give "messages", a chat, or "prompt", a text')
        try:
            json.dumps(prompt, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # the tokenizer's error would come once vLLM has started, and speak of types
            raise InvalidInputError(f"{place}: holds half of a surrogate pair, which is no text") from None
        if _is_chat(prompt) and not all(map(_has_text_alone, prompt["messages"])):
            raise InvalidInputError(
                f"{place}: messages: a content of text parts is needed, because speculators are trained on text alone;"
                " leave the prompt out or change it"
            )
        if not _are_objects(prompt.get("tools") or []):
            raise InvalidInputError(f"{place}: tools: a list of objects expected, as in OpenAI's API")
        session = f"prompt-{count}" if prompt.get("id") is None else str(prompt["id"])
        yield _Prompt(number, prompt, check_session_id(session, f"{place}: id"))


def _is_chat(prompt: dict[str, Any]) -> bool:
    messages = prompt.get("messages")
    return bool(messages) and _are_objects(messages)


def _has_text_alone(message: dict[str, Any]) -> bool:
    parts = message.get("content")
    return not isinstance(parts, list) or all(isinstance(part, dict) and "text" in part for part in parts)


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _append(out: Path, answers: list[dict[str, Any]]) -> None:
    try:
        with out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(answer) + "\n" for answer in answers)
    except OSError as error:  # on a full disk it names no file
        why = f"{error.strerror}; mend that, and run the command again to go on"
        raise OSError(error.errno, why, str(out)) from error


def _answered(out: Path) -> int:
    """Return the number of answers in the file. Remove a last line that was cut off."""
    if not out.exists():
        return 0
    content = out.read_bytes()
    os.truncate(out, content.rfind(b"\n") + 1)
    return content.count(b"\n")


def _engine(source: PromptsSource, model: Model, done: int) -> OfflineEngine:
    """Start the engine. done: answers of earlier runs, whose random numbers it does not draw again."""
    try:
        seed = int(source.engine.get("seed") or 0) + done
        return OfflineEngine.start(model.name_or_path, **{"dtype": model.dtype, **source.engine, "seed": seed})
    except (ConfigurationError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"data.sources: type prompts needs vLLM: {error}") from error


def _tokens(engine: OfflineEngine, path: Path, prompt: _Prompt) -> list[int]:
    """Return the token ids of a prompt, of a chat by the target's own template, with its tools."""
    fields = prompt.fields
    try:
        if _is_chat(fields):
            return engine.tokenise(fields["messages"], fields.get("tools") or None)
        return engine.tokenise(fields["prompt"])
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}, line {prompt.line}: {error}; leave it out or change it") from None


def _ask(
    engine: OfflineEngine, source: PromptsSource, prompts: list[_Prompt], asked: list[list[int]]
) -> list[dict[str, Any]]:
    """Return vLLM's answers as recorded calls, in order. asked: the prompts' token ids."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=source.temperature, max_tokens=source.max_tokens)
    try:
        outputs = engine.llm.generate([{"prompt_token_ids": ids} for ids in asked], sampling, use_tqdm=False)
    except refusals() as error:
        lines = f"{prompts[0].line} to {prompts[-1].line}"
        raise InvalidInputError(
            f"{source.path}, lines {lines}: vLLM refuses one of these prompts: {first_line(error)}"
        ) from error
    return [
        {
            "session": prompt.session,
            "turn": 0,
            "prompt_token_ids": ids,
            "response_token_ids": list(output.outputs[0].token_ids),
        }
        for prompt, ids, output in zip(prompts, asked, outputs, strict=True)
    ]
