"""Print tables whole: a figure that is cut off is worth nothing."""

import sys

from rich.console import Console
from rich.table import Table

_LEAST = 80
"""Columns that every table fits into. A narrower terminal breaks the lines itself, and loses nothing."""
_WIDE = 1_000


def print_table(table: Table) -> None:
    """Print a table in the width of the terminal; where another program reads it, each row on one line."""
    width = max(Console().width, _LEAST) if sys.stdout.isatty() else _WIDE
    Console(width=width).print(table)
