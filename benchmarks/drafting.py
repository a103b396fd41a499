"""What the drafts are worth beside ArcticInference's: recorded conversations with greedy verification, in file order.

    python benchmarks/drafting.py --traces DIR [--peer-sweep] [--json]

Throughput is tokens / (steps + cost x drafted), where `cost` is the price of verifying one more token as a share of a
step. For every workload and cost the peer has the best of its 12 settings (spec factor 1, 2, 4; min probability .1,
.2, .3, .5); ours has one policy, told the cost. The fixed rule must reproduce the peer's tokens a step. All counts
are exact and repeatable; the peer's are kept with its build, and computed where they are not there yet.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np
import peer
from comparison import Row, add_options, more, pin, say, show
from contenders import DEPTH, MAX_DRAFT, TENANT
from trace_files import WORKLOADS, Tokens, calls, fingerprint

from agentspec.cache import DraftPolicy, SuffixCache
from agentspec.errors import AgentSpecError
from agentspec.simulate import simulate

COSTS = (0.002, 0.01, 0.03, 0.1)
FACTORS = (1.0, 2.0, 4.0)
PROBABILITIES = (0.1, 0.2, 0.3, 0.5)
FIXED_FACTORS = (1.0, 4.0)
MEAN_TARGET = 1.14
TARGETS = {"react_hotpot": 1.25, "rollouts_codegen": 1.19, "swe_gemini3": 1.08}
TARGET_COSTS = (0.01, 0.03)
FIXED_TOLERANCE = 0.005


@dataclass(slots=True)
class Counts:
    """What one setting did to one workload."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps

    def throughput(self, cost: float) -> float:
        return self.tokens / (self.steps + cost * self.drafted)


@dataclass(frozen=True, slots=True)
class Setting:
    factor: float
    probability: float

    def __str__(self) -> str:
        return f"{self.factor:g}/{self.probability:g}"


SETTINGS = [Setting(*pair) for pair in product(FACTORS, PROBABILITIES)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status: 2 for input that cannot work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--peer-sweep", action="store_true", help="compute the peer's counts again (some minutes)")
    parser.add_argument(
        "--workloads",
        type=lambda text: text.split(","),
        default=list(WORKLOADS),
        metavar="A,B",
        help="only these (all six; the mean needs them all)",
    )
    options = parser.parse_args(arguments)
    pin(options.cpu)
    try:
        rows = measure(options.traces, options.workloads, options.peer_dir, options.peer_sweep)
    except AgentSpecError as error:
        say(f"error: {error}")
        return 2
    show(rows, "drafting: ours and the peer's best setting", options.json)
    return 0


def measure(traces: Path, workloads: Sequence[str], peer_dir: Path | None, sweep: bool) -> list[Row]:
    """All rows: the targets first, then every workload and cost."""
    theirs = {name: peer_counts(traces, name, peer_dir, sweep) for name in workloads}
    rows: list[Row] = []
    ratios: dict[tuple[str, float], float] = {}
    for name in workloads:
        for cost in COSTS:
            best = max(SETTINGS, key=lambda setting: theirs[name][str(setting)].throughput(cost))
            bar = theirs[name][str(best)].throughput(cost)
            ours = our_counts(traces, name, DraftPolicy(cost=cost)).throughput(cost)
            ratios[name, cost] = ours / bar
            say(f"{name}, cost {cost}: {ours:.3f}, the peer {bar:.3f} ({best}), ratio {ours / bar:.3f}")
            rows.append(more(f"throughput, {name}, cost {cost:g} (the peer: {best})", ours, bar, 1.0))
    return headline_rows(ratios, rows) + rows + fixed_rows(traces, workloads, theirs)


def headline_rows(ratios: dict[tuple[str, float], float], rows: Sequence[Row]) -> list[Row]:
    """The mean over the six workloads, and those that have targets of their own."""
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


def fixed_rows(traces: Path, workloads: Sequence[str], theirs: dict[str, dict[str, Counts]]) -> list[Row]:
    """The peer's rule in our cache, at the settings of its published table."""
    rows = []
    for name, factor in product(workloads, FIXED_FACTORS):
        policy = DraftPolicy.fixed(max_depth=DEPTH, max_spec_factor=factor, min_token_prob=0.1, max_draft=MAX_DRAFT)
        ours = our_counts(traces, name, policy).tokens_per_step
        bar = theirs[name][str(Setting(factor, 0.1))].tokens_per_step
        say(f"{name}, fixed rule, factor {factor:g}: {ours:.4f}, the peer {bar:.4f}")
        rows.append(
            Row(
                f"tokens a step, {name}, fixed rule {factor:g}/0.1",
                ours,
                bar,
                ours / bar,
                f"within {FIXED_TOLERANCE:.1%}",
                abs(ours / bar - 1) <= FIXED_TOLERANCE,
            )
        )
    return rows


def our_counts(traces: Path, workload: str, policy: DraftPolicy) -> Counts:
    """Our cache on a workload, by the same code as `agentspec simulate`."""
    figures = simulate(calls(traces, workload, TENANT), SuffixCache(policy=policy), max_draft=MAX_DRAFT)
    return Counts(figures.tokens, figures.steps, figures.drafted)


def peer_counts(traces: Path, workload: str, peer_dir: Path | None, sweep: bool) -> dict[str, Counts]:
    """The peer's counts by setting: those kept beside its build, or computed."""
    folder = peer_dir or peer.default_folder()
    kept = folder / f"counts-{peer.VERSION}-{workload}-{fingerprint(traces, workload)}.json"
    if kept.is_file() and not sweep:
        return {name: Counts(**counts) for name, counts in json.loads(kept.read_text()).items()}
    say(f"{workload}: the peer's {len(SETTINGS)} settings")
    found = _sweep(traces, workload, peer_dir)
    kept.write_text(json.dumps({name: asdict(counts) for name, counts in found.items()}, indent=1))
    return found


def _sweep(traces: Path, workload: str, peer_dir: Path | None) -> dict[str, Counts]:
    """All settings at once: what its trees hold at a token of the record does not depend on what was drafted."""
    cache = peer.load(peer_dir).SuffixDecodingCache(max_tree_depth=DEPTH)
    counts = {str(setting): Counts() for setting in SETTINGS}
    for call in calls(traces, workload, TENANT):
        cache.start_request(call.line, call.prompt)
        text = np.concatenate([call.prompt, call.response])
        begin, end = len(call.prompt), len(text)
        due = dict.fromkeys(SETTINGS, begin)  # where each setting's next step is
        for at in range(begin, end):
            if at > begin:
                cache.add_active_response(call.line, text[at - 1 : at])
            context = text[max(0, at - DEPTH) : at]
            for setting in SETTINGS:
                if due[setting] == at:
                    due[setting] += _peer_step(cache, call.line, context, text[at:], setting, counts[str(setting)])
        cache.add_active_response(call.line, text[end - 1 :])
        cache.stop_request(call.line)
        for setting in SETTINGS:
            counts[str(setting)].tokens += end - begin
    return counts


def _peer_step(cache: object, name: int, context: Tokens, truth: Tokens, setting: Setting, counts: Counts) -> int:
    """One step of one setting; returns how many tokens it gives."""
    draft: list[int] = cache.speculate(  # type: ignore[attr-defined]
        name,
        context,
        max_spec_tokens=MAX_DRAFT,
        max_spec_factor=setting.factor,
        min_token_prob=setting.probability,
    ).token_ids
    accepted = 0
    for token, right in zip(draft, truth[:MAX_DRAFT].tolist(), strict=False):
        if token != right:
            break
        accepted += 1
    counts.steps += 1
    counts.drafted += len(draft)
    return accepted + 1


if __name__ == "__main__":
    sys.exit(main())
