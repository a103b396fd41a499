"""Let a model look around in a folder with tools, within a budget, and answer a question about it.

    agentspec serve MODEL --enable-auto-tool-choice --tool-call-parser PARSER
    python examples/agents/tool_agent.py --model MODEL "Which file defines the parser?"

The parser depends on the model (vLLM's documentation of tool calling lists them). The tools read below the folder only.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from agentspec import AsyncAgentClient, Budget, Progress

LONGEST = 4_000


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("question", nargs="?", default="What is in this folder?")
    options = parser.parse_args()
    root: Path = options.folder.resolve()

    def inside(path: str) -> Path:
        found = (root / path).resolve()
        if not found.is_relative_to(root):
            raise PermissionError(f"{path} is not in the folder")
        return found

    def list_files(path: str = ".") -> list[str]:
        """List the names in a folder."""
        return sorted(item.name for item in inside(path).iterdir())

    def read_file(path: str) -> str:
        """Return the beginning of a text file."""
        return inside(path).read_text(encoding="utf-8", errors="replace")[:LONGEST]

    def show(progress: Progress) -> None:
        for run in progress.attempt.tools:
            print(f"{run.tool}({run.arguments}): {run.answer[:60]!r}")

    async with AsyncAgentClient(base_url=options.base_url, model=options.model, store=None) as client:
        result = await client.session("tool-agent").run_tools(
            options.question,
            [list_files, read_file],
            at_once=4,
            budget=Budget(requests=12, tokens=4_000, seconds=600),
            on_progress=show,
            max_tokens=256,
        )
    print(f"stopped: {result.stopped}")
    print(result.text)
    return 0 if result.done else 1


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
