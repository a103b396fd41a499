"""Define ``agentspec``, the program that the package installs. Its longer commands have modules of their own."""

import errno
import io
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from agentspec.cache import Scope
from agentspec.cli import rollout, sessions, simulate, speculator
from agentspec.cli.server import write_private
from agentspec.cli.tables import print_table
from agentspec.cli.top import top
from agentspec.errors import AgentSpecError
from agentspec.report import read_run, render
from agentspec.server_ext.settings import settle_store

app = typer.Typer(
    name="agentspec",
    help="Speculative decoding for LLM agents: drafts from the session's own history, on vLLM, losslessly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def program(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options in front of a command."""


class _Serve(TyperCommand):
    """Leave ``--help=all`` and ``--help=GROUP`` to vLLM, which explains its own options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return what is left of the arguments, as Click does, or print vLLM's help and exit."""
        wanted = [argument for argument in args if argument.startswith("--help=")]
        if wanted:
            from agentspec.server_ext.vllm_adapter.startup.launch import run_vllm  # needs the core

            run_vllm(wanted)
        return super().parse_args(ctx, args)


@app.command(
    cls=_Serve,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="vLLM's own options: --help=all; of one subject: --help=SchedulerConfig; one alone: --help=max-model-len",
)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Model name or path, as for vllm serve.")],
    store: Annotated[
        str | None,
        typer.Option(
            help="URL of the store of sessions: sqlite:////absolute/path.db, redis://host:port/db or memory://."
        ),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            help="This server's tenant: its API keys draft from each other's answers; without one, each from its own."
        ),
    ] = None,
    principal_header: Annotated[
        str | None,
        typer.Option(
            help="Header by which your gateway names a request's sender. Let no client set it: it is trusted."
        ),
    ] = None,
    tenant_header: Annotated[
        str | None,
        typer.Option(
            help="Header by which your gateway names a request's tenant. Let no client set it: it is trusted."
        ),
    ] = None,
    api_keys_file: Annotated[
        str | None, typer.Option(help="File that names the tenant of each API key, in lines of 'sha256-of-key tenant'.")
    ] = None,
    scope: Annotated[
        Scope | None,
        typer.Option(help="What a request drafts from beside its own text (tenant: session, group and tenant)."),
    ] = None,
    public: Annotated[
        str | None,
        typer.Option(help="File of texts that all callers' requests may draft from: JSON lines or plain text."),
    ] = None,
    max_draft: Annotated[
        int | None,
        typer.Option(help="Longest draft, in tokens (num_speculative_tokens); by default what the engine can verify."),
    ] = None,
    verify_cost: Annotated[
        float | None,
        typer.Option(help="Price of verifying one more token, as a share of a decode step; measured unless given."),
    ] = None,
    record: Annotated[
        str | None,
        typer.Option(help="File to write a record of each decode step to, as JSON lines, for agentspec report."),
    ] = None,
) -> None:
    """Run vllm serve with the extension switched on; takes every option of vllm serve."""
    from agentspec.server_ext.vllm_adapter.frontend.shutdown import end_on_hang_up
    from agentspec.server_ext.vllm_adapter.startup.launch import (  # needs the core
        check_port,
        hand_on,
        run_vllm,
        serve_arguments,
    )

    settings: dict[str, Any] = {
        "principal_header": principal_header,
        "tenant_header": tenant_header,
        "api_keys_file": api_keys_file,
        "scope": scope,
        "public": public,
        "verify_cost": verify_cost,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    hand_on(store=store, tenant=tenant, record=record)
    # Where options stand before the model, `model` holds the first of them.
    arguments = serve_arguments([model, *context.args], given, max_draft)
    settle_store({})  # an unusable store is an error here
    check_port(arguments)
    end_on_hang_up()
    run_vllm(arguments)


simulate.add_to(app)
speculator.add_to(app)
sessions.add_to(app)
rollout.add_to(app)


@app.command()
def train(config: Annotated[Path, typer.Argument(help="YAML file; docs/speculator.md explains its fields.")]) -> None:
    """Train a speculator. Run the command again to resume a training that was cut off."""
    with speculator.needing_packages("training needs"):
        from agentspec.train.config import load_config
        from agentspec.train.run import train as run
    settings = load_config(config)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the processes of vLLM, which answers prompts
    trained = run(settings, Console(stderr=True))
    held_out = trained["held_out"]
    table = Table(title=f"{held_out['sessions']} held-out sessions, {held_out['response_tokens']:,} tokens")
    for column in ("speculator", "mean acceptance length", "accepted per position"):
        table.add_column(column)
    for name in ("untrained", "trained"):
        figures = held_out[name]
        shares = "  ".join(f"{share:.1%}" for share in figures["per_position"])
        table.add_row(name, f"{figures['mean_acceptance_length']:.3f}", shares)
    print_table(table)
    typer.echo(f"written: {settings.checkpoint.output_dir}")


@app.command()
def report(
    record: Annotated[
        Path, typer.Argument(help="File that AgentClient(record=…) or the server's --record wrote.", dir_okay=False)
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="File for the page.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Title of the page.")] = "What speculation did",
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


app.command()(top)


@app.command()
def version() -> None:
    """Print the version."""
    from agentspec import __version__

    typer.echo(__version__)


def _open_closed_streams() -> None:
    """Open the null device in place of outputs that are closed (``>&-``), or the next file would become one of them."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_WRONLY)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def main() -> None:
    """Run the program. Print an AgentSpecError, and an OSError of a file, as one line, not as a traceback."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):  # names of files and sessions that the terminal cannot show are no error
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except AgentSpecError as error:
        message = str(error)
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:  # nothing that the user named
            raise
        message = str(error.strerror) if error.filename is None else f"{error.filename}: {error.strerror}"
    else:
        return
    # Print Text, because markup would swallow brackets in user input that the message quotes.
    Console(stderr=True).print(Text.assemble(("agentspec: ", "bold red"), message), soft_wrap=True)
    sys.exit(2)
