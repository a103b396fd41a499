"""Replay recorded agent traffic on real vLLM, with one row of figures for each method.

    python benchmarks/serve.py --traces DIR --workload NAME --calls 40 --max-prompt 4096 --batch 8 [--limits equal]

By default every method has the settings that a new user gets: `agentspec serve` without options, which measures the
price of verification while it runs, and vLLM's `suffix` and `ngram` with vLLM's defaults. With `--limits equal` all
have the same draft limit, and agentspec has a tenant and a given price.

Forward pass, scheduler, drafting and verification are vLLM's; only the target's choice of token is the recorded
one (see agentspec.testing.replay). The methods run in one process each, taking turns. The model is a tiny Llama
with random weights and the traces' vocabulary, so tokens/second says little about large models. Tokens a step,
drafted and accepted tokens depend on the model only through the measured price. On this model, in a batch, verifying
one more token costs a third or more of a row's share of a decode step, so agentspec drafts less than on a large model.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any

import engines
from report import exit_status, positive, print_json, print_table, say, speed_ratio

from agentspec.errors import ConfigurationError
from agentspec.testing.replay import (
    NGRAM_DRAFT,
    NGRAM_MAX,
    NGRAM_MIN,
    Call,
    ReplayResult,
    compare,
)

OURS = "agentspec"
EQUAL = {"max_draft": 16, "tenant": "replay", "verify_cost": 0.02}
"""Options of `--limits equal` and their defaults. `--limits defaults` refuses them."""
LIMITS = ("defaults", "equal")
MEASURED = "measured"
TURNS = 12
"""Turns that each method takes unless --chunk is given. The noise is estimated from them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns its exit status."""
    options = _parser().parse_args(arguments)
    return exit_status(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    fill_limits(options)
    calls = read_calls(options)
    results = measure(options, calls)
    rows = [row(method, result, results.get(OURS)) for method, result in results.items()]
    if options.json:
        print_json([{"limits": options.limits, **item} for item in rows])
    else:
        _print_table(rows, options, len(calls))


def fill_limits(options: argparse.Namespace) -> None:
    """Fill in the options of equal limits. Raises ConfigurationError where one was given without them."""
    for name, value in EQUAL.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
        elif options.limits != "equal":
            flag = "--" + name.replace("_", "-")
            raise ConfigurationError(f"{flag} says nothing about the defaults: add --limits equal, or leave it out")


def our_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that agentspec is started with."""
    if options.limits == "defaults":
        return {"store": options.store}
    cost = None if options.verify_cost == MEASURED else options.verify_cost
    return {"store": options.store, "tenant": options.tenant or None, "verify_cost": cost}


def row(method: str, result: ReplayResult, ours: ReplayResult | None = None) -> dict[str, Any]:
    """Return one method's figures for the output. `ours`: agentspec's result, to compare this method with.

    `ahead` is true where agentspec gives more tokens a step and, within the noise, no fewer tokens/second.
    """
    item = {
        "method": method,
        "tokens": result.tokens,
        "steps": result.steps,
        "drafted": result.drafted,
        "accepted": result.accepted,
        "tokens_per_step": round(result.tokens_per_step, 4),
        "acceptance_rate": round(result.acceptance_rate, 4),
        "tokens_per_second": round(result.tokens_per_second, 2),
        "seconds": round(result.seconds, 3),
        "calls": result.calls,
        "accepted_by_source": dict(result.accepted_by_source),
    }
    if ours is not None and method != OURS:
        steps = ours.tokens_per_step / result.tokens_per_step
        speed, noise = speed_ratio(ours, result)
        item |= {
            "agentspec_tokens_per_step_ratio": round(steps, 4),
            "agentspec_speed_ratio": round(speed, 4),
            "noise": round(noise, 4),
            "ahead": steps > 1.0 and speed + noise >= 1.0,
        }
    return item


def read_calls(options: argparse.Namespace) -> list[Call]:
    """Return the first ``--calls`` calls with a short enough prompt. Raises ConfigurationError naming the option."""
    calls = list(islice(engines.short_calls(options, options.workload), options.calls))
    if not calls:
        raise engines.no_short_calls(options, options.workload)
    if len(calls) < options.calls:
        say(f"only {len(calls)} of the {options.calls} calls asked for have a prompt of at most {options.max_prompt}")
    return calls


def measure(options: argparse.Namespace, calls: Sequence[Call]) -> dict[str, ReplayResult]:
    """Run the calls on one engine for each method; the engines take turns."""
    say(f"{len(calls)} calls, {sum(len(call.response) for call in calls):,} tokens; starting vLLM, a minute or two")
    with ExitStack() as stack:
        started = engines.start_engines(
            options,
            stack,
            calls,
            batch=options.batch,
            max_draft=options.max_draft if options.limits == "equal" else None,
            settings=our_settings(options),
        )
        return compare(
            started,
            calls,
            batch=options.batch,
            chunk=options.chunk or max(1, len(calls) // TURNS),
            progress=lambda method, done: say(f"{method}: {done}/{len(calls)} calls"),
        )


def _parser() -> argparse.ArgumentParser:
    parser = engines.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines.add_options(parser, ("none", "ngram", "suffix", OURS), max_prompt=4096)
    engines.add_sizes(parser)
    add = parser.add_argument
    add("--workload", required=True, metavar="NAME", help="which recording")
    add("--calls", type=positive, default=40, metavar="N", help="how many calls, in file order (%(default)s)")
    add("--batch", type=positive, default=1, metavar="B", help="requests in flight (%(default)s)")
    add("--limits", choices=LIMITS, default="defaults", help="what the methods are set to (%(default)s)")
    add("--chunk", type=positive, metavar="N", help="calls until the next method's turn (a twelfth of all)")
    add("--store", default="memory://", metavar="URL", help="where agentspec keeps the turns (%(default)s)")
    equal = parser.add_argument_group("with --limits equal")
    equal.add_argument(
        "--max-draft", type=positive, metavar="K", help=f"draft tokens a step, all methods ({EQUAL['max_draft']})"
    )
    equal.add_argument("--tenant", help=f"agentspec's tenant; empty: none ({EQUAL['tenant']})")
    equal.add_argument(
        "--verify-cost",
        type=_price,
        metavar="C",
        help="what agentspec takes verifying one more token to cost, as a share of a step, or: measured "
        f"({EQUAL['verify_cost']})",
    )
    return parser


def _price(text: str) -> float | str:
    if text == MEASURED:
        return MEASURED
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and up to 1, or measured, got {text!r}")
    return value


def _print_table(rows: Sequence[dict[str, Any]], options: argparse.Namespace, calls: int) -> None:
    equal = options.limits == "equal"
    limits = f"at most {options.max_draft} draft tokens" if equal else "defaults"
    columns = (
        "method",
        "tokens",
        "steps",
        "drafted",
        "accepted",
        "tokens/step",
        "acceptance",
        "tokens/s",
        "agentspec's",
    )
    cells = []
    for item in rows:
        compared = "agentspec_speed_ratio" in item
        cells.append(
            (
                item["method"],
                *(f"{item[name]:,}" for name in ("tokens", "steps", "drafted", "accepted")),
                f"{item['tokens_per_step']:.2f}",
                f"{item['acceptance_rate']:.2f}",
                f"{item['tokens_per_second']:.1f}",
                f"{item['agentspec_speed_ratio']:.3f} ± {item['noise']:.3f}" if compared else "",
            )
        )
    title = f"{options.workload}: {calls} calls, batch {options.batch}, {limits}"
    print_table(title, columns, cells, left=("method",), width=120)
    print("agentspec's: its tokens/s over this method's, and the standard error of that ratio")
    if any(item["method"] == "ngram" for item in rows):
        ngrams = f"{NGRAM_MIN} to {NGRAM_MAX}" if equal else "5"
        print(f"ngram: vLLM's own, n-grams of {ngrams} tokens, {options.max_draft if equal else NGRAM_DRAFT} a draft")


if __name__ == "__main__":
    sys.exit(main())
