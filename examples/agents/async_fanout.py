"""Review several files at once, one session each, then order all findings in another session.

    agentspec serve MODEL
    python examples/agents/async_fanout.py --model MODEL FILE [FILE ...]

The two turns of a review share most of their text, so the server drafts the second from the session.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from agentspec import AsyncAgentClient


async def review(client: AsyncAgentClient, path: Path) -> str:
    """Review one file in a session of its own. Return its most important finding."""
    session = client.session(f"review:{path}")
    await session.clear()  # forget the turns of an earlier run
    await session.chat(
        f"Review this file.\n\n{path.read_text(encoding='utf-8', errors='replace')[:4000]}", max_tokens=256
    )
    reply = await session.chat("Name the most important finding in one sentence.", max_tokens=64)
    accepted = f", {reply.speculation.accepted} drafted tokens accepted" if reply.speculation else ""
    print(f"{path}: done{accepted}")
    return f"{path}: {reply.text}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()

    async with AsyncAgentClient(base_url=options.base_url, model=options.model, timeout=300) as client:
        findings = await asyncio.gather(*(review(client, path) for path in dict.fromkeys(options.files)))
        summary = client.session().stream("Put these findings in order of urgency:\n" + "\n".join(findings))
        async for text in summary:
            print(text, end="", flush=True)
        print()


if __name__ == "__main__":
    asyncio.run(main())
