"""Test that the speculator benchmark runs with torch alone, and counts the bytes that a loop reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "speculator.py"
H, I, V, N = 256, 256, 2048, 3  # noqa: E741

_BARE = """
import runpy, sys
absent = ["vllm", "pydantic", "openai", "httpx", "redis", "msgpack", "rich", "typer", "agentspec.cache"]
sys.modules.update(dict.fromkeys(absent))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _run(*options: str) -> str:
    command = [sys.executable, "-c", _BARE, str(SCRIPT), "--device", "cpu", "--repeats", "1", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_small_shape_on_a_cpu() -> None:
    result = json.loads(_run("--shape", "small", "--json"))
    rows = result["rows"]
    assert {(row["precision"], row["batch"]) for row in rows} == {
        (precision, batch) for precision in ("bf16", "fp8 head", "fp8") for batch in (1, 8, 32)
    }
    bandwidth = result["provenance"]["copy_gb_a_second"] * 1e9
    head, projections, norms = V * I, 4 * I * H, 2 * 4 * I
    for row in rows:
        weights = 2 * head + 2 * projections + norms + row["batch"] * 2 * I
        if row["precision"] != "bf16":
            weights -= head - 8  # a scale and a one
        if row["precision"] == "fp8":
            weights -= projections - 8
        assert row["bytes_read"] == N * weights
        assert row["floor_ms"] == pytest.approx(1e3 * row["bytes_read"] / bandwidth, rel=0.02)
        assert row["ratio"] == pytest.approx(row["ms"] / row["floor_ms"], rel=1e-3)
        assert row["ms_a_token"] == pytest.approx(row["ms"] / N, rel=1e-3)
        assert row["met"] is None and row["target"] is None  # the target is a GPU's
    assert result["provenance"]["device"]
