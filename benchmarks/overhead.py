"""Measure the extension's cost when it makes no drafts: a decode step with it and without it, in one run.

    python benchmarks/overhead.py [--model DIR] [--json]

The requests' tokens never repeat, so no draft is ever made. Three engines play them in turns: vLLM with the extension,
vLLM without it, and vLLM without it and with its default for asynchronous scheduling. Every drafter outside vLLM
switches asynchronous scheduling off. The CPU build never uses it, so there the third engine equals the second and shows
the noise. The time is that of LLMEngine.step() while every slot decodes. Of two equal engines one can be up to 7 %
faster for as long as it lives, so more rounds don't help: a launch starts new engines, in another order. A launch's
ratio is the median over its rounds of the ratio of medians. The result is the geometric mean of the launches, with its
standard error.

The extension adds a time, not a share of a step, so the result is also given in milliseconds, with its parts. A fourth
engine, whose methods are timed, gives the parts: the native call; the rest of agentspec's drafting, which is Python;
and vLLM's question to the worker for drafts. The rest of the added time is vLLM's own handling of a speculative
configuration.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from report import exit_status, positive, print_json, print_table, say

from agentspec.cache import Scope
from agentspec.errors import ConfigurationError
from agentspec.testing.replay import RESERVED_TOKENS, Call, ModelShape, ReplayEngine

TARGET = 1.03
"""Largest allowed ratio of a decode step's time with the extension to that without it."""
OWN_TARGETS = {1: 0.05, 8: 0.08, 64: 0.25}
"""Most time that agentspec's own drafting shall take in a step without drafts, in ms by batch size."""

WITH, WITHOUT, DEFAULT = "agentspec", "none", "none, default scheduling"
TIMED = "agentspec, timed"
RATIOS = ("ratio", "ratio_to_default", "ratio_of_both_without")
_CORE = "vllm.v1.engine.core:EngineCore"
PARTS = {
    "native": ("agentspec.cache.suffix_cache:SuffixCache", "step"),
    "drafting": ("agentspec.server_ext.vllm_adapter.worker.runner:RunnerExtension", "draft"),
    "asking": (_CORE, "post_step"),
}
"""Methods whose time is measured: owner and name. "drafting" includes "native"."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns its exit status."""
    options = _parser().parse_args(arguments)
    return exit_status(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    rows = measure(options)
    if options.json:
        print_json(rows)
    else:
        _print_table(rows)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of each batch size. Raises ConfigurationError for a vocabulary too small for the streams."""
    shape = ModelShape(hidden=options.hidden, layers=options.layers, heads=max(1, options.hidden // 32))
    vocabulary = shape.vocab_size if options.model is None else _vocabulary(options.model)
    streams = [
        _Streams(vocabulary, options.prompt, options.response, options.seed + i) for i in range(options.launches)
    ]
    needed = (options.rounds + 1) * sum(options.batch)
    # If the vocabulary is too small for distinct requests, a request must not draft from other sessions.
    scope: Scope = "tenant" if needed <= streams[0].distinct else "session"
    launches = []
    for number in range(options.launches):
        say(f"launch {number + 1} of {options.launches}: four engines start")
        launches.append(_launch(options, shape, streams[number], scope, number))
    model = "random weights" if options.model is None else str(options.model)
    common = {"model": model, "scope": scope}
    return [common | _summary(list(rows)) for rows in zip(*launches, strict=True)]


def _launch(
    options: argparse.Namespace, shape: ModelShape, streams: "_Streams", scope: Scope, number: int
) -> list[dict[str, Any]]:
    """Return the figures of each batch size, measured on newly started engines."""
    kinds = [(WITH, "agentspec", False), (WITHOUT, "none", False), (DEFAULT, "none", None), (TIMED, "agentspec", False)]
    first = number % len(kinds)
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                ReplayEngine(
                    method=method,
                    model=options.model,
                    shape=shape,
                    max_model_len=options.prompt + options.response + 64,
                    max_batch=max(options.batch),
                    max_draft=options.max_draft,
                    settings={"store": "memory://", "scope": scope},
                    async_scheduling=asynchronous,
                    timed=PARTS if name == TIMED else None,
                )
            )
            for name, method, asynchronous in kinds[first:] + kinds[:first]
        }
        default_async = {name: engine.wait_ready()["async_scheduling"] for name, engine in engines.items()}[DEFAULT]
        return [
            {"default_async_scheduling": default_async} | _measure_batch(engines, streams, batch, options.rounds)
            for batch in options.batch
        ]


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one batch size: means over the launches, and each launch's ratios."""
    names = ("ms_with", "ms_without", "ms_default", *RATIOS)
    means = {name: round(statistics.geometric_mean(row[name] for row in rows), 4) for name in names}
    means |= {f"ms_{part}": round(statistics.mean(row[f"ms_{part}"] for row in rows), 4) for part in PARTS}
    added = [row["ms_with"] - (row["ms_without"] + row["ms_default"]) / 2 for row in rows]
    own = OWN_TARGETS.get(rows[0]["batch"])
    ratio, error = _mean(rows)
    return {
        **{name: rows[0][name] for name in ("batch", "rounds", "default_async_scheduling")},
        "drafted": sum(row["drafted"] for row in rows),
        **means,
        "launches": [{name: row[name] for name in RATIOS} for row in rows],
        "ratio_to_both": round(ratio, 4),
        "standard_error": None if error is None else round(error, 4),
        "target": TARGET,
        "met": ratio <= TARGET,
        "ms_added": round(statistics.mean(added), 4),
        "ms_added_error": round(statistics.stdev(added) / math.sqrt(len(added)), 4) if len(added) > 1 else None,
        "ms_python": round(means["ms_drafting"] - means["ms_native"], 4),
        "own_target": own,
        "own_met": None if own is None else means["ms_drafting"] <= own,
    }


def _mean(rows: Sequence[dict[str, Any]]) -> tuple[float, float | None]:
    """Return the ratio over all launches and its standard error (None for a single launch)."""
    if rows[0]["default_async_scheduling"]:  # compare with the faster of vLLM's two modes
        name = max(RATIOS[:2], key=lambda name: statistics.geometric_mean(row[name] for row in rows))
        ratios = [row[name] for row in rows]
    else:  # the two engines without the extension are equal
        ratios = [math.sqrt(row["ratio"] * row["ratio_to_default"]) for row in rows]
    mean = statistics.geometric_mean(ratios)
    if len(ratios) == 1:
        return mean, None
    return mean, mean * statistics.stdev(map(math.log, ratios)) / math.sqrt(len(ratios))


def _measure_batch(engines: Mapping[str, ReplayEngine], streams: "_Streams", batch: int, rounds: int) -> dict[str, Any]:
    medians: dict[str, list[float]] = {name: [] for name in engines}
    parts: dict[str, list[float]] = {name: [] for name in PARTS}
    drafted = 0
    orders = list(itertools.permutations(engines))  # no engine always follows the same other one
    for number in range(rounds + 1):
        calls = streams.calls(batch)
        for name in orders[number % len(orders)]:
            result = engines[name].run(calls, batch)
            drafted += result.drafted
            if number:  # the first round warms up
                medians[name].append(statistics.median(result.decode_seconds))
                for part, seconds in result.part_seconds.items():
                    parts[part].append(statistics.median(seconds))
    say(f"batch {batch}: {rounds} rounds done")

    def ratio(a: str, b: str) -> float:
        return round(statistics.median(x / y for x, y in zip(medians[a], medians[b], strict=True)), 4)

    return {
        "batch": batch,
        "rounds": rounds,
        "drafted": drafted,
        "ms_with": round(1e3 * statistics.median(medians[WITH]), 3),
        "ms_without": round(1e3 * statistics.median(medians[WITHOUT]), 3),
        "ms_default": round(1e3 * statistics.median(medians[DEFAULT]), 3),
        "ratio": ratio(WITH, WITHOUT),
        "ratio_to_default": ratio(WITH, DEFAULT),
        "ratio_of_both_without": ratio(DEFAULT, WITHOUT),
        **{f"ms_{part}": round(1e3 * statistics.median(seconds), 4) for part, seconds in parts.items()},
    }


class _Streams:
    """Make calls whose tokens never repeat: in a whole launch if the vocabulary suffices, else within a call."""

    def __init__(self, vocabulary: int, prompt: int, response: int, seed: int) -> None:
        self._length, self._prompt = prompt + response, prompt
        if vocabulary - RESERVED_TOKENS < self._length:
            raise ConfigurationError(
                f"--prompt {prompt} and --response {response} need {self._length} different tokens, and the model's "
                f"vocabulary has {vocabulary}; make them shorter"
            )
        self._random = np.random.default_rng(seed)
        self._tokens = np.arange(RESERVED_TOKENS, vocabulary, dtype=np.int32)
        self._blocks = self._shuffled()
        self._count = 0
        self.distinct = len(self._tokens) // self._length

    def calls(self, count: int) -> list[Call]:
        """Return the next ``count`` calls, each in a session of its own."""
        result = []
        for _ in range(count):
            block = next(self._blocks)
            self._count += 1
            result.append(Call(f"idle-{self._count}", block[: self._prompt], block[self._prompt :]))
        return result

    def _shuffled(self) -> Iterator[np.ndarray[Any, np.dtype[np.int32]]]:
        while True:
            order = self._random.permutation(self._tokens)
            for begin in range(0, len(order) - self._length + 1, self._length):
                yield order[begin : begin + self._length]


def _vocabulary(model: Path) -> int:
    try:
        return int(json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"--model {model}: no config.json with a vocab_size ({error})") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="a model folder (default: a small Llama with random weights)")
    add("--hidden", type=positive, default=64, help="hidden size of the random model, a multiple of 32 (%(default)s)")
    add("--layers", type=positive, default=2, help="its layers (%(default)s)")
    add("--batch", type=positive, nargs="+", default=[1, 8, 64], metavar="B", help="batch sizes (1 8 64)")
    add("--launches", type=positive, default=9, help="how often the engines start anew (%(default)s)")
    add("--rounds", type=positive, default=6, help="turns of each engine in a launch (%(default)s)")
    add("--prompt", type=positive, default=256, help="tokens of a prompt (%(default)s)")
    add("--response", type=positive, default=64, help="tokens of a response (%(default)s)")
    add("--max-draft", type=positive, metavar="K", help="agentspec's draft limit (default: what the engine can verify)")
    add("--seed", type=int, default=0, help="of the token streams (%(default)s)")
    add("--json", action="store_true", help="print a JSON list, one object a batch size, instead of a table")
    return parser


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    columns = ("batch", "with", "without", "default scheduling", "ratio", "control", "target", "met")
    cells = []
    for item in rows:
        error = "" if item["standard_error"] is None else f" ± {item['standard_error']:.3f}"
        cells.append(
            (
                str(item["batch"]),
                *(f"{item[name]:.3f}" for name in ("ms_with", "ms_without", "ms_default")),
                f"{item['ratio_to_both']:.3f}{error}",
                f"{item['ratio_of_both_without']:.3f}",
                f"<= {item['target']:.2f}",
                "yes" if item["met"] else "no",
            )
        )
    print_table(f"idle extension, ms per decode step ({rows[0]['model']})", columns, cells, width=110)
    columns = ("batch", "added", "native call", "our Python", "our sum", "target", "met", "asking the worker")
    cells = []
    for item in rows:
        error = "" if item["ms_added_error"] is None else f" ± {item['ms_added_error']:.3f}"
        target = "" if item["own_target"] is None else f"<= {item['own_target']:.2f}"
        met = {None: "", True: "yes", False: "no"}[item["own_met"]]
        parts = [f"{item[f'ms_{name}']:.3f}" for name in ("native", "python", "drafting")]
        cells.append(
            (str(item["batch"]), f"{item['ms_added']:.3f}{error}", *parts, target, met, f"{item['ms_asking']:.3f}")
        )
    print_table("what it adds, ms per decode step", columns, cells, width=110)


if __name__ == "__main__":
    sys.exit(main())
