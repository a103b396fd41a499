"""What the comparing benchmarks print: a row a figure, ours beside the peer's, with the target and the noise."""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import peer

from agentspec.testing.replay_types import ReplayResult


@dataclass(frozen=True, slots=True)
class Row:
    """ratio: how many times better ours is, above 1 better; met: None where there is no target."""

    figure: str
    ours: float
    peer: float | None = None
    ratio: float | None = None
    target: str = ""
    met: bool | None = None


def less(figure: str, ours: float, peer: float, target: float | None = None) -> Row:
    """A time or size: the target is how many times less than the peer's it must be."""
    ratio = peer / ours
    if target is None:
        return Row(figure, ours, peer, ratio)
    return Row(figure, ours, peer, ratio, f"at least {target:g}x less", ratio >= target)


def more(figure: str, ours: float, peer: float | None, target: float, ratio: float | None = None) -> Row:
    """A throughput: the target is the least ratio to the peer's."""
    found = ratio if ratio is not None else ours / (peer or ours)
    return Row(figure, ours, peer, found, f"at least {target:g}", found >= target)


def at_most(figure: str, ours: float, limit: float, unit: str, peer: float | None = None) -> Row:
    """A figure with a limit of its own."""
    ratio = peer / ours if peer is not None and ours else None
    return Row(figure, ours, peer, ratio, f"at most {limit:g} {unit}".strip(), ours <= limit)


def speed_ratio(ours: ReplayResult, other: ReplayResult) -> tuple[float, float]:
    """Return how many times faster ours gave tokens, and the standard error of that ratio.

    The error comes from leaving out one turn at a time, of the turns that both took on the same calls. It is 0 where
    there are fewer than three turns: they say nothing about it.
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
    """What all comparing benchmarks take."""
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help="folder with load.py and .tok.npz")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    parser.add_argument(
        "--cpu", type=int, metavar="N", help="the core to stay on (the last one that this process may use)"
    )
    peer.add_option(parser)


def pin(cpu: int | None) -> None:
    """Keep this process on one core, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0)) if cpu is None else cpu})


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def show(rows: Sequence[Row], title: str, as_json: bool) -> None:
    """Print the rows on stdout."""
    if as_json:
        print(json.dumps([_rounded(row) for row in rows], indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for name in ("figure", "ours", "peer", "ratio", "target", "met"):
        table.add_column(name, justify="left" if name in ("figure", "target") else "right")
    marks = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}
    for row in rows:
        table.add_row(row.figure, _text(row.ours), _text(row.peer), _text(row.ratio), row.target, marks[row.met])
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def _rounded(row: Row) -> dict[str, object]:
    return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in asdict(row).items()}


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
