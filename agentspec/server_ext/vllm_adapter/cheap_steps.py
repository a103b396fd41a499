"""Keep a step as cheap as in vLLM without speculation, however long a draft may be.

vLLM sizes graphs, buffers and work by ``num_speculative_tokens``, as if every row drafted that many tokens in every
step. Drafts of agentspec are ragged and often missing. docs/engine-limits.md has the details.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentspec.server_ext.vllm_adapter.launch import uses_agentspec
from agentspec.server_ext.vllm_adapter.runner import extension_of

_PLACEHOLDER = -1
"""Token id with which vLLM's sampler fills a row behind its last accepted token."""

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
    """Return what vLLM would compute for n rows without drafts: one logit a row, at its last token."""
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

    The scheduler has taken away a request's draft when it scheduled it, so there is nothing left to be replaced.
    Under asynchronous scheduling the answer also fills in placeholders: then it stays vLLM's.
    """
    extension = extension_of(runner)
    if extension is not None and extension.drafted_nothing and not runner.use_async_scheduling:
        return None
    return original(runner)


def sample_tokens(original: Callable[..., Any], runner: Any, *args: Any) -> Any:
    """Note in the runner's output that it drafted nothing, so that the engine core need not ask."""
    output = original(runner, *args)
    extension = extension_of(runner)
    idle = extension is not None and extension.drafted_nothing and not runner.use_async_scheduling
    if idle and output.req_ids:  # otherwise it may be a constant of vLLM's
        setattr(output, _NO_DRAFTS, True)
    return output


def update_from_output(
    original: Callable[..., Any], scheduler: Any, scheduler_output: Any, model_runner_output: Any
) -> Any:
    """Remember whether the step drafted nothing until ``post_step``, which vLLM calls without the runner's output."""
    setattr(scheduler, _NO_DRAFTS, getattr(model_runner_output, _NO_DRAFTS, False))
    return original(scheduler, scheduler_output, model_runner_output)


def post_step(original: Callable[..., None], core: Any, model_executed: bool) -> None:
    """Leave out the round trip to the worker that fetches drafts, where there are none.

    The worker hears of finished requests with the next step. An engine in the caller's process runs that with its next
    request, which may never come: so run it at once, without a token. An engine core of its own does so itself.
    """
    if not getattr(core.scheduler, _NO_DRAFTS, False):
        original(core, model_executed)
    of_caller = not hasattr(core, "output_queue") and core.batch_queue is None and uses_agentspec(core.vllm_config)
    if of_caller and core.scheduler.has_finished_requests() and not core.scheduler.has_unfinished_requests():
        core.step()


# --- Requests with one token left to compute: the prefix cache holds the rest of the prompt, or they resume. vLLM fills
# --- such a row up with num_speculative_tokens placeholders, so that it fits a full CUDA graph of drafts of one length.
# --- Ours are ragged, so that brings nothing, and costs a forward pass over 129 tokens. Where max_num_batched_tokens is
# --- smaller, vLLM waits for room that never comes, and no request runs any more.


def init_scheduler(original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Let a request begin with the tokens that it has.

    vLLM does so where the number of draft tokens depends on the batch size. Give it a table of that kind, with the same
    number for every size.
    """
    original(scheduler, *args, **kwargs)
    if scheduler.dynamic_sd_lookup is None and uses_agentspec(scheduler.vllm_config):
        sizes = scheduler.scheduler_config.max_num_seqs + 1
        scheduler.dynamic_sd_lookup = [scheduler.num_spec_tokens] * sizes


# --- Verification of greedy drafts, on CPUs. vLLM's rejection sampler copies the logits of each draft position twice
# --- and those of each row once, float32 over the whole vocabulary, before it takes their largest. On a CPU the copies
# --- take as long as the output layer of a small model does; on a GPU they take microseconds.


def verify(
    original: Callable[..., Any],
    sampler: Any,
    metadata: Any,
    draft_probs: Any,
    logits: Any,
    sampling_metadata: Any,
) -> Any:
    """Read the largest logits in place where all requests are greedy and nothing changes a logit."""
    if sampler.synthetic_mode or not only_argmax_decides(sampling_metadata):
        return original(sampler, metadata, draft_probs, logits, sampling_metadata)
    import torch
    from vllm.v1.outputs import SamplerOutput

    # The function by which vLLM chooses without speculation, so that ties fall the same way.
    choices = sampler.sampler.greedy_sample(logits.to(torch.float32))
    return SamplerOutput(sampled_token_ids=verified(choices, metadata), logprobs_tensors=None)


def only_argmax_decides(sampling_metadata: Any) -> bool:
    """Return whether every request takes its largest raw logit and wants nothing else: no logprobs, no processors."""
    holder = sampling_metadata.thinking_budget_state_holder
    return bool(
        sampling_metadata.all_greedy
        and sampling_metadata.no_penalties
        and not sampling_metadata.bad_words_token_ids
        and sampling_metadata.allowed_token_ids_mask is None
        and sampling_metadata.max_num_logprobs is None
        and not sampling_metadata.logprob_token_ids
        and (holder is None or not holder.has_tracked_requests())
        and all(_serves_nobody(processor) for processor in sampling_metadata.logitsprocs.non_argmax_invariant)
    )


def _serves_nobody(processor: Any) -> bool:
    """Return whether a logits processor has no request to serve. Assume that a foreign one always has."""
    from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor

    if type(processor) is MinTokensLogitsProcessor:
        return not processor.min_toks
    return type(processor) is LogitBiasLogitsProcessor and not processor.biases


def verified(choices: Any, metadata: Any) -> Any:
    """Return [rows, longest draft + 1]: each row's choices up to the first that is not its draft's, then placeholders.

    choices: [draft tokens + rows], the target's choice at each position, in the order of the logits.
    """
    import torch

    counts = torch.tensor(metadata.num_draft_tokens)
    rows, longest = len(counts), metadata.max_spec_len
    drafted = torch.arange(longest) < counts[:, None]
    agrees = torch.zeros((rows, longest), dtype=torch.bool)
    agrees[drafted] = choices[metadata.target_logits_indices] == metadata.draft_token_ids
    accepted = agrees.cumprod(1).sum(1)
    at = torch.arange(longest + 1)
    begins = metadata.bonus_logits_indices - counts
    result = torch.full((rows, longest + 1), _PLACEHOLDER, dtype=torch.int32)
    kept = at <= accepted[:, None]
    result[kept] = choices[(begins[:, None] + at)[kept]].to(torch.int32)
    return result


# --- Log probabilities of tokens that a request names (logprob_token_ids). vLLM's rejection sampler returns none for
# --- them. If another request of the batch wants log probabilities, it raises an error, which ends the engine.


def named_logprobs(
    original: Callable[..., Any],
    sampler: Any,
    metadata: Any,
    draft_probs: Any,
    logits: Any,
    sampling_metadata: Any,
) -> Any:
    """Return the log probabilities of the named tokens at each verified position, as vLLM does without drafts."""
    named = sampling_metadata.logprob_token_ids
    if not named:
        return original(sampler, metadata, draft_probs, logits, sampling_metadata)
    target, positions = sampler.sampler, metadata.max_spec_len + 1

    def gather(logprobs: Any, _: int, sampled: Any) -> Any:
        spread = {row * positions + i: tokens for row, tokens in named.items() for i in range(positions)}
        return target.gather_specific_token_logprobs(logprobs, spread, sampled)

    most = sampling_metadata.max_num_logprobs or 0  # with None vLLM gathers nothing
    wanted = dataclasses.replace(sampling_metadata, logprob_token_ids=None, max_num_logprobs=most)
    target.gather_logprobs = gather
    try:
        return original(sampler, metadata, draft_probs, logits, wanted)
    finally:
        del target.gather_logprobs


def expand_batch_to_tokens(
    original: Callable[..., Any],
    x: Any,
    cu_num_tokens: Any,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> Any:
    """Repeat a value of each row for its tokens, in plain torch.

    The kernel of vLLM's CPU build fills a converted copy, so temperature, top-k and top-p of draft positions get lost.
    This replaces it for every drafter, ours or not.
    """
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = x if replace_from == replace_to else torch.where(x == replace_from, replace_to, x)
    return values.repeat_interleave(counts.to(torch.int64), output_size=num_tokens)


# --- The bitmask of allowed tokens for structured output. vLLM allocates max_num_seqs * (1 + num_speculative_tokens)
# --- rows of a bit for each token of the vocabulary when the first such request comes: 627 MB for 256 sequences, 128
# --- draft tokens and 152 k tokens. Drafts of a step are bounded for all rows together, so a small part is ever used.


def grammar_bitmask(
    original: Callable[..., Any],
    manager: Any,
    requests: Any,
    structured_output_request_ids: Sequence[str],
    scheduled_spec_decode_tokens: Mapping[str, Sequence[int]],
) -> Any:
    """Allocate a bitmask for the drafts of this step before vLLM fills it."""
    ids, drafts = structured_output_request_ids, scheduled_spec_decode_tokens
    if ids and manager.backend is not None and uses_agentspec(manager.vllm_config):
        rows = len(ids) + sum(len(drafts.get(request_id, ())) for request_id in ids)
        present = manager._grammar_bitmask
        if present is None or present.shape[0] < rows:
            least = max(rows, manager.vllm_config.scheduler_config.max_num_seqs)
            manager._grammar_bitmask = manager.backend.allocate_token_bitmask(1 << (least - 1).bit_length())
    return original(manager, requests, ids, drafts)
