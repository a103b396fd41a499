"""Answer prompts with the target in offline vLLM, and write them to a file of recorded calls."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentspec.errors import ConfigurationError, InvalidInputError, first_line
from agentspec.identifiers import check_session_id
from agentspec.json_lines import read_objects
from agentspec.server_ext.vllm_adapter.launch import refusals
from agentspec.train.config import Model, PromptsSource

_TOGETHER = 64
"""Prompts that vLLM answers between two writes to the file."""


def answer_prompts(source: PromptsSource, model: Model, out: Path, progress: Callable[[int, int], None]) -> None:
    """Write an answer to every prompt into ``out``, in the format of ``agentspec simulate``.

    Prompts that ``out`` has answers to are skipped, so a run that was cut off goes on; vLLM is started only if answers
    are missing. Sampled answers depend on the seed in ``engine`` (vLLM's default is 0), not on the training's seed,
    because trainings with other seeds share them. ``progress`` gets the number of answers done and of all. Raises
    InvalidInputError that names file and line of a prompt that cannot be used, and ConfigurationError if vLLM cannot be
    imported or refuses ``engine``.
    """
    prompts = list(_read(source.path))
    if not prompts:
        raise InvalidInputError(f'{source.path}: holds no prompt; give JSON lines with "messages" or "prompt"')
    done = _answered(out)
    progress(done, len(prompts))
    if done >= len(prompts):
        return
    engine = _engine(source, model)
    try:
        for at in range(done, len(prompts), _TOGETHER):
            part = prompts[at : at + _TOGETHER]
            try:
                answers = _ask(engine, part, source)
            except refusals() as error:
                raise InvalidInputError(
                    f"{source.path}: vLLM refuses one of the prompts {at + 1} to {at + len(part)}: {first_line(error)}"
                ) from error
            lines = [json.dumps(_record(prompts, at + i, output)) + "\n" for i, output in enumerate(answers)]
            with out.open("a", encoding="utf-8") as file:
                file.writelines(lines)
            progress(at + len(part), len(prompts))
    finally:
        engine.llm_engine.engine_core.shutdown()  # frees the device's memory


def _read(path: Path) -> Iterator[dict[str, Any]]:
    for number, prompt in read_objects(path):
        if not (_is_chat(prompt) or isinstance(prompt.get("prompt"), str)):
            raise InvalidInputError(f'{path}, line {number}: give "messages", a chat, or "prompt", a text')
        try:
            json.dumps(prompt, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # the tokenizer's error would come once vLLM has started, and speak of types
            raise InvalidInputError(
                f"{path}, line {number}: holds half of a surrogate pair, which is no text"
            ) from None
        if not _are_objects(prompt.get("tools") or []):
            raise InvalidInputError(f"{path}, line {number}: tools: a list of objects expected, as in OpenAI's API")
        if prompt.get("id") is not None:
            check_session_id(str(prompt["id"]), f"{path}, line {number}: id")  # before vLLM answers hours of prompts
        yield prompt


def _is_chat(prompt: dict[str, Any]) -> bool:
    messages = prompt.get("messages")
    return bool(messages) and _are_objects(messages)


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _answered(out: Path) -> int:
    """Return the number of answers in the file. Remove a last line that was cut off."""
    if not out.exists():
        return 0
    content = out.read_bytes()
    os.truncate(out, content.rfind(b"\n") + 1)
    return content.count(b"\n")


def _engine(source: PromptsSource, model: Model) -> Any:
    try:
        from vllm import LLM
    except ImportError as error:
        raise ConfigurationError(
            f"data.sources: type prompts needs vLLM ({error}); install it, or give recorded sessions"
        ) from error
    try:
        return LLM(model.name_or_path, **{"dtype": model.dtype, **source.engine})
    except refusals(TypeError) as error:
        raise ConfigurationError(f"data.sources: engine: vLLM refuses it: {first_line(error)}") from error


def _ask(engine: Any, prompts: list[dict[str, Any]], source: PromptsSource) -> list[Any]:
    """Return vLLM's outputs, in order. Chat messages go through the target's own template, with their tools."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=source.temperature, max_tokens=source.max_tokens)
    answers: list[Any] = [None] * len(prompts)
    alike: dict[tuple[bool, str], list[int]] = {}  # vLLM takes the same tools for all chats of a call
    for i, prompt in enumerate(prompts):
        tools = json.dumps(prompt.get("tools") or None)
        alike.setdefault((_is_chat(prompt), tools), []).append(i)
    for (chat, tools), places in alike.items():
        if chat:
            asked = [prompts[i]["messages"] for i in places]
            outputs = engine.chat(asked, sampling, tools=json.loads(tools), use_tqdm=False)
        else:
            outputs = engine.generate([prompts[i]["prompt"] for i in places], sampling, use_tqdm=False)
        for i, output in zip(places, outputs, strict=True):
            answers[i] = output
    return answers


def _record(prompts: list[dict[str, Any]], number: int, output: Any) -> dict[str, Any]:
    return {
        "session": f"prompt-{number + 1}" if prompts[number].get("id") is None else str(prompts[number]["id"]),
        "turn": 0,
        "prompt_token_ids": list(output.prompt_token_ids),
        "response_token_ids": list(output.outputs[0].token_ids),
    }
