"""``agentspec train CONFIG.yaml``: a speculator for a target, from recorded sessions or prompts."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from agentspec.errors import ConfigurationError


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(train)


def train(config: Annotated[Path, typer.Argument(help="YAML file; docs/speculator.md explains its fields.")]) -> None:
    """Train a speculator; started again after it was cut off, it goes on."""
    try:
        from agentspec.train.config import load_config
        from agentspec.train.run import train as run
    except ImportError as error:
        raise ConfigurationError(f"training needs more packages ({error}): pip install 'agentspec[train]'") from error
    settings = load_config(config)
    report = run(settings, Console(stderr=True))
    held_out = report["held_out"]
    table = Table(title=f"{held_out['sessions']} held-out sessions, {held_out['response_tokens']:,} tokens")
    for column in ("speculator", "mean acceptance length", "accepted per position"):
        table.add_column(column)
    for name in ("untrained", "trained"):
        figures = held_out[name]
        shares = "  ".join(f"{share:.1%}" for share in figures["per_position"])
        table.add_row(name, f"{figures['mean_acceptance_length']:.3f}", shares)
    Console().print(table)
    typer.echo(f"written: {settings.checkpoint.output_dir}")
