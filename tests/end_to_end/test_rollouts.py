"""The rollout script as its users run it: several epochs, then a second run that starts from what the first stored."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentspec.testing.server import CPU_ENVIRONMENT
from demo.tasks import make_task
from tests.end_to_end.conftest import ENVIRONMENT, MODEL

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).parents[2] / "examples" / "rl" / "rollouts.py"


def rollouts(problems: Path, out: Path, store: str, *options: str) -> list[tuple[float, float]]:
    """Run the script; (tokens a step, acceptance rate) of each epoch, as it printed them."""
    command = [sys.executable, str(SCRIPT), str(problems), "--model", str(MODEL), "--out", str(out), "--store", store]
    command += ["--samples", "4", "--max-tokens", "100", "--max-model-len", "512", "--max-num-seqs", "4"]
    # A measured cost would make the counts depend on the machine.
    command += ["--dtype", "float32", "--enforce-eager", "--verify-cost", "0.02", *options]
    environment = {**os.environ, **CPU_ENVIRONMENT, **ENVIRONMENT, "COLUMNS": "120"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split("│")[1:-1] for line in done.stdout.splitlines() if line.startswith("│")]
    return [(float(row[3]), float(row[4])) for row in rows]


def test_later_epochs_and_later_runs_draft_from_earlier_ones(tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    messages = [[{"role": "user", "content": make_task(1_000_100 + i).request}] for i in range(3)]
    problems.write_text("".join(json.dumps({"id": f"p{i}", "messages": m}) + "\n" for i, m in enumerate(messages)))
    store = f"sqlite:///{tmp_path / 'rollouts.db'}"
    out = tmp_path / "rollouts.jsonl"
    first = rollouts(problems, out, store, "--epochs", "2", "--temperature", "0.6")
    assert first[1][0] > first[0][0] * 1.2, "the second epoch should draft from the first"
    again = rollouts(problems, out, store, "--epochs", "1", "--temperature", "0.6", "--seed", "7")
    assert again[0][0] > first[0][0] * 1.2, "a new process should draft from the store"
    samples = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(samples) == 3 * 4 * 3
    assert {sample["id"] for sample in samples} == {"p0", "p1", "p2"}


@pytest.mark.parametrize(("line", "message"), [("{", "not JSON"), ('{"id": 1}', '"prompt"')])
def test_a_bad_problem_file_names_the_line(tmp_path: Path, line: str, message: str) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"id": "a", "prompt": "x"}\n' + line + "\n")
    command = [sys.executable, str(SCRIPT), str(problems), "--model", "unused"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "line 2" in done.stderr
    assert message in done.stderr
