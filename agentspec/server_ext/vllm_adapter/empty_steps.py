"""Steps without any draft, kept as cheap as in vLLM without speculation.

vLLM would run its rejection sampler over the whole vocabulary although there is nothing to verify, and hand empty
drafts round.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from agentspec.server_ext.vllm_adapter.runner import drafter_of


def wrap_metadata(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def _calc_spec_decode_metadata(self: Any, num_draft_tokens: Any, cu_num_scheduled_tokens: Any) -> Any:
        if drafter_of(self) is None or any(num_draft_tokens.tolist()):
            return method(self, num_draft_tokens, cu_num_scheduled_tokens)
        return metadata_without_drafts(cu_num_scheduled_tokens, self.device)

    return _calc_spec_decode_metadata


def metadata_without_drafts(cu_num_scheduled_tokens: Any, device: Any) -> Any:
    """What vLLM would compute for n rows without drafts: one logit a row, at its last token."""
    rows = len(cu_num_scheduled_tokens)
    decoding = _decode_metadata(rows, device)
    if int(cu_num_scheduled_tokens[-1]) == rows:
        return decoding
    import torch

    indices = torch.from_numpy(cu_num_scheduled_tokens - 1).to(device, non_blocking=True)
    return dataclasses.replace(decoding, logits_indices=indices)


@functools.cache
def _decode_metadata(rows: int, device: Any) -> Any:
    """It for rows with one token each, which most steps have: nobody changes it, so one serves all of them."""
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


def wrap_sample(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        nothing = spec_decode_metadata is not None and spec_decode_metadata.max_spec_len == 0
        return method(self, logits, None if nothing and drafter_of(self) is not None else spec_decode_metadata)

    return _sample


def wrap_take(method: Callable[..., Any]) -> Callable[..., Any]:
    """None, which vLLM knows as "no news", in place of an empty draft for every row.

    The scheduler has taken away a request's draft when it scheduled it, so there is nothing left to be replaced.
    Under asynchronous scheduling the answer also fills in placeholders: then it stays vLLM's.
    """

    @functools.wraps(method)
    def take_draft_token_ids(self: Any) -> Any:
        drafter = drafter_of(self)
        if drafter is not None and drafter.idle and not self.use_async_scheduling:
            return None
        return method(self)

    return take_draft_token_ids
