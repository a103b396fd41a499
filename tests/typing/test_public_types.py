"""The types that users see, as mypy sees them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--strict", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent.parent)


def test_the_public_api_has_the_types_that_users_rely_on() -> None:
    # strict also reports an ignore that is not needed: the wrong calls in it must be wrong
    result = check(str(HERE / "client_api.py"))
    assert result.returncode == 0, result.stdout


def test_a_wrong_use_is_found(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from agentspec import AgentClient\n"
        "async def main(client: AgentClient) -> str:\n"
        "    return (await client.session('s').chat('hello')).text\n"
    )
    result = check(str(program))
    assert result.returncode == 1
    assert "program.py:3" in result.stdout
