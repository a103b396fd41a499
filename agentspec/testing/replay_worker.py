"""Run vLLM in the worker process of one replay engine, step by step, as commands come over a pipe.

Between two commands nothing runs here, so that several engines can take turns on one machine. Two methods of vLLM's
model runner are replaced (``Patch`` of ``server_ext.vllm_adapter``), whatever the method of speculation: one forces the
recorded tokens, the other counts.
"""

import functools
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from agentspec.server_ext.vllm_adapter import Patch, install, worker_rpc
from agentspec.testing.replay_types import (
    RESERVED_TOKENS,
    Call,
    EngineSpec,
    ReplayError,
    ReplayResult,
)

_WARM_UP = Call("agentspec-warm-up", np.arange(16, dtype=np.int32), np.arange(16, RESERVED_TOKENS, dtype=np.int32))
"""Warm-up call whose tokens do not repeat, so that no drafter learns from them."""

_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
REPLAY_KEY = "agentspec_replay"
"""Key in ``SamplingParams.extra_args`` of the recorded response, a flat list of ints."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Record one step of the model runner. The sequences have one entry for each row that was given tokens."""

    request_ids: Sequence[str]
    sampled: Sequence[int]
    """tokens that the row was given: accepted draft tokens and the bonus token"""
    drafted: Sequence[int]
    """draft tokens of the row that were verified"""
    scheduled: int
    """tokens of all rows in the forward pass"""

    @property
    def prefills(self) -> bool:
        """Return whether the forward pass held more than the last token and the draft of each row."""
        return self.scheduled != len(self.sampled) + sum(self.drafted)


def serve(pipe: Connection, spec: EngineSpec) -> None:
    """Answer commands until the pipe closes: ("begin", calls, batch) and ("advance", calls or None).

    Every answer is ("ok", value) or ("error", text). The engine's info comes first, unasked, when it is ready.
    """
    import os

    os.dup2(2, 1)  # send vLLM's log to stderr: stdout is the caller's
    replay: Replay | None = None
    engine: Engine | None = None
    while True:
        try:
            if engine is None:
                engine = Engine(spec)
                pipe.send(("ok", engine.info()))
            name, *args = pipe.recv()
            if name == "begin":
                if replay is not None:
                    replay.end()
                replay = Replay(engine, *args)
                pipe.send(("ok", None))
            elif replay is None:
                raise ReplayError("nothing to advance: call begin first")
            else:
                pipe.send(("ok", replay.advance(*args)))
        except EOFError:
            return
        except Exception as error:
            import traceback

            traceback.print_exc()
            pipe.send(("error", f"{type(error).__name__}: {error}"))
            if engine is None:
                return


class Engine:
    """Run a vLLM engine in this process that plays recorded responses."""

    def __init__(self, spec: EngineSpec) -> None:
        sys.path[:0] = spec.module_paths
        from vllm import LLM
        from vllm.platforms import current_platform

        self.spec = spec
        self.records: list[StepRecord] = []
        self.calls = 0
        self.part_seconds = dict.fromkeys(spec.timed, 0.0)
        self.forced = spec.method != "vllm"
        """whether outputs are the recorded tokens"""
        if self.forced:
            install_replay(self.records.append)
        install_timers(spec.timed, self.part_seconds)
        self.passes = 0
        if spec.drafter is not None:
            install([Patch("runner", _PROPOSER, "propose", self._count_passes, "counts the drafter's forward passes")])
        if spec.prepare is not None:
            spec.prepare()
        options: dict[str, Any] = {}
        if spec.method == "agentspec":
            options["additional_config"] = {"agentspec": spec.agentspec_settings()}
        self.llm = LLM(
            model=spec.model,
            load_format="dummy" if spec.random_weights else "auto",
            skip_tokenizer_init=True,
            dtype="float32" if current_platform.is_cpu() else "bfloat16",
            enforce_eager=current_platform.is_cpu(),
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.max_batch,
            speculative_config=spec.speculative_config(),
            async_scheduling=spec.async_scheduling,
            kv_cache_memory_bytes=spec.kv_cache_bytes,
            gpu_memory_utilization=0.2,
            seed=spec.seed,
            disable_log_stats=True,
            **options,
        )
        Replay(self, [_WARM_UP], 1).advance(None)

    def info(self) -> dict[str, Any]:
        """Return the engine's vLLM version, device type, and whether it schedules asynchronously."""
        import vllm
        from vllm.platforms import current_platform

        scheduler = self.llm.llm_engine.vllm_config.scheduler_config
        return {
            "vllm": vllm.__version__,
            "device": current_platform.device_type,
            "async_scheduling": bool(scheduler.async_scheduling),
        }

    def _count_passes(self, original: Callable[..., Any], drafter: Any, *args: Any, **kwargs: Any) -> Any:
        drafted = original(drafter, *args, **kwargs)
        self.passes += 1 if drafter.parallel_drafting else max(1, drafted.shape[1])
        return drafted

    def add(self, call: Call) -> tuple[str, str]:
        """Start a call. Return its id in outputs, and the engine's own id for it."""
        from vllm import SamplingParams

        extra: dict[str, Any] = {}
        if self.forced:
            extra[REPLAY_KEY] = [int(token) for token in call.response]
        ids = {"session_id": call.session, "group_id": call.group}
        extra |= {name: value for name, value in ids.items() if value is not None}
        params = SamplingParams(
            temperature=0.0, max_tokens=len(call.response), ignore_eos=True, detokenize=False, extra_args=extra
        )
        self.calls += 1
        request_id = f"replay-{self.calls}"
        prompt = {"prompt_token_ids": [int(token) for token in call.prompt]}
        return request_id, self.llm.llm_engine.add_request(request_id, prompt, params)

    def accepted_by_source(self, request_id: str) -> dict[str, int]:
        """Return the extension's accepted tokens of a finished request by source; empty for other methods.

        Raises ReplayError when the extension met an error: drafts were lost, so the measurement means nothing.
        """
        if self.spec.method != "agentspec":
            return {}
        ask = self.llm.llm_engine.collective_rpc
        (figures,) = ask(worker_rpc, args=("request", request_id), kwargs={"admin": True})
        (stats,) = ask(worker_rpc, args=("stats",))
        errors = {name: n for name, n in stats["counters"].items() if name.startswith("errors")}
        if errors:
            raise ReplayError(f"the extension met errors, see its log: {errors}")
        return {} if figures is None else dict(figures["accepted_by_source"])


@dataclass(slots=True)
class _Running:
    request_id: str
    call: Call
    produced: int = 0


class Replay:
    """Work through ``calls`` in their order with ``batch`` slots; the calls of a lane never overlap."""

    def __init__(self, engine: Engine, calls: Sequence[Call], batch: int) -> None:
        self._engine = engine
        self._batch = batch
        self._pending = deque(calls)
        self._running: dict[str, _Running] = {}

    def advance(self, calls: int | None) -> ReplayResult:
        """Step the engine until ``calls`` more calls have finished (None: all); the others stay in flight."""
        times: list[float] = []
        parts: dict[str, list[float]] = {name: [] for name in self._engine.part_seconds}
        sources: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        done, seconds, cpu_seconds, passes = 0, 0.0, 0.0, self._engine.passes
        while calls is None or done < calls:
            begin, cpu_begin = time.perf_counter(), time.process_time()
            self._fill()
            if not self._running:
                break
            self._engine.part_seconds.update(dict.fromkeys(parts, 0.0))
            filled = time.perf_counter()
            outputs = self._engine.llm.llm_engine.step()
            end = time.perf_counter()
            cpu_seconds += time.process_time() - cpu_begin
            seconds += end - begin  # leave the checking and counting below out
            for record in self._engine.records:
                self._count(record, counts)
                if len(record.sampled) == self._batch and not record.prefills:
                    times.append(end - filled)
                    for name, seconds_of_part in self._engine.part_seconds.items():
                        parts[name].append(seconds_of_part)
            self._engine.records.clear()
            for output in outputs:
                if not self._engine.forced:
                    self._count_free(output, counts)
                if output.finished:
                    done += 1
                    sources.update(self._finish(output))
        return ReplayResult(
            calls=done,
            tokens=counts["tokens"],
            steps=counts["steps"],
            drafted=counts["drafted"],
            accepted=counts["accepted"],
            passes=self._engine.passes - passes,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            accepted_by_source=dict(sources),
            decode_seconds=tuple(times),
            part_seconds={name: tuple(values) for name, values in parts.items()},
        )

    def end(self) -> None:
        """End the requests in flight, such as those of a replay that failed."""
        self._engine.llm.llm_engine.abort_request([running.request_id for running in self._running.values()])

    def _fill(self) -> None:
        busy = {_lane(running.call) for running in self._running.values()}
        while len(self._running) < self._batch:
            at = next((i for i, call in enumerate(self._pending) if _lane(call) not in busy), None)
            if at is None:
                return
            call = self._pending[at]
            del self._pending[at]
            busy.add(_lane(call))
            request_id, engine_id = self._engine.add(call)
            self._running[engine_id] = _Running(request_id, call)

    def _count(self, record: StepRecord, counts: Counter[str]) -> None:
        for engine_id, sampled, drafted in zip(record.request_ids, record.sampled, record.drafted, strict=True):
            running = self._running.get(engine_id)
            if running is None:
                continue
            kept = min(sampled, len(running.call.response) - running.produced)
            if kept <= 0:  # asynchronous scheduling runs one step past the end
                continue
            running.produced += kept
            counts["tokens"] += kept
            counts["steps"] += 1
            counts["drafted"] += drafted
            counts["accepted"] += min(sampled - 1, kept)

    def _count_free(self, output: Any, counts: Counter[str]) -> None:
        """Count the tokens that vLLM wrote by itself, one a step."""
        running = next(r for r in self._running.values() if r.request_id == output.request_id)
        written = len(output.outputs[0].token_ids)
        counts["tokens"] += written - running.produced
        counts["steps"] += written - running.produced
        running.produced = written

    def _finish(self, output: Any) -> dict[str, int]:
        engine_id = next(key for key, r in self._running.items() if r.request_id == output.request_id)
        running = self._running.pop(engine_id)
        tokens = list(output.outputs[0].token_ids)
        wanted = [int(token) for token in running.call.response]
        if not self._engine.forced:
            wanted[: len(tokens)] = tokens  # only the number of tokens must be as recorded
        if tokens != wanted:
            at = next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), len(tokens))
            raise ReplayError(
                f"method {self._engine.spec.method}, session {running.call.session}: output differs from the record "
                f"at token {at} ({len(tokens)} tokens, {len(wanted)} recorded)"
            )
        return self._engine.accepted_by_source(running.request_id)


def _lane(call: Call) -> str | int:
    lane = call.session if call.lane is None else call.lane
    return id(call) if lane is None else lane


# --- The replay in vLLM's model runner


def install_replay(record: Callable[[StepRecord], None]) -> None:
    """Patch vLLM's model runner to force tokens and to call ``record`` after every step. Call it once a process.

    Raises UnsupportedEngineError when this vLLM's runner has no such methods.
    """
    runner = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
    count = functools.partial(_bookkeeping_sync, record)
    install(
        [
            Patch("runner", runner, "_sample", _sample, "makes the recorded token the target's choice"),
            Patch("runner", runner, "_bookkeeping_sync", count, "counts the tokens that enter a request"),
        ]
    )


def install_timers(timed: Mapping[str, tuple[str, str]], seconds: dict[str, float]) -> None:
    """Patch methods so that they add their durations to ``seconds``, by name. timed: owner and method of each."""
    for name, (owner, method) in timed.items():
        install([Patch("all", owner, method, functools.partial(_timed, name, seconds), "measures the method's time")])


def _timed(name: str, seconds: dict[str, float], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    begin = time.perf_counter()
    try:
        return original(*args, **kwargs)
    finally:
        seconds[name] += time.perf_counter() - begin


def _sample(
    original: Callable[..., Any], runner: Any, logits: Any, spec_decode_metadata: Any, *args: Any, **kwargs: Any
) -> Any:
    """Force the recorded tokens; the sampler and the rejection sampler that follow are vLLM's own."""
    if logits is not None:
        drafts = None if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
        force(logits, runner.requests, runner.input_batch.req_ids, drafts)
    return original(runner, logits, spec_decode_metadata, *args, **kwargs)


def force(logits: Any, requests: Any, request_ids: Sequence[str], drafts: Sequence[int] | None) -> None:
    """Make the recorded token the largest logit of its row, in place.

    ``logits``: [rows, vocab]. Request ``i`` has ``drafts[i] + 1`` rows in batch order (one without drafts), the
    ``j``-th of which decides output token ``len(output_token_ids) + j``. Rows past the end of the recorded
    response, and requests without one, keep the model's own choice.
    """
    import torch

    rows: list[int] = []
    tokens: list[int] = []
    row = 0
    for i, request_id in enumerate(request_ids):
        width = 1 if drafts is None else drafts[i] + 1
        state = requests[request_id]
        response = (state.sampling_params.extra_args or {}).get(REPLAY_KEY, ())
        begin = len(state.output_token_ids)
        wanted = response[begin : begin + width]
        rows.extend(range(row, row + len(wanted)))
        tokens.extend(wanted)
        row += width
    if tokens:
        on_gpu = logits.device.type == "cuda"
        index = torch.tensor([rows, tokens], pin_memory=on_gpu).to(logits.device, non_blocking=True)
        logits[index[0], index[1]] = torch.finfo(logits.dtype).max / 2


def _bookkeeping_sync(
    record: Callable[[StepRecord], None],
    original: Callable[..., Any],
    runner: Any,
    scheduler_output: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Record the tokens that each row was given. vLLM adds verified tokens to requests here, for every method."""
    request_ids = list(runner.input_batch.req_ids)
    outputs = [runner.requests[request_id].output_token_ids for request_id in request_ids]
    before = [len(output) for output in outputs]
    result = original(runner, scheduler_output, *args, **kwargs)
    drafts = scheduler_output.scheduled_spec_decode_tokens
    sampled = [len(output) - n for output, n in zip(outputs, before, strict=True)]
    given = [i for i, n in enumerate(sampled) if n]
    record(
        StepRecord(
            request_ids=[request_ids[i] for i in given],
            sampled=[sampled[i] for i in given],
            # A prefix-cache hit can leave placeholders (-1) where no draft was.
            drafted=[sum(token >= 0 for token in drafts.get(request_ids[i], ())) for i in given],
            scheduled=scheduler_output.total_num_scheduled_tokens,
        )
    )
    return result
