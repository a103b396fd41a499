"""Measure suffix indexes, a draft model, and both on real vLLM: tokens/second and tokens a step on three kinds of text.

    python benchmarks/hybrid.py --json

The target is the demo's model and the texts are its own greedy answers to the demo's tasks. They are written once and
then played to one engine for each method; the engines take turns every few calls. Drafts are the method's, verification
and its time are vLLM's (see agentspec.testing.replay). Workloads:

repetitive   an agent's later turns: the corrected function, after the one in the prompt
fresh        first answers to tasks, every one in a session that sees no other: there is nothing to copy from
mixed        three turns of a session, then a first answer of another, and so on
"""

import argparse
import platform
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from report import machine, print_json, print_table, say, speed_ratio

from agentspec.testing.replay import Call, ReplayEngine, ReplayResult, fitting_length
from agentspec.testing.replay import compare as take_turns

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that the demo's tasks can be imported

MAX_DRAFT = 16
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "ngram": ("ngram", {}),
    "suffix": ("agentspec", {}),
    "speculator": ("agentspec", {"speculator": "", "arctic_suffix_rule": {"max_spec_factor": 0.0}}),
    "hybrid": ("agentspec", {"speculator": ""}),
    "hybrid, not judging": ("agentspec", {"speculator": "", "score_suffix_drafts": False}),
}
"""Replay method and agentspec's settings for each method's name; speculator "" stands for the speculator's folder."""
SINGLE = ("none", "ngram", "suffix", "speculator")
WORKLOADS = ("repetitive", "fresh", "mixed")
_FIRST_SEEDS = {"warm-up": 2_000, "repetitive": 3_000, "fresh": 4_000, "mixed": 5_000}
"""First task seed of each workload, counted from FIRST_HELD_OUT_SEED."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 0. Raises what the engines raise."""
    options = _parser().parse_args(arguments)
    say("writing the texts")
    loads = write_workloads(options.model, options.sessions)
    results = measure(options, loads)
    rows = [row(load, method, done) for load, methods in results.items() for method, done in methods.items()]
    ratios = [ratio for load, methods in results.items() for ratio in compare(load, methods)]
    if options.json:
        provenance = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "machine": machine(),
            "python": platform.python_version(),
            "speculator": options.speculator.name,
            "sessions": options.sessions,
            "batch": options.batch,
        }
        print_json({"provenance": provenance, "rows": rows, "ratios": ratios})
    else:
        _print(rows, ratios)
    return 0


def write_workloads(model: Path, sessions: int) -> dict[str, list[Call]]:
    """Return the calls of each workload and a warm-up: prompts of demo sessions, and the model's greedy answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from demo.tasks import FIRST_HELD_OUT_SEED

    tokenizer = AutoTokenizer.from_pretrained(model)
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def calls(name: str, seed: int, turns: slice) -> list[Call]:
        result = []
        for prompt in _prompts(tokenizer, FIRST_HELD_OUT_SEED + _FIRST_SEEDS[name] + seed)[turns]:
            with torch.inference_mode():
                text = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=240)[0]
            response = text[len(prompt) :].numpy().astype(np.int32)
            result.append(Call(f"{name}-{seed}", np.array(prompt, np.int32), response))
        return result

    first, later = slice(0, 1), slice(1, None)
    fresh = [call for seed in range(3 * sessions) for call in calls("fresh", seed, first)]
    repetitive = [call for seed in range(sessions) for call in calls("repetitive", seed, later)]
    # Put a first answer of another session behind up to three turns of each session.
    mixed: list[Call] = []
    for seed in range(sessions):
        mixed += [*calls("mixed", seed, slice(0, 3)), *calls("mixed", sessions + seed, first)]
    warm = [call for seed in range(max(2, sessions // 3)) for call in calls("warm-up", seed, slice(None))]
    return {"warm-up": warm, "repetitive": repetitive, "fresh": fresh, "mixed": mixed}


def _prompts(tokenizer: Any, seed: int) -> list[list[int]]:
    """Return the prompt of every turn of a session, as token ids."""
    from demo.sessions import session

    messages = [{"role": message.role, "content": message.content} for message in session(seed)]
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    prompts = []
    for at in turns:
        text = tokenizer.apply_chat_template(messages[:at], add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return prompts


def measure(options: argparse.Namespace, loads: dict[str, list[Call]]) -> dict[str, dict[str, ReplayResult]]:
    """Run each workload after one warm-up, on one engine for each method; the engines take turns."""
    calls = [call for load in loads.values() for call in load]
    say(f"{len(calls)} calls, {sum(len(call.response) for call in calls):,} tokens; starting {len(METHODS)} engines")
    with ExitStack() as stack:
        engines = {}
        for name, (method, settings) in METHODS.items():
            given = {key: str(options.speculator) if key == "speculator" else value for key, value in settings.items()}
            engines[name] = stack.enter_context(
                ReplayEngine(
                    method=method,
                    model=options.model,
                    max_model_len=fitting_length(calls, MAX_DRAFT),
                    max_batch=options.batch,
                    max_draft=MAX_DRAFT,
                    settings={"store": "memory://", "scope": "session", **given},
                )
            )
            engines[name].wait_ready()  # start one at a time: it takes most of a core
            say(f"{name} is ready")
        results: dict[str, dict[str, ReplayResult]] = {}
        for load, load_calls in loads.items():
            results[load] = take_turns(engines, load_calls, batch=options.batch)
            for name, done in results[load].items():
                say(f"{load}, {name}: {done.tokens_per_second:.0f} tokens/s")
    del results["warm-up"]
    return results


def row(load: str, method: str, total: ReplayResult) -> dict[str, Any]:
    """Return the figures of one method on one workload for the output."""
    return {
        "workload": load,
        "method": method,
        "tokens": total.tokens,
        "tokens_per_second": round(total.tokens_per_second, 1),
        "mean_acceptance_length": round(total.tokens_per_step, 3),
        "acceptance_rate": round(total.acceptance_rate, 3),
        "drafted": total.drafted,
        "accepted_by_source": dict(total.accepted_by_source),
    }


def compare(load: str, methods: dict[str, ReplayResult]) -> list[dict[str, Any]]:
    """Return the ratio of the hybrid's tokens/second to the best single method's, and to its own without judging.

    ``noise``: standard error of the ratio, from the turns that all methods took on the same calls.
    """
    best = max(SINGLE, key=lambda name: methods[name].tokens_per_second)
    return [
        _ratio(load, "hybrid / best single", f"{best}", methods["hybrid"], methods[best]),
        _ratio(load, "judging", "hybrid, not judging", methods["hybrid"], methods["hybrid, not judging"]),
    ]


def _ratio(load: str, what: str, other_name: str, ours: ReplayResult, other: ReplayResult) -> dict[str, Any]:
    value, noise = speed_ratio(ours, other)
    return {
        "workload": load,
        "figure": what,
        "against": other_name,
        "ratio": round(value, 3),
        "noise": round(noise, 3),
        "steps_ratio": round(ours.tokens_per_step / other.tokens_per_step, 3),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, default=ROOT / "demo" / "model", help="the target (%(default)s)")
    add("--speculator", type=Path, default=ROOT / "demo" / "drafter", help="trained for it (%(default)s)")
    add("--sessions", type=int, default=12, metavar="N", help="sessions a workload (%(default)s)")
    add("--batch", type=int, default=1, metavar="B", help="requests in flight (%(default)s)")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


def _print(rows: Sequence[dict[str, Any]], ratios: Sequence[dict[str, Any]]) -> None:
    for title, items in (("Suffix index, a draft model, and both", rows), ("The hybrid", ratios)):
        columns = [name for name in items[0] if name != "accepted_by_source"]
        cells = [[str(item[name]) for name in columns] for item in items]
        headings = [name.replace("_", " ") for name in columns]
        print_table(title, headings, cells, left=headings, width=120)


if __name__ == "__main__":
    sys.exit(main())
