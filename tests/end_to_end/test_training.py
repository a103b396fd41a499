"""Training from nothing but prompts, and from what a server has stored: real vLLM answers, a speculator comes out."""

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
from demo.tasks import make_task
from tests.end_to_end.conftest import ENVIRONMENT, MODEL

pytestmark = pytest.mark.engine


def train(folder: Path, source: dict[str, Any], out: Path) -> subprocess.CompletedProcess[str]:
    """Run `agentspec train` for a few steps on the demo's model."""
    settings = {
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
        "checkpoint": {"output_dir": str(out)},
    }
    file = folder / f"{out.name}.yaml"
    file.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "agentspec.cli", "train", str(file)]
    environment = {**os.environ, **CPU_ENVIRONMENT, **ENVIRONMENT}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)


def test_prompts_are_answered_once_by_the_target(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    chats = [[{"role": "user", "content": make_task(seed).request}] for seed in range(8)]
    lines = [{"id": f"p{i}", "messages": chat} for i, chat in enumerate(chats)]
    lines[3] = {"id": "p3", "prompt": "def "}
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    engine = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8}
    source = {"type": "prompts", "path": str(prompts), "max_tokens": 24, "engine": engine}
    done = train(tmp_path, source, tmp_path / "one")
    assert done.returncode == 0, done.stderr[-3000:]
    (answers,) = (tmp_path / "cache").glob("*/answers-0.jsonl")
    calls = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [call["session"] for call in calls] == [f"p{i}" for i in range(8)]
    assert all(2 <= len(call["response_token_ids"]) <= 24 for call in calls)
    report = json.loads((tmp_path / "one" / "report.json").read_text())
    assert report["training"]["sessions"] + report["held_out"]["sessions"] == 8

    # cut off while the last answer was written: only that one is asked for again, and then none
    answers.write_bytes(answers.read_bytes()[:-9])
    for name, starts_vllm in (("two", True), ("three", False)):
        for file in answers.parent.glob("*.safetensors"):
            file.unlink()
        done = train(tmp_path, source, tmp_path / name)
        assert done.returncode == 0, done.stderr[-3000:]
        assert [json.loads(line) for line in answers.read_text().splitlines()] == calls
        assert ("EngineCore" in done.stdout + done.stderr) == starts_vllm


def test_stored_sessions_are_trained_on(fast: ModelServer, database: Path, tmp_path: Path) -> None:
    with AgentClient(base_url=fast.base_url, model="demo", api_key="none", store="memory://") as client:
        for number in range(6):
            session = client.session(f"training-{number}")
            session.chat(make_task(number).request, max_tokens=24, temperature=0.0)
            session.chat("Again.", max_tokens=24, temperature=0.0)
    done = train(tmp_path, {"type": "store", "url": f"sqlite:///{database}"}, tmp_path / "stored")
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "stored" / "report.json").read_text())
    assert report["training"]["sessions"] + report["held_out"]["sessions"] >= 6
