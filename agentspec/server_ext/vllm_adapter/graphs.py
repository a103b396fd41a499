"""CUDA graphs for ragged drafts: a step without drafts runs as in vLLM without speculation.

vLLM expects every row of a decode step to have the same number of tokens, 1 + ``num_speculative_tokens``. It rounds all
graph sizes up to multiples of that, and keeps the full decode graphs for steps in which every row has exactly so many.
Drafts of agentspec are ragged and often missing: with 128 tokens, a step of one row without a draft would be padded to
129 and never meet a full graph. So where agentspec drafts, the uniform length is 1. Full graphs are then captured for
steps without drafts, and a step with drafts takes the piecewise graph of the next default size.

vLLM asks for the length in three places, and each is told in the process where it runs:

``VllmConfig``           chooses the sizes, where the engine's arguments are read (API server, ``LLM``): general plugin
``GPUModelRunner``       recognises steps without drafts, and captures: worker, with the drafter
``CudagraphDispatcher``  picks the graph: worker, with the drafter

Models with a state for each draft token keep vLLM's length: the builders of their metadata capture graphs for
1 + ``num_speculative_tokens`` tokens a row only. docs/engine-limits.md has the details.
"""

import functools
from collections.abc import Callable
from typing import Any

from agentspec.server_ext.vllm_adapter.callers import uses_agentspec
from agentspec.server_ext.vllm_adapter.draft_limit import keeps_states


def drafts_are_ragged(vllm_config: Any) -> bool:
    """Return whether the uniform decode length of this engine is 1 although it drafts."""
    return uses_agentspec(vllm_config) and not keeps_states(vllm_config.model_config)


def patch_graph_sizes() -> None:
    """Let vLLM's configuration choose graph sizes for ragged drafts; doing it again changes nothing."""
    from vllm.config import VllmConfig

    original = VllmConfig.uniform_decode_query_len
    if getattr(original.fget, "_agentspec_hooked", False):
        return

    @functools.wraps(original.fget)
    def uniform_decode_query_len(self: Any) -> int:
        return 1 if drafts_are_ragged(self) else int(original.fget(self))

    uniform_decode_query_len._agentspec_hooked = True  # type: ignore[attr-defined]
    VllmConfig.uniform_decode_query_len = property(uniform_decode_query_len)
    VllmConfig._set_cudagraph_sizes = _wrap_sizes(VllmConfig._set_cudagraph_sizes)


def patch_graph_dispatch(runner_class: Any) -> None:
    """Let vLLM's model runner and its dispatcher take the length from the configuration, once it is patched there.

    Both set it in their constructors, from the number of draft tokens; what they set is passed over. Called from the
    drafter's constructor, which vLLM's runner calls before it sets its own.
    """
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    for owner in (runner_class, CudagraphDispatcher):
        owner.uniform_decode_query_len = property(_length_of_config, _pass_over)


def _length_of_config(self: Any) -> int:
    return int(self.vllm_config.uniform_decode_query_len)


def _pass_over(self: Any, value: int) -> None:
    del self, value


def _wrap_sizes(method: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(method)
    def _set_cudagraph_sizes(self: Any) -> None:
        compilation = self.compilation_config
        default = compilation.max_cudagraph_capture_size is None and compilation.cudagraph_capture_sizes is None
        method(self)
        if default and compilation.cudagraph_capture_sizes and drafts_are_ragged(self):
            _add_sizes_for_drafts(self)

    return _set_cudagraph_sizes


def _add_sizes_for_drafts(vllm_config: Any) -> None:
    """Add the default sizes above those for steps without drafts, as far as drafts can reach.

    vLLM stops at twice the number of rows, where a step without speculation cannot have more. Its platform's limit and
    ``max_num_batched_tokens`` hold as ever.
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
