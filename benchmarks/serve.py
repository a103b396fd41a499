"""Recorded agent traffic replayed on real vLLM, one row of figures a method.

    python benchmarks/serve.py --traces DIR --workload NAME --calls 40 --max-prompt 4096 --batch 8

Forward pass, scheduler, drafting and verification are vLLM's; only the target's choice of token is the recorded
one (see agentspec.testing.replay). The methods run in one process each, taking turns. The model is a tiny Llama
with random weights and the traces' vocabulary, so that tokens/second says little about large models; tokens a
step, drafted and accepted tokens do not depend on it. (agentspec would measure what verifying a token costs and draft
by that. On this model, in a batch, that is a third of a decode step's share of a row and more; the price is therefore
given, as it is on large models, unless --verify-cost measured is.)
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import peer
from trace_files import VOCABULARY, records

from agentspec.errors import AgentSpecError, ConfigurationError
from agentspec.testing.replay import (
    METHODS,
    NGRAM_MAX,
    NGRAM_MIN,
    Call,
    ModelShape,
    ReplayEngine,
    ReplayResult,
    compare,
    fitting_length,
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")  # one line, without the usage


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns the exit status: 2 for input that cannot work, 1 for a failed run."""
    options = _parser().parse_args(arguments)
    try:
        calls = read_calls(options)
        results = measure(options, calls)
    except ConfigurationError as error:
        _say(f"error: {error}")
        return 2
    except AgentSpecError as error:
        _say(f"error: {error}")
        return 1
    rows = [row(method, result) for method, result in results.items()]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        _print_table(rows, f"{options.workload}: {len(calls)} calls, batch {options.batch}, K={options.max_draft}")
    return 0


def row(method: str, result: ReplayResult) -> dict[str, Any]:
    """One object of the output."""
    return {
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


def read_calls(options: argparse.Namespace) -> list[Call]:
    """The first ``--calls`` calls whose prompt is short enough. Raises ConfigurationError naming the option."""
    found = records(options.traces, options.workload)
    calls = list(_fitting(found, options))
    if not calls:
        raise ConfigurationError(
            f"--max-prompt {options.max_prompt}: no call of {options.workload} has a prompt that short"
        )
    if len(calls) < options.calls:
        _say(f"only {len(calls)} of the {options.calls} calls asked for have a prompt of at most {options.max_prompt}")
    return calls


def measure(options: argparse.Namespace, calls: Sequence[Call]) -> dict[str, ReplayResult]:
    """One engine a method, all of them alive, taking turns."""
    paths = {"suffix": [peer.build(options.peer_dir)]} if "suffix" in options.methods else {}
    _say(f"{len(calls)} calls, {sum(len(call.response) for call in calls):,} tokens; starting vLLM, a minute or two")
    with ExitStack() as stack:
        engines = {
            method: stack.enter_context(
                ReplayEngine(
                    method=method,
                    shape=ModelShape(VOCABULARY, options.hidden, options.layers, max(1, options.hidden // 32)),
                    max_model_len=fitting_length(calls, options.max_draft),
                    max_batch=options.batch,
                    max_draft=options.max_draft,
                    settings={"store": options.store, "tenant": options.tenant or None, "cost": options.verify_cost},
                    seed=options.seed,
                    module_paths=paths.get(method, ()),
                )
            )
            for method in options.methods
        }
        return compare(
            engines,
            calls,
            batch=options.batch,
            chunk=options.chunk,
            progress=lambda method, done: _say(f"{method}: {done}/{len(calls)} calls"),
        )


def _fitting(candidates: Iterable[dict[str, Any]], options: argparse.Namespace) -> Iterator[Call]:
    found = 0
    for record in candidates:
        if len(record["prompt"]) > options.max_prompt:
            continue
        found += 1
        yield Call(
            session=f"{options.workload}-{record['session']}",
            prompt=record["prompt"],
            response=record["response"],
            group=f"{options.workload}-{record['group']}",
        )
        if found == options.calls:
            return


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--traces", type=Path, required=True, metavar="DIR", help="folder with load.py and NAME.tok.npz files")
    add("--workload", required=True, metavar="NAME", help="which of them")
    add("--calls", type=_positive, default=40, metavar="N", help="how many calls, in file order (%(default)s)")
    add(
        "--max-prompt",
        type=_positive,
        default=4096,
        metavar="P",
        help="calls with a prompt of more tokens are skipped, and do not count towards --calls (%(default)s)",
    )
    add("--batch", type=_positive, default=1, metavar="B", help="requests in flight (%(default)s)")
    add(
        "--methods",
        type=_methods,
        default=",".join(METHODS),
        help="comma-separated, of: none (plain vLLM), ngram (vLLM's own prompt lookup with n-grams of "
        f"{NGRAM_MIN} to {NGRAM_MAX} tokens), suffix (vLLM's own, on ArcticInference's extension), agentspec "
        "(%(default)s)",
    )
    peer.add_option(parser)
    add("--max-draft", type=_positive, default=16, metavar="K", help="draft tokens a step, all methods (%(default)s)")
    add("--chunk", type=_positive, metavar="N", help="calls until the next method's turn (twice the batch)")
    add("--store", default="memory://", metavar="URL", help="where agentspec keeps the turns (%(default)s)")
    add("--tenant", default="replay", help="agentspec's tenant; empty: none, no global tree (%(default)s)")
    add(
        "--verify-cost",
        type=_price,
        default=0.02,
        metavar="C",
        help="what agentspec takes verifying one more token to cost, as a share of a step, or: measured (%(default)s)",
    )
    add("--hidden", type=_positive, default=64, help="hidden size of the random model, a multiple of 32 (%(default)s)")
    add("--layers", type=_positive, default=2, help="its layers (%(default)s)")
    add("--seed", type=int, default=0, help="of its weights (%(default)s)")
    add("--json", action="store_true", help="print a JSON list, one object a method, instead of a table")
    return parser


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


def _price(text: str) -> float | None:
    if text == "measured":
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and up to 1, or measured, got {text!r}")
    return value


def _methods(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"unknown method {', '.join(unknown) or text!r}; known: {', '.join(METHODS)}")
    return list(dict.fromkeys(names))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_table(rows: Sequence[dict[str, Any]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    names = ("method", "tokens", "steps", "drafted", "accepted", "tokens/step", "acceptance", "tokens/s")
    for name in names:
        table.add_column(name, justify="left" if name == "method" else "right")
    for item in rows:
        table.add_row(
            item["method"],
            *(f"{item[name]:,}" for name in ("tokens", "steps", "drafted", "accepted")),
            f"{item['tokens_per_step']:.2f}",
            f"{item['acceptance_rate']:.2f}",
            f"{item['tokens_per_second']:.1f}",
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    if any(item["method"] == "ngram" for item in rows):
        print(f"ngram: vLLM's own, prompt_lookup_min={NGRAM_MIN}, prompt_lookup_max={NGRAM_MAX}, the same K")


if __name__ == "__main__":
    sys.exit(main())
