"""Draw a report of recorded replies: ``agentspec report``."""

from pathlib import Path
from typing import Annotated

import typer

from agentspec.cli.server import write_private
from agentspec.report import read_run, render


def report(
    record: Annotated[
        Path, typer.Argument(help="What AgentClient(record=…) or the server's --record wrote.", dir_okay=False)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its title.")] = "What speculation did",
) -> None:
    """Draw a page of what speculation did: the text by source, acceptance and speed by turn, sessions compared."""
    if out.exists() and out.samefile(record):
        raise typer.BadParameter(f"{out}: is the record itself; name another file for the page")
    try:
        page = render(read_run(record), title)
        write_private(out, page.encode("utf-8", "replace"))  # JSON may hold half a surrogate pair
    except OSError as error:
        raise typer.BadParameter(f"{error.filename or out}: {error.strerror}") from None
    typer.echo(f"written: {out}", err=not out.is_file())  # /dev/stdout is read by another program
