"""vLLM's general plugin: loaded in the API server, the engine core and every worker. Loading twice is harmless.

It makes the session id and the caller reach the engine, adds the worker method behind ``/v1/agentspec``, lets the
speculative methods ``arctic`` and ``suffix`` mean agentspec, fits CUDA graphs and buffers to drafts, and mends a defect
of the CPU build. It changes nothing for a server that was started with another method, or with one of those two and
ArcticInference.
"""

import logging

from agentspec.errors import UnsupportedEngineError

logger = logging.getLogger("vllm.agentspec")


def register() -> None:
    """Entry point of ``vllm.general_plugins``."""
    import vllm

    from agentspec.server_ext import vllm_adapter

    try:
        vllm_adapter.check_version(vllm.__version__)
    except UnsupportedEngineError as error:
        # Without agentspec's proposer this vLLM is none of our business; with it, the proposer raises the same.
        logger.debug("agentspec stays out: %s", error)
        return
    vllm_adapter.carry_callers()
    vllm_adapter.add_worker_rpc()
    vllm_adapter.mend_cpu_sampling()
    vllm_adapter.take_over_methods()
    vllm_adapter.patch_graph_sizes()
    vllm_adapter.patch_grammar_bitmask()
