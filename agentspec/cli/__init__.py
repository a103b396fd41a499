"""Provide the command line, on typer. ``app`` holds the program and its short commands; the others have a file each."""

from agentspec.cli.app import main

__all__ = ["main"]
