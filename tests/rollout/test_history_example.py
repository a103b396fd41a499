"""Test that examples/rl/history.py does not train kept runs again. The training itself is TRL's."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib.pyplot")  # it may run fc-list the first time, which the test must not replace

SCRIPT = Path(__file__).parents[2] / "examples" / "rl" / "history.py"
LINE = {"rollout_seconds": 2.0, "tokens": 60, "drafted": 40, "accepted": 20}


def test_a_run_that_is_there_is_drawn_and_what_is_missing_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[str] = []

    def train(command: list[str], **_: Any) -> None:
        figures = Path(command[command.index("--figures") + 1])
        if figures.stem == "siblings" and trained.count("siblings") == 0:
            trained.append(figures.stem)
            raise subprocess.CalledProcessError(1, command)
        trained.append(figures.stem)
        figures.write_text(json.dumps(LINE) + "\n")

    monkeypatch.setattr(subprocess, "run", train)
    monkeypatch.setattr(sys, "argv", ["history.py", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "a.svg")])
    with pytest.raises(subprocess.CalledProcessError):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert trained == ["plain", "off", "siblings", "siblings", "epochs"]
    assert (tmp_path / "a.svg").exists() and "tokens_per_step 1.50" in capsys.readouterr().out
