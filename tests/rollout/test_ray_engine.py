"""Test the driver of rollouts on Ray, with actors that answer at once; real ones are in end_to_end/test_ray.py."""

import secrets
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
    """Stand in for RayError, the base of RayTaskError and of the errors for dead workers."""


class TaskError(ActorError):
    def __init__(self, cause: Exception) -> None:
        super().__init__("a traceback of many lines")
        self.cause = cause


class Worker:
    """Finish one request a turn. fail: raised by the next turn."""

    def __init__(self, number: int, weights: Weights | None) -> None:
        self.number, self.weights = number, weights
        self.open: list[str] = []
        self.seen: list[str] = []
        self.fail: Exception | None = None
        self.aborted: list[str] = []
        self.prompts: list[list[int]] = []
        self.closing: Exception | None = None
        self.killed = False

    def ready(self) -> tuple[int, dict[str, Any]]:
        return 2, {"dtype": "float32"}

    def work(self, requests: Sequence[Request]) -> list[Answer]:
        self.open += [request[0] for request in requests]
        self.seen += [request[0] for request in requests]
        self.prompts += [request[1] for request in requests]
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
        self.open = [name for name in self.open if name not in request_ids]

    def close(self) -> None:
        if self.closing is not None:
            raise self.closing


class Ray:
    """Run a call when its result is asked for, or at once if it never is."""

    exceptions = SimpleNamespace(RayError=ActorError, RayTaskError=TaskError)

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.silent = 0

    def make(self, number: int, weights: Weights | None) -> Any:
        worker = Worker(number, weights)
        self.workers.append(worker)

        def asked(name: str, *given: Any) -> Any:
            function = getattr(worker, name)
            return function(*given) if name in ("begin_epoch", "abort") else Call(function, given)

        def method(*name: str) -> Any:
            return SimpleNamespace(remote=lambda *given: asked(*name, *given))

        asking = {name: method(name) for name in ("ready", "work", "abort")}
        return SimpleNamespace(**asking, call=method(), worker=worker)

    def kill(self, actor: Any) -> None:
        actor.worker.killed = True

    def get(self, call: "Call") -> Any:
        return call.function(*call.given)

    def wait(self, calls: list["Call"], num_returns: int, timeout: float) -> tuple[list["Call"], list["Call"]]:
        if self.silent:  # as if the timeout were over
            self.silent -= 1
            return [], calls
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
        if number < 2:
            raise ActorError("killed")
        return f"epoch {epoch}"

    assert engine.update_weights(update, 3) == "epoch 3"
    assert loaded == [0, 2, 1, 3]


def test_a_worker_that_the_network_cut_off_does_not_keep_its_gpus(ray: Ray) -> None:
    engine = engine_on(ray, workers=1)
    engine.add("a", [1], SAMPLING, {})
    ray.workers[0].fail = ActorError("the actor is temporarily unavailable")
    assert run(engine, 1) == ["a"]
    assert [worker.killed for worker in ray.workers] == [True, False]


def test_workers_that_started_end_where_another_does_not(ray: Ray) -> None:
    def make(number: int, weights: Weights | None) -> Any:
        actor = ray.make(number, weights)
        if number == 1:
            actor.ready.remote = lambda: Call(failing(ActorError("out of memory")), ())
        return actor

    with pytest.raises(RolloutError, match=r"^a worker did not start: out of memory$"):
        RayEngine(ray, make, 2, "m")
    assert [worker.killed for worker in ray.workers] == [True, True]


def failing(error: BaseException) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        raise error

    return call


@pytest.mark.parametrize("given", [{"seed": 5}, {}])
def test_no_two_workers_have_one_seed_not_even_one_in_the_place_of_another(
    given: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's default seed is always the same."""
    ray, seeds = Ray(), []
    monkeypatch.setenv("AGENTSPEC", "0")  # as --plain sets it; a node may have 1
    monkeypatch.setenv("AGENTSPEC_TENANT", "acme")

    def actor(model: str, options: dict[str, Any], environment: Any, weights: Weights | None) -> Any:
        seeds.append(options["seed"])
        assert (environment["AGENTSPEC"], environment["AGENTSPEC_TENANT"], "HOME" in environment) == (
            "0",
            "acme",
            False,
        )
        return ray.make(len(seeds) - 1, weights)

    module = SimpleNamespace(
        is_initialized=lambda: True,
        cluster_resources=lambda: {"CPU": 8.0},
        remote=lambda kind: SimpleNamespace(options=lambda **given: SimpleNamespace(remote=actor)),
        **{name: getattr(ray, name) for name in ("exceptions", "get", "wait", "kill")},
    )
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setattr(secrets, "randbits", lambda bits: 5)
    engine = RayEngine.start("m", 2, **given)
    engine.add("a", [1], SAMPLING, {})
    ray.workers[0].fail = ActorError("killed")
    run(engine, 1)
    assert seeds == [5, 6, 7]


def test_workers_that_are_silent_are_told(ray: Ray, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_on(ray)
    engine.add("a", [1], SAMPLING, {})
    ray.silent = 2
    assert run(engine, 1) == ["a"]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and told[0].startswith("agentspec: no answer of 1 workers for 300 s: they start, or the Ray")


@pytest.mark.parametrize(
    ("error", "why"), [(ActorError("killed"), "killed"), (TaskError(OSError("full")), "OSError('full')")]
)
def test_all_workers_end_also_where_the_end_of_one_fails(
    ray: Ray, error: Exception, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_on(ray)
    ray.workers[0].closing = error
    engine.close()
    assert [worker.killed for worker in ray.workers] == [True, True]
    assert [record.getMessage() for record in caplog.records] == [
        f"agentspec: worker 0 did not end as it should: {why}"
    ]


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


def test_an_answer_to_an_aborted_request_is_not_that_of_a_later_one_of_its_name(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(ray, workers=1)
    engine.add("a", [1], SAMPLING, {})
    with monkeypatch.context() as patch:
        patch.setattr(ray, "wait", failing(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.abort(["a"])
    engine.add("a", [2], SAMPLING, {})
    assert run(engine, 1) == ["a"]
    assert ray.workers[0].prompts == [[2]]


def test_all_workers_hear_of_an_epoch(ray: Ray) -> None:
    engine_on(ray).begin_epoch()
    assert [worker.seen for worker in ray.workers] == [["epoch"], ["epoch"]]


def test_a_workers_own_error_is_raised_as_it_is(ray: Ray) -> None:
    with pytest.raises(InvalidInputError, match=r"^does not fit$"):
        engine_on(ray).tokenise("x")


def test_a_workers_own_error_that_cannot_be_sent_is_no_death(ray: Ray) -> None:
    engine = engine_on(ray)
    engine.add("a", [1], SAMPLING, {})
    ray.workers[0].fail = TaskError(ActorError("The cause isn't serializable.\n\nOdd: what went wrong"))
    with pytest.raises(RolloutError, match=r"^a worker failed: The cause isn't serializable. … Odd: what went wrong$"):
        run(engine, 1)
    assert len(ray.workers) == 2, "none was made in its place"


def test_a_missing_ray_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"--ray needs Ray: pip install 'ray>=2.40'"):
        RayEngine.start("model", 2)
