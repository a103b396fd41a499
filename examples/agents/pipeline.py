"""Pass a task through sub-agents: one plans, one writes, one reviews, each in a session that the main one started.

    agentspec serve MODEL
    python examples/agents/pipeline.py --model MODEL "a function that counts words"

The server drafts what a sub-agent repeats of the others from their family of sessions. The report shows what came from
where.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from agentspec import AgentClient, Budget, Stage
from agentspec.report import read_run, render

STAGES = [
    Stage("plan", "Plan this in three short steps:", system="You are an architect."),
    Stage("write", "Write the Python code of this plan. Answer with the code only:"),
    Stage("review", "Correct the errors in this code. Answer with the whole code:", system="You are a reviewer."),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--report", type=Path, default=Path("report.html"))
    parser.add_argument("task", nargs="?", default="a function that counts words")
    options = parser.parse_args()

    with TemporaryDirectory() as folder:
        record = Path(folder) / "record.jsonl"
        with AgentClient(base_url=options.base_url, model=options.model, store=None, record=record) as client:
            session = client.session("pipeline")
            result = session.pipeline(options.task, STAGES, budget=Budget(requests=6, seconds=600), max_tokens=128)
        for attempt in result.attempts:
            print(f"{attempt.name}: {attempt.reason or (attempt.reply.text if attempt.reply else '')}\n")
        print(f"stopped: {result.stopped}")
        if any(attempt.reply for attempt in result.attempts):
            options.report.touch(mode=0o600)  # it holds what was said
            options.report.write_text(render(read_run(record)), encoding="utf-8", errors="replace")
            print(f"where the tokens came from: {options.report}")
    return 0 if result.done else 1


if __name__ == "__main__":
    raise SystemExit(main())
