"""Simulate a GPU server on recorded sessions, 1 to 128 at once, with agentspec's own drafting code.

    python benchmarks/batch.py --traces DIR [--workloads A,B] [--sessions 1,8,32,128] [--save | --json]

No GPU takes part. Drafts, prices and budgets come from agentspec's own objects, the target's tokens from the recording.
A decode step takes a + b x (tokens verified) milliseconds, where each row verifies one token and its draft. a and b are
fitted to published decode times of an 8B and a 70B model (MODELS). Prefill and the time that drafting itself takes are
left out. The counts do not depend on the machine.

Rows are always busy (batch_replay.py). A replay ends after --tokens tokens for each concurrent session.
ArcticInference's best setting is the best of 12 at the price of a token in that batch, by the counts that drafting.py
keeps. Throughput is given relative to the same server without speculation. It is given once more for servers that lose
3 % or 30 % without asynchronous scheduling, which vLLM's V1 runner switches off for host-side drafters.
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import arctic
import numpy as np
import trace_files
from batch_replay import Counts, Drafter, IndexDrafter, NgramDrafter, replay
from drafters import ARCTIC_DEFAULTS, OtherDrafters, Setting, best_settings, ngram_rule
from report import exit_status, names, positive, print_json, print_table, save, say
from trace_files import WORKLOADS, records

from agentspec.cache import DraftPolicy
from agentspec.cache.core import without_clock
from agentspec.server_ext.settings import Settings

SESSIONS = (1, 8, 32, 128)
LEAST_TOKENS, TOKENS_A_SESSION = 20_000, 2_400
OURS, UNLIMITED, NGRAM = "agentspec", "agentspec, longest_step null", "ngram"
DEFAULT, BEST = "suffix, default", "suffix, best of 12"
METHODS = (OURS, UNLIMITED, BEST, DEFAULT, NGRAM)
ASYNC_GAINS = (0.03, 0.30)
"""Shares of the plain throughput that synchronous scheduling costs: published reports range from 3 to 30 %."""


@dataclass(frozen=True, slots=True)
class Model:
    """Hold a target's published decode times: pairs of requests in flight and milliseconds between tokens."""

    name: str
    published: tuple[tuple[int, float], ...]

    def step(self) -> tuple[float, float]:
        """Fit a and b to the published times by least squares. Return them in milliseconds."""
        rows, times = np.array(self.published).T
        b, a = np.polyfit(rows, times, 1)
        return float(a), float(b)

    def price(self, rows: int) -> float:
        """Return the price of verifying one more token in a batch of `rows`, as a share of a row's step."""
        a, b = self.step()
        return b * rows / (a + b * rows)


SOURCE = "https://docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance"
"""NVIDIA NIM's performance page. The times are the ITL column of each model's first table, up to 150 requests. The page
names the GPU, an H100, for another model only.
b is measured per row and used per verified token. A row adds attention too, so drafts look dearer than they are."""
MODELS = (
    Model("Llama-3.1-8B", ((1, 4.63), (5, 4.58), (25, 5.19), (50, 5.91), (100, 7.57), (150, 9.81))),
    Model("Llama-3.1-70B", ((1, 13.21), (5, 12.64), (25, 15.31), (50, 17.42), (100, 23.28), (150, 27.73))),
)


@without_clock()
def measure(traces: Path, workload: str, slots: int, tokens: int, best: Sequence[Setting]) -> list[dict[str, Any]]:
    """Return the rows of one workload and number of sessions: every method on every model.

    best: ArcticInference's best setting for each model.
    """
    recorded = list(records(traces, workload))
    width = max(len(record["prompt"]) + len(record["response"]) for record in recorded)

    def run(drafter: Drafter) -> Counts:
        return replay(recorded, slots, tokens, drafter)

    def arctic_rule(setting: Setting) -> Counts:
        rule = DraftPolicy.fixed(
            max_depth=setting.depth,
            max_spec_factor=setting.factor,
            min_token_prob=setting.probability,
            max_draft=setting.limit,
        )
        return run(IndexDrafter(rule, slots, width))

    at_best = {setting: arctic_rule(setting) for setting in set(best)}
    default = arctic_rule(ARCTIC_DEFAULTS["ArcticInference library"])
    ngram = run(NgramDrafter()) if ngram_rule() is not None else None
    rows = []
    for model, setting in zip(MODELS, best, strict=True):
        ours, unlimited = (
            run(IndexDrafter(DraftPolicy(), slots, width, model.step(), settings))
            for settings in (Settings(), Settings(longest_step=None))
        )
        methods = {OURS: ("", ours), UNLIMITED: ("", unlimited)}
        methods |= {BEST: (str(setting), at_best[setting]), DEFAULT: ("", default)}
        if ngram is not None:
            methods[NGRAM] = ("", ngram)
        rows += [figures(workload, slots, model, method, *found) for method, found in methods.items()]
    return rows


def figures(workload: str, slots: int, model: Model, method: str, setting: str, counts: Counts) -> dict[str, Any]:
    """Return one object of the output. `ratio`: throughput over the same server without speculation."""
    a, b = model.step()
    speed = counts.tokens / counts.milliseconds(a, b)
    ratio = speed / (slots / (a + b * slots))
    return {
        "workload": workload,
        "sessions": slots,
        "model": model.name,
        "method": method,
        "setting": setting,
        "steps": counts.steps,
        "tokens": counts.tokens,
        "drafted": counts.drafted,
        "drafted_rows": counts.drafted_rows,
        "tokens_per_row_step": round(counts.tokens / counts.rows, 4),
        "tokens_per_second": round(1e3 * speed, 1),
        "ratio": round(ratio, 4),
        **{f"ratio_async_{round(100 * gain)}": round(ratio * (1 - gain), 4) for gain in ASYNC_GAINS},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns its exit status."""
    options = _parser().parse_args(arguments)
    return exit_status(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    rows = run_all(options)
    result = {
        "tokens_a_session": options.tokens,
        "source": SOURCE,
        "models": [
            {"name": model.name, "published_ms": model.published, "a_ms": round(a, 3), "b_ms": round(b, 4)}
            for model in MODELS
            for a, b in [model.step()]
        ],
        "rows": rows,
    }
    if options.save:
        save("batch", "simulated: recorded tokens, a step takes a + b x (tokens verified) ms", result)
    if options.json:
        print_json(result)
    else:
        _print_tables(rows)


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every workload at every number of sessions, `--jobs` at a time."""
    from rich.console import Console
    from rich.progress import Progress

    rule = ngram_rule()
    if rule is None:
        say("vLLM is not installed: its ngram is left out")
    else:
        rule(np.zeros(8, np.int32))  # compile once, before the processes start
    others = OtherDrafters(options.traces, options.peer_dir)
    cells = []
    for workload, slots in product(options.workloads, options.sessions):
        prices = [model.price(slots) for model in MODELS]
        best = best_settings(others.settings(workload), prices)
        tokens = max(LEAST_TOKENS, options.tokens * slots)
        cells.append((workload, slots, tokens, [best[price][0] for price in prices]))
    with Progress(console=Console(stderr=True)) as progress, ProcessPoolExecutor(options.jobs) as pool:
        task = progress.add_task("simulating", total=len(cells))
        futures = [pool.submit(measure, options.traces, *cell) for cell in cells]
        rows = []
        for (workload, slots, *_), future in zip(cells, futures, strict=True):
            progress.update(task, description=f"{workload}, {slots} sessions")
            rows += future.result()
            progress.advance(task)
    return rows


def _print_tables(rows: Sequence[dict[str, Any]]) -> None:
    """Print each method's throughput over no speculation, one line for each workload and number of sessions."""
    gains = [f"agentspec less {100 * gain:.0f} %" for gain in ASYNC_GAINS]
    for model in dict.fromkeys(row["model"] for row in rows):
        cells: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
        for row in rows:
            if row["model"] == model:
                cells.setdefault((row["workload"], row["sessions"]), {})[row["method"]] = row
        lines = []
        for (workload, slots), found in cells.items():
            ratios = [f"{found[name]['ratio']:.2f}" if name in found else "" for name in METHODS]
            less = [f"{found[OURS][f'ratio_async_{round(100 * gain)}']:.2f}" for gain in ASYNC_GAINS]
            lines.append((workload, str(slots), *ratios, *less))
        columns = ("workload", "sessions", *METHODS, *gains)
        print_table(f"simulated throughput over no speculation, {model}", columns, lines, left=("workload",))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    trace_files.add_option(parser)
    add("--workloads", type=names, default=list(WORKLOADS), metavar="A,B", help="only these (all six)")
    add("--sessions", type=_numbers, default=list(SESSIONS), metavar="N,M", help="sessions at once (1,8,32,128)")
    add(
        "--tokens",
        type=positive,
        default=TOKENS_A_SESSION,
        metavar="N",
        help=f"length of a replay, for each session at once (%(default)s; at least {LEAST_TOKENS} together)",
    )
    add("--jobs", type=positive, default=1, metavar="J", help="replays at the same time (%(default)s)")
    arctic.add_option(parser)
    add("--save", action="store_true", help="write results/batch.json, which plot.py reads")
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
