"""Compute whether rows with many tokens left should get longer drafts, in batches that drain. Runs no engine.

    python benchmarks/stragglers.py --traces DIR [--batch 8 32 64] [--problems 48] [--json]

All samples of a batch start at once, none waits for a slot, and the batch ends with its longest sample. A step takes
FIXED + rows + draft tokens, in units of a token. `agentspec serve` has one price for all rows, 1 / (1 + FIXED / rows):
the fewer rows are alive, the cheaper is a draft token. A rule for stragglers has a price for each row,
1 / (1 + FIXED * share). share is the row's part of the tokens that all rows have left, where each row's number of
tokens is raised to the power of --sharp. `exact` knows how many tokens a row has left. `past` expects as many as the
group's finished samples had left at this length. Each problem has 8 samples in each of two epochs. Output is a list of
{figure, value, target, met}: the time of a rule over the time of the one price.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import engines
from report import exit_status, positive, print_json, print_table, say
from trace_files import accepted_tokens, samples_by_problem

from agentspec.cache import SuffixCache
from agentspec.cache.core import without_clock
from agentspec.cache.policy import MAX_DRAFT
from agentspec.errors import ConfigurationError
from agentspec.server_ext.pricing.step_cost import HIGHEST_COST, LOWEST_COST

WORKLOAD, SAMPLES, EPOCHS = "rollouts_codegen", 8, 2
FIXED = (400, 100, 25)
"""Fixed part of a step's duration, in units of what a row or draft token adds: from a GPU's to a CPU's."""

Problem = list[dict[str, Any]]


class Lengths:
    """Remember how long a group's finished samples were."""

    def __init__(self) -> None:
        self._of: defaultdict[str, list[int]] = defaultdict(list)

    def add(self, group: str, length: int) -> None:
        """Note a finished sample."""
        self._of[group].append(length)

    def left(self, group: str, done: int) -> float:
        """Return the mean tokens left after `done` in the group's longer samples, else in all groups' ones."""
        longer = [known - done for known in self._of[group] if known > done]
        if not longer:
            longer = [known - done for each in self._of.values() for known in each if known > done]
        return sum(longer) / len(longer) if longer else 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns its exit status."""
    options = _parser().parse_args(arguments)
    return exit_status(lambda: run(options))


@without_clock()
def run(options: argparse.Namespace) -> None:
    """Count and print."""
    problems = read_problems(options.traces, options.workload, options.problems)
    rows: list[dict[str, Any]] = []
    for batch in options.batch:
        for fixed in FIXED:
            one_price = list(replay(problems, batch, fixed, lambda left: 1 / len(left)))
            for name in ("exact", "past"):
                for sharp in options.sharp:
                    times = replay(problems, batch, fixed, _shares(sharp), exact=name == "exact")
                    for epoch, (time, base) in enumerate(zip(times, one_price, strict=True)):
                        figure = f"batch {batch}, fixed {fixed}, {name}, sharp {sharp:g}, epoch {epoch}"
                        rows.append({"figure": figure, "value": round(time / base, 4), "target": None, "met": None})
            say(f"batch {batch}, fixed {fixed}: done")
    if options.json:
        print_json(rows)
    else:
        cells = [[str(row["figure"]), str(row["value"])] for row in rows]
        print_table("time over that of one price", ("rule", "ratio"), cells, left=("rule",))


def read_problems(traces: Path, workload: str, count: int) -> list[Problem]:
    """Return the first problems that have samples for all epochs. Raises ConfigurationError if there is none."""
    wanted = SAMPLES * EPOCHS
    enough = (samples[:wanted] for samples in samples_by_problem(traces, workload) if len(samples) >= wanted)
    problems = list(islice(enough, count))
    if not problems:
        raise ConfigurationError(f"--workload {workload}: no problem has {wanted} samples")
    return problems


Share = Callable[[Mapping[str, float]], float | Mapping[str, float]]
"""Takes the tokens left by row. Returns the share of the fixed time that a token saves: one for all, or by row."""


def _shares(sharp: float) -> Share:
    def shares(left: Mapping[str, float]) -> dict[str, float]:
        powers = {name: value**sharp for name, value in left.items()}
        return {name: power / sum(powers.values()) for name, power in powers.items()}

    return shares


def replay(problems: Sequence[Problem], batch: int, fixed: int, share: Share, *, exact: bool = True) -> Iterator[float]:
    """Yield the time of each epoch. exact: rows know how many tokens they have left."""
    cache, lengths = SuffixCache(), Lengths()
    together = max(1, batch // SAMPLES)
    for epoch in range(EPOCHS):
        time = 0.0
        for begin in range(0, len(problems), together):
            rows: dict[str, tuple[str, list[int], int]] = {}
            for number, problem in enumerate(problems[begin : begin + together], begin):
                for sample, record in enumerate(problem[epoch * SAMPLES : (epoch + 1) * SAMPLES]):
                    cache.start(f"{number}-{sample}", record["prompt"], group=str(number))
                    cache.extend(f"{number}-{sample}", record["response"][:1])
                    rows[f"{number}-{sample}"] = (str(number), list(record["response"]), 1)
            time += _drain(cache, rows, fixed, share, None if exact else lengths, lengths)
        yield time


def _drain(
    cache: SuffixCache,
    rows: dict[str, tuple[str, list[int], int]],
    fixed: int,
    share: Share,
    past: Lengths | None,
    finished: Lengths,
) -> float:
    """Return the time of a batch. rows: group, response and tokens said of each request."""
    time = 0.0
    while True:
        for name, (group, response, done) in list(rows.items()):
            if done == len(response):
                cache.finish(name)
                finished.add(group, done)
                del rows[name]
        if not rows:
            return time
        left = {
            name: past.left(group, done) if past else float(len(response) - done)
            for name, (group, response, done) in rows.items()
        }
        shares = share(left)
        time += fixed + len(rows)
        for name, (group, response, done) in list(rows.items()):
            part = shares if isinstance(shares, float) else shares[name]
            price = min(max(1 / (1 + fixed * part), LOWEST_COST), HIGHEST_COST)
            limit = min(MAX_DRAFT, len(response) - done - 1)
            draft = cache.propose([name], limit, cost=price)[0].token_ids.tolist()
            end = done + accepted_tokens(draft, response[done:]) + 1
            cache.extend(name, response[done:end])
            rows[name] = (group, response, end)
            time += len(draft)


def _parser() -> argparse.ArgumentParser:
    parser = engines.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines.add_recording(parser, WORKLOAD)
    add = parser.add_argument
    add("--problems", type=positive, default=48, help="the first so many (%(default)s)")
    add("--batch", type=positive, nargs="+", default=[8, 32, 64], metavar="B", help="samples that start together")
    add(
        "--sharp", type=float, nargs="+", default=[0.5, 1.0, 2.0], metavar="P", help="power of the tokens that are left"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
