"""Keep the bitmask of structured output as small as the drafts of a step.

It has a row for each position, with a bit for each token of the vocabulary: whether the grammar allows it. vLLM
allocates it at the first such request, as if every sequence had the longest draft: 627 MB for 256 sequences, 128 draft
tokens and a vocabulary of 152,000. From 0.33 on every step sends the worker as many rows for each request as the
longest possible draft needs. But a step has one budget of draft tokens for all requests together, so only a small part
of the bitmask is ever used.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentspec.server_ext.vllm_adapter.startup.speculative_config import uses_agentspec


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
