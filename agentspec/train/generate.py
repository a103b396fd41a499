"""Answer prompts with the target in offline vLLM, and write them to a file of recorded calls."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentspec.errors import ConfigurationError, InvalidInputError, first_line
from agentspec.problems import Problem, read_problems
from agentspec.server_ext.vllm_adapter.offline import OfflineEngine
from agentspec.server_ext.vllm_adapter.startup.launch import refusals
from agentspec.train.config import Model, PromptsSource

_TOGETHER = 64
"""Prompts that vLLM answers between two writes to the file."""


def answer_prompts(source: PromptsSource, model: Model, out: Path, progress: Callable[[int, int], None]) -> None:
    """Write an answer to every prompt into ``out``, in the format of ``agentspec simulate``.

    Prompts that ``out`` has answers to are skipped, so a run that was cut off goes on; vLLM is started only if answers
    are missing. Sampled answers depend on the seed in ``engine`` (default 0) and on where a run was cut off, not on the
    training's seed, because trainings with other seeds share them. ``progress`` gets the number of answers done and of
    all. Raises InvalidInputError that names file and line of a prompt that cannot be used, before any is answered, and
    ConfigurationError if vLLM cannot be imported or refuses ``engine``.
    """
    prompts = read_problems(source.path, named=False)
    done = _answered(out)
    progress(done, len(prompts))
    if done >= len(prompts):
        return
    engine = _engine(source, model, done)
    try:
        asked = [_tokens(engine, prompt) for prompt in prompts]
        for at in range(done, len(prompts), _TOGETHER):
            part = slice(at, at + _TOGETHER)
            answers = _ask(engine, source, prompts[part], asked[part])
            _append(out, answers)
            progress(at + len(answers), len(prompts))
    finally:
        engine.close()  # frees the device's memory


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
        options = {"dtype": model.dtype, **source.engine, **model.variant, "seed": seed}
        return OfflineEngine.start(model.name_or_path, **options)
    except (ConfigurationError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"data.sources: type prompts needs vLLM: {error}") from error


def _tokens(engine: OfflineEngine, prompt: Problem) -> list[int]:
    """Return the token ids of a prompt, of a chat by the target's own template, with its tools."""
    try:
        return engine.tokenise(prompt.prompt, prompt.tools)
    except InvalidInputError as error:
        raise InvalidInputError(f"{prompt.place}: {error}; leave it out or change it") from None


def _ask(
    engine: OfflineEngine, source: PromptsSource, prompts: list[Problem], asked: list[list[int]]
) -> list[dict[str, Any]]:
    """Return vLLM's answers as recorded calls, in order. asked: the prompts' token ids."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=source.temperature, max_tokens=source.max_tokens)
    try:
        outputs = engine.llm.generate([{"prompt_token_ids": ids} for ids in asked], sampling, use_tqdm=False)
    except refusals() as error:
        which = f"{prompts[0].place}, or up to {len(prompts) - 1} prompts behind it"
        raise InvalidInputError(f"{which}: vLLM refuses one of them: {first_line(error)}") from error
    return [
        {
            "session": prompt.id,
            "turn": 0,
            "prompt_token_ids": ids,
            "response_token_ids": list(output.outputs[0].token_ids),
        }
        for prompt, ids, output in zip(prompts, asked, outputs, strict=True)
    ]
