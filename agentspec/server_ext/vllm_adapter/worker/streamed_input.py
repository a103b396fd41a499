"""Let a request with streamed input go on behind its responses as without drafts."""

from collections.abc import Callable
from typing import Any

from agentspec.server_ext.vllm_adapter.startup.speculative_config import uses_agentspec


def handle_stopped_request(original: Callable[..., bool], scheduler: Any, request: Any) -> bool:
    """Make a request whose response has ended what it would be without drafts, before its next input is appended.

    vLLM keeps the tokens of the response that are computed: without drafts all but the last. An accepted draft may
    hold the last one, and others behind it, which vLLM removes from the text but counts as computed. It would then skip
    as many tokens of the next input.

    In the same step the worker has drafted behind the end. vLLM would verify that draft in the next response, whose
    ``max_tokens`` and stop tokens the draft ignores. It takes no draft for a request whose prompt is being computed, as
    is the case here from now on.
    """
    if request.resumable and uses_agentspec(scheduler.vllm_config):
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        request.is_prefill_chunk = True
    return original(scheduler, request)
