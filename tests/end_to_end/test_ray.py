"""Test `agentspec rollout --ray`: workers on one store draft from each other, and a killed run loses nothing."""

import importlib.util
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agentspec.rollout import RayEngine, rollout_options
from agentspec.server_ext.vllm_adapter.offline import Answer, Sampling
from agentspec.testing.redis_server import RedisServer
from agentspec.testing.server import CPU_ENVIRONMENT
from demo.tasks import make_task
from tests.end_to_end.conftest import ENVIRONMENT, MODEL
from tests.end_to_end.test_rollouts import PROBLEMS, SAMPLES, finish, folder, lines, start

__all__ = ["folder"]

pytestmark = [
    pytest.mark.engine,
    pytest.mark.rl,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'ray>=2.40'"),
]

ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 4, "seed": 1}

RAY = {"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}
"""Ray would lower its workers' priority, and kill them if other programs use much memory."""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RAY.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["sqlite", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return the URL of an empty store, which both workers use."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'rollouts.db'}"
    else:
        with RedisServer() as server:
            yield server.url


@pytest.fixture
def engine(store: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayEngine]:
    """Start two workers on one store."""
    import ray

    for name, value in {**CPU_ENVIRONMENT, **ENVIRONMENT, "AGENTSPEC_STORE": ""}.items():
        monkeypatch.setenv(name, value)
    drafting = rollout_options(store=store, verify_cost=0.02)
    started = RayEngine.start(str(MODEL), 2, **drafting, **ENGINE)
    yield started
    started.close()
    ray.shutdown()


def greedy(engine: RayEngine, name: str, prompt: list[int]) -> Answer:
    engine.add(name, prompt, Sampling(0.0, 1.0, 100), {"group_id": name})
    while not (answers := engine.step()):
        pass
    return answers[0]


def received(engine: RayEngine) -> list[int]:
    """Return how many of the other workers' turns each worker has read from the store."""
    import ray

    def of(worker: Any) -> int:
        (stats,) = worker._engine.llm.collective_rpc("agentspec_rpc", args=("stats",))
        read: int = stats["store"]["loader"]["delivered"] + stats["store"]["follower"]["delivered"]
        return read

    counts: list[int] = ray.get([member.actor.__ray_call__.remote(of) for member in engine._members])
    return counts


def test_a_worker_drafts_from_what_the_other_sampled(engine: RayEngine) -> None:
    prompts = [
        engine.tokenise([{"role": "user", "content": make_task(1_000_100 + number).request}]) for number in range(2)
    ]
    begin, apart = (greedy(engine, f"{number}", prompt) for number, prompt in enumerate(prompts))
    assert engine.given == [1, 1], "requests go to the worker that has had fewer"
    deadline = time.monotonic() + 180
    while min(received(engine)) < 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    crossed = [greedy(engine, f"again {number}", prompt) for number, prompt in enumerate(reversed(prompts))]
    assert engine.given == [2, 2]
    for first, again in zip((apart, begin), crossed, strict=True):
        assert again.tokens == first.tokens
        assert len(again.tokens) - again.accepted < (len(first.tokens) - first.accepted) / 2


def processes(name: str, parent: int) -> list[int]:
    """Return the ids of the processes below `parent` whose title is `name`."""
    parents: dict[int, int] = {}
    found = []
    for place in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            identifier = int(place.name)
            parents[identifier] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if (place / "cmdline").read_bytes().startswith(name.encode()):
                found.append(identifier)

    def is_below(identifier: int) -> bool:
        while identifier > 1 and identifier != parent:
            identifier = parents.get(identifier, 0)
        return identifier == parent

    return [identifier for identifier in found if is_below(identifier)]


def test_killed_workers_and_drivers_leave_each_sample_once(folder: Path) -> None:
    out = folder / "rollouts.jsonl"
    options = ("--epochs", "3", "--ray", "2")

    def until(run: Any, count: int, done: Callable[[], bool] = lambda: True) -> None:
        while run.poll() is None and (not out.exists() or len(lines(out)) < count or not done()):
            time.sleep(0.01)

    run = start(folder, out.name, *options)
    until(run, 2)
    workers = processes("ray::RayWorker", run.pid)
    assert len(workers) == 2, "two workers must be at work"
    os.kill(workers[0], signal.SIGKILL)
    until(run, 8)
    written = lines(out)
    assert 8 <= len(written) < 3 * PROBLEMS * SAMPLES, "it must go on without that worker, and be killed before its end"
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    written = lines(out)
    finish(start(folder, out.name, *options))
    samples = lines(out)
    keys = [(one["id"], one["epoch"], one["sample"]) for one in samples]
    assert samples[: len(written)] == written, "what was written stays"
    assert len(keys) == len(set(keys)) == 3 * PROBLEMS * SAMPLES
    assert sum(one["accepted"] for one in samples) > 0


def test_more_workers_than_there_is_room_for_are_refused(folder: Path) -> None:
    run = start(folder, "rollouts.jsonl", "--ray", "1000")
    _, errors = run.communicate(timeout=600)
    assert run.returncode == 2 and "workers: the Ray cluster has room for" in errors
