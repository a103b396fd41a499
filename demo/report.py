"""Report what the demo measured: a table with one row a turn, and ``summary.json``."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo.agent import Turn

SOURCES = ("request", "session", "global", "model")
"""Sources of accepted tokens, one column of the table each."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Hold one turn without agentspec and the same turn with it."""

    plain: Turn
    fast: Turn
    after_restart: bool

    @property
    def identical(self) -> bool:
        """Return whether both wrote the same text."""
        return self.plain.text == self.fast.text

    @property
    def restored(self) -> int:
        """Return the number of accepted tokens that came from earlier turns, of this session or of others."""
        by_source = self.fast.speculation.accepted_by_source if self.fast.speculation else {}
        return sum(by_source.get(source, 0) for source in ("session", "group", "global"))


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the figures of ``summary.json``. speedup: total time without over total time with agentspec."""
    accepted: Counter[str] = Counter()
    drafts = 0
    for pair in pairs:
        if pair.fast.speculation:
            accepted.update(pair.fast.speculation.accepted_by_source)
            drafts += pair.fast.speculation.drafts
    last = {pair.fast.session: pair.fast for pair in pairs}.values()
    results = [result for turn in last for result in turn.results]
    seconds = sum(pair.fast.seconds for pair in pairs)
    return {
        "identical": all(pair.identical for pair in pairs),
        "speedup": round(sum(pair.plain.seconds for pair in pairs) / seconds, 3) if seconds else 0.0,
        "turns": len(pairs),
        "mean_acceptance_length": round(1 + sum(accepted.values()) / drafts, 3) if drafts else 1.0,
        "accepted_by_source": dict(accepted),
        "accepted_after_restart": sum(pair.restored for pair in pairs if pair.after_restart),
        "passed_tests": sum(result.passed for result in results),
        "failed_tests": sum(not result.passed for result in results),
    }


def write_summary(pairs: Sequence[Pair], path: Path) -> dict[str, Any]:
    """Write the summary and return it."""
    figures = summary(pairs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def print_table(pairs: Sequence[Pair], console: Console) -> None:
    """Print one row a turn: tokens, steps, acceptance, sources of accepted tokens, speed, and whether texts agree."""
    table = Table(title="The agent's turns, with agentspec; without it every token is a step")
    for column in ("session", "turn", "tests"):
        table.add_column(column)
    for column in ("tokens", "steps", "mean acc.\nlength", "accept.\nrate", *SOURCES):
        table.add_column(column, justify="right")
    for column in ("tok/s\nwithout", "tok/s\nwith", "speed-up"):
        table.add_column(column, justify="right")
    table.add_column("same\ntext")
    for pair in pairs:
        table.add_row(*_cells(pair), style="bold" if pair.after_restart else None)
    console.print(table)


def _cells(pair: Pair) -> list[str]:
    plain, fast, spec = pair.plain, pair.fast, pair.fast.speculation
    passed = sum(result.passed for result in fast.results)
    by_source = spec.accepted_by_source if spec else {}
    return [
        fast.session + (" (after the restart)" if pair.after_restart else ""),
        str(fast.number),
        f"{passed}/{len(fast.results)}",
        str(fast.tokens),
        str(spec.steps) if spec else "-",
        f"{spec.mean_acceptance_length:.2f}" if spec else "-",
        f"{spec.acceptance_rate:.2f}" if spec else "-",
        *(str(by_source.get(source, 0)) for source in SOURCES),
        f"{plain.tokens / plain.seconds:.0f}",
        f"{fast.tokens / fast.seconds:.0f}",
        f"{plain.seconds / fast.seconds:.2f}x",
        "yes" if pair.identical else "NO",
    ]
