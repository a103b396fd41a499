"""``agentspec``: the program that the package installs."""

import sys

import typer
from rich.console import Console
from rich.text import Text

from agentspec.cli import serve, simulate, speculator, train
from agentspec.errors import AgentSpecError

app = typer.Typer(
    name="agentspec",
    help="Speculative decoding for LLM agents: drafts from the session's own history, on vLLM, losslessly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
serve.add_to(app)
simulate.add_to(app)
speculator.add_to(app)
train.add_to(app)


@app.command()
def version() -> None:
    """Print the version."""
    from agentspec import __version__

    typer.echo(__version__)


def main() -> None:
    """Entry point: an error of ours is one line that names the remedy, not a traceback."""
    try:
        app()
    except AgentSpecError as error:
        # Text, not markup: messages quote what the user wrote, brackets included.
        Console(stderr=True).print(Text.assemble(("agentspec: ", "bold red"), str(error)), soft_wrap=True)
        sys.exit(2)
