"""The bitmask of allowed tokens for structured output, sized by the drafts that there are; runs in the engine core.

vLLM allocates ``max_num_seqs * (1 + num_speculative_tokens)`` rows of a bit for each token of the vocabulary when the
first such request comes: 627 MB for 256 sequences, 128 draft tokens and 152 k tokens. Drafts of a step are bounded for
all rows together, so a small part of that is ever used.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from agentspec.server_ext.vllm_adapter.callers import uses_agentspec


def patch_grammar_bitmask() -> None:
    """Let the bitmask of an engine that drafts with agentspec grow as needed; doing it again changes nothing."""
    from vllm.v1.structured_output import StructuredOutputManager

    original = StructuredOutputManager.grammar_bitmask
    if getattr(original, "_agentspec_hooked", False):
        return

    @functools.wraps(original)
    def grammar_bitmask(
        self: Any, requests: Any, request_ids: Sequence[str], drafts: Mapping[str, Sequence[int]]
    ) -> Any:
        if request_ids and self.backend is not None and uses_agentspec(self.vllm_config):
            _make_room(self, len(request_ids) + sum(len(drafts.get(name, ())) for name in request_ids))
        return original(self, requests, request_ids, drafts)

    grammar_bitmask._agentspec_hooked = True  # type: ignore[attr-defined]
    StructuredOutputManager.grammar_bitmask = grammar_bitmask


def _make_room(manager: Any, rows: int) -> None:
    """Allocate a bitmask of at least ``rows`` rows, unless there is one. What is in it is filled anew in each step."""
    present = manager._grammar_bitmask
    if present is None or present.shape[0] < rows:
        least = max(rows, manager.vllm_config.scheduler_config.max_num_seqs)
        manager._grammar_bitmask = manager.backend.allocate_token_bitmask(1 << (least - 1).bit_length())
