"""The driver's side of rollouts on Ray, with actors that answer at once; real ones are in end_to_end/test_ray.py."""

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from agentspec.errors import ConfigurationError, InvalidInputError, RolloutError
from agentspec.rollout import RayEngine
from agentspec.rollout.ray_engine import Request, Weights
from agentspec.server_ext.vllm_adapter.offline import Answer, Sampling

SAMPLING = Sampling(1.0, 1.0, 8)


class ActorError(Exception):
    """Ray's errors have one base, RayError, of which RayTaskError is one and the deaths of workers are others."""


class TaskError(ActorError):
    def __init__(self, cause: Exception) -> None:
        super().__init__("a traceback of many lines")
        self.cause = cause


class Worker:
    """Finishes one request a turn. fail: raised by the next turn."""

    def __init__(self, number: int, weights: Weights | None) -> None:
        self.number, self.weights = number, weights
        self.open: list[str] = []
        self.seen: list[str] = []
        self.fail: Exception | None = None
        self.aborted: list[str] = []

    def max_running(self) -> int:
        return 2

    def loaded(self) -> dict[str, Any]:
        return {"dtype": "float32"}

    def work(self, requests: Sequence[Request]) -> list[Answer]:
        self.open += [request[0] for request in requests]
        self.seen += [request[0] for request in requests]
        if self.fail is not None:
            raise self.fail
        return [Answer(self.open.pop(0), [1], [0.0], "one", "stop", 1, 0, 0)] if self.open else []

    def tokenise(self, prompt: str, tools: Any) -> list[int]:
        raise TaskError(InvalidInputError("does not fit"))

    def update_weights(self, update: Callable[[Any, int], str | None], epoch: int) -> str | None:
        return update(self.number, epoch)

    def begin_epoch(self) -> None:
        self.seen.append("epoch")

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


class Ray:
    """Runs a call when its result is asked for, or at once where nobody asks."""

    exceptions = SimpleNamespace(RayError=ActorError, RayTaskError=TaskError)

    def __init__(self) -> None:
        self.workers: list[Worker] = []

    def make(self, number: int, weights: Weights | None) -> Any:
        worker = Worker(number, weights)
        self.workers.append(worker)

        def method(name: str) -> Any:
            return SimpleNamespace(remote=lambda *given: Call(getattr(worker, name), given))

        asked = {name: method(name) for name in ("max_running", "loaded", "work", "tokenise", "update_weights")}
        told = {name: SimpleNamespace(remote=getattr(worker, name)) for name in ("begin_epoch", "abort")}
        return SimpleNamespace(**asked, **told)

    def get(self, call: "Call") -> Any:
        return call.function(*call.given)

    def wait(self, calls: list["Call"], num_returns: int) -> tuple[list["Call"], list["Call"]]:
        return calls[:num_returns], calls[num_returns:]


class Call:
    def __init__(self, function: Callable[..., Any], given: tuple[Any, ...]) -> None:
        self.function, self.given = function, given


@pytest.fixture
def ray() -> Ray:
    return Ray()


def engine_on(ray: Ray, workers: int = 2) -> RayEngine:
    return RayEngine(ray, ray.make, workers, "m")


def run(engine: RayEngine, wanted: int, most: int = 50) -> list[str]:
    names: list[str] = []
    while len(names) < wanted and most:
        names += [answer.request_id for answer in engine.step()]
        most -= 1
    return names


def test_a_group_stays_on_its_worker_until_that_has_more_than_its_share(ray: Ray) -> None:
    engine = engine_on(ray)
    assert engine.max_running == 4 and engine.loaded == {"dtype": "float32"}
    for number in range(4):
        engine.add(f"a{number}", [1], SAMPLING, {"group_id": "a"})
        if number == 0:
            engine.add("b0", [1], SAMPLING, {"group_id": "b"})
    assert sorted(run(engine, 5)) == ["a0", "a1", "a2", "a3", "b0"]
    assert ray.workers[0].seen == ["a0", "a1", "a2", "a3"] and ray.workers[1].seen == ["b0"]
    for number in range(8):
        engine.add(f"c{number}", [1], SAMPLING, {"group_id": "c"})
    run(engine, 8)
    given = [[name for name in worker.seen if name.startswith("c")] for worker in ray.workers]
    assert given == [["c3", "c4", "c5", "c6", "c7"], ["c0", "c1", "c2"]], "a full worker hands its group on"


def test_a_dead_workers_requests_start_again_on_another_with_its_weights(ray: Ray) -> None:
    engine = engine_on(ray, workers=1)
    assert engine.update_weights(lambda number, epoch: f"epoch {epoch}", 3) == "epoch 3"
    for name in "abc":
        engine.add(name, [1], SAMPLING, {})
    assert run(engine, 1) == ["a"]
    ray.workers[0].fail = ActorError("killed")
    assert sorted(run(engine, 2)) == ["b", "c"]
    dead, other = ray.workers
    assert dead.weights is None and other.weights is not None and other.weights[1] == 3
    assert other.seen == ["b", "c"], "what was answered does not start again"


def test_weights_have_a_version_also_where_every_worker_dies_of_them_once(ray: Ray) -> None:
    engine = engine_on(ray)
    loaded: list[int] = []

    def update(number: int, epoch: int) -> str:
        loaded.append(number)
        if loaded.count(number) == 1:
            raise ActorError("killed")
        return f"epoch {epoch}"

    assert engine.update_weights(update, 3) == "epoch 3"
    assert loaded == [0, 0, 1, 1]


def test_workers_that_die_one_after_the_other_end_the_rollout(ray: Ray) -> None:
    engine = engine_on(ray, workers=1)
    engine.add("a", [1], SAMPLING, {})
    make = ray.make

    def make_ill(number: int, weights: Weights | None) -> Any:
        actor = make(number, weights)
        ray.workers[-1].fail = ActorError("The actor died.\nRuntimeError: out of memory")
        return actor

    ray.workers[0].fail = ActorError("killed")
    engine._make = make_ill
    with pytest.raises(RolloutError, match=r"one after the other: The actor died. … RuntimeError: out of memory"):
        run(engine, 1)


def test_an_aborted_request_is_not_answered(ray: Ray) -> None:
    engine = engine_on(ray, workers=1)
    for name in "ab":
        engine.add(name, [1], SAMPLING, {})
    engine.abort(["a"])
    assert run(engine, 1) == ["b"]
    assert ray.workers[0].aborted == ["a"]


def test_all_workers_hear_of_an_epoch(ray: Ray) -> None:
    engine_on(ray).begin_epoch()
    assert [worker.seen for worker in ray.workers] == [["epoch"], ["epoch"]]


def test_a_workers_own_error_is_raised_as_it_is(ray: Ray) -> None:
    with pytest.raises(InvalidInputError, match=r"^does not fit$"):
        engine_on(ray).tokenise("x")


def test_a_missing_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"--ray needs Ray: pip install 'agentspec\[ray\]'"):
        RayEngine.start("model", 2)
