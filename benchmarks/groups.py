"""Count what finding groups by their prompts costs against named groups, on recorded samples of problems. No engine.

    python benchmarks/groups.py --traces DIR [--at-once 8] [--problems 164] [--json]

Trainers send no ids, so agentspec takes requests with the same prompt for a group, from the second one on. Each
problem's samples run so many at once and draft from each other, as vLLM would run them. The counts don't depend on the
machine. Output is a list of {figure, value, target, met}. Target: found groups take at most 2 % more steps than named.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import engines
from report import exit_status, positive, print_json, print_table, say
from trace_files import accepted_tokens, samples_by_problem

from agentspec.cache import DraftPolicy, SuffixCache
from agentspec.cache.core import without_clock
from agentspec.cache.policy import MAX_DRAFT
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.identity.prompt_groups import PromptGroups

WORKLOAD, TARGET, COST = "rollouts_codegen", 1.02, 0.02
Problem = list[dict[str, Any]]
Naming = Callable[[dict[str, Any]], str | None]
"""Returns the group of a record."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns its exit status."""
    options = _parser().parse_args(arguments)
    return exit_status(lambda: run(options))


@without_clock()
def run(options: argparse.Namespace) -> None:
    """Count and print."""
    problems = list(islice(samples_by_problem(options.traces, options.workload), options.problems))
    found = PromptGroups(max_bytes=1 << 24)
    steps = {
        name: count(problems, options.at_once, naming)
        for name, naming in (
            ("named", lambda record: str(record["group"])),
            ("found", lambda record: found.group_of(Identity(), record["prompt"])),
            ("no", lambda record: None),
        )
    }
    rows: list[dict[str, Any]] = [
        {"figure": f"steps, {name} groups", "value": value, "target": None, "met": None}
        for name, value in steps.items()
    ]
    ratio = steps["found"] / steps["named"]
    row = {"figure": "found over named", "value": round(ratio, 4), "target": TARGET, "met": ratio <= TARGET}
    rows.append(row)
    if options.json:
        print_json(rows)
    else:
        columns = ("figure", "value", "target", "met")
        cells = [[str(row[name]) for name in columns] for row in rows]
        print_table(f"{len(problems)} problems, {options.at_once} samples at once", columns, cells, left=("figure",))


def count(problems: Sequence[Problem], at_once: int, naming: Naming) -> int:
    """Return the decode steps of all samples, added up. A problem begins when the one before has ended."""
    cache, steps = SuffixCache(policy=DraftPolicy(cost=COST)), 0
    for number, samples in enumerate(problems):
        for begin in range(0, len(samples), at_once):
            steps += sum(_wave(cache, f"{number}-{begin}", samples[begin : begin + at_once], naming))
    say(f"{steps:,} steps")
    return steps


def _wave(cache: SuffixCache, name: str, samples: Problem, naming: Naming) -> Iterator[int]:
    """Run samples at the same time, to the end of the longest. Yields how many of them each step had."""
    running = {}
    for number, record in enumerate(samples):
        request = f"{name}-{number}"
        cache.start(request, record["prompt"], group=naming(record))
        running[request] = (record["response"], 1)
        cache.extend(request, record["response"][:1])  # the step that ends the prompt drafts nothing
    yield len(running)
    while True:
        for request, (response, done) in list(running.items()):
            if done == len(response):
                cache.finish(request)
                del running[request]
        if not running:
            return
        limits = [min(MAX_DRAFT, len(response) - done - 1) for response, done in running.values()]
        drafts = cache.propose(list(running), limits)
        for (request, (response, done)), draft in zip(list(running.items()), drafts, strict=True):
            end = done + accepted_tokens(draft.token_ids, response[done:]) + 1
            cache.extend(request, response[done:end])
            running[request] = (response, end)
        yield len(running)


def _parser() -> argparse.ArgumentParser:
    parser = engines.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines.add_recording(parser, WORKLOAD)
    add = parser.add_argument
    add("--problems", type=positive, default=164, help="the first so many (%(default)s)")
    add("--at-once", type=positive, default=8, help="samples of a problem that run at the same time (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
