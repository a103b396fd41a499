"""Test the count of what a rule for the last rows of a batch would gain."""

import json
from pathlib import Path

import pytest

import stragglers  # isort: skip


def test_a_rule_is_compared_in_each_epoch(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loader = traces / "load.py"
    loader.write_text(loader.read_text().replace("range(3)", "range(16)"))
    asked = ["--traces", str(traces), "--batch", "8", "--sharp", "1", "--json"]
    assert stragglers.main(asked) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len(stragglers.FIXED) * 2 * stragglers.EPOCHS and all(row["value"] > 0 for row in rows)


def test_a_recording_with_too_few_samples_is_named(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stragglers.main(["--traces", str(traces)]) == 2
    assert "error: --workload rollouts_codegen: no problem has 16 samples" in capsys.readouterr().err
