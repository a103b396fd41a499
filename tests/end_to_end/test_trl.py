"""Test TRL unmodified: one environment variable makes the rollouts of its GRPO trainer draft."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from agentspec.testing.server import CPU_ENVIRONMENT, free_port
from tests.end_to_end.conftest import ENVIRONMENT

pytestmark = [
    pytest.mark.engine,
    pytest.mark.rl,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL: pip install trl"),
]

ROOT = Path(__file__).parents[2]
STEPS = 12


def train(folder: Path, switch: str) -> tuple[list[dict[str, Any]], str]:
    """Run the example. Return the figures of its steps, and its log."""
    figures = folder / f"figures-{switch}.jsonl"
    command = [sys.executable, str(ROOT / "examples" / "rl" / "grpo.py"), "--steps", str(STEPS)]
    environment = {**os.environ, **CPU_ENVIRONMENT, **ENVIRONMENT, "AGENTSPEC": switch, "AGENTSPEC_STORE": "memory://"}
    environment["VLLM_LOGGING_LEVEL"] = "INFO"
    environment["MASTER_PORT"] = str(free_port())  # two trainers on one machine would both take 29500
    done = subprocess.run(
        [*command, "--figures", str(figures)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=700,
        check=False,
    )
    if switch == "0" and "'Parameter' object has no attribute 'weight_loader'" in done.stderr:
        pytest.skip("on this processor vLLM's CPU build packs the weights that it loads, and can take no others")
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in figures.read_text().splitlines()], done.stdout + done.stderr


def test_one_variable_makes_trl_draft(tmp_path: Path) -> None:
    plain, plain_log = train(tmp_path, "0")
    drafting, log = train(tmp_path, "1")
    assert len(drafting) == len(plain) == STEPS
    assert log.count("AGENTSPEC=1: this engine drafts") == 1 and "agentspec" not in plain_log.lower()
    assert len({line["reward"] for line in drafting}) > STEPS / 2, "the samples must differ, or there is no training"

    later = drafting[1:]
    rate = sum(line["accepted"] for line in later) / sum(line["drafted"] for line in later)
    assert rate > 0.5
    assert all(line["drafted"] == 0 for line in plain)
    # In a step each row decodes one token plus the accepted ones; in plain vLLM it decodes one token.
    assert sum(line["tokens"] - line["accepted"] for line in drafting) < 0.8 * sum(line["tokens"] for line in drafting)

    differences = [fmean(line["logp_difference"] for line in run) for run in (drafting, plain)]
    assert differences[0] <= 2 * differences[1], "TRL's importance sampling sees the same log probabilities"
