"""Test that vLLM's own drafters draft the same whether they run in every step or only in steps that ask them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentspec.testing.server import CPU_ENVIRONMENT
from tests.end_to_end.conftest import ENVIRONMENT, MODEL

pytestmark = [pytest.mark.engine, pytest.mark.drafters]

ROOT = Path(__file__).parents[2]
SMALL = {"max_num_batched_tokens": 64, "block_size": 32, "num_gpu_blocks_override": 26}
"""With these, prompts come in chunks beside rows that rest, kept tokens do not fit in, and rows are preempted."""


def run(drafter: str, tokens: int, mode: str, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one engine in its own process. Return what it wrote."""
    method = {"method": drafter, "model": str(MODEL.with_name(drafter)), "num_speculative_tokens": tokens}
    out = folder / f"{mode}.json"
    arguments = (str(MODEL), json.dumps(method), mode, json.dumps(job), str(out))
    command = [sys.executable, "-m", "tests.end_to_end.skipped_passes_run", *arguments]
    environment = {**os.environ, **CPU_ENVIRONMENT, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    answer: dict[str, Any] = json.loads(out.read_text())
    return answer


def tokens_of(draft: list[tuple[int, float]]) -> list[int]:
    """Return a draft's tokens without their probabilities."""
    return [token for token, _ in draft]


@pytest.mark.parametrize(
    ("drafter", "tokens", "job"),
    [("eagle3", 3, {}), ("draft_model", 4, SMALL), ("eagle3", 3, {**SMALL, "enable_prefix_caching": False})],
    ids=["eagle3", "draft_model in little memory", "eagle3 without cached prefixes"],
)
def test_a_drafter_that_rests_drafts_as_one_that_does_not(
    drafter: str, tokens: int, job: dict[str, Any], tmp_path: Path
) -> None:
    always, seldom = (run(drafter, tokens, mode, job, tmp_path) for mode in ("always", "seldom"))
    assert seldom["texts"] == always["texts"]
    assert seldom["steps"] == always["steps"]
    assert seldom["rests"] > 0.6 * seldom["steps"]
    if job:
        assert seldom["late"] > 0
    asked = seldom["drafts"]
    assert len(asked) > 80
    same = [name for name, draft in asked.items() if tokens_of(draft) == tokens_of(always["drafts"][name])]
    assert len(same) >= len(asked) - 2, "but for ties, which a longer query may round otherwise"
    for name in same:
        assert [p for _, p in asked[name]] == pytest.approx([p for _, p in always["drafts"][name]], abs=1e-3)
