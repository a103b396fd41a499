"""Compare agentspec's drafts with other drafters' on recorded conversations, verified greedily, in file order.

    python benchmarks/drafting.py --traces DIR [--limits defaults|equal|both] [--peer-sweep] [--json]

Throughput is tokens / (steps + cost x drafted), where `cost` is the price of verifying one more token as a share of a
step. Counts are exact and repeatable. The other drafters' counts are computed once and kept with ArcticInference's
build.

With the defaults, agentspec drafts as `agentspec simulate` does without options, and once more with `--verify-cost`. It
is compared with ArcticInference's best of 12 settings (spec factor 1, 2, 4; min probability .1, .2, .3, .5) for each
workload and cost, and with every other drafter at its own defaults.

With equal limits, all draft at most 32 tokens, agentspec has one tenant, and its policy is told the cost.
ArcticInference's rule in agentspec's cache must reproduce its tokens a step.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from drafters import DEPTH, MAX_DRAFT, TENANT, Counts, OtherDrafters, Setting, best_settings
from report import Row, add_options, exit_status, more, names, pin, say, show
from trace_files import WORKLOADS, calls

from agentspec.cache import DraftPolicy, SuffixCache
from agentspec.simulate import simulate

LIMITS = ("defaults", "equal", "both")
COSTS = (0.002, 0.01, 0.03, 0.1)
ARCTIC_FACTORS = (1.0, 4.0)
MEAN_TARGET = 1.14
TARGETS = {"react_hotpot": 1.25, "rollouts_codegen": 1.19, "swe_gemini3": 1.08}
TARGET_COSTS = (0.01, 0.03)
DEFAULT_TARGET = 1.03
DEFAULT_TARGETS = {"refine_code_ldb": 1.35}
"""Least ratio of agentspec's throughput with its defaults to ArcticInference's best setting; others: DEFAULT_TARGET."""
ARCTIC_TOLERANCE = 0.005


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--peer-sweep", action="store_true", help="compute the others' counts again (some minutes)")
    parser.add_argument(
        "--limits",
        choices=LIMITS,
        default="both",
        help="defaults: everyone's own; equal: 32 tokens, a tenant, the cost told (%(default)s)",
    )
    parser.add_argument(
        "--workloads",
        type=names,
        default=list(WORKLOADS),
        metavar="A,B",
        help="only these (all six; the mean needs them all)",
    )
    options = parser.parse_args(arguments)
    return exit_status(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Count and print."""
    pin(options.cpu)
    others = OtherDrafters(options.traces, options.peer_dir, options.peer_sweep)
    rows = []
    if options.limits != "equal":
        rows += default_rows(options.traces, options.workloads, others)
    if options.limits != "defaults":
        rows += equal_rows(options.traces, options.workloads, others)
    show(rows, "drafting: ours beside the others", options.json)


def default_rows(traces: Path, workloads: Sequence[str], drafters: OtherDrafters) -> list[Row]:
    """Return the rows of agentspec with its defaults: those against ArcticInference's best setting first."""
    targets: list[Row] = []
    others: list[Row] = []
    for name in workloads:
        best = best_settings(drafters.settings(name), TARGET_COSTS)
        theirs = drafters.defaults(name)
        plain = default_counts(traces, name, DraftPolicy())
        for cost in TARGET_COSTS:
            setting, bar = best[cost]
            told = default_counts(traces, name, DraftPolicy(cost=cost))
            target = DEFAULT_TARGETS.get(name, DEFAULT_TARGET)
            for label, counts in (("defaults", plain), ("defaults, told the cost", told)):
                figure = f"throughput, {label}, {name}, cost {cost:g} (the peer's best: {setting})"
                targets.append(_said(more(figure, counts.throughput(cost), bar, target)))
            others += [
                _said(
                    more(
                        f"throughput, defaults, {name}, cost {cost:g}, beside {rival}",
                        plain.throughput(cost),
                        counts.throughput(cost),
                        1.0,
                    )
                )
                for rival, counts in theirs.items()
            ]
        others += [
            Row(
                f"tokens a step, defaults, {name}, beside {rival}",
                plain.tokens_per_step,
                counts.tokens_per_step,
                plain.tokens_per_step / counts.tokens_per_step,
            )
            for rival, counts in theirs.items()
        ]
    return targets + others


def equal_rows(traces: Path, workloads: Sequence[str], others: OtherDrafters) -> list[Row]:
    """Return the rows of equal limits: the targets first, then every workload and cost."""
    theirs = {name: others.settings(name) for name in workloads}
    rows: list[Row] = []
    ratios: dict[tuple[str, float], float] = {}
    for name in workloads:
        for cost, (best, bar) in best_settings(theirs[name], COSTS).items():
            ours = our_counts(traces, name, DraftPolicy(cost=cost, max_draft=MAX_DRAFT)).throughput(cost)
            ratios[name, cost] = ours / bar
            rows.append(_said(more(f"throughput, {name}, cost {cost:g} (the peer: {best})", ours, bar, 1.0)))
    return headline_rows(ratios, rows) + rows + arctic_rule_rows(traces, workloads, theirs)


def _said(row: Row) -> Row:
    """Print the row on stderr as soon as it is known, and return it."""
    say(f"{row.figure}: {row.ours:.3f}, the other {row.peer:.3f}, ratio {row.ratio:.3f}")
    return row


def headline_rows(ratios: dict[tuple[str, float], float], rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the mean over the six workloads, of targets of single workloads, and of the least ratio."""
    found = []
    for cost in TARGET_COSTS:
        of_cost = [ratio for (_, at), ratio in ratios.items() if at == cost]
        if len(of_cost) == len(WORKLOADS):
            mean = math.exp(sum(map(math.log, of_cost)) / len(of_cost))
            found.append(
                more(f"throughput, geometric mean of six ratios, cost {cost:g}", mean, None, MEAN_TARGET, mean)
            )
        for name, target in TARGETS.items():
            row = next((row for row in rows if row.figure.startswith(f"throughput, {name}, cost {cost:g} ")), None)
            if row is not None:
                found.append(more(f"{row.figure}: its own target", row.ours, row.peer, target))
    worst = min(ratios, key=lambda key: ratios[key])
    found.append(
        more(f"throughput, the least ratio ({worst[0]}, cost {worst[1]:g})", ratios[worst], None, 1.0, ratios[worst])
    )
    return found


def arctic_rule_rows(traces: Path, workloads: Sequence[str], theirs: Mapping[str, Mapping[str, Counts]]) -> list[Row]:
    """Return the rows of ArcticInference's rule in agentspec's cache, at the settings of its published table."""
    rows = []
    for name, factor in product(workloads, ARCTIC_FACTORS):
        policy = DraftPolicy.fixed(max_depth=DEPTH, max_spec_factor=factor, min_token_prob=0.1, max_draft=MAX_DRAFT)
        ours = our_counts(traces, name, policy).tokens_per_step
        bar = theirs[name][str(Setting(factor, 0.1))].tokens_per_step
        say(f"{name}, ArcticInference's rule, factor {factor:g}: {ours:.4f}, the peer {bar:.4f}")
        rows.append(
            Row(
                f"tokens a step, {name}, ArcticInference's rule {factor:g}/0.1",
                ours,
                bar,
                ours / bar,
                f"within {ARCTIC_TOLERANCE:.1%}",
                abs(ours / bar - 1) <= ARCTIC_TOLERANCE,
            )
        )
    return rows


def default_counts(traces: Path, workload: str, policy: DraftPolicy) -> Counts:
    """Count the drafts of `agentspec simulate` without options, or with the policy's cost as `--verify-cost`."""
    figures = simulate(calls(traces, workload), SuffixCache(policy=policy))
    return Counts(figures.tokens, figures.steps, figures.drafted)


def our_counts(traces: Path, workload: str, policy: DraftPolicy) -> Counts:
    """Count agentspec's drafts with a tenant and the equal limit, by the code of `agentspec simulate`."""
    figures = simulate(calls(traces, workload, TENANT), SuffixCache(policy=policy), max_draft=MAX_DRAFT)
    return Counts(figures.tokens, figures.steps, figures.drafted)


if __name__ == "__main__":
    sys.exit(main())
