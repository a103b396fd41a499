"""The command line, on typer: ``app`` is the program with its short commands; the others have a file each."""

from agentspec.cli.app import main

__all__ = ["main"]
