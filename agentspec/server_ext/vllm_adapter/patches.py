"""List every method of vLLM that is replaced: where, why, and in which of the versions that are supported."""

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentspec.errors import UnsupportedEngineError
from agentspec.server_ext.vllm_adapter.frontend import response_lengths, senders, shutdown
from agentspec.server_ext.vllm_adapter.frontend.engine_calls import RPC_METHOD
from agentspec.server_ext.vllm_adapter.startup import native_methods, speculative_config
from agentspec.server_ext.vllm_adapter.startup.speculative_config import uses_agentspec
from agentspec.server_ext.vllm_adapter.worker import (
    cheap_steps,
    cpu,
    cuda_graphs,
    grammar_bitmask,
    runner,
    sampling_faults,
    streamed_input,
)
from agentspec.server_ext.vllm_adapter.worker.cpu import on_cpu
from agentspec.server_ext.vllm_adapter.worker.runner import worker_rpc

OLDEST_VERSION = (0, 28)
NEWEST_VERSION = (0, 33)

MARK = "agentspec_replacement"
"""Name of the attribute that marks a patched function. Its value is the replacement that the function calls."""

Process = Literal["all", "frontend", "engine core", "worker", "runner"]


@dataclass(frozen=True, slots=True)
class Patch:
    """Describe one method of vLLM that is replaced.

    process: the process that needs the patch. "frontend" is the API server, or the process of an offline ``LLM``.
    "runner" is a worker whose engine drafts with agentspec; it is patched right before it makes its model runner. All
    other patches are installed in every process.
    owner: "module:class", or a module.
    replacement: a function whose first argument is the original. adds: vLLM has nothing of that name, so the owner gets
    the replacement as it is.
    cpu_only: whether other platforms keep the original.
    since, until: the first and the last version of vLLM in which the method is replaced.
    """

    process: Process
    owner: str
    name: str
    replacement: Any
    why: str
    adds: bool = False
    cpu_only: bool = False
    since: tuple[int, int] = OLDEST_VERSION
    until: tuple[int, int] = NEWEST_VERSION

    def original(self) -> Any:
        """Return vLLM's own function. Raises UnsupportedEngineError where this vLLM has none of that name."""
        method, _ = self._present()
        while MARK in vars(method):
            method = method.__wrapped__
        return method

    def install(self) -> None:
        """Replace the method. A second call changes nothing. Raises UnsupportedEngineError as ``original`` does."""
        if self.cpu_only and not on_cpu():
            return
        if self.adds:
            setattr(self._find_owner(), self.name, self.replacement)
            return
        method, is_property = self._present()
        if not self._wraps(method):
            wrapped = self._wrap(method)
            setattr(self._find_owner(), self.name, property(wrapped) if is_property else wrapped)

    def _find_owner(self) -> Any:
        module, _, name = self.owner.partition(":")
        owner = importlib.import_module(module)
        return getattr(owner, name) if name else owner

    def _present(self) -> tuple[Any, bool]:
        """Return the function that is in place now, and whether a property holds it."""
        present: Any = inspect.getattr_static(self._find_owner(), self.name, None)
        if present is None:
            raise UnsupportedEngineError(f"this vLLM has no {self.owner}.{self.name}; see the supported versions")
        return (present.fget, True) if isinstance(present, property) else (present, False)

    def _wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        replacement = self.replacement

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return replacement(method, *args, **kwargs)

        setattr(wrapped, MARK, replacement)
        return wrapped

    def _wraps(self, method: Any) -> bool:
        """Return whether this patch replaced the method, or one that the method wraps."""
        while method is not None:
            if vars(method).get(MARK) is self.replacement:
                return True
            method = getattr(method, "__wrapped__", None)
        return False


def init_device(original: Callable[[Any], None], worker: Any) -> None:
    """Check an engine that drafts with agentspec, and patch the runner, before the worker makes its model runner."""
    if uses_agentspec(worker.vllm_config):
        check_engine(worker.vllm_config)
        shutdown.outlive_terminal()
        install([patch for patch in current_patches() if patch.process == "runner"])
    original(worker)


_ENGINE_ARGS = "vllm.engine.arg_utils:EngineArgs"
_MIDDLEWARE = "vllm.entrypoints.serve.middleware.authenticate:AuthenticationMiddleware"
_OLD_MIDDLEWARE = "vllm.entrypoints.serve.utils.server_utils:AuthenticationMiddleware"
_INPUTS = "vllm.v1.engine.input_processor:InputProcessor"
_ASYNC = "vllm.v1.engine.async_llm:AsyncLLM"
_OUTPUTS = "vllm.v1.engine.output_processor:OutputProcessor"
_CONFIG = "vllm.config:VllmConfig"
_GRAMMARS = "vllm.v1.structured_output:StructuredOutputManager"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_NEW_REQUEST = "vllm.v1.core.sched.output:NewRequestData"
_CORE = "vllm.v1.engine.core:EngineCore"
_WORKER = "vllm.v1.worker.worker_base:WorkerBase"
_MANAGER = "vllm.v1.engine.utils:CoreEngineProcManager"
_GPU_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_WRAPPER = "vllm.v1.worker.worker_base:WorkerWrapperBase"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"  # the CPU's runner inherits from it
_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
_SPECULATIVE = "vllm.config.speculative:SpeculativeConfig"
_GRAPHS = "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher"
_SAMPLING = "vllm.v1.sample.rejection_sampler"
_SAMPLER = f"{_SAMPLING}:RejectionSampler"
_THINKING = "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder"

# fmt: off
PATCHES = (
    Patch("frontend", _ENGINE_ARGS, "create_speculative_config", speculative_config.create_speculative_config,
          "translates the user's speculative method, decides a draft limit that nobody gave"),
    Patch("all", _CONFIG, "uniform_decode_query_len", cuda_graphs.uniform_decode_query_len,
          "full CUDA graphs are for steps without drafts", since=(0, 29)),
    Patch("all", _CONFIG, "_set_cudagraph_sizes", cuda_graphs.set_cudagraph_sizes,
          "adds graph sizes for steps with drafts"),
    Patch("all", _CONFIG, "use_v2_model_runner", native_methods.use_v2_model_runner,
          "agentspec drafts in the V1 model runner"),
    Patch("all", _CONFIG, "num_lookahead_tokens", native_methods.config_property,
          "KV slots for as many tokens as vLLM's drafter drafts, not for the longest draft"),
    Patch("all", _CONFIG, "num_prefill_lookahead_tokens", native_methods.config_property,
          "prompt tokens that vLLM's drafter reads ahead", since=(0, 31)),
    Patch("all", _SPECULATIVE, "max_num_new_slots_for_drafting", native_methods.method_property,
          "input slots that vLLM's drafter adds"),
    Patch("all", _SPECULATIVE, "use_multi_module_mtp", native_methods.method_property,
          "as many modules as vLLM's drafter uses"),
    Patch("frontend", _MIDDLEWARE, "__call__", senders.authenticate,
          "remembers who sent a request; lets the administrator's key pass to our routes", since=(0, 29)),
    Patch("frontend", _OLD_MIDDLEWARE, "__call__", senders.authenticate,
          "remembers who sent a request; lets the administrator's key pass to our routes", until=(0, 28)),
    Patch("frontend", _INPUTS, "__init__", senders.init_input_processor,
          "hands the sender on to the thread that prepares prompts; makes the object that tells callers apart"),
    Patch("frontend", _INPUTS, "process_inputs", senders.process_inputs,
          "writes the identity where the worker finds it"),
    Patch("frontend", _ASYNC, "__init__", response_lengths.init_client,
          "makes the object that tells the engines where stop texts have ended responses"),
    Patch("frontend", _OUTPUTS, "process_outputs", response_lengths.process_outputs,
          "tells the engines where stop texts have ended responses"),
    Patch("frontend", "vllm.v1.engine.utils", "zmq_socket_ctx", shutdown.startup_socket,
          "lets a signal end a server whose engines start"),
    Patch("frontend", _MANAGER, "__init__", shutdown.init_engine_manager,
          "notes whether the engines have something to save"),
    Patch("frontend", _MANAGER, "shutdown", shutdown.shut_down_engines,
          "gives engines time to save; by default vLLM gives none"),
    Patch("frontend", _ASYNC, "shutdown", shutdown.shut_down_client,
          "tells requests that reached the engines too late to be aborted"),
    Patch("engine core", _GRAMMARS, "grammar_bitmask", grammar_bitmask.grammar_bitmask,
          "allocates it for the drafts that there are", until=(0, 32)),
    Patch("engine core", _GRAMMARS, "grammar_bitmask", grammar_bitmask.even_grammar_bitmask,
          "lays it out for the drafts that there are", since=(0, 33)),
    Patch("engine core", _SCHEDULER, "__init__", cheap_steps.init_scheduler,
          "fills no request up with placeholders of the longest draft"),
    Patch("engine core", _SCHEDULER, "__init__", shutdown.init_scheduler,
          "ends the process with the one that started it"),
    Patch("engine core", _SCHEDULER, "update_from_output", cheap_steps.update_from_output,
          "notes whether the step drafted anything, sends a rollout's figures of drafts before a stop text"),
    Patch("engine core", _SCHEDULER, "_free_request", cheap_steps.free_request,
          "enters the tokens of the last step in the prefix cache"),
    Patch("engine core", _SCHEDULER, "_handle_stopped_request", streamed_input.handle_stopped_request,
          "lets streamed input follow a response as without drafts"),
    Patch("engine core", _NEW_REQUEST, "anon_repr", senders.anon_repr,
          "keeps identities out of what vLLM logs when an engine ends"),
    Patch("engine core", _CORE, "post_step", cheap_steps.post_step,
          "asks the worker for no drafts where there are none"),
    Patch("worker", _SAMPLING, "expand_batch_to_tokens", sampling_faults.expand_batch_to_tokens,
          "the CPU build loses the sampling parameters of draft positions", cpu_only=True),
    Patch("worker", _WORKER, RPC_METHOD, worker_rpc,
          "answers the HTTP routes", adds=True),
    Patch("worker", _GPU_WORKER, "sleep", runner.sleep,
          "notes that the draft model's weights are discarded"),
    Patch("worker", _GPU_WORKER, "wake_up", runner.wake_up,
          "reads the draft model's weights again"),
    Patch("worker", _WRAPPER, "init_device", init_device,
          "installs the patches below, before the worker makes its model runner"),
    Patch("worker", _WRAPPER, "shutdown", runner.shut_down,
          "writes turns that wait, and the snapshot"),
    Patch("runner", _RUNNER, "__init__", runner.init_runner,
          "attaches agentspec to the runner"),
    Patch("runner", _RUNNER, "propose_draft_token_ids", runner.propose_draft_token_ids,
          "drafts with all that the runner knows; a custom_class proposer gets the sampled tokens alone"),
    Patch("runner", _PROPOSER, "__init__", native_methods.init_proposer,
          "makes vLLM's drafter for the tokens that it drafts"),
    Patch("runner", _RUNNER, "_bookkeeping_sync", runner.bookkeeping_sync,
          "drafts once the sampled tokens are on the host"),
    Patch("runner", _RUNNER, "_on_request_state_removed", runner.on_request_state_removed,
          "tells the engine that a request has ended"),
    Patch("runner", _RUNNER, "_update_states", runner.update_states,
          "tells the engine which requests begin, before their prompts are computed, and that no step follows"),
    Patch("runner", _RUNNER, "_input_fits_in_drafter", runner.input_fits_in_drafter,
          "drafts go on near max_model_len, cut row by row"),
    Patch("runner", _RUNNER, "_calc_spec_decode_metadata", cheap_steps.calc_spec_decode_metadata,
          "makes the metadata of a step without drafts once"),
    Patch("runner", _RUNNER, "_sample", cheap_steps.sample,
          "leaves out the rejection sampler where nothing was drafted"),
    Patch("runner", _RUNNER, "sample_tokens", cheap_steps.sample_tokens,
          "tells the engine core that nothing was drafted"),
    Patch("runner", _RUNNER, "take_draft_token_ids", cheap_steps.take_draft_token_ids,
          "hands no empty drafts to the scheduler"),
    Patch("runner", _RUNNER, "uniform_decode_query_len", cuda_graphs.configured_query_len,
          "recognises steps without drafts, and captures full graphs for them", adds=True),
    Patch("runner", _GRAPHS, "uniform_decode_query_len", cuda_graphs.configured_query_len,
          "picks full graphs for steps without drafts", adds=True),
    Patch("runner", _RUNNER, "_check_and_update_cudagraph_mode", cuda_graphs.check_and_update_cudagraph_mode,
          "captures full graphs for steps with drafts"),
    Patch("runner", _RUNNER, "_build_attention_metadata", cuda_graphs.build_attention_metadata,
          "prepares the replay of full graphs with drafts as they were captured"),
    Patch("runner", _SAMPLER, "forward", sampling_faults.named_logprobs,
          "returns the log probabilities of logprob_token_ids; vLLM returns none, or ends the engine"),
    Patch("runner", _SAMPLER, "forward", sampling_faults.min_tokens_behind_drafts,
          "counts drafts towards min_tokens at the token behind them"),
    Patch("runner", _THINKING, "update_state", sampling_faults.update_thinking,
          "counts thinking beside drafts as without"),
    Patch("runner", _THINKING, "apply_to_logits", sampling_faults.force_end_of_thinking,
          "ends it in the right row and at the right token"),
    Patch("runner", _SAMPLER, "forward", cpu.verify,
          "reads greedy choices without copies of the logits", cpu_only=True),
)
# fmt: on


def install(patches: Sequence[Patch]) -> None:
    """Install patches. A second call changes nothing."""
    for patch in patches:
        patch.install()


def current_patches() -> list[Patch]:
    """Return the patches of the installed version of vLLM."""
    import vllm

    release = _release_of(vllm.__version__)
    return [patch for patch in PATCHES if patch.since <= release <= patch.until]


def check_version(version: str) -> None:
    """Raise UnsupportedEngineError unless ``version`` is one that the patches were written for."""
    if not OLDEST_VERSION <= _release_of(version) <= NEWEST_VERSION:
        oldest, newest = (".".join(map(str, release)) for release in (OLDEST_VERSION, NEWEST_VERSION))
        raise UnsupportedEngineError(
            f"vLLM {version} is not supported: agentspec works with vLLM {oldest} to {newest}; "
            f'install it, e.g. pip install "vllm=={newest}.*"'
        )


def _release_of(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; an empty tuple if it does not begin with numbers."""
    try:
        return tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        return ()


def check_engine(vllm_config: Any) -> None:
    """Raise UnsupportedEngineError for a vLLM version that is not supported, or for pipeline parallelism."""
    import vllm

    check_version(vllm.__version__)
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedEngineError(
            f"pipeline_parallel_size={parallel.pipeline_parallel_size}: vLLM's V1 engine cannot verify drafts over "
            "several pipeline stages; use tensor parallelism, or serve without agentspec"
        )
