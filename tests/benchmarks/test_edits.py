"""The replay of commits: every form of an edit, what quoting brings, and the folder for the other benchmarks."""

import json
import subprocess
from pathlib import Path

import pytest
from trace_files import calls, known

pytest.importorskip("transformers")

import edits  # isort: skip

MODEL = Path(__file__).parents[2] / "demo" / "model"


def test_commits_become_calls_in_three_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    asked = ["--repo", str(tmp_path), "--tokenizer", str(MODEL), "--traces", str(out)]
    assert edits.main([*asked, "--json"]) == 0
    rows = {(row["workload"], row["price"], row["quotes"]): row for row in json.loads(capsys.readouterr().out)}
    assert len(rows) == 12 and {row["tokens"] > 0 for row in rows.values()} == {True}
    assert rows["edit_json", 0.01, True]["steps"] < rows["edit_json", 0.01, False]["steps"]
    assert known(out) == ["edit_diff", "edit_json", "edit_whole"]
    for name in known(out):
        written = list(calls(out, name))
        assert len(written) == 2 and sum(len(call.response) for call in written) == rows[name, 0.01, True]["tokens"]
    assert edits.main(asked) == 0
    assert len(capsys.readouterr().out.splitlines()) == 12
