"""Measure what long drafts cost the requests beside them: time between tokens, in one batch, on real vLLM.

    python benchmarks/beside.py --traces DIR [--quiet chat_mtbench] [--copying refine_code_ldb] [--json]

A verification step lasts as long for a row without a draft as for the row with the longest one. Here some rows of the
batch play a workload that doesn't repeat, the others one that copies long texts; each row is refilled from its own
workload. The benchmark measures the steps in which every row decodes and none is prefilled. Their duration is the time
between tokens of the rows that don't repeat. Every method has its defaults, as in serve.py, and takes turns with plain
vLLM (`none`). Times are given as multiples of plain vLLM's too.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any

import engines
import numpy as np
from report import exit_status, positive, print_json, print_table, say

from agentspec.errors import ConfigurationError
from agentspec.testing.replay import Call, ReplayResult

METHODS = ("none", "suffix", "agentspec")
MULTIPLE = 2.0
"""Longest step that agentspec's budget of draft tokens allows, as a multiple of a plain step's duration."""
QUANTILES = {"median": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
HELD = ("median", "p95", "p99")
"""Quantiles that must stay within MULTIPLE. The maximum need not: on a shared machine another process may cause it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns its exit status."""
    options = _parser().parse_args(arguments)
    return exit_status(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    if "none" not in options.methods:
        raise ConfigurationError("--methods: none is what the others are compared with: add it")
    calls = mixed_calls(options)
    results = measure(options, calls)
    rows = [row(method, result, results["none"]) for method, result in results.items()]
    if options.json:
        print_json(rows)
    else:
        _print_table(rows, options)


def mixed_calls(options: argparse.Namespace) -> list[Call]:
    """Return the calls of both workloads. Every session plays in one lane, and every lane is one row of the batch.

    Raises ConfigurationError naming the option where a workload has too few sessions with short prompts.
    """
    found: list[Call] = []
    for flag, workload, rows in (
        ("--quiet", options.quiet, options.quiet_rows),
        ("--copying", options.copying, options.copying_rows),
    ):
        calls = list(islice(_lanes(options, workload, rows), options.calls))
        if len({call.lane for call in calls}) < rows:
            raise ConfigurationError(
                f"{flag} {workload}: fewer than {rows} sessions have prompts of at most {options.max_prompt} tokens; "
                f"raise --max-prompt or lower {flag}-rows"
            )
        found += calls
    return found


def _lanes(options: argparse.Namespace, workload: str, rows: int) -> Iterator[Call]:
    lanes: dict[str | None, int] = {}
    for call in engines.short_calls(options, workload):
        lane = lanes.setdefault(call.session, len(lanes) % rows)
        yield replace(call, lane=f"{workload}, row {lane}")


def measure(options: argparse.Namespace, calls: Sequence[Call]) -> dict[str, ReplayResult]:
    """Run one engine a method, in turns, until each has measured enough steps or has no calls left."""
    batch = options.quiet_rows + options.copying_rows
    say(f"{len(calls)} calls; starting {len(options.methods)} engines, a minute or two")
    with ExitStack() as stack:
        started = engines.start_engines(options, stack, calls, batch=batch)
        for engine in started.values():
            engine.wait_ready()
            engine.begin(calls, batch)
        results = {method: ReplayResult() for method in started}
        order = list(started)
        while order:
            for method in list(order):
                piece = started[method].advance(1)
                results[method] += piece
                steps = len(results[method].decode_seconds)
                if steps >= options.steps or piece.calls == 0:
                    order.remove(method)
                    say(f"{method}: {steps} steps")
            order = order[1:] + order[:1]
    return results


def row(method: str, result: ReplayResult, plain: ReplayResult) -> dict[str, Any]:
    """Return one method's figures for the output: times in ms, and as multiples of plain vLLM's (`times_none`)."""
    times, plain_times = quantiles(result), quantiles(plain)
    ratios = {name: times[name] / plain_times[name] for name in times}
    return {
        "method": method,
        "steps": len(result.decode_seconds),
        "tokens_per_step": round(result.tokens_per_step, 4),
        "drafted_per_step": round(result.drafted / result.steps, 4) if result.steps else 0.0,
        "milliseconds": {name: round(value, 3) for name, value in times.items()},
        "times_none": {name: round(value, 3) for name, value in ratios.items()},
        "target": f"{', '.join(HELD)}: at most {MULTIPLE:g} times none",
        "met": all(ratios[name] <= MULTIPLE for name in HELD),
    }


def quantiles(result: ReplayResult) -> Mapping[str, float]:
    """Return the quantiles of the time between tokens, in ms. Raises ConfigurationError where none was measured."""
    if not result.decode_seconds:
        raise ConfigurationError("no step had all rows decoding: raise --calls, or lower the number of rows")
    values = np.quantile(np.array(result.decode_seconds) * 1e3, list(QUANTILES.values()))
    return dict(zip(QUANTILES, values.tolist(), strict=True))


def _parser() -> argparse.ArgumentParser:
    parser = engines.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines.add_options(parser, METHODS, max_prompt=2048)
    engines.add_sizes(parser)
    add = parser.add_argument
    add("--quiet", default="chat_mtbench", metavar="NAME", help="the workload that doesn't repeat (%(default)s)")
    add("--copying", default="refine_code_ldb", metavar="NAME", help="the one that copies long texts (%(default)s)")
    add("--quiet-rows", type=positive, default=4, metavar="N", help="rows of the batch that play it (%(default)s)")
    add("--copying-rows", type=positive, default=4, metavar="N", help="rows of the batch that play it (%(default)s)")
    add("--calls", type=positive, default=400, metavar="N", help="of each workload at most (%(default)s)")
    add("--steps", type=positive, default=1_000, metavar="N", help="steps to measure a method (%(default)s)")
    return parser


def _print_table(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    mix = f"{options.quiet_rows} rows of {options.quiet} beside {options.copying_rows} of {options.copying}"
    columns = ("method", "steps", "tokens/step", *QUANTILES, "met")
    cells = [
        (
            item["method"],
            f"{item['steps']:,}",
            f"{item['tokens_per_step']:.2f}",
            *(f"{item['milliseconds'][name]:.1f} ({item['times_none'][name]:.2f})" for name in QUANTILES),
            "yes" if item["met"] else "no",
        )
        for item in rows
    ]
    print_table(f"time between tokens, {mix}: ms (times none)", columns, cells, left=("method",), width=120)


if __name__ == "__main__":
    sys.exit(main())
