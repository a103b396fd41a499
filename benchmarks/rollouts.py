"""Replay recorded samples of problems on real vLLM, epoch after epoch, and compare what drafting gains.

    python benchmarks/rollouts.py --traces DIR [--problems 16] [--samples 8] [--epochs 3] [--batch 1 8] [--save]

An epoch samples each problem a few times; the next one replays other recorded samples of the same problems, so its text
drifts as a policy's does. Prompts carry no ids: agentspec finds the groups. `agentspec` measures the price of verifying
a token, `priced` is told it (`--verify-cost`), so that its counts repeat, and `off` is `priced` with scope none, which
drafts from a sample's own text alone. The first epoch shows what siblings are worth, the last what epochs are. The
engines start once. Each batch size has token ids of its own, so that none knows the text of the one before.

`--json` prints a list of {figure, value, target, met}. Targets: siblings take at least 1.26 times fewer steps than
plain decoding (Seer, arXiv 2511.14617: 26 to 48 % from siblings' drafts), epochs 1.5 times, both 1.15 times fewer than
vLLM's suffix decoding; and at least .97 of plain vLLM's tokens a second with the price measured.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any

import arctic
import engines
import numpy as np
from report import exit_status, positive, print_json, print_table, save, say, speed_ratio
from trace_files import VOCABULARY, samples_by_problem

from agentspec.errors import ConfigurationError
from agentspec.testing.replay import (
    RESERVED_TOKENS,
    Call,
    ModelShape,
    ReplayEngine,
    ReplayResult,
    compare,
    fitting_length,
)

WORKLOAD = "rollouts_codegen"
CONTENDERS = ("none", "ngram", "suffix", "off", "priced", "agentspec")
OURS = ("priced", "agentspec")
SIBLINGS, EPOCHS, AHEAD, SPEED = 1.26, 1.5, 1.15, 0.97
TURNS = 6

Epochs = list[list[Call]]
Results = dict[str, list[ReplayResult]]
"""Results of each contender, one for each epoch."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns its exit status."""
    options = _parser().parse_args(arguments)
    return exit_status(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    rows: list[dict[str, Any]] = []
    counts: list[dict[str, Any]] = []
    for batch, results in measure(options, read_epochs(options)):
        rows += figures(results, batch)
        counts += _counts(results, batch)
        if options.save:
            sizes = {name: getattr(options, name) for name in ("problems", "samples", "epochs", "verify_cost")}
            save(
                "rollouts", "rollouts, recorded samples forced on real vLLM", {**sizes, "figures": rows, "rows": counts}
            )
        if not options.json:
            _print_table(results, options, batch)
    if options.json:
        print_json(rows)
    else:
        columns = ("figure", "value", "target", "met")
        cells = [[str(row[name]) for name in columns] for row in rows]
        print_table("rollouts", columns, cells, left=("figure",), width=120)


def read_epochs(options: argparse.Namespace) -> Epochs:
    """Return the calls of each epoch. Raises ConfigurationError if the recording has too few samples."""
    wanted = options.samples * options.epochs
    enough = (samples for samples in samples_by_problem(options.traces, options.workload) if len(samples) >= wanted)
    problems = [samples[:wanted] for samples in islice(enough, options.problems)]
    if len(problems) < options.problems:
        raise ConfigurationError(
            f"--problems {options.problems}: {options.workload} has {len(problems)} problems with {wanted} samples; "
            "ask for fewer problems, samples or epochs"
        )
    return [list(_epoch(problems, epoch, options.samples)) for epoch in range(options.epochs)]


def _epoch(problems: list[list[dict[str, Any]]], epoch: int, samples: int) -> Iterator[Call]:
    for problem in problems:
        for number in range(epoch * samples, (epoch + 1) * samples):
            yield Call(session=None, prompt=problem[number]["prompt"], response=problem[number]["response"])


def measure(options: argparse.Namespace, epochs: Epochs) -> Iterator[tuple[int, Results]]:
    """Run all epochs on one engine for each contender, which take turns. Yields the results of each batch size."""
    calls = [call for epoch in epochs for call in epoch]
    say(f"{len(calls)} samples, {sum(len(call.response) for call in calls):,} tokens; starting vLLM")
    shape = ModelShape(VOCABULARY, options.hidden, options.layers, max(1, options.hidden // 32))
    told = {"verify_cost": options.verify_cost}
    settings: dict[str, dict[str, Any]] = {"off": {"scope": "none", **told}, "priced": told}
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(
                ReplayEngine(
                    method="agentspec" if name in settings else name,
                    shape=shape,
                    max_model_len=fitting_length(calls, None),
                    max_batch=max(options.batch),
                    settings={"store": "memory://", **settings.get(name, {})},
                    seed=options.seed,
                    module_paths=[arctic.build(options.peer_dir)] if name == "suffix" else (),
                )
            )
            for name in options.methods
        }
        for batch in options.batch:
            results: Results = {name: [] for name in started}
            for number, epoch in enumerate(epochs):
                shifted = [_shifted(call, 1_009 * batch) for call in epoch]
                done = compare(started, shifted, batch=batch, chunk=max(batch, len(epoch) // TURNS))
                for name, result in done.items():
                    results[name].append(result)
                say(f"batch {batch}, epoch {number}: done")
            yield batch, results


def _shifted(call: Call, by: int) -> Call:
    """Return the call with other token ids, which keeps every repetition. Special tokens stay, the end's included."""
    ids = VOCABULARY - RESERVED_TOKENS
    prompt, response = (
        np.where(tokens < RESERVED_TOKENS, tokens, (tokens - RESERVED_TOKENS + by) % ids + RESERVED_TOKENS)
        for tokens in (call.prompt, call.response)
    )
    return replace(call, prompt=prompt, response=response)


def figures(results: Mapping[str, Sequence[ReplayResult]], batch: int) -> list[dict[str, Any]]:
    """Return the ratios of the other contenders' steps to agentspec's, and of its speed to theirs, with targets."""
    rows = []
    for ours in (name for name in OURS if name in results):
        found = results[ours]
        last = [(len(found) - 1, "epochs", EPOCHS)] if len(found) > 1 else []
        for epoch, what, target in [(0, "siblings", SIBLINGS), *last]:
            for other, least in (("none", target), ("suffix", AHEAD), ("off", None)):
                if other in results:
                    ratio = results[other][epoch].steps / found[epoch].steps
                    rows.append(_row(f"batch {batch}: steps of {other} over {ours}'s, {what}", ratio, least))
    for other, least in (("none", SPEED), ("suffix", None)):
        if other in results and "agentspec" in results:
            total, theirs = _total(results["agentspec"]), _total(results[other])
            speed, noise = speed_ratio(total, theirs)
            row = _row(f"batch {batch}: tokens/s of agentspec over {other}'s, all epochs", speed, least)
            rows.append({**row, "noise": round(noise, 4)})
            if total.cpu_seconds:
                ratio = total.tokens_per_cpu_second / theirs.tokens_per_cpu_second
                rows.append(_row(f"batch {batch}: tokens a CPU second of agentspec over {other}'s", ratio, None))
    return rows


def _row(figure: str, value: float, target: float | None) -> dict[str, Any]:
    met = None if target is None else value >= target
    return {"figure": figure, "value": round(value, 4), "target": target, "met": met}


def _counts(results: Mapping[str, Sequence[ReplayResult]], batch: int) -> list[dict[str, Any]]:
    """Return what each contender did in each epoch."""
    return [
        {
            "batch": batch,
            "method": name,
            "epoch": epoch,
            "tokens": result.tokens,
            "steps": result.steps,
            "drafted": result.drafted,
            "accepted": result.accepted,
            "tokens_per_second": round(result.tokens_per_second, 1),
            "tokens_per_cpu_second": round(result.tokens_per_cpu_second, 1),
        }
        for name, epochs in results.items()
        for epoch, result in enumerate(epochs)
    ]


def _total(results: Sequence[ReplayResult]) -> ReplayResult:
    total = ReplayResult()
    for result in results:
        total += result
    return total


def _print_table(results: Mapping[str, Sequence[ReplayResult]], options: argparse.Namespace, batch: int) -> None:
    columns = ("method", "epoch", "tokens", "steps", "tokens/step", "acceptance", "tokens/s")
    cells = [
        (
            name if epoch == 0 else "",
            str(epoch),
            f"{result.tokens:,}",
            f"{result.steps:,}",
            f"{result.tokens_per_step:.3f}",
            f"{result.acceptance_rate:.2f}",
            f"{result.tokens_per_second:.0f}",
        )
        for name, epochs in results.items()
        for epoch, result in enumerate(epochs)
    ]
    title = f"{options.problems} problems x {options.samples} samples x {options.epochs} epochs, batch {batch}"
    print_table(title, columns, cells, left=("method",), width=120)


def _parser() -> argparse.ArgumentParser:
    parser = engines.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines.add_recording(parser, WORKLOAD)
    add = parser.add_argument
    add("--problems", type=positive, default=16, help="(%(default)s)")
    add("--samples", type=positive, default=8, help="of each problem in an epoch (%(default)s)")
    add("--epochs", type=positive, default=3, help="(%(default)s)")
    add("--batch", type=positive, nargs="+", default=[1, 8, 32, 64], metavar="B", help="requests in flight")
    add("--methods", type=_methods, default=",".join(CONTENDERS), metavar="A,B", help="%(default)s")
    arctic.add_option(parser)
    add("--hidden", type=positive, default=64, help="hidden size of the random model, a multiple of 32 (%(default)s)")
    add("--layers", type=positive, default=2, help="its layers (%(default)s)")
    add("--seed", type=int, default=0, help="of its weights (%(default)s)")
    add(
        "--verify-cost",
        type=float,
        default=0.02,
        metavar="P",
        help="price that `priced` and `off` are told (%(default)s)",
    )
    add("--save", action="store_true", help="keep the result in benchmarks/results, which plot.py reads")
    return parser


def _methods(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown or not set(OURS) & set(names):
        raise argparse.ArgumentTypeError(f"{text!r}: give {' or '.join(OURS)}, and any of {', '.join(CONTENDERS)}")
    return list(dict.fromkeys(names))


if __name__ == "__main__":
    sys.exit(main())
