"""Test training from prompts alone, and from a server's store: real vLLM answers, a speculator comes out."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentspec import AgentClient
from agentspec.testing.server import CPU_ENVIRONMENT, ModelServer
from agentspec.train.config import TrainingConfig
from agentspec.train.corpus import folder_of
from demo.tasks import make_task
from tests.end_to_end.conftest import ENVIRONMENT, MODEL

pytestmark = [pytest.mark.engine, pytest.mark.store]


def settings(folder: Path, source: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a few training steps on the demo's model."""
    return {
        "micro_batch_size": 2,
        "train_iters": 3,
        "model": {
            "name_or_path": str(MODEL),
            "dtype": "float32",
            "proj_dim": 32,
            "emb_dim": 32,
            "speculator_width": 32,
        },
        "data": {"sources": [source], "train_eval_split": [0.5, 0.5], "cache_dir": str(folder / "cache")},
        "checkpoint": {"output_dir": str(folder / "speculator")},
    }


def train(folder: Path, source: dict[str, Any]) -> dict[str, Any]:
    """Run `agentspec train`. Return its report."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(settings(folder, source)))
    command = [sys.executable, "-m", "agentspec", "train", str(file)]
    environment = {**os.environ, **CPU_ENVIRONMENT, **ENVIRONMENT}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads((folder / "speculator" / "report.json").read_text())
    return report


def test_prompts_are_answered_by_the_target(tmp_path: Path) -> None:
    """The target answers the prompts to which an earlier run, cut off while it wrote, has no answer."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{i}", "messages": [{"role": "user", "content": make_task(i).request}]} for i in range(8)]
    lines[3] = {"id": "p3", "prompt": "def "}
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    engine = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8}
    source = {"type": "prompts", "path": str(prompts), "max_tokens": 24, "engine": engine}
    answers = folder_of(TrainingConfig.model_validate(settings(tmp_path, source))) / "answers-0.jsonl"
    answers.parent.mkdir(parents=True)
    earlier = {"session": "p0", "turn": 0, "prompt_token_ids": [5, 6], "response_token_ids": [7, 8, 9]}
    answers.write_text(json.dumps(earlier) + '\n{"session": "p1", "tu')
    report = train(tmp_path, source)
    first, *calls = [json.loads(line) for line in answers.read_text().splitlines()]
    assert first == earlier
    assert [call["session"] for call in calls] == [f"p{i}" for i in range(1, 8)]
    assert all(2 <= len(call["response_token_ids"]) <= 24 for call in calls)
    assert len(calls[0]["prompt_token_ids"]) > 20 > len(calls[2]["prompt_token_ids"])
    assert report["training"]["sessions"] + report["held_out"]["sessions"] == 8


def test_stored_sessions_are_trained_on(fast: ModelServer, database: Path, tmp_path: Path) -> None:
    with AgentClient(base_url=fast.base_url, model="demo", api_key="none", store="memory://") as client:
        for number in range(20):  # their keys, which differ in every store, decide which are held out
            session = client.session(f"training-{number}")
            session.chat(make_task(number).request, max_tokens=24, temperature=0.0)
            session.chat("Again.", max_tokens=24, temperature=0.0)
    report = train(tmp_path, {"type": "store", "url": f"sqlite:///{database}"})
    assert report["training"]["sessions"] + report["held_out"]["sessions"] >= 20
