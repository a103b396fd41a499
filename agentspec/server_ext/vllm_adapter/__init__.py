"""What knows vLLM's internals, and all that does: a new vLLM version is a change in this package.

``drafter``       vLLM's drafter object (``custom_class``): engine state -> Step, drafts -> engine
``batch``         a step read out of the model runner, once every decode step
``hooks``         the methods of vLLM's model runner that are wrapped
``empty_steps``   those of them that keep a step without drafts cheap
``greedy_steps``  greedy verification without copies of the logits, on CPUs
``graphs``        CUDA graphs for steps without drafts and for ragged ones
``runner``        what the wrapped methods ask of a drafter
``forward``       what vLLM hands over after a step, and what a draft model there has to offer
``speculator``    the speculator: hidden states in, drafted tokens out
``ranks``         the tensor-parallel ranks around a draft model
``engine``        which engines are supported, and the proposer that one gets
``methods``       vLLM's speculative methods that agentspec takes over
``draft_limit``   the longest draft where the user gave no number, by model
``native_drafters``  vLLM's own drafters beside the trees: n-gram and Medusa
``callers``       who sent a request, and its session, on their way from the API server to the worker
``structured_output``  the bitmask of allowed tokens, sized by the drafts that there are
``frontend``      request ids of the API, and the HTTP routes' questions to the engines
``rpc``           the worker's answers to them
``cpu_sampling``  a defect of vLLM's CPU build, mended
"""

from agentspec.server_ext.vllm_adapter.callers import carry_callers, uses_agentspec
from agentspec.server_ext.vllm_adapter.cpu_sampling import mend_cpu_sampling
from agentspec.server_ext.vllm_adapter.drafter import AgentSpecProposer
from agentspec.server_ext.vllm_adapter.engine import check_engine, check_version
from agentspec.server_ext.vllm_adapter.frontend import api_request_id, ask_engines
from agentspec.server_ext.vllm_adapter.graphs import patch_graph_sizes
from agentspec.server_ext.vllm_adapter.methods import take_over_methods
from agentspec.server_ext.vllm_adapter.rpc import RPC_METHOD, add_worker_rpc, worker_rpc
from agentspec.server_ext.vllm_adapter.structured_output import patch_grammar_bitmask

__all__ = [
    "RPC_METHOD",
    "AgentSpecProposer",
    "add_worker_rpc",
    "api_request_id",
    "ask_engines",
    "carry_callers",
    "check_engine",
    "check_version",
    "mend_cpu_sampling",
    "patch_grammar_bitmask",
    "patch_graph_sizes",
    "take_over_methods",
    "uses_agentspec",
    "worker_rpc",
]
