"""Draw a page of what speculation did, from a client's record of replies or a server's step record."""

from agentspec.report.page import render
from agentspec.report.records import Run, Session, Turn, read_run

__all__ = ["Run", "Session", "Turn", "read_run", "render"]
