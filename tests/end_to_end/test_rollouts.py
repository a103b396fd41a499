"""Test `agentspec rollout` on real vLLM: epochs draft from earlier ones, and a killed run can be continued."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentspec.testing.server import CPU_ENVIRONMENT
from demo.tasks import make_task
from tests.end_to_end.conftest import ENVIRONMENT, MODEL, other_weights

pytestmark = pytest.mark.engine

PROBLEMS, SAMPLES = 3, 4
REWARD = "def score(problem, sample):\n    return float('def' in sample.text) + problem.fields['bonus']\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    messages = [[{"role": "user", "content": make_task(1_000_100 + i).request}] for i in range(PROBLEMS)]
    rows = [{"id": f"p{i}", "messages": m, "bonus": i} for i, m in enumerate(messages)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARD)
    return tmp_path


def start(folder: Path, out: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "agentspec", "rollout", "problems.jsonl", "--model", str(MODEL), "--out", out]
    command += ["--store", f"sqlite:///{folder / 'rollouts.db'}", "--samples", str(SAMPLES), "--max-tokens", "100"]
    # A measured cost would make the counts depend on the machine.
    command += ["--max-model-len", "512", "--max-num-seqs", "4", "--verify-cost", "0.02"]
    command += ["--dtype", "float32", "--enforce-eager", "--temperature", "0.6", "--reward", "rewards:score", *options]
    environment = {**os.environ, **CPU_ENVIRONMENT, **ENVIRONMENT, "COLUMNS": "120"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(run: subprocess.Popen[str]) -> list[list[str]]:
    """Wait for a run. Return the rows of the table that it printed."""
    out, errors = run.communicate(timeout=600)
    assert run.returncode == 0, errors[-3000:]
    return [re.split(r"\s{2,}", line.strip()) for line in out.splitlines() if line.strip()[:1].isdigit()]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.store
def test_later_epochs_and_later_runs_draft_from_earlier_ones(folder: Path) -> None:
    first = finish(start(folder, "first.jsonl", "--epochs", "2", "--format", "verl"))
    assert float(first[1][4]) > float(first[0][4]) * 1.2, "the second epoch should draft from the first"
    again = finish(start(folder, "again.jsonl", "--epochs", "1"))
    assert float(again[0][4]) > float(first[0][4]) * 1.2, "a new process should draft from the store"
    samples = lines(folder / "first.jsonl")
    assert {(one["id"], one["epoch"], one["sample"]) for one in samples} == {
        (f"p{i}", epoch, sample) for i in range(PROBLEMS) for epoch in range(2) for sample in range(SAMPLES)
    }
    for one in samples:
        assert len(one["logprobs"]) == len(one["completion_ids"])
        assert one["steps"] >= 2 and len(one["completion_ids"]) <= one["steps"] + one["accepted"]
        assert all(logprob <= 0 for logprob in one["logprobs"])
        assert one["reward"] in (int(one["id"][1]), int(one["id"][1]) + 1)
    plain = finish(start(folder, "plain.jsonl", "--plain"))
    assert plain[0][2] == plain[0][3] and {one["steps"] > 1 for one in lines(folder / "plain.jsonl")} == {True}
    repeated = {tuple(one["completion_ids"]) for one in samples} & {
        tuple(one["completion_ids"]) for one in lines(folder / "again.jsonl")
    }
    assert len(repeated) < PROBLEMS * SAMPLES, "two runs must not draw the same random numbers"
    assert len((folder / "first.verl" / "1.jsonl").read_text().splitlines()) == PROBLEMS * SAMPLES


@pytest.mark.store
def test_an_epochs_samples_are_of_its_weights(folder: Path) -> None:
    """Otherwise vLLM's prefix cache would reuse what earlier weights computed of the prompts."""
    other_weights(folder / "new")
    (folder / "hooks.py").write_text(
        "def load(llm, folder):\n"
        "    llm.collective_rpc('reload_weights', kwargs={'weights_path': folder})\n"
        "    return folder\n"
        f"def trained(llm, epoch):\n    return load(llm, 'new' if epoch else {str(MODEL)!r})\n"
        "def new(llm, epoch):\n    return load(llm, 'new')\n"
    )
    problems = [json.loads(line) for line in (folder / "problems.jsonl").read_text().splitlines()]
    for problem in problems:
        problem["messages"][0]["content"] *= 6  # more than a block of the KV cache
    (folder / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    greedy = ["--temperature", "0", "--samples", "1"]
    finish(start(folder, "trained.jsonl", *greedy, "--epochs", "2", "--update-weights", "hooks:trained"))
    finish(start(folder, "new.jsonl", *greedy, "--update-weights", "hooks:new"))
    trained, new = lines(folder / "trained.jsonl"), lines(folder / "new.jsonl")
    first, second = ([one for one in trained if one["epoch"] == epoch] for epoch in range(2))
    assert {one["weight_version"] for one in second} == {"new"}

    def said(samples: list[dict[str, Any]]) -> dict[str, list[int]]:
        return {one["id"]: one["completion_ids"] for one in samples}

    assert said(second) == said(new) != said(first)
    for one, other in zip(sorted(second, key=by_id), sorted(new, key=by_id), strict=True):
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-3)


def by_id(sample: dict[str, Any]) -> str:
    return str(sample["id"])


@pytest.mark.rl
@pytest.mark.timeout(1500)
def test_a_rollout_killed_three_times_writes_each_sample_once(folder: Path) -> None:
    out, kills, epochs = folder / "rollouts.jsonl", random.Random(11), 4  # an epoch may end before the kill
    wanted_samples = epochs * PROBLEMS * SAMPLES
    written: list[dict[str, Any]] = []
    for _ in range(3):
        run = start(folder, out.name, "--epochs", str(epochs))
        wanted = len(written) + kills.randint(1, 8)
        while run.poll() is None and (not out.exists() or len(lines(out)) < wanted):
            time.sleep(0.01)
        os.killpg(run.pid, signal.SIGKILL)  # kill vLLM's own processes too, as when a machine goes down
        run.communicate()
        now = lines(out)
        assert now[: len(written)] == written, "what was written stays"
        written = now
    assert len(written) < wanted_samples, "it must have been killed before its end"
    finish(start(folder, out.name, "--epochs", str(epochs)))
    samples = lines(out)
    keys = [(one["id"], one["epoch"], one["sample"]) for one in samples]
    assert samples[: len(written)] == written
    assert len(keys) == len(set(keys)) == wanted_samples


def engine_core(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (core,) = (pid for pid in children if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return int(core)


@pytest.mark.rl
def test_a_rollout_that_is_told_to_end_leaves_no_engine_behind(folder: Path) -> None:
    """A cluster's scheduler, for example, signals only the command."""
    out, run = folder / "rollouts.jsonl", start(folder, "rollouts.jsonl", "--epochs", "50")
    while run.poll() is None and (not out.exists() or not lines(out)):
        time.sleep(0.01)
    core = engine_core(run.pid)
    run.terminate()
    _, errors = run.communicate(timeout=300)  # this waits for all processes that hold its pipes
    assert run.returncode == 130 and "Traceback" not in errors
    assert not Path(f"/proc/{core}").exists()
    assert out.read_text().endswith("\n")


@pytest.mark.rl
def test_a_rollout_whose_engine_is_killed_ends(folder: Path) -> None:
    """The kernel may kill it if memory is short. vLLM's client would wait for the next output for ever."""
    out, run = folder / "rollouts.jsonl", start(folder, "rollouts.jsonl", "--epochs", "50")
    while run.poll() is None and (not out.exists() or not lines(out)):
        time.sleep(0.01)
    os.kill(engine_core(run.pid), signal.SIGKILL)
    _, errors = run.communicate(timeout=600)
    assert run.returncode == 2 and "the engine's process died" in errors and "Traceback" not in errors


@pytest.mark.rl
def test_a_rollout_whose_engine_is_killed_while_weights_are_loaded_ends(folder: Path) -> None:
    (folder / "hooks.py").write_text(
        "def killed(llm, epoch):\n    llm.llm_engine.engine_core.resources.engine_manager.processes[0].kill()\n"
    )
    run = start(folder, "rollouts.jsonl", "--update-weights", "hooks:killed")
    _, errors = run.communicate(timeout=600)
    assert run.returncode == 2 and "the engine's process died" in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--reward", "nowhere:score"], "--reward nowhere:score: No module"),
        (["--reward", "json"], "give it as module:function"),
        (["--samples", "0"], "Invalid value for '--samples'"),
        (["--engine", "{"], "--engine is not JSON"),
        (["--store", "ftp://x"], "unknown kind of store"),
    ],
)
def test_a_wrong_option_is_named_before_vllm_starts(folder: Path, options: list[str], message: str) -> None:
    run = start(folder, "rollouts.jsonl", *options)
    _, errors = run.communicate(timeout=600)
    assert run.returncode == 2 and message in errors
