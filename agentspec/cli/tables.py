"""Print tables whole: a figure that is cut off is worth nothing."""

import sys
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

_LEAST = 80
"""Columns that every table fits into. A narrower terminal breaks the lines itself, and loses nothing."""
_WIDE = 1_000

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def print_table(table: Table) -> None:
    """Print a table in the width of the terminal; where another program reads it, each row on one line."""
    width = max(Console().width, _LEAST) if sys.stdout.isatty() else _WIDE
    Console(width=width).print(table)


def figures_table(title: str, figures: Iterable[tuple[str, str]]) -> Table:
    """Return a table with a row for each figure, given by its name and its value."""
    table = Table(title=Text(title, "table.title"), show_header=False)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures:
        table.add_row(name, Text(value))
    return table
