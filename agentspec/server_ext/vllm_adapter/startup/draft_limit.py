"""Choose the longest draft by model, where the user gives no number, and find how many draft tokens a step can hold.

vLLM is told the longest draft before it makes its configuration. docs/engine-limits.md says what a long draft costs.
"""

import logging
import os
from contextlib import suppress
from copy import copy
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agentspec.cache.policy import MAX_DRAFT
from agentspec.server_ext.pricing import EngineLimits

logger = logging.getLogger("vllm.agentspec")

STATE_SHARE = 0.25
LEAST_STATES, MOST_STATES = 4, 16
_LOGITS_COPIES = 4
"""Float32 copies of a position's logits that vLLM's rejection sampler holds at once: all logits, the target's, a clone
kept for logprobs, and the softmax under random sampling."""
_LOGITS_COPIES_SORTED = 8
"""Copies without Triton, where top-p sorts the logits too: values, 64-bit indices (two) and the values' softmax."""
_FREE_ON_HOST = 0.25
"""Share of the host's memory that counts as free where the device is the CPU."""
_CONTAINER_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Files below /sys/fs/cgroup with a container's memory limit, of cgroup v2 and v1. v2's says "max" where there is none.
"""


def keeps_states(model_config: Any) -> bool:
    """Return whether vLLM keeps a state for each draft token of this model. model_config: vLLM's ModelConfig."""
    return bool(model_config.is_hybrid or model_config.is_attention_free)


def default_draft_limit(engine_args: Any, model_config: Any, parallel_config: Any) -> int:
    """Return the longest draft of a request, in tokens, that suits the model.

    An attention layer can forget rejected draft tokens, so drafts cost it no memory, and the limit is the most that
    vLLM's rejection sampler verifies: MAX_DRAFT. A layer with a recurrent state (Mamba, gated delta net, linear
    attention, short convolution) cannot go back. vLLM keeps a state for each draft token of each request there
    (``num_speculative_blocks``), whether it is drafted or not. A model with such layers gets the largest K, between
    LEAST_STATES and MOST_STATES, for which the K states of a request take at most STATE_SHARE of the request's KV cache
    at ``max_model_len`` tokens. A model without any attention layer has no KV cache, and gets LEAST_STATES.

    With LoRA adapters vLLM wants ``max_num_batched_tokens`` to hold a whole draft for each of ``max_num_seqs``
    requests, so the limit is also at most the first number over the second, less one.

    engine_args: vLLM's EngineArgs, which give the precision of the states. model_config, parallel_config: vLLM's.
    """
    by_states = by_adapters = MAX_DRAFT
    if keeps_states(model_config):
        by_states = _limit_by_states(engine_args, model_config, parallel_config)
        _log_limit(by_states, "vLLM keeps a state of this model for each draft token")
    if engine_args.enable_lora:
        by_adapters = min(max(tokens_a_request(engine_args, model_config, parallel_config) - 1, 1), MAX_DRAFT)
    if by_adapters < by_states:
        _log_limit(by_adapters, "with LoRA, max_num_batched_tokens must hold a draft for each of max_num_seqs requests")
    return min(by_states, by_adapters)


def _log_limit(limit: int, reason: str) -> None:
    logger.info(
        "agentspec: drafts have at most %d tokens, because %s; num_speculative_tokens (--max-draft) sets another limit",
        limit,
        reason,
    )


def tokens_a_request(engine_args: Any, model_config: Any, parallel_config: Any) -> int:
    """Return how many tokens a step has for each request: ``max_num_batched_tokens`` over ``max_num_seqs``.

    vLLM chooses the limits that the user left out later, by how it is used. Assume the use that allows least.
    engine_args, model_config, parallel_config: vLLM's.
    """
    workers = engine_args.pipeline_parallel_size * engine_args.tensor_parallel_size
    each = []
    for usage in engine_args.get_batch_defaults(workers)[0]:
        chosen = copy(engine_args)
        chosen._set_default_max_num_seqs_and_batched_tokens_args(usage, model_config, parallel_config)
        each.append(chosen.max_num_batched_tokens // max(chosen.max_num_seqs, 1))
    return int(min(each))


def _limit_by_states(engine_args: Any, model_config: Any, parallel_config: Any) -> int:
    try:
        return _largest_by_states(engine_args, model_config, parallel_config)
    except Exception:  # each architecture describes its states in code of its own, which may raise anything
        logger.debug("agentspec: the size of the model's states is not known", exc_info=True)
        return LEAST_STATES


def _largest_by_states(engine_args: Any, model_config: Any, parallel_config: Any) -> int:
    """Return the largest K by the rule of `default_draft_limit`. Raises any error that the model's class raises."""
    attention_layers = model_config.get_num_layers_by_block_type(parallel_config, "attention")
    state_layers = model_config.get_num_layers(parallel_config) - attention_layers
    heads, head_size = model_config.get_num_kv_heads(parallel_config), model_config.get_head_size()
    keys_and_values = 1 if model_config.use_mla else 2
    number_bytes = 1 if str(engine_args.kv_cache_dtype).startswith("fp8") else int(model_config.dtype.itemsize)
    token_bytes = attention_layers * keys_and_values * heads * head_size * number_bytes
    allowed = STATE_SHARE * token_bytes * model_config.max_model_len
    limit = LEAST_STATES
    for tokens in range(LEAST_STATES, MOST_STATES + 1):  # each state may grow with the number of draft tokens
        state = _state_bytes(engine_args, model_config, parallel_config, tokens)
        if tokens * state * state_layers <= allowed:
            limit = tokens
    return limit


def _state_bytes(engine_args: Any, model_config: Any, parallel_config: Any, draft_tokens: int) -> int:
    """Return the bytes of one state of one layer, as the model's class describes it for that many draft tokens."""
    config = SimpleNamespace(  # has the fields that those descriptions read of a VllmConfig, which does not exist yet
        model_config=model_config,
        parallel_config=parallel_config,
        speculative_config=SimpleNamespace(num_speculative_tokens=draft_tokens),
        num_speculative_tokens=draft_tokens,
        cache_config=SimpleNamespace(
            cache_dtype=engine_args.kv_cache_dtype,
            mamba_cache_dtype=engine_args.mamba_cache_dtype,
            mamba_ssm_cache_dtype=engine_args.mamba_ssm_cache_dtype,
            use_replayssm=False,
            use_kda_recoverssm=False,
        ),
    )
    model, _ = model_config.registry.resolve_model_cls(model_config.architectures, model_config=model_config)
    shapes, types = model.get_mamba_state_shape_from_config(config), model.get_mamba_state_dtype_from_config(config)
    return sum(prod(shape) * int(dtype.itemsize) for shape, dtype in zip(shapes, types, strict=True))


def engine_limits(vllm_config: Any) -> EngineLimits:
    """Return the memory and the tokens that vLLM leaves for drafts on its device.

    On CUDA the memory outside ``gpu_memory_utilization`` is free, and vLLM has reserved memory for one draft token of
    each of ``max_num_seqs`` rows, because its profiling run sampled that many. With ``kv_cache_memory_bytes``, which
    vLLM follows instead, nothing counts as free. Elsewhere a share of the host's memory does, and none is reserved.
    """
    from vllm.platforms import current_platform

    scheduler = vllm_config.scheduler_config
    if current_platform.is_cuda_alike():
        cache = vllm_config.cache_config
        given = getattr(cache, "kv_cache_memory_bytes", None)
        unclaimed = 0.0 if given else 1.0 - cache.gpu_memory_utilization
        free, copies = unclaimed * current_platform.get_device_total_memory(), _LOGITS_COPIES
        provided = scheduler.max_num_seqs
    else:
        free, copies, provided = _FREE_ON_HOST * host_memory(), _LOGITS_COPIES_SORTED, 0
    return EngineLimits(
        free_bytes=int(free),
        position_bytes=4 * copies * vllm_config.model_config.get_vocab_size(),
        provided_tokens=provided,
        scheduled_tokens=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
    )


def host_memory(limits: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory of this host in bytes, or of this container if it may have less. limits: where it says so."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in _CONTAINER_LIMITS:
        with suppress(OSError, ValueError):
            memory = min(memory, int((limits / name).read_text()))
    return memory
