"""What ``agentspec rollout`` prints, with an engine that answers at once."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agentspec.cli import rollout
from agentspec.cli.app import main
from agentspec.rollout import OfflineEngine
from tests.rollout.test_generator import LLM, Engine


@pytest.mark.parametrize(("seconds", "lines"), [(3600.0, 2), (0.0, 6)])
def test_progress_in_a_log_is_lines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: float,
    lines: int,
) -> None:
    """A bar is drawn in a terminal only: under nohup it came when the rollout was over."""
    problems, out = tmp_path / "problems.jsonl", tmp_path / "out.jsonl"
    problems.write_text("".join(json.dumps({"id": name, "prompt": "one two"}) + "\n" for name in "ab"))

    def start(*_: Any, **__: Any) -> OfflineEngine:
        return OfflineEngine(LLM(Engine(batch=2)))

    monkeypatch.setattr(OfflineEngine, "start", start)
    monkeypatch.setattr(rollout, "_LOG_SECONDS", seconds)
    monkeypatch.setenv("AGENTSPEC", "0")
    command = [
        "rollout",
        str(problems),
        "--model",
        "m",
        "--out",
        str(out),
        "--samples",
        "2",
        "--epochs",
        "2",
        "--plain",
    ]
    monkeypatch.setattr(sys, "argv", ["agentspec", *command])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr().err.splitlines()
    assert end.value.code in (None, 0)
    assert [line.partition(" accepted")[2] for line in printed][-1] == ", 8 of 8 samples"
    assert len(printed) == lines
