"""Test the replay of commits: every form of an edit, what quoting gains, and the folder for the other benchmarks."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from trace_files import calls, known

pytest.importorskip("transformers")

import edits  # isort: skip

VIEWS, FORMS = ("numbered", "plain", "result"), ("diff", "json", "patch", "tags", "whole")
MODEL = Path(__file__).parents[2] / "demo" / "model"


def test_a_folder_with_nothing_to_replay_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--repo", str(tmp_path), "--tokenizer", str(MODEL)]
    assert edits.main(asked) == 2
    assert re.search(f"error: --repo {tmp_path}: git log fails: .*not a git repository", capsys.readouterr().err)
    for words in (("init", "-q"), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-qm", "x")):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    assert edits.main(asked) == 2
    assert f"error: --repo {tmp_path}: no commit changes a file of .py" in capsys.readouterr().err


def test_commits_become_calls_in_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def git(*words: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *author, *words], check=True, capture_output=True)

    git("init", "-q")
    lines = [f'def crisp_{n}(firm_crown):\n    """Return {n}."""\n    return "{n}"\n' for n in range(12)]
    for changed in range(3):
        lines[changed] = lines[changed].replace("firm_crown", "clear_badge")
        (tmp_path / "a.py").write_text("".join(lines))
        git("add", "a.py")
        git("commit", "-q", "-m", f"Rename in crisp_{changed}")
    out = tmp_path / "traces"
    asked = ["--repo", str(tmp_path), "--tokenizer", str(MODEL), "--traces", str(out), "--others", "1"]
    assert edits.main([*asked, "--json"]) == 0
    rows = {(row["workload"], row["price"], row["quotes"]): row for row in json.loads(capsys.readouterr().out)}
    workloads = [f"{view}_{form}" for view in VIEWS for form in FORMS]
    assert len(rows) == 4 * len(workloads) and {row["tokens"] > 0 for row in rows.values()} == {True}
    for name in (
        "plain_json",
        "plain_diff",
        "plain_patch",
        "numbered_tags",
        "numbered_whole",
        "result_tags",
        "result_whole",
    ):
        assert rows[name, 0.01, True]["steps"] < rows[name, 0.01, False]["steps"], name
    assert known(out) == workloads
    for name in known(out):
        written = list(calls(out, name))
        assert len(written) == 2 and sum(len(call.response) for call in written) == rows[name, 0.01, True]["tokens"]
    assert edits.main(asked) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
