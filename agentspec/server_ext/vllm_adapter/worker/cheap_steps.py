"""Keep a step, and the end of a request, as cheap as in vLLM without speculation, however long a draft may be.

vLLM sizes its work by ``num_speculative_tokens``, as if every row drafted that many tokens in every step. Drafts of
agentspec are ragged and often missing. docs/engine-limits.md has the details.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from agentspec.server_ext.vllm_adapter.startup.draft_limit import keeps_states
from agentspec.server_ext.vllm_adapter.startup.native_methods import drafter_tokens
from agentspec.server_ext.vllm_adapter.startup.speculative_config import uses_agentspec
from agentspec.server_ext.vllm_adapter.worker.runner import extension_of

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

    The scheduler removed each request's draft when it scheduled the request, and takes none of a step that ends a
    response before streamed input (``streamed_input``), so there is nothing left to replace. Under asynchronous
    scheduling vLLM's answer also fills in placeholders, so it is left alone.
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
