"""A defect of vLLM's CPU build, mended: it concerns every drafter, ours or not."""

from typing import Any


def mend_cpu_sampling() -> None:
    """vLLM's CPU build loses temperature, top-k and top-p of drafted positions: its kernel fills a converted copy.

    ``expand_batch_to_tokens`` is replaced there by the same in plain torch. Needed for T > 0 with any drafter.
    """
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if not current_platform.is_cpu():
        return

    def expand_batch_to_tokens(
        x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> Any:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        values = x if replace_from == replace_to else torch.where(x == replace_from, replace_to, x)
        return values.repeat_interleave(counts.to(torch.int64), output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
