"""Test the count of steps with named groups, groups found by prompts, and none."""

import json
from pathlib import Path

import numpy as np
import pytest

import groups  # isort: skip


def test_samples_draft_from_those_that_were_finished() -> None:
    answer = np.arange(100, 160, dtype=np.int32)
    problem = [{"group": "p", "prompt": np.array([1, 2, 3], np.int32), "response": answer} for _ in range(4)]
    alone = groups.count([problem[:1]], 2, lambda record: record["group"])
    assert alone == len(answer), "nothing repeats in a sample, so each token takes a step"
    both = groups.count([problem], 2, lambda record: record["group"])
    assert 2 * alone < both < 3 * alone, "of two equal samples at once neither leads; the next two repeat them"


def test_found_groups_are_compared_with_named_ones(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert groups.main(["--traces", str(traces), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["figure"] for row in rows] == [
        *("steps, named groups", "steps, found groups", "steps, no groups", "found over named")
    ]
    assert rows[3]["value"] == round(rows[1]["value"] / rows[0]["value"], 4)
