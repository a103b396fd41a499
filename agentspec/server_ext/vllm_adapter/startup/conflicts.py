"""Name the options and models that exclude drafts, each with the remedy.

vLLM refuses most of these, too, but at the end of a traceback, and some only after it has loaded the model.
"""

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from agentspec.server_ext.arctic_methods import METHODS
from agentspec.server_ext.vllm_adapter.startup.draft_limit import keeps_states, tokens_a_request
from agentspec.server_ext.vllm_adapter.startup.given_method import is_own, named_drafter
from agentspec.server_ext.vllm_adapter.worker.cpu import on_cpu

_PLUGINS = "vllm.logits_processors"
"""Entry points by which packages add logits processors to vLLM."""


def conflict(
    engine_args: Any, model_config: Any, parallel_config: Any, environ: Mapping[str, str] = os.environ
) -> str | None:
    """Return why this engine cannot draft with agentspec, and the remedy. None: it can.

    engine_args, model_config, parallel_config: vLLM's, of the served model.
    """
    if environ.get("VLLM_USE_V2_MODEL_RUNNER", "").strip().lower() in ("1", "true"):
        return "VLLM_USE_V2_MODEL_RUNNER=1: agentspec drafts in vLLM's V1 model runner only; unset the variable"
    if (what := _needs_other_runner(engine_args, model_config, parallel_config)) is not None:
        return (
            f"{what}: only vLLM's V2 model runner has that, and agentspec drafts in the V1 model runner; leave it out, "
            "or start plain 'vllm serve'"
        )
    if environ.get("VLLM_USE_RUST_FRONTEND", "").strip() not in ("", "0") and is_server(engine_args):
        return (
            "VLLM_USE_RUST_FRONTEND: agentspec finds out who sent a request in vLLM's Python server only, so a caller "
            "could pass for another one; unset the variable"
        )
    if getattr(engine_args, "async_scheduling", None):
        return (
            "--async-scheduling: agentspec drafts from the tokens of the step before, which asynchronous scheduling "
            "doesn't wait for; leave the option out"
        )
    launcher = getattr(engine_args, "distributed_executor_backend", None)
    if launcher == "external_launcher" and engine_args.tensor_parallel_size > 1:
        return (
            "--distributed-executor-backend external_launcher with --tensor-parallel-size: each rank schedules by "
            "itself there, and agentspec drafts on the first one only; use one rank an engine, or another backend"
        )
    if (plugins := _dropped_plugins(engine_args)) is not None:
        return (
            f"logits processors of installed packages ({plugins}): vLLM runs none with speculative decoding; uninstall "
            "them, or start plain 'vllm serve'"
        )
    if getattr(engine_args, "enable_lora", False) and tokens_a_request(engine_args, model_config, parallel_config) < 2:
        return (
            "--enable-lora: vLLM wants --max-num-batched-tokens to hold two tokens for each of --max-num-seqs requests "
            "with any speculative decoding; raise the first or lower the second"
        )
    if getattr(engine_args, "logits_processors", None):
        return (
            "--logits-processors: vLLM runs no custom logits processors with speculative decoding; leave the option "
            "out, or start plain 'vllm serve'"
        )
    if keeps_states(model_config) and on_cpu():
        return (
            f"{model_config.architectures[0]} on a CPU: with any speculative decoding vLLM's CPU build ends at a model "
            "with recurrent states, or answers other text; start plain 'vllm serve'"
        )
    return None


def _needs_other_runner(engine_args: Any, model_config: Any, parallel_config: Any) -> str | None:
    """Return the option or model that only vLLM's V2 model runner serves; None: there is none."""
    attention = getattr(engine_args, "attention_config", None)
    needs = {
        "--return-sampling-mask": getattr(engine_args, "return_sampling_mask", None),
        "--enable-trace-replay": getattr(engine_args, "enable_trace_replay", None),
        "--watermark-config": getattr(engine_args, "watermark_config", None),
        "--attention-config with hisparse_config": getattr(attention, "hisparse_config", None),
        "--prefill-context-parallel-size": getattr(parallel_config, "prefill_context_parallel_size", 1) > 1,
        "--enable-batch-sharded-sampling": getattr(parallel_config, "enable_batch_sharded_sampling", None),
        "a diffusion model": getattr(model_config, "is_diffusion", False),
    }
    return next((what for what, asked in needs.items() if asked), None)


def _dropped_plugins(engine_args: Any) -> str | None:
    """Return the logits processors that vLLM would run without agentspec, and doesn't with it; None: there are none."""
    named = named_drafter(engine_args)
    if named is not None and named not in METHODS and not is_own(engine_args):
        return None  # vLLM drops them for its own methods, too
    return ", ".join(sorted(plugin.name for plugin in entry_points(group=_PLUGINS))) or None


def is_server(engine_args: Any) -> bool:
    """Return whether these are the options of a server's engine, rather than of an ``LLM``'s."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return isinstance(engine_args, AsyncEngineArgs)
