"""Replay recorded agent traffic on vLLM on one GPU, at several batch sizes, with a model of a real size.

    python benchmarks/gpu.py --traces DIR [--shape llama-3.1-8b] [--workloads A,B] [--batch 1,8,32] [--save | --json]

The engines start once, share the GPU and take turns. The model has random weights in a published shape; each step takes
as long as with trained ones. Every method but `vllm` is made to say the recorded text (see serve.py), with the settings
that a new user gets. `vllm` is vLLM without speculation as it chooses to run: its newest model runner, scheduling
ahead. Its text doesn't matter, because every step writes one token.

Each batch size replays calls of its own, with token ids of its own, so that no drafter has seen them. One GPU with room
for as many models as there are methods is needed.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import engines
import numpy as np
from report import exit_status, names, positive, print_json, print_table, save, say, speed_ratio
from trace_files import VOCABULARY, WORKLOADS

from agentspec.testing.replay import Call, ModelShape, ReplayResult, compare

OURS = "agentspec"
METHODS = ("vllm", "none", "ngram", "suffix", OURS)
SHAPES = {
    "llama-3.1-8b": ModelShape(VOCABULARY, hidden=4096, layers=32, heads=32, kv_heads=8, inner=14336),
    "llama-3.2-1b": ModelShape(VOCABULARY, hidden=2048, layers=16, heads=32, kv_heads=8, inner=8192),
    "small": ModelShape(VOCABULARY, hidden=64, layers=2, heads=2),
}
TURNS = 6


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns its exit status."""
    options = _parser().parse_args(arguments)
    return exit_status(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    rows = measure(options)
    result = {"machine": _device(), "shape": options.shape, "max_prompt": options.max_prompt, "rows": rows}
    if options.save:
        save("gpu", "serving on a GPU", result)
    if options.json:
        print_json(result)
    else:
        _print_table(rows)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each workload, batch size and method."""
    cells = {
        (workload, batch): read_calls(options, workload, batch)
        for workload in options.workloads
        for batch in options.batch
    }
    rows = []
    with ExitStack() as stack:
        started = engines.start_engines(
            options,
            stack,
            [call for calls in cells.values() for call in calls],
            batch=max(options.batch),
            shape=SHAPES[options.shape],
            kv_cache_bytes=options.kv_cache << 30,
        )
        for method, engine in started.items():
            say(f"{method}: {engine.wait_ready()}")
        for (workload, batch), calls in cells.items():
            say(f"{workload}, batch {batch}: {len(calls)} calls")
            results = compare(started, calls, batch=batch, chunk=max(1, len(calls) // TURNS))
            ours = results.get(OURS)
            for method, result in results.items():
                rows.append({"workload": workload, "batch": batch, "method": method, **figures(result, ours)})
                say("  " + ", ".join(f"{name} {value}" for name, value in rows[-1].items()))
    return rows


def read_calls(options: argparse.Namespace, workload: str, batch: int) -> list[Call]:
    """Return the workload's first calls, in file order, with enough tokens for the batch size.

    Every token id is shifted by a number that belongs to the batch size, which keeps every repetition within a cell.
    Raises ConfigurationError where no prompt is short enough.
    """
    shift = 1_009 * batch
    calls: list[Call] = []
    wanted = options.tokens * (1 if batch == 1 else batch // 2)
    for call in engines.short_calls(options, workload):
        calls.append(
            Call(
                session=f"{call.session}-{batch}",
                prompt=_shifted(call.prompt, shift),
                response=_shifted(call.response, shift),
                group=None if call.group is None else f"{call.group}-{batch}",
            )
        )
        wanted -= len(call.response)
        if wanted <= 0:
            break
    if not calls:
        raise engines.no_short_calls(options, workload)
    return calls


def figures(result: ReplayResult, ours: ReplayResult | None) -> dict[str, Any]:
    """Return one method's figures; `agentspec_speed_ratio` is agentspec's tokens/second over this method's."""
    decode = sorted(result.decode_seconds)
    item = {
        "tokens": result.tokens,
        "steps": result.steps,
        "drafted": result.drafted,
        "accepted": result.accepted,
        "tokens_per_step": round(result.tokens_per_step, 3),
        "tokens_per_second": round(result.tokens_per_second, 1),
        "seconds": round(result.seconds, 3),
        "step_ms": round(1e3 * decode[len(decode) // 2], 3) if decode else None,
    }
    if ours is not None and ours is not result:
        speed, noise = speed_ratio(ours, result)
        item |= {"agentspec_speed_ratio": round(speed, 4), "noise": round(noise, 4)}
    return item


def _shifted(tokens: Any, shift: int) -> Any:
    return ((tokens.astype(np.int64) + shift) % VOCABULARY).astype(np.int32)


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def _parser() -> argparse.ArgumentParser:
    parser = engines.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    engines.add_options(parser, METHODS, max_prompt=2048)
    add("--shape", choices=SHAPES, default="llama-3.1-8b", help="of the model (%(default)s)")
    add("--workloads", type=names, default=",".join(WORKLOADS), metavar="A,B", help="recordings (%(default)s)")
    add("--batch", type=_sizes, default="1,8,32", metavar="A,B", help="requests in flight (%(default)s)")
    add("--tokens", type=positive, default=3000, metavar="N", help="recorded at batch 1; B/2 times as many at B")
    add("--kv-cache", type=positive, default=10, metavar="GIB", help="of each engine's KV cache (%(default)s)")
    add("--save", action="store_true", help="write results/gpu.json")
    return parser


def _sizes(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    columns = ("workload", "batch", "method", "tokens/step", "tokens/s", "step ms", "agentspec's")
    cells = [
        (
            row["workload"],
            str(row["batch"]),
            row["method"],
            f"{row['tokens_per_step']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            "" if row["step_ms"] is None else f"{row['step_ms']:.2f}",
            f"{row['agentspec_speed_ratio']:.3f} ± {row['noise']:.3f}" if "agentspec_speed_ratio" in row else "",
        )
        for row in rows
    ]
    print_table("Serving on a GPU", columns, cells, left=("workload", "method"), width=120)
    print("agentspec's: its tokens/s over this method's, and the standard error of that ratio")


if __name__ == "__main__":
    sys.exit(main())
