"""Replay recorded samples of problems on real vLLM, epoch after epoch, and compare what drafting gains.

    python benchmarks/rollouts.py --traces DIR --problems 16 --samples 4 --epochs 3 --batch 1 8 --json

An epoch samples each problem a few times; the next one replays other recorded samples of the same problems, so its text
drifts as a policy's does. Prompts carry no ids: agentspec finds the groups. `off` is agentspec with scope none, which
drafts from a sample's own text alone. The first epoch shows what siblings are worth, the last what epochs are. Output
is a list of {figure, value, target, met}. Targets: siblings take at least 1.26 times fewer steps than plain decoding
(Seer, arXiv 2511.14617: 26 to 48 % from siblings' drafts), epochs 1.5 times, both 1.15 times fewer than vLLM's suffix
decoding; and at least .97 of plain vLLM's tokens a second with the price measured.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import arctic
import engines
from report import exit_status, positive, print_json, print_table, say, speed_ratio
from trace_files import VOCABULARY, records

from agentspec.errors import ConfigurationError
from agentspec.testing.replay import Call, ModelShape, ReplayEngine, ReplayResult, compare, fitting_length

WORKLOAD = "rollouts_codegen"
CONTENDERS = ("none", "ngram", "suffix", "off", "agentspec")
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
    epochs = read_epochs(options)
    for batch in options.batch:
        results = measure(options, epochs, batch)
        rows += figures(results, batch)
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
    problems: list[list[dict[str, Any]]] = []
    for _, group in groupby(records(options.traces, options.workload), key=lambda record: record["group"]):
        samples = list(group)
        if len(samples) >= wanted:
            problems.append(samples[:wanted])
        if len(problems) == options.problems:
            break
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


def measure(options: argparse.Namespace, epochs: Epochs, batch: int) -> Results:
    """Run all epochs on one engine for each contender; the engines take turns."""
    calls = [call for epoch in epochs for call in epoch]
    say(f"batch {batch}: {len(calls)} samples, {sum(len(call.response) for call in calls):,} tokens; starting vLLM")
    shape = ModelShape(VOCABULARY, options.hidden, options.layers, max(1, options.hidden // 32))
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(
                ReplayEngine(
                    method="agentspec" if name == "off" else name,
                    shape=shape,
                    max_model_len=fitting_length(calls, None),
                    max_batch=batch,
                    settings={"store": "memory://", **({"scope": "none"} if name == "off" else {})},
                    seed=options.seed,
                    module_paths=[arctic.build(options.peer_dir)] if name == "suffix" else (),
                )
            )
            for name in options.methods
        }
        results: Results = {name: [] for name in started}
        for number, epoch in enumerate(epochs):
            done = compare(started, epoch, batch=batch, chunk=max(1, len(epoch) // TURNS))
            for name, result in done.items():
                results[name].append(result)
            say(f"batch {batch}, epoch {number}: done")
        return results


def figures(results: Mapping[str, Sequence[ReplayResult]], batch: int) -> list[dict[str, Any]]:
    """Return what is compared with a target."""
    ours = results["agentspec"]
    rows = []
    for epoch, what, target in ((0, "siblings", SIBLINGS), (len(ours) - 1, "epochs", EPOCHS)):
        if "none" in results:
            ratio = results["none"][epoch].steps / ours[epoch].steps
            rows.append(_row(f"batch {batch}: steps of none over agentspec's, {what}", ratio, target))
        if "suffix" in results:
            ratio = results["suffix"][epoch].steps / ours[epoch].steps
            rows.append(_row(f"batch {batch}: steps of suffix over agentspec's, {what}", ratio, AHEAD))
    if "none" in results:
        speed, noise = speed_ratio(_total(ours), _total(results["none"]))
        row = _row(f"batch {batch}: tokens/s of agentspec over none's, all epochs", speed, SPEED)
        rows.append({**row, "noise": round(noise, 4)})
    return rows


def _row(figure: str, value: float, target: float) -> dict[str, Any]:
    return {"figure": figure, "value": round(value, 4), "target": target, "met": value >= target}


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
    add = parser.add_argument
    add("--traces", type=Path, required=True, metavar="DIR", help="folder with load.py and NAME.tok.npz files")
    add("--workload", default=WORKLOAD, metavar="NAME", help="recording with several samples a problem (%(default)s)")
    add("--problems", type=positive, default=16, help="(%(default)s)")
    add("--samples", type=positive, default=4, help="of each problem in an epoch (%(default)s)")
    add("--epochs", type=positive, default=3, help="(%(default)s)")
    add("--batch", type=positive, nargs="+", default=[1, 8, 32, 64], metavar="B", help="requests in flight")
    add("--methods", type=_methods, default=",".join(CONTENDERS), metavar="A,B", help="%(default)s")
    arctic.add_option(parser)
    add("--hidden", type=positive, default=64, help="hidden size of the random model, a multiple of 32 (%(default)s)")
    add("--layers", type=positive, default=2, help="its layers (%(default)s)")
    add("--seed", type=int, default=0, help="of its weights (%(default)s)")
    add("--json", action="store_true", help="print a JSON list of {figure, value, target, met}")
    return parser


def _methods(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown or "agentspec" not in names:
        raise argparse.ArgumentTypeError(f"{text!r}: give agentspec and any of {', '.join(CONTENDERS)}")
    return list(dict.fromkeys(names))


if __name__ == "__main__":
    sys.exit(main())
