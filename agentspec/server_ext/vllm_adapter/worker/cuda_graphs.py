"""Choose CUDA graphs for steps whose rows have drafts of different lengths, or none.

vLLM expects every row of a decode step to have 1 + num_speculative_tokens tokens. It rounds all graph sizes up to
multiples of that, and keeps the full decode graphs for steps in which every row has exactly that many. With 128 draft
tokens, a step of one row without a draft would be padded to 129 tokens and never meet a full graph. So where agentspec
drafts, the uniform length is 1, and full decode graphs are captured for steps without drafts.

A step with drafts would then run piecewise: attention outside the graphs, launched layer by layer, which keeps the host
busy for longer than the device. Where attention can replay a batch of any shape (FlashAttention 3, Triton), full graphs
are captured for such steps too. Models with a state for each draft token keep vLLM's graphs: the builders of their
metadata capture graphs for that many tokens a row only.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from agentspec.server_ext.vllm_adapter.startup.draft_limit import keeps_states
from agentspec.server_ext.vllm_adapter.startup.speculative_config import uses_agentspec


def drafts_are_ragged(vllm_config: Any) -> bool:
    """Return whether the uniform decode length of this engine is 1 although it drafts."""
    return uses_agentspec(vllm_config) and not keeps_states(vllm_config.model_config)


def uniform_decode_query_len(original: Callable[[Any], int], vllm_config: Any) -> int:
    """Return how many tokens each row has in the steps for which vLLM captures full decode graphs."""
    return 1 if drafts_are_ragged(vllm_config) else int(original(vllm_config))


def _length_of_config(holder: Any) -> int:
    config = holder.vllm_config
    return 1 if drafts_are_ragged(config) else 1 + int(config.num_speculative_tokens)


def _ignore(holder: Any, value: int) -> None:
    del holder, value


configured_query_len = property(_length_of_config, _ignore)
"""Uniform decode length of the engine, in tokens, for vLLM's model runner and graph dispatcher. Both set it in their
constructors from the number of draft tokens; the property ignores that."""


def set_cudagraph_sizes(original: Callable[[Any], None], vllm_config: Any) -> None:
    """Add graph sizes for steps with drafts, unless the user chose the sizes."""
    compilation = vllm_config.compilation_config
    default = compilation.max_cudagraph_capture_size is None and compilation.cudagraph_capture_sizes is None
    original(vllm_config)
    if default and compilation.cudagraph_capture_sizes and drafts_are_ragged(vllm_config):
        _add_sizes_for_drafts(vllm_config)


def _add_sizes_for_drafts(vllm_config: Any) -> None:
    """Add the default graph sizes, in tokens, that steps with drafts can reach.

    vLLM's own sizes stop at twice the number of rows, as without speculation. The platform's limit and
    ``max_num_batched_tokens`` still hold.
    """
    from vllm.platforms import current_platform

    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    longest = 1024 if current_platform.is_device_capability_family(100) else 512
    reach = scheduler.max_num_seqs * (1 + vllm_config.num_speculative_tokens)
    largest = min(2 * reach, longest, scheduler.max_num_batched_tokens)
    present = compilation.cudagraph_capture_sizes
    grid = [*range(8, 256, 8), *range(256, longest + 1, 16)]
    added = [size for size in grid if present[-1] < size <= largest]
    if added:
        compilation.cudagraph_capture_sizes = [*present, *added]
        compilation.max_cudagraph_capture_size = added[-1]


def check_and_update_cudagraph_mode(
    original: Callable[..., None],
    runner: Any,
    attention_backends: Iterable[Iterable[Any]],
    kv_cache_groups: Iterable[Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Let vLLM choose its graphs, then register full graphs for steps with drafts if attention can replay any batch."""
    groups, backends = list(kv_cache_groups), [list(backends) for backends in attention_backends]
    original(runner, backends, groups, *args, **kwargs)
    specs = [(backend, group.kv_cache_spec) for of, group in zip(backends, groups, strict=False) for backend in of]
    if may_replay_drafts(runner.vllm_config) and all(_replays_any_batch(runner.vllm_config, *spec) for spec in specs):
        capture_drafts(runner.cudagraph_dispatcher)


def may_replay_drafts(vllm_config: Any) -> bool:
    """Return whether steps with drafts may run as full graphs, if the attention backends can replay them.

    Data-parallel ranks agree on one kind of graph and one size for each step, which must exist on all of them whatever
    their rows drafted. So they keep vLLM's graphs. Engines that split a batch in other ways, models with an encoder,
    and models that attend to an image in both directions keep them, too.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    return (
        drafts_are_ragged(vllm_config)
        and parallel.data_parallel_size == 1
        and parallel.decode_context_parallel_size == 1
        and not parallel.use_ubatching
        and not model.is_encoder_decoder
        and not model.is_mm_prefix_lm
    )


def _replays_any_batch(vllm_config: Any, backend: Any, kv_cache_spec: Any) -> bool:
    from vllm.v1.attention.backend import AttentionCGSupport

    support = backend.get_builder_cls().get_cudagraph_support(vllm_config, kv_cache_spec)
    return bool(support is AttentionCGSupport.ALWAYS)


def capture_drafts(dispatcher: Any) -> None:
    """Replace the piecewise graphs of vLLM's default mode by full graphs of the same sizes.

    Full decode graphs remain for steps in which every row has one token. Other modes are the user's choice and are
    left alone.
    """
    from vllm.config import CUDAGraphMode

    if dispatcher.cudagraph_mode != CUDAGraphMode.FULL_AND_PIECEWISE:
        return
    rows = dispatcher.vllm_config.scheduler_config.max_num_seqs
    piecewise = dispatcher.cudagraph_keys[CUDAGraphMode.PIECEWISE]
    dispatcher.cudagraph_keys[CUDAGraphMode.FULL].update(
        dataclasses.replace(size, num_reqs=min(size.num_tokens, rows)) for size in piecewise
    )
    piecewise.clear()


def build_attention_metadata(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepare the replay of a step with drafts for the longest row that its graph was captured for.

    A graph for n tokens was captured as if one row might have all n. The values that a backend derives from the longest
    row, such as the size of its tiles, must be the same in the replay.
    """
    padded = kwargs.get("num_tokens_padded")  # None unless the step runs as a full graph
    if padded is not None and kwargs["max_query_len"] > 1 and drafts_are_ragged(runner.vllm_config):
        kwargs["max_query_len"] = padded
    return original(runner, *args, **kwargs)
