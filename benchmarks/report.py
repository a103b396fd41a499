"""Print the benchmarks' results: figures with targets, ratios with their noise, tables and JSON."""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import arctic
import trace_files

from agentspec.errors import AgentSpecError, ConfigurationError
from agentspec.testing.replay_types import ReplayResult

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """Hold one figure of agentspec and ArcticInference's (`peer`).

    ratio: how many times better agentspec's is; above 1 it is better. met: None where there is no target.
    """

    figure: str
    ours: float
    peer: float | None = None
    ratio: float | None = None
    target: str = ""
    met: bool | None = None


def less(figure: str, ours: float, peer: float, target: float | None = None) -> Row:
    """Return the row of a time or size. target: how many times less than ArcticInference's it must be."""
    ratio = peer / ours
    if target is None:
        return Row(figure, ours, peer, ratio)
    return Row(figure, ours, peer, ratio, f"at least {target:g}x less", ratio >= target)


def more(figure: str, ours: float, peer: float | None, target: float, ratio: float | None = None) -> Row:
    """Return the row of a throughput. target: the least ratio to ArcticInference's."""
    found = ratio if ratio is not None else ours / (peer or ours)
    return Row(figure, ours, peer, found, f"at least {target:g}", found >= target)


def at_most(figure: str, ours: float, limit: float, unit: str, peer: float | None = None) -> Row:
    """Return the row of a figure that must not exceed `limit`."""
    ratio = peer / ours if peer is not None and ours else None
    return Row(figure, ours, peer, ratio, f"at most {limit:g} {unit}".strip(), ours <= limit)


def speed_ratio(ours: ReplayResult, other: ReplayResult) -> tuple[float, float]:
    """Return the ratio of tokens/second of ours to the other's, and its standard error.

    The error comes from leaving out one turn at a time, of the turns that both took on the same calls. It is 0 for
    fewer than three turns, which cannot give an error.
    """
    value = ours.tokens_per_second / other.tokens_per_second
    turns = [(*mine, *theirs) for mine, theirs in zip(ours.turns, other.turns, strict=True)]
    if len(turns) < 3:
        return value, 0.0
    tokens, seconds, other_tokens, other_seconds = (sum(column) for column in zip(*turns, strict=True))
    without = [
        math.log((tokens - t) / (seconds - s)) - math.log((other_tokens - v) / (other_seconds - u))
        for t, s, v, u in turns
    ]
    mean = sum(without) / len(without)
    spread = sum((item - mean) ** 2 for item in without) * (len(without) - 1) / len(without)
    return value, value * math.sqrt(spread)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Register the options of the benchmarks that compare with ArcticInference's extension."""
    trace_files.add_option(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    parser.add_argument(
        "--cpu", type=int, metavar="N", help="the core to stay on (the last one that this process may use)"
    )
    arctic.add_option(parser)


def positive(text: str) -> int:
    """Return an option's value as a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value


def positive_number(text: str) -> float:
    """Return an option's value as a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def names(text: str) -> list[str]:
    """Return an option's value, A,B, as a list."""
    return text.split(",")


def pin(cpu: int | None) -> None:
    """Keep this process on one core, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0)) if cpu is None else cpu})


def exit_status(run: Callable[[], None]) -> int:
    """Run a benchmark. Return its exit status: 2 for input that cannot work, 1 for a failed run. Say what was wrong."""
    try:
        run()
    except ConfigurationError as error:
        say(f"error: {error}")
        return 2
    except AgentSpecError as error:
        say(f"error: {error}")
        return 1
    return 0


def say(text: str) -> None:
    """Print progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def show(rows: Sequence[Row], title: str, as_json: bool) -> None:
    """Print the rows on stdout."""
    if as_json:
        print_json([rounded(asdict(row)) for row in rows])
        return
    marks = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}
    columns = ("figure", "ours", "peer", "ratio", "target", "met")
    cells = [(row.figure, *map(_text, (row.ours, row.peer, row.ratio)), row.target, marks[row.met]) for row in rows]
    print_table(title, columns, cells, left=("figure", "target"))


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = (), width: int = 130
) -> None:
    """Print a table on stdout, `width` characters wide where that is no terminal. left: columns that align left."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else width).print(table)


def print_json(value: object) -> None:
    """Print a result on stdout."""
    print(json.dumps(value, indent=1))


def save(name: str, kind: str, content: Mapping[str, Any]) -> None:
    """Write results/NAME.json, which plot.py reads, with the commit, date and machine in front."""
    where = {
        "kind": kind,
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(_lines({**where, **content}), encoding="utf-8")
    say(f"wrote {path.relative_to(ROOT)}")


def _commit() -> str:
    """Return the checkout's commit; "" without git, so that hours of measuring are not lost for want of it."""
    try:
        told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return told.stdout.strip()


def _lines(result: Mapping[str, Any]) -> str:
    """Return the result as JSON with a line for each field and each row."""
    fields = []
    for name, value in result.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n  " + ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in value) + "\n ]"
        fields.append(f"{json.dumps(name)}: {text}")
    return "{\n " + ",\n ".join(fields) + "\n}\n"


def machine() -> str:
    """Return a description of this machine, for the head of a result."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpus = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):  # there is no driver
        gpus = []
    names = ", ".join(filter(None, gpus)) or "no GPU"
    return f"{platform.machine()}, {os.cpu_count() or 1} cores, {names}"


def rounded(item: Mapping[str, object]) -> dict[str, object]:
    """Return the object with its floats at five digits, and None for those that JSON has no number for."""
    return {name: _five_digits(value) if isinstance(value, float) else value for name, value in item.items()}


def _five_digits(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
