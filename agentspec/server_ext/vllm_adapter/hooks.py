"""The methods of vLLM's V1 model runner that are wrapped, once a process.

vLLM's ``custom_class`` proposer gets neither request ids nor the scheduler's output, and is not told when a request
ends. Three wraps mend that:

``propose_draft_token_ids``    gives the drafter the runner, the scheduler's output and the target's hidden states
``_on_request_state_removed``  tells it that a request has finished or was aborted (never inferred from a batch)
``_input_fits_in_drafter``     near ``max_model_len`` vLLM would skip the whole batch; drafts are cut per row instead

Three more, in ``empty_steps``, keep a step without any draft as cheap as in vLLM without speculation, and ``graphs``
lets it run the same CUDA graphs. On CPUs ``greedy_steps`` spares greedy verification its copies of the logits.
Everything else stays vLLM's: scheduling, verification, sampling.
"""

import functools
from collections.abc import Callable
from typing import Any

from agentspec.errors import UnsupportedEngineError
from agentspec.server_ext.vllm_adapter.empty_steps import wrap_metadata, wrap_sample, wrap_take
from agentspec.server_ext.vllm_adapter.forward import ForwardPass
from agentspec.server_ext.vllm_adapter.graphs import patch_graph_dispatch
from agentspec.server_ext.vllm_adapter.greedy_steps import patch_greedy_verification
from agentspec.server_ext.vllm_adapter.runner import drafter_of


def install_hooks() -> None:
    """Wrap the methods of vLLM's V1 model runner; doing it again changes nothing."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if getattr(GPUModelRunner, "_agentspec_hooked", False):
        return
    for name, wrap in (
        ("propose_draft_token_ids", _wrap_propose),
        ("_on_request_state_removed", _wrap_removed),
        ("_input_fits_in_drafter", _wrap_fits),
        ("_calc_spec_decode_metadata", wrap_metadata),
        ("_sample", wrap_sample),
        ("take_draft_token_ids", wrap_take),
    ):
        method = getattr(GPUModelRunner, name, None)
        if method is None:
            raise UnsupportedEngineError(f"this vLLM has no GPUModelRunner.{name}; see the supported versions")
        setattr(GPUModelRunner, name, wrap(method))
    patch_graph_dispatch(GPUModelRunner)
    patch_greedy_verification()
    GPUModelRunner._agentspec_hooked = True


def _wrap_propose(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def propose_draft_token_ids(self: Any, *args: Any) -> Any:
        drafter = drafter_of(self)
        if drafter is None:
            return method(self, *args)
        forward = ForwardPass(*args)
        forward.input_batch = self.input_batch
        return drafter.propose_for(self, forward)

    return propose_draft_token_ids


def _wrap_removed(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def _on_request_state_removed(self: Any, req_id: str, req_state: Any) -> None:
        method(self, req_id, req_state)
        drafter = drafter_of(self)
        if drafter is not None:
            drafter.request_removed(req_id, req_state)

    return _on_request_state_removed


def _wrap_fits(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def _input_fits_in_drafter(self: Any, common_attn_metadata: Any) -> bool:
        if drafter_of(self) is not None:
            return common_attn_metadata is not None
        return bool(method(self, common_attn_metadata))

    return _input_fits_in_drafter
