"""Verify the drafts of a greedy step without copies of its logits. On CPUs only.

vLLM's rejection sampler copies the logits of each draft position twice and those of each row once, float32 over the
whole vocabulary, before it takes their largest. Where all requests are greedy and nothing changes a logit, the largest
one can be read in place. On a CPU the copies take as long as the output layer of a small model does; on a GPU they
take microseconds, and the sampler is left as it is.
"""

import functools
from collections.abc import Callable
from typing import Any

_PLACEHOLDER = -1
"""What vLLM's sampler returns behind the last accepted token of a row."""


def patch_greedy_verification() -> None:
    """Let vLLM's rejection sampler read greedy choices in place. Does nothing on a GPU."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    if current_platform.is_cpu():
        RejectionSampler.forward = _wrap_forward(RejectionSampler.forward)


def _wrap_forward(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def forward(self: Any, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> Any:
        if self.synthetic_mode or not only_argmax_decides(sampling_metadata):
            return method(self, metadata, draft_probs, logits, sampling_metadata)
        import torch
        from vllm.v1.outputs import SamplerOutput

        # The function by which vLLM chooses without speculation, so that ties fall the same way.
        choices = self.sampler.greedy_sample(logits.to(torch.float32))
        return SamplerOutput(sampled_token_ids=verified(choices, metadata), logprobs_tensors=None)

    return forward


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
        and all(_idle(processor) for processor in sampling_metadata.logitsprocs.non_argmax_invariant)
    )


def _idle(processor: Any) -> bool:
    """Return whether a logits processor has no request to serve. One that isn't vLLM's own may always have."""
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
