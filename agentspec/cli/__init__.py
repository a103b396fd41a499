"""The command line: one file a command."""

from agentspec.cli.app import main

__all__ = ["main"]
