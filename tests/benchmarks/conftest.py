"""Let the benchmark scripts import each other by name, as scripts do, and give them a folder of traces."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

_LOADER = """
import numpy as np

def tokens(name):
    for line in range(3):
        prompt = np.arange(10 * line, 10 * line + 8, dtype=np.int32)
        response = np.array([7, 8, 9, 7, 8, 9, 7, 8, 2], np.int32)
        yield {"session": line, "turn": 0, "group": 5, "prompt": prompt, "response": response}
"""


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Return a folder with all workloads, each of three calls of 9 tokens."""
    import trace_files

    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "load.py").write_text(_LOADER)
    for name in trace_files.WORKLOADS:
        (folder / f"{name}.tok.npz").touch()
    return folder
