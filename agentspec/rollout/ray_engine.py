"""Sample on several machines: engines in Ray actors, which the generator drives as if they were one.

    engine = RayEngine.start("MODEL", 4, **rollout_options())
    generator = RolloutGenerator(engine, Journal(Path("rollouts.jsonl")))

The journal stays with the driver, so each sample is written once, whichever worker dies. The workers draft from each
other's samples where they share a store. Ray is imported when an engine starts.
"""

import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentspec.errors import ConfigurationError, RolloutError
from agentspec.server_ext.vllm_adapter.offline import Answer, OfflineEngine, Sampling

logger = logging.getLogger(__name__)

_TURN_SECONDS = 0.2
"""Longest turn of a worker. It steps for so long, or until a request finishes, before it looks for new requests."""
_MOST_DEATHS = 3
"""Most workers that may die one after the other while no request finishes."""
_SILENT_SECONDS = 300.0
"""Time without an answer of any worker after which a warning is logged. A large model takes minutes to load."""
_SWITCH = "AGENTSPEC"
_HANDED_ON = ("AGENTSPEC_", "VLLM_", "HF_")
"""Environment variables that the workers get from the driver: the switch, which a node may have otherwise, and those
with these prefixes."""

Weights = tuple[Callable[[Any, int], Any], int]
"""A function that loads an epoch's weights, and the epoch."""
Request = tuple[str, list[int], Sampling, dict[str, Any]]
"""Arguments of ``OfflineEngine.add``."""


def _handed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that the workers get."""
    return {name: value for name, value in environ.items() if name == _SWITCH or name.startswith(_HANDED_ON)}


class RayWorker:
    """Hold an engine in a Ray actor and step it.

    environment: variables to set before vLLM is imported. weights: weights to load first, for a worker that replaces a
    dead one; None: the model's own.
    """

    def __init__(
        self, model: str, options: Mapping[str, Any], environment: Mapping[str, str], weights: Weights | None
    ) -> None:
        os.environ.update(environment)
        # Run the engine core in the actor's own process, so that it ends with the actor.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self._engine = OfflineEngine.start(model, **options)
        if weights is not None:
            self._engine.update_weights(*weights)
        self._open: set[str] = set()

    def ready(self) -> tuple[int, dict[str, Any]]:
        """Return the engine's `max_running` and `loaded`. An answer means that the engine has started."""
        return self._engine.max_running, self._engine.loaded

    def work(self, requests: Sequence[Request]) -> list[Answer]:
        """Start requests, and step until a request finishes or the turn is over. Return the finished answers."""
        for request in requests:
            self._engine.add(*request)
            self._open.add(request[0])
        answers: list[Answer] = []
        end = time.monotonic() + _TURN_SECONDS
        while self._open and not answers and time.monotonic() < end:
            answers = self._engine.step()
            self._open.difference_update(answer.request_id for answer in answers)
        if answers and not self._open:
            self._engine.settle()
        return answers

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests without an answer."""
        self._engine.abort(request_ids)
        self._open.difference_update(request_ids)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine, and return its result."""
        return getattr(self._engine, method)(*arguments)


@dataclass(slots=True)
class _Member:
    """Hold what the driver knows of a worker.

    waiting: requests that are still to be sent to it. open: all requests without an answer yet, by id. call: future of
    the turn that runs. given: number of requests so far.
    """

    number: int
    actor: Any
    waiting: list[Request] = field(default_factory=list)
    open: dict[str, Request] = field(default_factory=dict)
    call: Any = None
    given: int = 0


class RayEngine:
    """Start, step and abort requests on workers, as ``OfflineEngine`` does on its engine.

    A worker that dies is replaced, and its requests start again. make: function that returns a new actor. It gets the
    number of actors made before, and the weights to load.
    """

    def __init__(self, ray: Any, make: Callable[[int, Weights | None], Any], workers: int, model: str) -> None:
        self._ray, self._make = ray, make
        self._made = itertools.count()
        self.model = model
        self._weights: Weights | None = None
        self._deaths = 0
        self._groups: dict[str, _Member] = {}
        self._members = [_Member(number, make(next(self._made), None)) for number in range(workers)]
        try:
            started: list[tuple[int, dict[str, Any]]] = [self._get(each.actor.ready.remote()) for each in self._members]
        except BaseException as error:
            self._kill(*self._members)  # otherwise those that did start would keep their GPUs
            if isinstance(error, ray.exceptions.RayError):
                raise RolloutError(f"a worker did not start: {_reason(error)}") from error
            raise
        self.max_running = sum(max_running for max_running, _ in started)
        self.loaded = started[0][1]

    @classmethod
    def start(cls, model: str, workers: int, **options: Any) -> "RayEngine":
        """Start workers on the cluster that ``ray.init`` finds, or on this machine, and wait until all are ready.

        options: as ``vllm.LLM`` takes them. A worker takes one CPU and, in a cluster with GPUs, one GPU for each
        tensor-parallel rank of its engine. Raises ConfigurationError without Ray, for fewer than one worker, and for
        more than the cluster has room for. Raises RolloutError if a worker does not start.
        """
        ray = _import_ray()
        if workers < 1:
            raise ConfigurationError(f"workers: at least 1 expected, got {workers}")
        if not ray.is_initialized():
            ray.init(log_to_driver=False, include_dashboard=False)
        resources = ray.cluster_resources()
        gpus = int(options.get("tensor_parallel_size", 1)) if resources.get("GPU") else 0
        room = int(resources.get("GPU", 0) // gpus if gpus else resources.get("CPU", 0))
        if workers > room:
            raise ConfigurationError(f"workers: the Ray cluster has room for {room}, got {workers}; start fewer")
        environment = _handed_on(os.environ)
        actor = ray.remote(RayWorker).options(num_cpus=1, num_gpus=gpus)

        seed = secrets.randbits(31) if options.get("seed") is None else int(options["seed"])

        def make(made: int, weights: Weights | None) -> Any:
            # Engines with one seed would draw the same samples, and a worker that replaces a dead one would repeat its.
            return actor.remote(model, {**options, "seed": seed + made}, environment, weights)

        return cls(ray, make, workers, model)

    def add(self, request_id: str, prompt: list[int], sampling: Sampling, extra: dict[str, Any]) -> None:
        """Start a request on its group's worker, or on the least busy one if the group's has far more to do."""
        group = extra.get("group_id", request_id)
        least = min(self._members, key=lambda member: (len(member.open), member.given))
        member = self._groups.setdefault(group, least)
        if len(member.open) > len(least.open) + self.max_running // len(self._members):
            member = self._groups[group] = least
        member.given += 1
        member.open[request_id] = (request_id, prompt, sampling, extra)
        member.waiting.append(member.open[request_id])

    @property
    def given(self) -> list[int]:
        """Return how many requests each worker was given so far."""
        return [member.given for member in self._members]

    def step(self) -> list[Answer]:
        """Wait for a worker's turn. Return the answers that it finished."""
        for member in self._members:
            if member.call is None and member.open:
                member.call = member.actor.work.remote(member.waiting)
                member.waiting = []
        calls = {member.call: member for member in self._members if member.call is not None}
        call = self._first(list(calls))
        member = calls[call]
        member.call = None
        try:
            found: list[Answer] = self._get(call)
        except self._ray.exceptions.RayError as error:
            self._replace(member, error)
            return []
        # A replaced worker's answers are gone, so each request is open until its one answer is here.
        answers = [answer for answer in found if member.open.pop(answer.request_id, None) is not None]
        if answers:
            self._deaths = 0
        return answers

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests without an answer."""
        ending = set(request_ids)
        for member in self._members:
            ended = ending & member.open.keys()
            member.open = {name: request for name, request in member.open.items() if name not in ended}
            member.waiting = [request for request in member.waiting if request[0] not in ended]
            if ended:
                member.actor.abort.remote(sorted(ended))
            if ended and not member.open:
                member.call = None  # its answers would be taken for those of later requests with the same ids

    def tokenise(
        self, prompt: str | Sequence[int] | Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """Return a prompt's token ids. Raises InvalidInputError as ``OfflineEngine.tokenise`` does."""
        tokens: list[int] = self._ask("tokenise", prompt, tools)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids."""
        text: str = self._ask("decode", tokens)
        return text

    def update_weights(self, update: Callable[[Any, int], Any], epoch: int) -> Any:
        """Load an epoch's weights on every worker, at the same time. Return their version."""
        self._weights = None  # a worker that replaces a dead one is told below, not when it is made
        calls = [member.actor.call.remote("update_weights", update, epoch) for member in self._members]
        version: Any = None
        for member, call in zip(self._members, calls, strict=True):
            while call is not None:
                try:
                    version, call = self._get(call), None
                except self._ray.exceptions.RayError as error:
                    self._replace(member, error)
                    call = member.actor.call.remote("update_weights", update, epoch)
        self._weights = (update, epoch)
        return version

    def begin_epoch(self) -> None:
        """Tell agentspec in the workers that an epoch begins (setting ``history_window``)."""
        for member in self._members:
            member.actor.call.remote("begin_epoch")

    def close(self) -> None:
        """End the workers once the store has their finished turns. Logs a worker's error instead of raising it."""
        calls = [member.actor.call.remote("close") for member in self._members]
        try:
            for member, call in zip(self._members, calls, strict=True):
                try:
                    self._ray.get(call)
                except self._ray.exceptions.RayError as error:
                    own = isinstance(error, self._ray.exceptions.RayTaskError)
                    why = repr(error.cause) if own else _reason(error)
                    logger.warning("agentspec: worker %d did not end as it should: %s", member.number, why)
        finally:
            self._kill(*self._members)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the first worker's engine, again if that worker dies and is replaced."""
        member = self._members[0]
        while True:
            try:
                return self._get(member.actor.call.remote(method, *arguments))
            except self._ray.exceptions.RayError as error:
                self._replace(member, error)

    def _first(self, calls: list[Any]) -> Any:
        """Wait for the first of these calls to end, and return it. Log a warning every _SILENT_SECONDS until then."""
        while True:
            ready, _ = self._ray.wait(calls, num_returns=1, timeout=_SILENT_SECONDS)
            if ready:
                return ready[0]
            logger.warning(
                "agentspec: no answer of %d workers for %.0f s: they start, or the Ray cluster has no room for them "
                "(see `ray status`); run the rollout again with fewer workers to go on without them",
                *(len(calls), _SILENT_SECONDS),
            )

    def _kill(self, *members: _Member) -> None:
        for member in members:
            self._ray.kill(member.actor)

    def _get(self, call: Any) -> Any:
        """Return a call's result. Raises a worker's own error without Ray's around it; RayError if the worker died."""
        self._first([call])
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            if type(error.cause) is self._ray.exceptions.RayError:  # the worker's own error cannot be pickled
                raise RolloutError(f"a worker failed: {_reason(error.cause)}") from error
            raise error.cause from None

    def _replace(self, member: _Member, error: Exception) -> None:
        """Replace a dead worker by a new one with its weights and requests. The others go on meanwhile.

        Raises RolloutError if worker after worker dies and no request finishes.
        """
        self._deaths += 1
        if self._deaths > _MOST_DEATHS:
            raise RolloutError(f"{self._deaths} workers died one after the other: {_reason(error)}") from error
        logger.warning("agentspec: worker %d died, %d requests start again", member.number, len(member.open))
        self._kill(member)  # a worker that the network has cut off lives on, and would keep its GPUs
        member.actor, member.call = self._make(next(self._made), self._weights), None
        member.waiting = list(member.open.values())


def _reason(error: Exception) -> str:
    """Return the first and last line of a dead worker's error, which say what happened and by which error."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " … ".join(dict.fromkeys((lines[0].strip(), lines[-1].strip())))


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigurationError("--ray needs Ray: pip install 'ray>=2.40'") from None
    return ray
