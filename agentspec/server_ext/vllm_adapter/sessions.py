"""The session id's way through vLLM, from the request to the worker; runs in the API server's process."""

import functools
from typing import Any

from agentspec.errors import InvalidSessionError
from agentspec.server_ext.identity import SESSION_KEY, merge_session
from agentspec.server_ext.vllm_launch import PROPOSER_PATH


def carry_session_ids() -> None:
    """Copy vLLM's ``session_id``, which ends in the engine core, into ``extra_args``, which reaches the worker."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    original = InputProcessor.process_inputs
    if getattr(original, "_agentspec_hooked", False):
        return

    @functools.wraps(original)
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        params = request.sampling_params
        if isinstance(params, SamplingParams) and uses_agentspec(self.vllm_config):
            try:
                params.extra_args = merge_session(params.extra_args, request.session_id)
            except InvalidSessionError as error:  # vLLM answers 400 only to its own kind
                raise VLLMValidationError(str(error), parameter=SESSION_KEY) from error
        return request

    process_inputs._agentspec_hooked = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_inputs


def uses_agentspec(vllm_config: Any) -> bool:
    """Whether this engine drafts with agentspec."""
    spec = vllm_config.speculative_config
    return spec is not None and spec.method == "custom_class" and spec.model == PROPOSER_PATH
