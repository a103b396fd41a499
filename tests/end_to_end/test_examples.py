"""Run the examples for agents against the demo's server, as a user starts them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentspec.testing.server import ModelServer
from tests.end_to_end.conftest import ENVIRONMENT, MODEL

pytestmark = [pytest.mark.engine, pytest.mark.clients]

FOLDER = Path(__file__).parents[2] / "examples" / "agents"
EXAMPLES = {
    "two_sessions.py": "second session: ",
    "refine_loop.py": "stopped: ",
    "pipeline.py": "where the tokens came from",
    "editor.py": "of them from the prediction",
    "async_fanout.py": "b.py: done",
    "openai_agents.py": "4 messages in session poet",
    "pydantic_ai_agent.py": "tokens in the last turn",
}
"""What each example prints."""
ARGUMENTS = {"async_fanout.py": ("a.py", "b.py"), "editor.py": ("a.py", "add a docstring", "rename values to items")}
MAY_FAIL = {"refine_loop.py", "pipeline.py"}
"""Examples whose exit status may report what the toy model wrote: code that fails its tests, or nothing at all."""
TOOLS = ("--max-num-seqs", "8", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
NEEDS = {"openai_agents.py": "agents", "pydantic_ai_agent.py": "pydantic_ai"}


def run(name: str, server: ModelServer, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an example as its first lines say."""
    command = [sys.executable, str(FOLDER / name), "--base-url", server.base_url, "--model", "demo", *arguments]
    environment = {**os.environ, "XDG_DATA_HOME": str(folder / "data")}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder, env=environment)


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs_on_a_real_server(name: str, fast: ModelServer, tmp_path: Path) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    for file in ("a.py", "b.py"):
        (tmp_path / file).write_text("def first(values):\n    return values[0]\n")
    before = fast.stats()["counters"]["finished"]
    ran = run(name, fast, tmp_path, *ARGUMENTS.get(name, ()))
    assert ran.returncode in ({0, 1} if name in MAY_FAIL else {0}), ran.stdout + ran.stderr
    assert EXAMPLES[name] in ran.stdout and "Traceback" not in ran.stderr
    assert fast.stats()["counters"]["finished"] >= before + 1


def test_the_tool_agent_runs_where_tools_are_parsed(tmp_path: Path) -> None:
    """The small model gets the tools' descriptions, cannot call them, and answers without."""
    environment = {**ENVIRONMENT, "AGENTSPEC_STORE": "memory://"}
    with ModelServer(MODEL, options=TOOLS, name="demo", log=tmp_path / "server.log", environment=environment) as server:
        ran = run("tool_agent.py", server, tmp_path)
        assert ran.returncode == 0 and "stopped: done" in ran.stdout, ran.stdout + ran.stderr
        assert "tool-agent" in {session["id"] for session in server.get("/v1/agentspec/sessions")["sessions"]}
