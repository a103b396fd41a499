"""Test the replay of sessions in steps of a given length, with and without the thread that indexes."""

import json
from pathlib import Path

import numpy as np
import pytest

import indexing  # isort: skip
import trace_files  # isort: skip


def test_a_thread_makes_a_long_prompt_known_sooner() -> None:
    prompt = np.random.default_rng(2).integers(0, 50_000, 60_000, np.int32)
    response = np.concatenate([prompt[start : start + 40] for start in range(59_000, 39_000, -1000)])
    session = [{"session": "s", "prompt": prompt, "response": response}]
    alone, with_thread = (indexing.replay([session], 1, 0.005, thread=thread) for thread in (False, True))
    assert alone.tokens == with_thread.tokens == len(response)
    assert with_thread.row_steps < alone.row_steps


def test_all_turns_are_replayed(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--traces", str(traces), "--workload", "chat_mtbench", "--batch", "2", "--step", "0.1", "--json"]
    assert indexing.main(arguments) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 8 and all(row["value"] > 0 for row in rows)


def test_a_call_without_a_response_counts_as_none(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--traces", str(traces), "--workload", "chat_mtbench", "--batch", "1", "--step", "0.1", "--json"]

    def figures() -> dict[str, float]:
        assert indexing.main(arguments) == 0
        return {row["figure"]: row["value"] for row in json.loads(capsys.readouterr().out)}

    name, before = "batch 1, steps alone, tokens a step", figures()
    said = (traces / "load.py").read_text()
    silent = 'yield {"session": "silent", "prompt": [1, 2], "response": []}'
    (traces / "load.py").write_text(said.replace("    for line", f"    {silent}\n    for line"))
    trace_files._module.cache_clear()
    assert figures()[name] == before[name]


def test_the_turns_of_sessions_that_take_turns_in_the_file_stay_in_order(
    traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = traces / "load.py"
    loader.write_text(loader.read_text().replace('"session": line', '"session": line % 2'))
    found: list[list[int]] = []

    def replay(sessions: list[list[indexing.Record]], *_: object, **__: object) -> indexing.Replay:
        found.extend([int(turn["prompt"][0]) for turn in turns] for turns in sessions)
        return indexing.Replay(1, 1, [1.0])

    monkeypatch.setattr(indexing, "replay", replay)
    assert indexing.main(["--traces", str(traces), "--workload", "chat_mtbench", "--batch", "1"]) == 0
    assert found[:2] == [[0, 20], [10]]


def test_a_step_takes_some_time(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        indexing.main(["--traces", str(traces), "--workload", "chat_mtbench", "--step", "-1"])
    assert "--step: must be a number above 0" in capsys.readouterr().err
