"""Test two tensor-parallel ranks: suffix indexes are on one, and texts are those of two ranks without agentspec."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentspec.testing.server import CPU_ENVIRONMENT
from tests.end_to_end.conftest import ENVIRONMENT, MODEL

pytestmark = [pytest.mark.engine, pytest.mark.ranks]

ROOT = Path(__file__).parents[2]


def run(method: str, out: Path) -> dict[str, Any]:
    """Run one engine on two ranks. Return what it wrote."""
    command = [sys.executable, "-m", "tests.end_to_end.tensor_parallel_run", str(MODEL), method, str(out)]
    environment = {**os.environ, **CPU_ENVIRONMENT, **ENVIRONMENT, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    answer: dict[str, Any] = json.loads(out.read_text())
    return answer | {"log": done.stdout + done.stderr}


@pytest.fixture(scope="module")
def plain_texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the texts without the extension."""
    texts: list[str] = run("plain", tmp_path_factory.mktemp("plain") / "plain.json")["texts"]
    return texts


def test_two_ranks_write_the_same_text_and_draft_on_one(plain_texts: list[str], tmp_path: Path) -> None:
    fast = run("agentspec", tmp_path / "fast.json")
    assert fast["texts"] == plain_texts
    drafting = [answer for answer in fast["stats"] if answer is not None]
    assert len(fast["stats"]) == 2
    assert len(drafting) == 1
    assert drafting[0]["counters"]["accepted"] > 100


def test_offline_with_a_speculator_the_text_is_the_same(plain_texts: list[str], tmp_path: Path) -> None:
    """One rank has the indexes, both the head, in ``vllm.LLM(speculative_config={"method": "arctic", …})``."""
    fast = run("arctic", tmp_path / "fast.json")
    assert fast["texts"] == plain_texts
    (stats,) = [answer for answer in fast["stats"] if answer is not None]
    assert stats["model"]["runs"] > 5
    assert not [name for name in stats["counters"] if name.startswith("errors")]


def test_a_speculator_that_fails_on_one_rank_ends_the_engine(tmp_path: Path) -> None:
    """Ranks that are out of step would mix up their messages, so the engine stops writing text, and nothing hangs."""
    answer = run("broken", tmp_path / "broken.json")
    assert answer.get("error") == "EngineDeadError"
    assert "so the ranks are out of step: restart the server" in answer["log"]
