"""The examples for agents against the demo's server, as a user starts them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentspec.testing.server import ModelServer

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
NEEDS = {"openai_agents.py": "agents", "pydantic_ai_agent.py": "pydantic_ai"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs_on_a_real_server(name: str, fast: ModelServer, tmp_path: Path) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    for file in ("a.py", "b.py"):
        (tmp_path / file).write_text("def first(values):\n    return values[0]\n")
    before = fast.stats()["counters"]["finished"]
    command = [
        sys.executable,
        str(FOLDER / name),
        "--base-url",
        fast.base_url,
        "--model",
        "demo",
        *ARGUMENTS.get(name, ()),
    ]
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path / "data")}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
    # The toy model writes no slugify that passes its tests, which the coder reports by its status.
    assert ran.returncode in ({0, 1} if name == "refine_loop.py" else {0}), ran.stdout + ran.stderr
    assert EXAMPLES[name] in ran.stdout and "Traceback" not in ran.stderr
    assert fast.stats()["counters"]["finished"] >= before + 1
