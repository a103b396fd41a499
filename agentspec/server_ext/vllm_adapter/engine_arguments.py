"""Read the arguments of an engine: what excludes drafts, how long drafts may be, and what drafts.

vLLM refuses what excludes a drafter on the host too, but at the end of a traceback, some of it not before the model is
loaded. It is told the longest draft before it makes its configuration. Where the user gives no number, the model
decides.
"""

import logging
import os
from collections.abc import Mapping
from math import prod
from types import SimpleNamespace
from typing import Any

from agentspec.cache.policy import MAX_DRAFT
from agentspec.errors import ConfigurationError
from agentspec.server_ext.settings import Settings

logger = logging.getLogger("vllm.agentspec")

STATE_SHARE = 0.25
LEAST_STATES, MOST_STATES = 4, 16


def conflict(engine_args: Any, model_config: Any, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why this engine cannot draft with agentspec, and the remedy. None: it can.

    model_config: vLLM's ModelConfig of the served model.
    """
    if environ.get("VLLM_USE_V2_MODEL_RUNNER", "").strip().lower() in ("1", "true"):
        return "VLLM_USE_V2_MODEL_RUNNER=1: agentspec drafts in vLLM's V1 model runner only; unset the variable"
    if getattr(engine_args, "async_scheduling", None):
        return (
            "--async-scheduling: agentspec drafts from the tokens of the step before, which asynchronous scheduling "
            "doesn't wait for; leave the option out"
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


def on_cpu() -> bool:
    """Return whether vLLM serves on a CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def schedule_synchronously(engine_args: Any, model_config: Any) -> None:
    """Switch asynchronous scheduling off: the suffix indexes need each step's tokens before they draft.

    Raises ConfigurationError with the remedy where an option or the model excludes drafts.
    """
    if (reason := conflict(engine_args, model_config)) is not None:
        raise ConfigurationError(reason)
    engine_args.async_scheduling = False


def describe(settings: Settings, method: str | None, longest: int, *, has_keys: bool | None = None) -> str:
    """Return one line that says what drafts, how far, at what price, and who drafts from whose answers.

    method: the draft model beside the suffix indexes; None: there is none. longest: of one draft, in tokens. has_keys:
    whether vLLM's server checks API keys; None: there is no server, so there are no callers.
    """
    if not settings.enabled:
        return "switched off (enabled: false), no drafts"
    sources = {"tenant": "session, group, tenant", "session": "session, family", "none": "own text"}[settings.scope]
    index = f"suffix index ({sources})"
    rule = settings.arctic_suffix_rule
    if rule is not None and rule.max_spec_factor == rule.max_spec_offset == 0:
        index = ""
    elif rule is not None:
        index += " by ArcticInference's rule"
    price = "measured" if settings.verify_cost is None else f"{settings.verify_cost:g}"
    drafters = " + ".join(part for part in (index, method) if part)
    line = f"{drafters}, up to {longest} tokens, price {price}"
    return line if has_keys is None else f"{line}; {_who_shares(settings, has_keys)}"


def _who_shares(settings: Settings, has_keys: bool) -> str:
    told_apart = has_keys or settings.principal_header is not None or settings.api_keys_file is not None
    if settings.scope == "none":
        return "each request drafts from its own text alone"
    if settings.scope == "session":
        whose = "for its principal" if told_apart else "whoever names it, --api-key separates callers"
        return f"each session drafts from itself, its parent and children alone, {whose}"
    if settings.tenant is not None:
        sessions = "but not sessions" if told_apart else "--api-key keeps sessions apart"
        return f"all callers of tenant {settings.tenant!r} share answers, {sessions}"
    if settings.tenant_header or settings.api_keys_file:
        return "shared within each tenant"
    if settings.principal_header:
        return "shared within each principal"
    return "shared within each API key" if has_keys else "shared by all callers, --api-key separates them"


def keeps_states(model_config: Any) -> bool:
    """Return whether vLLM keeps a state for each draft token of this model. model_config: vLLM's ModelConfig."""
    return bool(model_config.is_hybrid or model_config.is_attention_free)


def default_draft_limit(engine_args: Any, model_config: Any, parallel_config: Any) -> int:
    """Return the longest draft of a request, in tokens, that suits the model.

    An attention layer can forget rejected draft tokens, so drafts cost it no memory, and the limit is what vLLM's
    rejection sampler verifies: MAX_DRAFT. A layer with a recurrent state (Mamba, gated delta net, linear attention,
    short convolution) cannot go back. vLLM keeps a state for each draft token of each request there
    (``num_speculative_blocks``), whether it is drafted or not. Such a model gets the largest K for which the K states
    of a request take at most STATE_SHARE of what the cache holds for a request of ``max_model_len`` tokens, between
    LEAST_STATES and MOST_STATES. A model without any attention layer holds nothing else, and gets LEAST_STATES.

    With LoRA adapters vLLM wants ``max_num_batched_tokens`` to hold a whole draft for each of ``max_num_seqs``
    requests, and the limit is what those two numbers leave.

    engine_args: vLLM's EngineArgs, which say in what precision states are kept. model_config, parallel_config: vLLM's.
    """
    by_states = by_adapters = MAX_DRAFT
    if keeps_states(model_config):
        by_states = _limit_by_states(engine_args, model_config, parallel_config)
        _log_limit(by_states, "vLLM keeps a state of this model for each draft token")
    if engine_args.enable_lora:
        by_adapters = _limit_by_adapters(engine_args)
    if by_adapters < by_states:
        _log_limit(by_adapters, "with LoRA, max_num_batched_tokens must hold a draft for each of max_num_seqs requests")
    return min(by_states, by_adapters)


def _log_limit(limit: int, reason: str) -> None:
    logger.info(
        "agentspec: drafts have at most %d tokens, because %s; num_speculative_tokens (--max-draft) sets another limit",
        limit,
        reason,
    )


def _limit_by_adapters(engine_args: Any) -> int:
    """Return how many tokens a draft may have with LoRA adapters. Where vLLM's limits aren't set, use its lowest."""
    workers = engine_args.pipeline_parallel_size * engine_args.tensor_parallel_size
    tokens, requests = engine_args.get_batch_defaults(workers)
    each = [
        (engine_args.max_num_batched_tokens or tokens[usage]) // (engine_args.max_num_seqs or requests[usage])
        for usage in tokens
    ]
    return int(min(max(min(each) - 1, 1), MAX_DRAFT))


def _limit_by_states(engine_args: Any, model_config: Any, parallel_config: Any) -> int:
    try:
        return _largest_by_states(engine_args, model_config, parallel_config)
    except Exception:  # each architecture describes its states in its own code
        logger.debug("agentspec: the size of the model's states is not known", exc_info=True)
        return LEAST_STATES


def _largest_by_states(engine_args: Any, model_config: Any, parallel_config: Any) -> int:
    attention_layers = model_config.get_num_layers_by_block_type(parallel_config, "attention")
    state_layers = model_config.get_num_layers(parallel_config) - attention_layers
    heads, head_size = model_config.get_num_kv_heads(parallel_config), model_config.get_head_size()
    keys_and_values = 1 if model_config.use_mla else 2
    number_bytes = 1 if str(engine_args.kv_cache_dtype).startswith("fp8") else int(model_config.dtype.itemsize)
    token_bytes = attention_layers * keys_and_values * heads * head_size * number_bytes
    allowed = STATE_SHARE * token_bytes * model_config.max_model_len
    limit = LEAST_STATES
    for tokens in range(LEAST_STATES, MOST_STATES + 1):  # one state may grow with the number of draft tokens
        state = _state_bytes(engine_args, model_config, parallel_config, tokens)
        if tokens * state * state_layers <= allowed:
            limit = tokens
    return limit


def _state_bytes(engine_args: Any, model_config: Any, parallel_config: Any, draft_tokens: int) -> int:
    """Return the bytes of one state of one layer, as the model's class describes it for that many draft tokens."""
    config = SimpleNamespace(  # what those descriptions read of a VllmConfig, which does not exist yet
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
