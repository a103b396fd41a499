"""Test the types that users see, as mypy sees them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_right_uses_pass_and_a_wrong_one_is_found(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from agentspec import AgentClient\n"
        "async def main(client: AgentClient) -> str:\n"
        "    return (await client.session('s').chat('hello')).text\n"
    )
    # --strict also reports an unneeded ignore, so the wrong calls in client_api must be wrong.
    command = [sys.executable, "-m", "mypy", "--strict", str(HERE / "client_api.py"), str(program)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent.parent)
    assert result.returncode == 1
    errors = [line for line in result.stdout.splitlines() if ": error:" in line]
    assert errors and all("program.py:3" in line for line in errors), result.stdout
