"""Test what ``agentspec rollout`` prints, with an engine that answers at once."""

import io
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from agentspec.cli import rollout
from agentspec.cli.app import main
from agentspec.problems import Problem
from agentspec.rollout import OfflineEngine
from agentspec.rollout.plan import EpochFigures
from agentspec.rollout.samples import Sample
from agentspec.server_ext.vllm_adapter import offline
from tests.rollout.stand_in_engine import LLM, Engine

Refusal = Callable[..., str]


@pytest.fixture(autouse=True)
def own_store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests from writing into the user's data folder, and from leaving their --store to the next."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
    monkeypatch.setenv("AGENTSPEC_STORE", "")


@pytest.mark.parametrize(("seconds", "lines"), [(3600.0, 2), (0.0, 7)])
def test_progress_in_a_log_is_lines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: float,
    lines: int,
) -> None:
    """A bar is drawn in a terminal only. In a log it would come when the rollout is over."""
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
    assert ("2 of 2 prompts tokenised" in printed) == (seconds == 0.0)


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_of_a_large_rollout_is_whole(width: int) -> None:
    """At 80 columns, the header of tokens a step must not be cut."""
    figures = EpochFigures(11, 524_288, 300_000, 224_288, 107_374_182, 31_457_280, 99_999_999, 55_000_000, 12_345.6)
    figures.rewarded, figures.reward_sum, figures.reward_errors = 524_000, 262_000.0, 288
    table = rollout._table()
    rollout._add_row(table, figures)
    shown = io.StringIO()
    Console(file=shown, width=width).print(table)
    words = set(shown.getvalue().replace("│", " ").replace("┃", " ").split())
    assert {"epoch", "samples", "a", "step", "accepted", "tokens/s", "reward"} <= words
    assert {"524288", "(300000", "107,374,182", "31,457,280", "3.41", "0.55", "8,697", "0.500", "failed)"} <= words


def test_the_table_is_whole_where_another_program_reads_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problems: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    command(monkeypatch, str(problems), "--out", str(problems.parent / "out.jsonl"), "--reward", "builtins:max")
    command(monkeypatch, str(problems), "--out", str(problems.parent / "out.jsonl"), "--reward", "builtins:max")
    printed = capsys.readouterr().out
    assert "8 (8 before)" in printed and "- (8 failed)" in printed


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """Run ``agentspec rollout``. Return the options that its engine was made with."""
    made: dict[str, Any] = {}

    def start(model: str, **options: Any) -> OfflineEngine:
        made.update(options)
        engine = OfflineEngine(LLM(Engine()))
        engine.model = model
        return engine

    monkeypatch.setattr(OfflineEngine, "start", start)
    monkeypatch.setenv("AGENTSPEC", "0")
    monkeypatch.setattr(sys, "argv", ["agentspec", "rollout", "--model", "m", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return made if end.value.code in (None, 0) else {}


def test_the_documentations_script_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problems: Path
) -> None:
    """On CPUs, vLLM's engine process imports the script. If that started another engine, none would come up."""
    page = (Path(__file__).parents[2] / "docs" / "rl.md").read_text(encoding="utf-8")
    _, script = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    started = []

    def start(model: str, **_: Any) -> OfflineEngine:
        started.append(model)
        return OfflineEngine(LLM(Engine()))

    monkeypatch.setattr(OfflineEngine, "start", start)
    monkeypatch.chdir(problems.parent)
    exec(script, {"__name__": "__mp_main__"})
    assert not started
    exec(script, {"__name__": "__main__"})
    assert started == ["MODEL"] and capsys.readouterr().out == "2.0 0.25\n" * 3


def test_the_documentations_reward_scores_a_sample() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rl.md").read_text(encoding="utf-8")
    reward, _ = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names = dict[str, Any]()
    exec(reward, names)
    problem = Problem("a", "2 + 2?", {"answer": "4"})
    scores = [names["score"](problem, Sample("a", 0, 0, [1], [2], [0.0], text)) for text in ("It is 4.", "It is 5.")]
    assert scores == [1.0, 0.0]


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"id": "a", "epoch": 3, "prompt": "one two"}')  # it begins like a sample
    return path


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problems: Path) -> Refusal:
    """Run a rollout with options that are refused. Return what it says, and write nothing."""

    def run(*option: str) -> str:
        out = problems.parent / "out.jsonl"
        assert not command(monkeypatch, str(problems), "--out", str(out), *option)
        assert not out.exists()
        return capsys.readouterr().err

    return run


def test_the_problems_are_never_written_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problems: Path
) -> None:
    text = problems.read_text()
    (problems.parent / "link").symlink_to(problems)
    for out in (problems, problems.parent / "link"):
        assert not command(monkeypatch, str(problems), "--out", str(out))
        assert "holds the problems; give another file" in capsys.readouterr().err
    assert problems.read_text() == text


def test_an_interrupted_rollout_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problems: Path
) -> None:
    """vLLM's processes print much as they end, and nothing about the samples."""
    (problems.parent / "weights_of_two.py").write_text(
        "def load(llm, epoch):\n    if epoch == 2:\n        raise KeyboardInterrupt\n"
    )
    monkeypatch.chdir(problems.parent)
    out = problems.parent / "out.jsonl"
    options = ("--samples", "3", "--epochs", "4", "--update-weights", "weights_of_two:load")
    assert not command(monkeypatch, str(problems), "--out", str(out), *options)
    assert f"interrupted: 6 samples are in {out}; run the command again to go on" in capsys.readouterr().err


def test_the_seed_of_an_engine_repeats_no_samples_of_an_earlier_run(
    monkeypatch: pytest.MonkeyPatch, problems: Path
) -> None:
    """The engine's random numbers begin anew with each run."""
    base = [str(problems), "--out", str(problems.parent / "out.jsonl"), "--engine", '{"seed": 5}', "--samples"]
    first, second, third = (command(monkeypatch, *base, samples)["seed"] for samples in ("1", "2", "3"))
    assert first == 5 and len({first, second, third}) == 3


def test_an_interrupted_rollout_names_the_file_to_which_its_samples_went(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problems: Path
) -> None:
    (problems.parent / "weights_that_move.py").write_text(
        "import os\n\ndef load(llm, epoch):\n    if epoch == 1:\n        os.replace('out.jsonl', 'moved.jsonl')\n"
        "        open('out.jsonl', 'w').close()\n    if epoch == 2:\n        raise KeyboardInterrupt\n"
    )
    monkeypatch.chdir(problems.parent)
    options = ("--samples", "3", "--epochs", "4", "--update-weights", "weights_that_move:load")
    assert not command(monkeypatch, str(problems), "--out", "out.jsonl", *options)
    found = problems.parent / "out.1.jsonl"
    assert f"6 samples are in {found}; run the command again with --out {found} to go on" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["out.jsonl", "./out.jsonl", "link.jsonl"])
def test_samples_and_the_record_of_steps_are_not_written_into_one_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problems: Path, given: str
) -> None:
    monkeypatch.chdir(problems.parent)
    Path("link.jsonl").symlink_to("out.jsonl")
    monkeypatch.setenv("AGENTSPEC_RECORD", given)
    assert not command(monkeypatch, str(problems), "--out", "out.jsonl")
    assert "--out out.jsonl: the setting record (AGENTSPEC_RECORD) names it, too" in capsys.readouterr().err


def test_a_file_that_cannot_hold_samples_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], problems: Path
) -> None:
    """The error names its option, before the engine starts."""
    for out, said in (
        (problems / "out.jsonl", f"cannot be written ({problems}: File exists)"),
        (problems.parent, "cannot be written (Is a directory)"),
        (problems.parent / "out.parquet", "samples are written as JSON lines; name it .jsonl"),
        (problems.parent / "out.jsonl.gz", "samples are written as JSON lines; name it .jsonl"),
        (Path("/dev/stdout"), "what vLLM logs is written there, too"),  # capfd's file, as behind > in a shell
    ):
        assert not command(monkeypatch, str(problems), "--out", str(out))
        assert f"--out {out}: {said}" in capfd.readouterr().err
    assert [path.name for path in problems.parent.iterdir()] == ["problems.jsonl"]
    assert command(monkeypatch, str(problems), "--out", os.devnull)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--temperature", "1e9"), "vLLM refuses how to sample: temperature must be in [0, 2]"),
        (("--max-tokens", "99999999999999999999"), "max_tokens: at most 2,147,483,647 expected"),
        (("--reward-timeout", "nan", "--reward", "builtins:max"), "--reward-timeout nan: seconds above 0 expected"),
        (("--reward-timeout", "5"), "--reward-timeout has no effect without --reward"),
        (("--reward", "rewards.py:score"), "leave .py out: rewards:score"),
        (("--reward", "no_such:score"), "No module named 'no_such'; modules are looked for in the working directory"),
        (("--reward", "builtins:int.no_such"), "--reward builtins:int.no_such: type object 'int' has no attribute"),
        *(((name, "0"), f"Invalid value for '{name}'") for name in ("--ray", "--samples", "--epochs", "--max-tokens")),
    ],
)
def test_a_number_that_cannot_work_is_named_before_vllms_start(
    refusal: Refusal, option: tuple[str, ...], said: str
) -> None:
    """Otherwise it would be a traceback, minutes later."""
    assert said in refusal(*option)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--store", "foo"), "unknown kind of store"),
        (("--store", "foo", "--ray", "1"), "unknown kind of store"),
        (("--store", "sqlite:////dev/null/turns.db"), "/dev/null"),
        (("--engine", '{"additional_config": {"agentspec": {"store": "foo"}}}'), "unknown kind of store"),
        (("--engine", '{"additional_config": {"agentspec": {"speculator": "./none"}}}'), "./none"),
        (("--engine", '{"additional_config": {"AgentSpec": {}}}'), "spell it 'agentspec'"),
    ],
)
def test_a_store_or_file_that_cannot_be_used_is_named_before_vllms_start(
    monkeypatch: pytest.MonkeyPatch, refusal: Refusal, option: tuple[str, ...], said: str
) -> None:
    """Importing vLLM takes long, so the check must come before."""
    monkeypatch.setattr(offline, "sampling_params", lambda _: pytest.fail("vLLM was imported"))
    assert said in refusal(*option)


def test_files_of_other_machines_are_not_looked_for_on_this_one() -> None:
    rollout._check_settings(
        {"agentspec": {"store": "sqlite:////dev/null/turns.db", "speculator": "./none"}}, here=False
    )


@pytest.mark.parametrize("option", [("--temperature", ".5"), ("--model", "other")])
def test_another_distribution_is_refused_before_vllms_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problems: Path, option: tuple[str, str]
) -> None:
    base = [str(problems), "--out", str(problems.parent / "out.jsonl"), "--samples", "1"]
    assert command(monkeypatch, *base)
    assert not command(monkeypatch, *base[:-1], "2", *option)
    printed = capsys.readouterr().err
    assert "write to another file" in printed and option[0][2:] in printed
    assert command(monkeypatch, *base[:-1], "2", "--max-draft", "4", "--max-num-seqs", "2")


def test_engine_options_go_together_with_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problems: Path
) -> None:
    window = {"additional_config": {"agentspec": {"history_window": "2 weights"}, "platform": 1}}
    native = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}, "seed": 5}
    base = [str(problems), "--out", str(problems.parent / "out.jsonl"), "--verify-cost", ".02", "--max-draft", "4"]
    made = command(monkeypatch, *base, "--engine", json.dumps(window))
    assert made["additional_config"] == {
        "agentspec": {"verify_cost": 0.02, "history_window": "2 weights", "max_draft": 4},
        "platform": 1,
    }
    made = command(monkeypatch, *base, "--engine", json.dumps(native))
    assert made["speculative_config"] == native["speculative_config"]
    assert made["additional_config"] == {"agentspec": {"verify_cost": 0.02, "max_draft": 4}}
    limit = '{"additional_config": {"agentspec": {"max_draft": 8}}}'
    assert command(monkeypatch, *base[:3], "--engine", limit)["additional_config"]["agentspec"]["max_draft"] == 8
    assert command(monkeypatch, *base, "--engine", limit)["additional_config"]["agentspec"]["max_draft"] == 4
    assert not command(monkeypatch, *base, "--engine", '{"model": "x"}')
    assert "--model" in capsys.readouterr().err
    assert not command(monkeypatch, *base, "--engine", '{"additional_config": 3}')
    assert "--engine: additional_config must be a JSON object, got int" in capsys.readouterr().err


def test_a_plain_rollout_checks_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problems: Path
) -> None:
    """A plain rollout is the same command with --plain added, so the other options are checked, too."""
    base = [str(problems), "--out", str(problems.parent / "out.jsonl"), "--plain"]
    for wrong, said in (
        (("--max-draft", "-4"), "got -4"),
        (("--verify-cost", "7"), "verify_cost"),
        (("--engine", '{"additional_config": {"agentspec": {"store": "foo"}}}'), "unknown kind of store"),
        (("--engine", '{"additional_config": {"agentspec": {"history_windwo": "2 weights"}}}'), "history_windwo"),
    ):
        assert not command(monkeypatch, *base, *wrong)
        assert said in capsys.readouterr().err
    engine = {
        "additional_config": {"agentspec": {"history_window": "2 weights"}, "platform": 1},
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    }
    made = command(monkeypatch, *base, "--engine", json.dumps(engine), "--max-draft", "4")
    assert made["additional_config"] == {"platform": 1}  # agentspec's section makes an engine draft with it
    assert made["speculative_config"] == engine["speculative_config"]
    made = command(monkeypatch, *base)
    assert not made.keys() & {"additional_config", "speculative_config"}


@pytest.mark.parametrize("width", [24, 40, 80, 200])
def test_progress_in_a_narrow_terminal_has_the_count(width: int) -> None:
    bars = Progress(*rollout._COLUMNS, console=Console(file=io.StringIO(), width=width, force_terminal=True))
    bars.add_task("epoch 11: 12,345 tokens/s, 55% of drafts accepted", total=524_288, completed=300_000)
    shown = io.StringIO()
    Console(file=shown, width=width).print(bars.get_renderable())
    (line,) = shown.getvalue().splitlines()
    assert "300000/524288 epoch 11" in line


def test_an_option_wins_over_the_same_value_among_engine_options(
    monkeypatch: pytest.MonkeyPatch, problems: Path
) -> None:
    """The same holds for `agentspec serve`, whose options win over --additional-config."""
    base = [str(problems), "--out", str(problems.parent / "out.jsonl"), "--engine"]
    given = {"dtype": "float16", "max_model_len": 8, "max_num_seqs": 2, "enforce_eager": False}
    engine = json.dumps({**given, "additional_config": {"agentspec": {"verify_cost": 0.5}}})
    made = command(monkeypatch, *base, engine)
    assert {name: made[name] for name in given} == given
    assert made["additional_config"] == {"agentspec": {"verify_cost": 0.5}}
    options = {"--dtype": "float32", "--max-model-len": "16", "--max-num-seqs": "4", "--verify-cost": ".02"}
    made = command(monkeypatch, *base, engine, "--enforce-eager", *(word for pair in options.items() for word in pair))
    assert {name: made[name] for name in given} == {
        "dtype": "float32",
        "max_model_len": 16,
        "max_num_seqs": 4,
        "enforce_eager": True,
    }
    assert made["additional_config"] == {"agentspec": {"verify_cost": 0.02}}


def test_epochs_in_a_trainers_format_hold_this_runs_samples(monkeypatch: pytest.MonkeyPatch, problems: Path) -> None:
    folder = problems.parent
    problems.write_text("".join(json.dumps({"id": name, "prompt": "one two"}) + "\n" for name in "ab"))
    base = [str(problems), "--format", "verl", "--out"]
    command(monkeypatch, *base, str(folder / "run.1"), "--samples", "3")
    problems.write_text(json.dumps({"id": "a", "prompt": "one two"}))
    command(monkeypatch, *base, str(folder / "run.1"), "--samples", "2")
    assert len((folder / "run.1.verl" / "0.jsonl").read_text().splitlines()) == 2
    assert len((folder / "run.1").read_text().splitlines()) == 6


def test_a_format_that_cannot_be_written_is_said_before_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problems: Path
) -> None:
    (problems.parent / "out.verl").write_text("a note")
    out = str(problems.parent / "out.jsonl")
    assert not command(monkeypatch, str(problems), "--format", "verl", "--out", out)
    assert "which is a file; move it away" in capsys.readouterr().err
    monkeypatch.setattr("os.access", lambda path, mode: path != problems.parent)
    assert not command(monkeypatch, str(problems), "--format", "verl", "--out", str(problems.parent / "other.jsonl"))
    assert f"{problems.parent} cannot be written; give another --out" in capsys.readouterr().err
