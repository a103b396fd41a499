"""Measure the demo's model in vLLM, on tasks that it was never trained on.

    python demo/evaluate_model.py --model demo/model --tasks 100

Every task is a whole agent loop: greedy answer, real unit tests, feedback, next answer.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also works as a plain script

from demo.tasks import FIRST_HELD_OUT_SEED, Task, extract_code, feedback, make_task, run_tests

MAX_TURNS = 5
MAX_REPLY_TOKENS = 320
HEADING = "## Measured on held-out tasks"
CLOSE_CALL = 1.0  # nats between the two best tokens; below, another batch shape may swap them


@dataclass
class Loop:
    """Hold the state of one task in the agent loop, and its counts."""

    task: Task
    messages: list[dict[str, str]]
    passed: bool = False
    replies: int = 0
    tokens: int = 0
    close_calls: int = 0
    unfinished: int = 0
    foreign_names: int = 0  # replies with an identifier that is nowhere in the conversation
    broken_prefixes: int = 0
    context: list[int] = field(default_factory=list)


def start(seed: int) -> Loop:
    """Return the loop of a seed's task before the first answer."""
    task = make_task(seed)
    return Loop(task, [{"role": "user", "content": task.request}])


def answer_all(llm: Any, loops: list[Loop]) -> None:
    """Run one turn of every given loop, in one batch."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_REPLY_TOKENS, logprobs=2)
    outputs = llm.chat([loop.messages for loop in loops], sampling, use_tqdm=False)
    for loop, output in zip(loops, outputs, strict=True):
        take_answer(loop, list(output.prompt_token_ids), output.outputs[0])


def take_answer(loop: Loop, prompt: list[int], completion: Any) -> None:
    """Count the reply's tokens and faults, run the tests on it and append the feedback."""
    loop.broken_prefixes += prompt[: len(loop.context)] != loop.context
    loop.context = prompt + list(completion.token_ids)
    loop.replies += 1
    loop.tokens += len(completion.token_ids)
    loop.unfinished += completion.finish_reason != "stop"
    for choices in completion.logprobs:
        best = sorted((choice.logprob for choice in choices.values()), reverse=True)
        loop.close_calls += best[0] - best[1] < CLOSE_CALL
    loop.foreign_names += bool(names(completion.text) - names(" ".join(m["content"] for m in loop.messages)))
    results = run_tests(loop.task, extract_code(completion.text))
    loop.passed = all(result.passed for result in results)
    loop.messages.append({"role": "assistant", "content": completion.text})
    loop.messages.append({"role": "user", "content": feedback(results)})


def names(text: str) -> set[str]:
    """Return the snake-case identifiers in a text."""
    return set(re.findall(r"[a-z]+(?:_[a-z]+)+", text))


def measure(loops: list[Loop]) -> dict[str, str]:
    """Return the figures over all loops by name."""
    replies = sum(loop.replies for loop in loops)
    tokens = sum(loop.tokens for loop in loops)
    passed = sum(loop.passed for loop in loops)
    foreign = sum(loop.foreign_names for loop in loops)
    close = sum(loop.close_calls for loop in loops)
    turns = Counter(loop.replies for loop in loops if loop.passed)
    return {
        "held-out tasks": str(len(loops)),
        f"all tests pass within {MAX_TURNS} turns": f"{passed} ({passed / len(loops):.1%})",
        "passed after": ", ".join(f"{turn} turns: {count}" for turn, count in sorted(turns.items())) or "-",
        "turns a task, on average": f"{replies / len(loops):.2f}",
        "tokens a reply, on average": f"{tokens / replies:.1f}",
        "longest session in tokens": str(max(len(loop.context) for loop in loops)),
        "replies whose identifiers are all copied": f"{1 - foreign / replies:.2%}",
        f"tokens decided by less than {CLOSE_CALL} nats": f"{close} of {tokens}",
        "replies without an end token": str(sum(loop.unfinished for loop in loops)),
        "prompts that did not extend the one before": str(sum(loop.broken_prefixes for loop in loops)),
    }


def write_section(readme: Path, numbers: dict[str, str]) -> None:
    """Replace the measured part of the model's README."""
    text = readme.read_text().partition(HEADING)[0].rstrip()
    rows = "\n".join(f"| {name} | {value} |" for name, value in numbers.items())
    readme.write_text(f"{text}\n\n{HEADING}\n\n| with greedy decoding in vLLM, float32 | |\n| --- | --- |\n{rows}\n")


def main() -> None:
    """Load the model and run the loops."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--model", default=str(Path(__file__).with_name("model")))
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=FIRST_HELD_OUT_SEED)
    parser.add_argument("--show", type=int, default=0, help="failed sessions to print")
    parser.add_argument("--write", action="store_true", help="put the numbers into the model's README")
    options = parser.parse_args()
    if options.tasks < 1:
        parser.error("--tasks: give at least 1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM

    llm = LLM(options.model, dtype="float32", enforce_eager=True, max_model_len=2048)
    loops = [start(options.first_seed + number) for number in range(options.tasks)]
    for _ in range(MAX_TURNS):
        open_loops = [loop for loop in loops if not loop.passed and len(loop.context) < 1500]
        if open_loops:
            answer_all(llm, open_loops)
    console = Console(soft_wrap=True)
    for loop in [loop for loop in loops if not loop.passed][: options.show]:
        for message in loop.messages:
            console.print(f"[{message['role']}]\n{message['content']}\n", markup=False)
    numbers = measure(loops)
    table = Table("what", "measured")
    for row in numbers.items():
        table.add_row(*row)
    console.print(table)
    if options.write:
        write_section(Path(options.model) / "README.md", numbers)


if __name__ == "__main__":
    main()
