"""Run the code of docs/sdk.md as it is written, each block after the earlier ones."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from .fake_server import FakeServer

GUIDE = Path(__file__).parents[2] / "docs" / "sdk.md"


def test_the_code_of_the_guide_runs(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    Path("setup.py").write_text("setup()\n")

    async def main() -> int:
        names: dict[str, Any] = {}
        count = 0
        for found in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
            line = text.count("\n", 0, found.start()) + 1
            source = "\n" * line + found.group(1).replace("http://localhost:8000/v1", server.url)
            if "response_format=" in source:
                server.answers = [{"content": '{"passed": true}'}]
            code: CodeType = compile(source, str(GUIDE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = FunctionType(code, names)()
            if inspect.isawaitable(result):
                await result
            count += 1
        return count

    assert asyncio.run(main()) >= 7
    assert len(server.chats) >= 10
