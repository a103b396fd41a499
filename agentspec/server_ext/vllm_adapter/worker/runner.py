"""Run agentspec in a worker: an object on vLLM's model runner, and the runner's methods that call it.

vLLM's ``custom_class`` proposer gets neither request ids nor the scheduler's output, and is not told when a request
ends. So the engine is not the runner's drafter but ``runner.agentspec``, made with the runner. The wrapped methods and
the worker's RPC find it there. A runner without it works as before. The runner's drafter is ``AgentSpecProposer``, or
one of vLLM's own, beside which the engine drafts (``native_drafters``).
"""

import atexit
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from agentspec.errors import SpeculatorError
from agentspec.server_ext.engine import DraftingEngine
from agentspec.server_ext.pricing import EngineLimits
from agentspec.server_ext.session_questions import unpacked
from agentspec.server_ext.settings import check_draft_limit, load_settings
from agentspec.server_ext.step import spread_drafts
from agentspec.server_ext.vllm_adapter.frontend.shutdown import note_saved, undisturbed
from agentspec.server_ext.vllm_adapter.startup.draft_limit import engine_limits
from agentspec.server_ext.vllm_adapter.startup.native_methods import drafter_tokens
from agentspec.server_ext.vllm_adapter.startup.speculative_config import uses_agentspec
from agentspec.server_ext.vllm_adapter.worker.cpu import keep_freed_memory, on_cpu
from agentspec.server_ext.vllm_adapter.worker.draft_models import BoundModel, ModelDrafter, build_draft_model
from agentspec.server_ext.vllm_adapter.worker.engine_builder import build_engine
from agentspec.server_ext.vllm_adapter.worker.native_drafters import NativeDrafter, limit_numba_threads
from agentspec.server_ext.vllm_adapter.worker.step_reader import (
    ForwardPass,
    StepReader,
    is_told_later,
    returned_tokens,
    text_of,
)

logger = logging.getLogger("vllm.agentspec")

_READY_TOKENS = 64
"""Draft tokens of a step for which memory is made ready on CPUs, at their first step."""
_SAMPLED = 3
"""Place of the sampled tokens, one list a row, in what the runner's ``_bookkeeping_sync`` returns."""


class RunnerExtension:
    """Draft for one model runner of vLLM, which carries this object as ``runner.agentspec``.

    engine: None on every tensor-parallel rank but the first, whose drafts vLLM takes. draft_model: a speculator or
    vLLM's own drafter; None: there is none. drafted_nothing: whether the latest step left every row without a draft.
    waiting: the pass whose tokens are not on the host yet.

    The constructor, ``load`` and ``wake`` raise AgentSpecError with the remedy. While vLLM decodes, only ``draft`` may.
    """

    def __init__(self, vllm_config: Any, native: ModelDrafter | None = None) -> None:
        log_as_vllm()
        self.settings = load_settings(vllm_config.additional_config)
        self.max_draft = check_draft_limit(vllm_config.speculative_config.num_speculative_tokens)
        limits = engine_limits(vllm_config)
        self._cpu_limits = limits if on_cpu() else None  # until the first step
        self.engine = build_engine(vllm_config, self.settings, self.max_draft, limits) if _is_first_rank() else None
        self.draft_model = build_draft_model(self.settings, vllm_config) if native is None else native
        self.drafted_nothing = True
        self.waiting: ForwardPass | None = None
        self._reported = self._weights_lost = False
        if self.engine is not None:
            # In a user's own process vLLM shuts down so late in the exit that native calls of threads return no more.
            atexit.register(self.engine.close)
            longest = vllm_config.model_config.max_model_len
            self._reader = StepReader(self.max_draft, longest, self.engine.knows)

    def load(self, target: Any) -> None:
        """Read the draft model's weights and the store, before vLLM serves. target: the served model."""
        if self.draft_model is not None:
            self.draft_model.load(target)
        if self.engine is not None:
            watch_weights(target, self.engine.note_new_weights)
            restored = self.engine.warm_up()
            logger.info("agentspec: read %d turns from the store, tenant %s", restored, self.settings.tenant or "-")

    def close(self) -> None:
        """Write what waits, and the snapshot, because the worker shuts down."""
        if self.engine is not None:
            self.engine.close()
            atexit.unregister(self.engine.close)

    def sleep(self, level: int) -> None:
        """Note that vLLM has put its weights to sleep. Level 2 discards them, the draft model's included."""
        self._weights_lost = self._weights_lost or level >= 2

    def wake(self, target: Any) -> None:
        """Read the draft model's weights again if sleep discarded them. vLLM does that for the target alone."""
        if self._weights_lost and self.draft_model is not None:
            self.draft_model.load(target)
        self._weights_lost = False

    def draft(self, runner: Any, forward: ForwardPass) -> list[list[int]]:
        """Return drafts for the runner's batch, one list a row.

        Raises SpeculatorError only after the draft model has failed on one of several tensor-parallel ranks: the
        others wait for this one in the model, or take its next message for the model's. No other error stops vLLM.
        """
        self.drafted_nothing = True
        drafts: list[list[int]] | None = None
        if self.settings.enabled:
            try:
                if self._cpu_limits is not None:
                    self._make_memory_ready(self._cpu_limits)
                if self.engine is not None:
                    drafts = self._draft(self.engine, runner, forward)
                elif self.draft_model is not None:
                    self.draft_model.follow(forward)
            except Exception:  # drafting must not stop vLLM, whatever its state is
                self._report()
            if self.draft_model is not None and self.draft_model.out_of_step is not None:
                raise SpeculatorError(
                    "the draft model failed on one tensor-parallel rank, so the ranks are out of step: restart the "
                    "server, without the draft model if this happens again"
                ) from self.draft_model.out_of_step
        return [[] for _ in forward.sampled] if drafts is None else drafts

    def finish(self, request_id: str, state: Any) -> None:
        """Tell the engine that a request has finished or was aborted. state: vLLM's CachedRequestState, or None."""
        if self.engine is None:
            return
        returned, text, may_be_shorter = None, None, False
        if state is not None:
            try:
                returned, may_be_shorter = returned_tokens(state), is_told_later(state)
                text = functools.partial(text_of, state)
            except Exception:
                self._report()
                returned = 0  # nobody knows where the response ends, so nothing of it is kept
        self.engine.finish(request_id, returned, text, may_be_shorter=may_be_shorter)

    def begin(self, runner: Any, requests: Sequence[Any]) -> None:
        """Let the engine begin requests whose prompts are computed next. requests: vLLM's NewRequestData."""
        if self.engine is not None:
            try:
                self.engine.begin(self._reader.begun(runner, requests))
            except Exception:
                self._report()

    def finish_if_idle(self) -> None:
        """Let the engine finish the last requests, because no step follows."""
        if self.engine is not None:
            try:
                self.engine.finish_if_idle()
            except Exception:
                self._report()

    def _make_memory_ready(self, limits: EngineLimits) -> None:
        """Keep freed memory from the first step on. Before it, vLLM's KV cache would take the pages that are ready."""
        self._cpu_limits = None
        if limits.draft_bytes is not None:
            keep_freed_memory(limits.draft_bytes, _READY_TOKENS * limits.position_bytes)

    def _bind(self, forward: ForwardPass) -> BoundModel | None:
        """Return the draft model for this pass; None if there is none, or it fails, so that the indexes draft alone."""
        if self.draft_model is None:
            return None
        try:
            with self.draft_model.together():
                return self.draft_model.bind(forward)
        except Exception:
            self._report()
            return None

    def _end_step(self, bound: BoundModel) -> None:
        """End the draft model's step. An error leaves the drafts that the step has."""
        try:
            bound.close()
        except Exception:
            self._report()

    def _draft(self, engine: DraftingEngine, runner: Any, forward: ForwardPass) -> list[list[int]]:
        """Read the step, let the engine draft, and spread the drafts over all rows of the batch. Raises any error."""
        bound = self._bind(forward)
        try:
            step = self._reader.read(runner, forward.scheduler_output, forward.sampled)
            drafts = engine.propose(step, bound)
        finally:
            if bound is not None:
                self._end_step(bound)
        self.drafted_nothing = not any(drafts)
        count = len(forward.sampled)
        return drafts if len(drafts) == count else spread_drafts(drafts, step.batch.rows.tolist(), count)

    def _report(self) -> None:
        """Count an error, and log the first one."""
        if self.engine is not None:
            self.engine.metrics.counters["errors_adapter"] += 1
        if not self._reported:
            self._reported = True
            logger.exception("agentspec: reading the engine's state failed, it goes on without its drafts")


def _is_first_rank() -> bool:
    """Return whether this process is the tensor-parallel rank whose drafts vLLM takes."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank()) == 0


def log_as_vllm() -> None:
    """Let the loggers below ``agentspec`` write as vLLM's do, unless somebody has configured them.

    By themselves they write nothing below a warning, and of a warning the bare text.
    """
    own, of_vllm = logging.getLogger("agentspec"), logging.getLogger("vllm")
    if not own.hasHandlers():
        own.handlers[:] = of_vllm.handlers
        own.setLevel(of_vllm.level)


# --- The wrapped methods of vLLM's V1 model runner, and the worker's RPC


def watch_weights(target: Any, changed: Callable[[], None]) -> None:
    """Call ``changed`` whenever weights are loaded into the served model from now on.

    Trainers, vLLM's own reloading and its weight transfer all call the model's ``load_weights``, often once for each
    tensor.
    """
    original = target.load_weights

    @functools.wraps(original)
    def load_weights(*args: Any, **kwargs: Any) -> Any:
        changed()
        return original(*args, **kwargs)

    target.load_weights = load_weights


def extension_of(runner: Any) -> RunnerExtension | None:
    """Return the extension of a model runner; None where its engine does not draft with agentspec."""
    return getattr(runner, "agentspec", None)


def init_runner(original: Callable[..., None], runner: Any, *args: Any, **kwargs: Any) -> None:
    """Attach the extension to a new runner, and to its drafter, which vLLM calls to load weights."""
    vllm_config = args[0] if args else kwargs["vllm_config"]
    if not uses_agentspec(vllm_config):
        original(runner, *args, **kwargs)
        return
    beside = drafter_tokens(vllm_config.speculative_config) is not None
    if beside and vllm_config.speculative_config.method == "ngram":
        limit_numba_threads()
    original(runner, *args, **kwargs)
    runner.agentspec = RunnerExtension(runner.vllm_config, NativeDrafter(runner) if beside else None)
    if beside:
        runner.drafter.load_model = functools.partial(load_native, runner.drafter.load_model, runner.agentspec)
    else:
        runner.drafter.extension = runner.agentspec


def load_native(original: Callable[..., None], extension: RunnerExtension, target: Any, *args: Any) -> None:
    """Let vLLM's drafter read its weights, and then the extension. vLLM counts the memory of both as the model's."""
    original(target, *args)
    extension.load(target)


def propose_draft_token_ids(original: Callable[..., Any], runner: Any, *args: Any) -> Any:
    """Draft from the scheduler's output, the runner's batch and the target's hidden states.

    Where the sampled tokens are a tensor, vLLM has not noted them yet: return no drafts, and draft after its
    bookkeeping.
    """
    extension = extension_of(runner)
    if extension is None:
        return original(runner, *args)
    forward = ForwardPass(*args)
    forward.input_batch = runner.input_batch
    forward.native = functools.partial(original, runner, *args)
    if isinstance(forward.sampled, list):
        return extension.draft(runner, forward)
    extension.waiting = forward
    return [[] for _ in runner.input_batch.req_ids]


def bookkeeping_sync(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Draft for a pass that waits, now that the sampled tokens are on the host and in the batch."""
    result = original(runner, *args, **kwargs)
    extension = extension_of(runner)
    if extension is not None and extension.waiting is not None:
        forward, extension.waiting = extension.waiting, None
        forward.sampled = result[_SAMPLED]
        runner._draft_token_ids = extension.draft(runner, forward)
    return result


def on_request_state_removed(original: Callable[..., Any], runner: Any, req_id: str, req_state: Any) -> None:
    """Tell the engine that a request has ended. Its absence from a batch says nothing: it may come back."""
    original(runner, req_id, req_state)
    extension = extension_of(runner)
    if extension is not None:
        extension.finish(req_id, req_state)


def update_states(original: Callable[[Any, Any], Any], runner: Any, scheduler_output: Any) -> Any:
    """Tell the engine which requests begin, before their prompts are computed, and that no step follows."""
    result = original(runner, scheduler_output)
    extension = extension_of(runner)
    if extension is not None:
        if scheduler_output.scheduled_new_reqs:
            extension.begin(runner, scheduler_output.scheduled_new_reqs)
        elif not scheduler_output.total_num_scheduled_tokens:
            extension.finish_if_idle()
    return result


def sleep(original: Callable[..., None], worker: Any, level: int = 1) -> None:
    """Tell the extension how deep vLLM sleeps."""
    original(worker, level)
    extension = extension_of(worker.model_runner)
    if extension is not None:
        extension.sleep(level)


def wake_up(original: Callable[..., None], worker: Any, tags: Sequence[str] | None = None) -> None:
    """Let the extension read lost weights again, once the memory for weights is back."""
    original(worker, tags)
    extension = extension_of(worker.model_runner)
    if extension is not None and (tags is None or "weights" in tags):
        extension.wake(worker.model_runner.get_model())


def shut_down(original: Callable[[Any], None], wrapper: Any) -> None:
    """Close the extension before the worker's resources go. Not every worker process runs exit handlers."""
    extension = extension_of(getattr(wrapper.worker, "model_runner", None))
    try:
        if extension is not None:
            with undisturbed():
                extension.close()
                if extension.engine is not None:
                    note_saved()
    finally:
        original(wrapper)


def input_fits_in_drafter(original: Callable[..., bool], runner: Any, common_attn_metadata: Any) -> bool:
    """Accept batches near ``max_model_len``, which vLLM would skip whole. The reader cuts each row's draft to fit."""
    if extension_of(runner) is not None:
        return common_attn_metadata is not None
    return bool(original(runner, common_attn_metadata))


def worker_rpc(worker: Any, what: str, *args: Any, **named: Any) -> Any:
    """Answer a question of ``ask_engines``; return None in a worker without an engine.

    what: the question. args, named: the arguments of the engine's method that answers it. A question about sessions
    comes `packed`.
    """
    extension = extension_of(getattr(worker, "model_runner", None))
    if extension is None or extension.engine is None:
        return None
    engine = extension.engine
    match what:
        case "request":
            return engine.request(*args, **named)
        case "begin_session_job":
            job, caller, *question = args
            return engine.sessions.begin(job, caller, unpacked(*question))
        case "poll_session_job":
            return engine.sessions.poll(*args)
        case "lengths":
            return engine.note_lengths(*args)
        case "new_epoch":
            return engine.note_new_epoch()
    return engine.stats()
