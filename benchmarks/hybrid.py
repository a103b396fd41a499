"""Measure suffix indexes, draft models, and both on real vLLM: tokens/second and tokens a step on three kinds of text.

    python benchmarks/hybrid.py --json
    python benchmarks/hybrid.py --json --methods none,suffix,eagle3,eagle3+trees,eagle3+threshold
    python benchmarks/hybrid.py --json --methods none,suffix,eagle3,eagle3+trees --verify-price .03 --pass-price .08

The target is the demo's model and the texts are its own greedy answers to the demo's tasks. They are written once and
then played to one engine for each method; the engines take turns every few calls. Drafts are the method's, verification
and its time are vLLM's (see agentspec.testing.replay). Workloads:

repetitive   an agent's later turns: the corrected function, after the one in the prompt
fresh        first answers to tasks, every one in a session that sees no other: there is nothing to copy from
mixed        three turns of a session, then a first answer of another, and so on

A drafter of vLLM's (eagle3, draft_model) runs alone, in vLLM without agentspec; with `+trees` beside agentspec; and
with `+threshold` under TensorRT-LLM's rule (`fusion_rules`). With prices, agentspec decides by them, and the result is
in tokens a unit of work, where a unit is a decode step without drafts. So it does not depend on the machine.

A pass of a drafter costs a large share of a step of the demo's four layers. `--layers 32` adds layers to the target
that do not change its text, and cost as much as its own.
"""

import argparse
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from fusion_rules import fix_prices, fix_threshold
from report import ROOT, exit_status, machine, names, positive, print_json, print_table, say, speed_ratio

from agentspec.testing.replay import Call, ReplayEngine, ReplayResult, fitting_length
from agentspec.testing.replay import compare as take_turns

sys.path.insert(0, str(ROOT))  # so that the demo's tasks can be imported

MAX_DRAFT = 16
DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3": {"method": "eagle3", "model": str(ROOT / "demo" / "eagle3"), "num_speculative_tokens": 3},
    "draft_model": {"method": "draft_model", "model": str(ROOT / "demo" / "draft_model"), "num_speculative_tokens": 4},
}
"""vLLM's speculative config of each of its own drafters."""


@dataclass(frozen=True, slots=True)
class Method:
    """Say how a method is replayed.

    replay: the engine's method. settings: agentspec's; speculator "" stands for the speculator's folder. drafter: key
    of DRAFTERS. prepare: called in the engine's process.
    """

    replay: str
    settings: dict[str, Any] = field(default_factory=dict)
    drafter: str | None = None
    prepare: Callable[[], None] | None = None


METHODS = {
    "none": Method("none"),
    "ngram": Method("ngram"),
    "suffix": Method("agentspec"),
    "speculator": Method("agentspec", {"speculator": "", "arctic_suffix_rule": {"max_spec_factor": 0.0}}),
    "hybrid": Method("agentspec", {"speculator": ""}),
    "hybrid-not-scoring": Method("agentspec", {"speculator": "", "score_suffix_drafts": False}),
}
for _drafter in DRAFTERS:
    METHODS[_drafter] = Method("none", drafter=_drafter)
    METHODS[f"{_drafter}+trees"] = Method("agentspec", drafter=_drafter)
    METHODS[f"{_drafter}+threshold"] = Method("agentspec", drafter=_drafter, prepare=fix_threshold)
DEFAULT_METHODS = ("none", "ngram", "suffix", "speculator", "hybrid", "hybrid-not-scoring")
SINGLE = ("none", "ngram", "suffix", "speculator")
WORKLOADS = ("repetitive", "fresh", "mixed")
_FIRST_SEEDS = {"warm-up": 2_000, "repetitive": 3_000, "fresh": 4_000, "mixed": 5_000}
"""First task seed of each workload, counted from FIRST_HELD_OUT_SEED."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Hold what verifying one more token and a pass of a drafter cost, as shares of a decode step without drafts."""

    verify: float
    drafter_pass: float

    def rate(self, result: ReplayResult) -> float:
        """Return tokens a unit of work, of a run with one request at a time."""
        work = result.steps + self.verify * result.drafted + self.drafter_pass * result.passes
        return result.tokens / work


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns its exit status."""
    options = read_options(arguments)
    return exit_status(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    say("writing the texts")
    loads = write_workloads(options.model, options.sessions)
    results = measure(options, loads)
    prices = options.prices
    rows = [row(load, method, done, prices) for load, methods in results.items() for method, done in methods.items()]
    ratios = [ratio for load, methods in results.items() for ratio in compare(load, methods, prices)]
    if options.json:
        provenance = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "machine": machine(),
            "python": platform.python_version(),
            "speculator": options.speculator.name,
            "sessions": options.sessions,
            "batch": options.batch,
            "layers": options.layers,
            "verify_price": options.verify_price,
            "pass_price": options.pass_price,
        }
        print_json({"provenance": provenance, "rows": rows, "ratios": ratios})
    else:
        _print(rows, ratios)


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


def deepen(model: Path, layers: int, folder: Path) -> Path:
    """Write a copy of a Llama with `layers` layers, of which the added ones leave the hidden states as they are.

    Return the copy's folder.
    """
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    for layer in range(config["num_hidden_layers"], layers):
        for name in [name for name in weights if name.startswith(last)]:
            idle = name.endswith(("o_proj.weight", "down_proj.weight"))
            copied = torch.zeros_like(weights[name]) if idle else weights[name].clone()
            weights[name.replace(last, f"model.layers.{layer}.")] = copied
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def measure(options: argparse.Namespace, loads: dict[str, list[Call]]) -> dict[str, dict[str, ReplayResult]]:
    """Run each workload after one warm-up, on one engine for each method; the engines take turns."""
    calls = [call for load in loads.values() for call in load]
    tokens = sum(len(call.response) for call in calls)
    say(f"{len(calls)} calls, {tokens:,} tokens; starting {len(options.methods)} engines")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agentspec-hybrid-")))
        model = options.model if options.layers is None else deepen(options.model, options.layers, folder)
        engines = {}
        for name in options.methods:
            length = fitting_length(calls, MAX_DRAFT)
            engines[name] = stack.enter_context(_engine(METHODS[name], options, model, length))
            engines[name].wait_ready()  # start one at a time: it takes most of a core
            say(f"{name} is ready")
        results: dict[str, dict[str, ReplayResult]] = {}
        for load, load_calls in loads.items():
            results[load] = take_turns(engines, load_calls, batch=options.batch)
            for name, done in results[load].items():
                say(f"{load}, {name}: {done.tokens_per_second:.0f} tokens/s")
    del results["warm-up"]
    return results


def _engine(method: Method, options: argparse.Namespace, model: Path, max_model_len: int) -> ReplayEngine:
    settings = {"store": "memory://", "scope": "session", **method.settings}
    if "speculator" in settings:
        settings["speculator"] = str(options.speculator)
    prepare = method.prepare
    if options.prices is not None:
        settings["verify_cost"] = options.prices.verify
        prepare = prepare or partial(fix_prices, options.prices.drafter_pass)
    return ReplayEngine(
        method=method.replay,
        model=model,
        max_model_len=max_model_len,
        max_batch=options.batch,
        max_draft=MAX_DRAFT,
        settings=settings,
        drafter=None if method.drafter is None else DRAFTERS[method.drafter],
        prepare=prepare if method.replay == "agentspec" else None,
    )


def row(load: str, method: str, total: ReplayResult, prices: Prices | None = None) -> dict[str, Any]:
    """Return the figures of one method on one workload for the output."""
    by_price = {} if prices is None else {"tokens_per_unit": round(prices.rate(total), 3)}
    return {
        "workload": load,
        "method": method,
        "tokens": total.tokens,
        **by_price,
        "tokens_per_second": round(total.tokens_per_second, 1),
        "tokens_per_cpu_second": round(total.tokens_per_cpu_second, 1),
        "mean_acceptance_length": round(total.tokens_per_step, 3),
        "acceptance_rate": round(total.acceptance_rate, 3),
        "steps": total.steps,
        "drafted": total.drafted,
        "passes": total.passes,
        "accepted_by_source": dict(total.accepted_by_source),
    }


def compare(load: str, methods: dict[str, ReplayResult], prices: Prices | None = None) -> list[dict[str, Any]]:
    """Return the ratios of tokens/second between the methods that ran. With prices: of tokens a unit of work.

    The hybrid is compared with the best single method, and with itself without `score_suffix_drafts`. A drafter beside
    agentspec is compared with the better of its two parts, and with the fixed threshold. ``noise``: standard error of
    the ratio, from the turns that both methods took on the same calls. ``cpu_ratio``: of tokens a second of CPU time.
    """

    def better(parts: Sequence[str]) -> str:
        rate = (lambda name: methods[name].tokens_per_second) if prices is None else lambda n: prices.rate(methods[n])
        return max((name for name in parts if name in methods), key=rate)

    pairs = [("scoring", "hybrid", "hybrid-not-scoring")]
    if "hybrid" in methods and methods.keys() & set(SINGLE):
        pairs.insert(0, ("hybrid / best single", "hybrid", better(SINGLE)))
    for drafter in DRAFTERS:
        both = f"{drafter}+trees"
        if both in methods and {drafter, "suffix"} <= methods.keys():
            pairs.append((f"{both} / better part", both, better((drafter, "suffix"))))
        pairs.append((f"{both} / threshold", both, f"{drafter}+threshold"))
    return [
        _ratio(load, what, other, methods[ours], methods[other], prices)
        for what, ours, other in pairs
        if {ours, other} <= methods.keys()
    ]


def _ratio(
    load: str, what: str, other_name: str, ours: ReplayResult, other: ReplayResult, prices: Prices | None
) -> dict[str, Any]:
    value, noise = speed_ratio(ours, other) if prices is None else (prices.rate(ours) / prices.rate(other), 0.0)
    return {
        "workload": load,
        "figure": what,
        "against": other_name,
        "ratio": round(value, 3),
        "noise": round(noise, 3),
        "cpu_ratio": round(ours.tokens_per_cpu_second / (other.tokens_per_cpu_second or 1.0), 3),
        "steps_ratio": round(ours.tokens_per_step / other.tokens_per_step, 3),
    }


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, with `prices`: a Prices, or None to measure time. Exit with a message for wrong ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, default=ROOT / "demo" / "model", help="the target (%(default)s)")
    add("--speculator", type=Path, default=ROOT / "demo" / "drafter", help="trained for it (%(default)s)")
    add("--methods", type=names, default=DEFAULT_METHODS, metavar="A,B", help=f"of {', '.join(METHODS)}")
    add("--sessions", type=positive, default=12, metavar="N", help="sessions a workload (%(default)s)")
    add("--batch", type=positive, default=1, metavar="B", help="requests in flight (%(default)s)")
    add("--layers", type=positive, metavar="N", help="of the target (default: as many as it has)")
    add("--verify-price", type=float, metavar="P", help="of one more draft token, as a share of a decode step")
    add("--pass-price", type=float, metavar="P", help="of a pass of vLLM's drafter, as a share of a decode step")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args(arguments)
    if not (options.model / "config.json").is_file():
        parser.error(f"--model: there is no config.json in {options.model}")
    unknown = [name for name in options.methods if name not in METHODS]
    if unknown:
        parser.error(f"--methods: {', '.join(unknown)} is not known; known are: {', '.join(METHODS)}")
    if (options.verify_price is None) != (options.pass_price is None):
        parser.error("--verify-price and --pass-price: give both or none")
    options.prices = None if options.pass_price is None else Prices(options.verify_price, options.pass_price)
    if options.prices is not None and options.batch != 1:
        parser.error("--batch: prices are for one request at a time")
    return options


def _print(rows: Sequence[dict[str, Any]], ratios: Sequence[dict[str, Any]]) -> None:
    tables = [("Suffix index, a draft model, and both", rows), ("The hybrid", ratios)]
    for title, items in tables if ratios else tables[:1]:  # without methods to compare there are no ratios
        columns = [name for name in items[0] if name != "accepted_by_source"]
        cells = [[str(item[name]) for name in columns] for item in items]
        headings = [name.replace("_", " ") for name in columns]
        print_table(title, headings, cells, left=headings, width=120)


if __name__ == "__main__":
    sys.exit(main())
