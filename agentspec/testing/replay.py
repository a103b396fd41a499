"""Replay recorded agent runs on real vLLM with forced tokens, and measure them end to end.

The replay replaces the target's choice at each position by the recorded response's token. Forward pass, scheduler,
proposer and verification are vLLM's own. So a method drafts the same tokens, and has the same accepted, as with the
model that wrote the record, on any model shape, random weights included:

    calls = [Call("run-1", prompt, response), ...]
    with ReplayEngine(method="none") as plain, ReplayEngine(method="agentspec") as ours:
        results = compare({"none": plain, "agentspec": ours}, calls, batch=8)

The engine's output is checked against the record, token by token. Method ``vllm`` alone forces no tokens: it shows how
long vLLM takes without speculation and with its own defaults. Times are those of the model shape that ran: a tiny model
makes drafting look expensive and verification cheap, compared with a large one.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from agentspec.cache.policy import MAX_DRAFT
from agentspec.errors import ConfigurationError
from agentspec.testing.replay_types import (
    METHODS,
    NGRAM_DRAFT,
    NGRAM_MAX,
    NGRAM_MIN,
    RESERVED_TOKENS,
    Call,
    EngineSpec,
    ModelShape,
    ReplayError,
    ReplayResult,
)
from agentspec.testing.replay_worker import serve

__all__ = [
    "METHODS",
    "NGRAM_DRAFT",
    "NGRAM_MAX",
    "NGRAM_MIN",
    "RESERVED_TOKENS",
    "Call",
    "ModelShape",
    "ReplayEngine",
    "ReplayError",
    "ReplayResult",
    "compare",
    "fitting_length",
]


class ReplayEngine:
    """Run a vLLM engine in a process of its own that replays calls. Use as a context manager, or ``close()`` it.

    ``model``: a model folder, or None for random weights of ``shape``. ``max_batch``: the largest ``batch`` of a run.
    ``max_draft``: the longest draft in tokens (default: the method's own limit). ``settings``: agentspec's settings
    (default: a memory store, so that nothing is left of a run). ``async_scheduling``: by default off for every method,
    so that they can be compared; None leaves it to vLLM, as method ``vllm`` always does. ``kv_cache_bytes``: size of
    the KV cache on a GPU; None: the memory that vLLM finds free, which is wrong if several engines start at once.
    ``module_paths``: folders from which the engine's process imports first (method ``suffix``: the folder of
    ``arctic_inference``, if it is not installed). ``timed``: methods to time, each by a name: "module:class" and the
    method. ``drafter``: a speculative config of vLLM's own, which runs beside ``agentspec``, or alone with ``none``.
    ``prepare``: a function of an importable module, which the process calls before it makes the engine.

    Starting takes about a minute and goes on in the background; the first run waits for it. Raises ConfigurationError
    for arguments that cannot work.
    """

    def __init__(
        self,
        *,
        method: str = "agentspec",
        model: str | Path | None = None,
        shape: ModelShape | None = None,
        max_model_len: int = 8_192,
        max_batch: int = 8,
        max_draft: int | None = None,
        settings: Mapping[str, Any] | None = None,
        seed: int = 0,
        async_scheduling: bool | None = False,
        kv_cache_bytes: int | None = None,
        module_paths: Iterable[str | Path] = (),
        timed: Mapping[str, tuple[str, str]] | None = None,
        drafter: Mapping[str, Any] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        paths = tuple(map(str, module_paths))
        if method == "suffix":
            _check_suffix(paths)
        if max_batch < 1:
            raise ConfigurationError(f"max_batch must be at least 1, got {max_batch}")
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if model is None:
            self._folder = tempfile.TemporaryDirectory(prefix="agentspec-replay-")
            write_model(self._folder.name, shape or ModelShape(), max_model_len)
        self.spec = EngineSpec(
            method=method,
            model=str(model) if self._folder is None else self._folder.name,
            random_weights=model is None,
            max_model_len=max_model_len,
            max_batch=max_batch,
            max_draft=max_draft,
            settings={"store": "memory://"} if settings is None else dict(settings),
            seed=seed,
            async_scheduling=None if method == "vllm" else async_scheduling,
            kv_cache_bytes=kv_cache_bytes,
            module_paths=paths,
            timed=dict(timed or {}),
            drafter=drafter,
            prepare=prepare,
        )
        self.spec.speculative_config()  # raises now, not in the process, if method and drafter cannot work
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self.spec), name=f"replay-{method}", daemon=True)
        with _environment(method):
            self._process.start()
        theirs.close()
        self._info: dict[str, Any] | None = None

    def wait_ready(self) -> dict[str, Any]:
        """Wait until the engine has started. Return its ``vllm`` version, ``device`` and ``async_scheduling``.

        Raises ReplayError if it could not start.
        """
        if self._info is None:
            self._info = dict(self._receive())
        return self._info

    def run(self, calls: Iterable[Call], batch: int = 1) -> ReplayResult:
        """Replay ``calls`` with ``batch`` requests in flight; the engine keeps what it learned from earlier runs.

        A free slot takes the next call whose session is not running, so that a session's turns stay in order.
        Raises ReplayError when an output is not the recorded one, ConfigurationError for a call that does not fit.
        """
        self.begin(calls, batch)
        return self.advance(None)

    def begin(self, calls: Iterable[Call], batch: int = 1) -> None:
        """Hand over the calls; ``advance`` then runs them piece by piece. Raises the errors of ``run``.

        Requests of earlier calls that are still in flight, such as after an error, are ended.
        """
        calls = list(calls)
        if not 1 <= batch <= self.spec.max_batch:
            raise ConfigurationError(f"batch must be between 1 and {self.spec.max_batch}, got {batch}")
        for number, call in enumerate(calls):
            self._check(number, call)
        self._ask("begin", calls, batch)

    def advance(self, calls: int | None) -> ReplayResult:
        """Run until ``calls`` more of them have finished (None: all). Requests in flight are paused, not ended.

        Returns the figures of this piece; ``calls == 0`` in it means that no call was left.
        """
        result: ReplayResult = self._ask("advance", calls)
        return result

    def close(self) -> None:
        """End the process and remove the model folder."""
        self._pipe.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> "ReplayEngine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check(self, number: int, call: Call) -> None:
        if len(call.prompt) == 0 or len(call.response) == 0:
            raise ConfigurationError(f"call {number} of session {call.session}: empty prompt or response")
        length = len(call.prompt) + len(call.response)
        if length > self.spec.max_model_len:
            raise ConfigurationError(
                f"call {number} of session {call.session}: {length} tokens do not fit into max_model_len="
                f"{self.spec.max_model_len}; leave it out or raise max_model_len"
            )

    def _ask(self, *command: Any) -> Any:
        self.wait_ready()
        try:
            self._pipe.send(command)
        except OSError:
            raise self._ended() from None
        return self._receive()

    def _receive(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if kind == "error":
            raise ReplayError(f"method {self.spec.method}: {value}")
        return value

    def _ended(self) -> ReplayError:
        self._process.join(timeout=5)
        code = self._process.exitcode
        return ReplayError(f"the engine process of method {self.spec.method} ended (exit code {code}): start a new one")


def compare(
    engines: Mapping[str, ReplayEngine],
    calls: Sequence[Call],
    *,
    batch: int = 1,
    chunk: int | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> dict[str, ReplayResult]:
    """Run the same calls on every engine, taking turns: ``chunk`` calls each (default: twice the batch).

    All engines take the same number of turns, in changing order, so that no engine always follows the same other one.
    Requests in flight are paused while other engines have their turn, so slots never run empty. ``progress`` gets the
    engine's name and the number of calls that it has finished. Raises the errors of ``ReplayEngine.run``.
    """
    size = chunk or 2 * batch
    for engine in engines.values():
        engine.wait_ready()
        engine.begin(calls, batch)
    results = {name: ReplayResult() for name in engines}
    order = list(engines)
    for goal in range(size, len(calls) + size, size):
        for name in order:
            # A step can finish several calls. Those beyond a turn's goal shorten the next turn.
            piece = engines[name].advance(min(goal, len(calls)) - results[name].calls)
            results[name] += replace(piece, turns=((piece.tokens, piece.seconds),))
            if progress is not None:
                progress(name, results[name].calls)
        order = order[1:] + order[:1]
    return results


def fitting_length(calls: Iterable[Call], max_draft: int | None = None) -> int:
    """Return a ``max_model_len``, in tokens, that leaves every call room for a whole draft at its end."""
    longest = max((len(call.prompt) + len(call.response) for call in calls), default=1)
    return longest + 2 * (MAX_DRAFT if max_draft is None else max_draft) + 2


def write_model(folder: str | Path, shape: ModelShape, max_model_len: int) -> Path:
    """Write the ``config.json`` of a Llama of that shape, for vLLM to fill with random weights. Return the folder.

    ``max_model_len``: in tokens. Raises ConfigurationError for a shape that no Llama can have.
    """
    kv_heads = shape.heads if shape.kv_heads is None else shape.kv_heads
    inner = 4 * shape.hidden if shape.inner is None else shape.inner
    least = min(shape.vocab_size, shape.hidden, shape.layers, shape.heads, kv_heads, inner)
    if least < 1 or shape.hidden % shape.heads or shape.heads % kv_heads:
        raise ConfigurationError(
            f"{shape}: every size must be at least 1, heads must divide hidden, and kv_heads must divide heads"
        )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "hidden_act": "silu",
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return path


def _check_suffix(paths: Sequence[str]) -> None:
    """Raise ConfigurationError without ArcticInference's module. Only look for it: its import may patch vLLM."""
    if PathFinder.find_spec("arctic_inference", [*paths, *sys.path]) is None:
        raise ConfigurationError(
            "method 'suffix' needs the module arctic_inference.suffix_decoding: build it (benchmarks/arctic.py of this "
            "project does, without torch) and name its folder in module_paths"
        )


@contextmanager
def _environment(method: str) -> Iterator[None]:
    """Set a worker's environment while it starts, because its libraries read some variables when they load."""
    before = dict(os.environ)
    for name in [name for name in before if name.startswith("AGENTSPEC_")]:
        del os.environ[name]  # the user's store or tenant must not change a measurement
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # runs the engine core in the worker, only when stepped
        VLLM_PLUGINS="agentspec" if method == "agentspec" else "",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    if method == "vllm":
        os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    else:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the V2 runner takes vLLM's own drafters only
    for name, value in (
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("KMP_BLOCKTIME", "1"),  # threads must not spin while another engine has its turn
        ("OMP_WAIT_POLICY", "PASSIVE"),
    ):
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
