"""Keep a step as cheap as in vLLM without speculation, however long a draft may be.

vLLM sizes graphs, buffers and work by ``num_speculative_tokens``, as if every row drafted that many tokens in every
step. Drafts of agentspec are ragged and often missing. docs/engine-limits.md has the details.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agentspec.server_ext.vllm_adapter.draft_limit import keeps_states
from agentspec.server_ext.vllm_adapter.native_methods import drafter_tokens
from agentspec.server_ext.vllm_adapter.runner import extension_of
from agentspec.server_ext.vllm_adapter.speculative_config import uses_agentspec

_NO_DRAFTS = "agentspec_no_drafts"
"""Attribute of the model runner's output, and then of the scheduler: True after a step that drafted nothing."""


# --- Steps without any draft. vLLM would run its rejection sampler over the whole vocabulary although there is nothing
# --- to verify, and send an empty draft for every row.


def calc_spec_decode_metadata(
    original: Callable[..., Any], runner: Any, num_draft_tokens: Any, cu_num_scheduled_tokens: Any
) -> Any:
    """Build the metadata of a step without drafts, skipping vLLM's array work."""
    if extension_of(runner) is None or any(num_draft_tokens.tolist()):
        return original(runner, num_draft_tokens, cu_num_scheduled_tokens)
    return metadata_without_drafts(cu_num_scheduled_tokens, runner.device)


def metadata_without_drafts(cu_num_scheduled_tokens: Any, device: Any) -> Any:
    """Return the metadata that vLLM would compute for n rows without drafts: one logit a row, at its last token."""
    rows = len(cu_num_scheduled_tokens)
    decoding = _decode_metadata(rows, device)
    if int(cu_num_scheduled_tokens[-1]) == rows:
        return decoding
    import torch

    indices = torch.from_numpy(cu_num_scheduled_tokens - 1).to(device, non_blocking=True)
    return dataclasses.replace(decoding, logits_indices=indices)


@functools.cache
def _decode_metadata(rows: int, device: Any) -> Any:
    """Return the metadata of a step in which every row decodes one token. Cached per batch size and device."""
    import torch
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    none = torch.empty(0, dtype=torch.int32, device=device)
    counts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    return SpecDecodeMetadata(
        draft_token_ids=none,
        num_draft_tokens=[0] * rows,
        cu_num_draft_tokens=torch.zeros(rows, dtype=torch.int32, device=device),
        cu_num_sampled_tokens=counts[1:],
        target_logits_indices=none,
        bonus_logits_indices=counts[:-1],
        logits_indices=counts[:-1],
    )


def sample(original: Callable[..., Any], runner: Any, logits: Any, spec_decode_metadata: Any) -> Any:
    """Sample a step without drafts as vLLM does without speculation."""
    nothing = spec_decode_metadata is not None and spec_decode_metadata.max_spec_len == 0
    if nothing and extension_of(runner) is not None:
        spec_decode_metadata = None
    return original(runner, logits, spec_decode_metadata)


def take_draft_token_ids(original: Callable[..., Any], runner: Any) -> Any:
    """Return None, which vLLM knows as "no news", in place of an empty draft for every row.

    The scheduler removed each request's draft when it scheduled the request, so there is nothing left to replace. Under
    asynchronous scheduling vLLM's answer also fills in placeholders, so it is left alone.
    """
    return None if _drafted_nothing(runner) else original(runner)


def sample_tokens(original: Callable[..., Any], runner: Any, *args: Any) -> Any:
    """Note in the runner's output that it drafted nothing, so that the engine core need not ask."""
    output = original(runner, *args)
    if _drafted_nothing(runner) and output.req_ids:  # without requests vLLM may return a constant that steps share
        setattr(output, _NO_DRAFTS, True)
    return output


def _drafted_nothing(runner: Any) -> bool:
    """Return whether the runner's latest step left every row without a draft. False under asynchronous scheduling."""
    extension = extension_of(runner)
    return extension is not None and extension.drafted_nothing and not runner.use_async_scheduling


def update_from_output(
    original: Callable[..., Any], scheduler: Any, scheduler_output: Any, model_runner_output: Any
) -> Any:
    """Note for ``post_step``, which does not get the runner's output, whether the step drafted nothing.

    Where vLLM counts each request's drafts, put these figures into every output of a request with stop texts. vLLM
    sends them only when the engine ends a request, but stop texts are found by the API server.
    """
    setattr(scheduler, _NO_DRAFTS, getattr(model_runner_output, _NO_DRAFTS, False))
    outputs = original(scheduler, scheduler_output, model_runner_output)
    if getattr(scheduler, "spec_decode_metrics_level", "none") != "none":
        for output in (output for client in outputs.values() for output in client.outputs):
            request = scheduler.requests.get(output.request_id)
            if request is not None and request.sampling_params is not None and request.sampling_params.stop:
                output.spec_decode_metrics = request.spec_decode_metrics
    return outputs


def post_step(original: Callable[..., None], core: Any, model_executed: bool) -> None:
    """Leave out the round trip that fetches drafts from the worker if the step drafted nothing.

    The worker hears of finished requests with the next step. An engine in the caller's process would run that step
    with its next request, which may never come, so run it at once. It computes no token. An engine core in a process
    of its own does this by itself.
    """
    if not getattr(core.scheduler, _NO_DRAFTS, False):
        original(core, model_executed)
    of_caller = not hasattr(core, "output_queue") and core.batch_queue is None and uses_agentspec(core.vllm_config)
    if of_caller and core.scheduler.has_finished_requests() and not core.scheduler.has_unfinished_requests():
        core.step()


# --- Requests with one token left to compute: those that resume, or whose prompt is in the prefix cache but for one
# --- token. vLLM pads such a row with num_speculative_tokens placeholders, so that it fits a full CUDA graph for drafts
# --- of one length. agentspec's drafts are ragged, so the placeholders gain nothing, and cost a forward pass over 129
# --- tokens. If max_num_batched_tokens is smaller, vLLM waits for room that never comes, and no request runs any more.


def init_scheduler(original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Keep vLLM from padding requests with placeholders.

    vLLM pads none where a table gives the number of draft tokens by batch size. So give the scheduler such a table,
    with the same number for every size.
    """
    original(scheduler, *args, **kwargs)
    if scheduler.dynamic_sd_lookup is None and uses_agentspec(scheduler.vllm_config):
        sizes = scheduler.scheduler_config.max_num_seqs + 1
        scheduler.dynamic_sd_lookup = [scheduler.num_spec_tokens] * sizes


# --- vLLM enters a request's blocks in its prefix cache when it makes room for the next step. So the tokens of the last
# --- step are not entered: without drafts one, with drafts up to 129. The next turn of a chat would compute them again.


def free_request(original: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Enter the tokens of a request's last step in the prefix cache, before its blocks are freed.

    Not beside a drafter of vLLM's, whose own KV cache may lack them, nor where vLLM keeps a state for each draft token.
    """
    if _alone(scheduler) and not keeps_states(scheduler.vllm_config.model_config):
        valid = min(request.num_computed_tokens, request.num_tokens)
        scheduler.kv_cache_manager.cache_blocks(request, valid)
    return original(scheduler, request, *args, **kwargs)


def _alone(scheduler: Any) -> bool:
    """Return whether agentspec drafts without a drafter of vLLM's, and steps end before others begin."""
    config = scheduler.vllm_config
    if not uses_agentspec(config) or drafter_tokens(config.speculative_config) is not None:
        return False
    return not scheduler.scheduler_config.async_scheduling and scheduler.connector is None


# --- The bitmask of allowed tokens for structured output has a row for each position, with a bit for each token of the
# --- vocabulary. vLLM allocates it at the first such request, as if every sequence had the longest draft: 627 MB for
# --- 256 sequences, 128 draft tokens and a vocabulary of 152,000. From 0.33 on every step sends the worker as many rows
# --- for each request as the longest possible draft needs. But a step has one budget of draft tokens for all requests
# --- together, so only a small part of the bitmask is ever used.


def grammar_bitmask(
    original: Callable[..., Any],
    manager: Any,
    requests: Any,
    structured_output_request_ids: Sequence[str],
    scheduled_spec_decode_tokens: Mapping[str, Sequence[int]],
) -> Any:
    """Allocate a bitmask for this step's drafts, one row for each position to verify, before vLLM fills it."""
    ids, drafts = structured_output_request_ids, scheduled_spec_decode_tokens
    if lengths := _masked_lengths(manager, ids, drafts):
        _make_room(manager, len(lengths) + sum(lengths))
    return original(manager, requests, ids, drafts)


def even_grammar_bitmask(
    original: Callable[..., Any],
    manager: Any,
    requests: Any,
    structured_output_request_ids: Sequence[str],
    scheduled_spec_decode_tokens: Mapping[str, Sequence[int]],
) -> Any:
    """Allocate a bitmask with as many rows for each request as the longest draft of the step needs, and tell vLLM so.

    The worker divides the rows among the requests, however many there are.
    """
    ids, drafts, config = structured_output_request_ids, scheduled_spec_decode_tokens, manager.vllm_config
    lengths = _masked_lengths(manager, ids, drafts)
    if not lengths:
        return original(manager, requests, ids, drafts)
    longest = max(lengths)
    _make_room(manager, len(lengths) * (1 + longest))
    manager.vllm_config = _StepConfig(config, longest)
    try:
        return original(manager, requests, ids, drafts)
    finally:
        manager.vllm_config = config


class _StepConfig:
    """Stand in for vLLM's configuration in one step, with the step's longest draft as ``num_speculative_tokens``."""

    def __init__(self, vllm_config: Any, num_speculative_tokens: int) -> None:
        self._vllm_config = vllm_config
        self.num_speculative_tokens = num_speculative_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vllm_config, name)


def _masked_lengths(manager: Any, ids: Sequence[str], drafts: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the length of each draft that a grammar masks, in tokens; an empty list if vLLM's own bitmask serves."""
    if not ids or manager.backend is None or not uses_agentspec(manager.vllm_config):
        return []
    return [len(drafts.get(request_id, ())) for request_id in ids]


def _make_room(manager: Any, rows: int) -> None:
    """Give the bitmask at least ``rows`` rows. Replace one that a single large step has left far too large."""
    size = 1 << (max(rows, manager.vllm_config.scheduler_config.max_num_seqs) - 1).bit_length()
    present = manager._grammar_bitmask
    if present is None or not size <= present.shape[0] <= 8 * size:
        manager._grammar_bitmask = manager.backend.allocate_token_bitmask(size)


# --- CUDA graphs. vLLM expects every row of a decode step to have 1 + num_speculative_tokens tokens. It rounds all
# --- graph sizes up to multiples of that, and keeps the full decode graphs for steps in which every row has exactly
# --- that many. With 128 draft tokens, a step of one row without a draft would be padded to 129 tokens and never meet a
# --- full graph. So where agentspec drafts, the uniform length is 1, and full decode graphs are captured for steps
# --- without drafts.
# ---
# --- A step with drafts would then run piecewise: attention outside the graphs, launched layer by layer, which keeps
# --- the host busy for longer than the device. Where attention can replay a batch of any shape (FlashAttention 3,
# --- Triton), full graphs are captured for such steps too. Models with a state for each draft token keep vLLM's graphs:
# --- the builders of their metadata capture graphs for that many tokens a row only.


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
