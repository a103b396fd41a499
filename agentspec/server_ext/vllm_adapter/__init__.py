"""Connect agentspec to vLLM. Only this package depends on vLLM's internals, so a new vLLM version changes no other.

``startup``  what happens before an engine is made
``frontend`` what runs in the API server
``worker``   what runs in the engine core and its workers
``offline``  runs an ``LLM`` of this process step by step, for rollouts
``patches``  every method of vLLM that is replaced

vLLM still schedules, samples and decides which draft tokens it accepts. docs/vllm-versions.md says what ran on which
version, and how to judge a new one.
"""

import logging
from collections.abc import Sequence
from typing import Any

from agentspec.errors import UnsupportedEngineError
from agentspec.server_ext.settings import check_draft_limit, load_settings
from agentspec.server_ext.vllm_adapter.frontend.engine_calls import api_request_id
from agentspec.server_ext.vllm_adapter.patches import (
    MARK,
    PATCHES,
    Patch,
    check_engine,
    check_version,
    current_patches,
    install,
)
from agentspec.server_ext.vllm_adapter.startup import speculative_config
from agentspec.server_ext.vllm_adapter.startup.speculative_config import uses_agentspec
from agentspec.server_ext.vllm_adapter.worker import runner
from agentspec.server_ext.vllm_adapter.worker.engine_builder import served_model_key
from agentspec.server_ext.vllm_adapter.worker.runner import worker_rpc

__all__ = [
    "PATCHES",
    "AgentSpecProposer",
    "Patch",
    "api_request_id",
    "check_engine",
    "check_version",
    "current_patches",
    "install",
    "register",
    "served_model_key",
    "uses_agentspec",
    "worker_rpc",
]

logger = logging.getLogger("vllm.agentspec")


def register() -> None:
    """Install the patches. vLLM calls this entry point (``vllm.general_plugins``) in each of its processes.

    An engine that does not draft with agentspec works as before, also with ArcticInference's methods if ArcticInference
    is installed. Only the CPU build's sampling is corrected for every engine.
    """
    import vllm

    try:
        check_version(vllm.__version__)
    except UnsupportedEngineError as error:
        # Leave this vLLM alone. If it is told to use agentspec's proposer, the proposer raises the same error.
        level = logging.WARNING if speculative_config.is_switched_on() else logging.DEBUG
        logger.log(level, "agentspec stays out: %s", error)
        return
    install([patch for patch in current_patches() if patch.process != "runner"])


class AgentSpecProposer:
    """Check the engine and load ``runner.agentspec``. vLLM constructs this class as its ``custom_class``.

    The wrapped constructor of the runner sets ``extension``, which makes the drafts. The constructor raises
    UnsupportedEngineError or ConfigurationError with the remedy.
    """

    extension: runner.RunnerExtension

    def __init__(self, vllm_config: Any) -> None:
        check_engine(vllm_config)
        load_settings(vllm_config.additional_config)
        check_draft_limit(vllm_config.speculative_config.num_speculative_tokens)
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        if not hasattr(GPUModelRunner.__init__, MARK):
            raise UnsupportedEngineError(
                "vLLM has not loaded the plugin of agentspec: name it in VLLM_PLUGINS, or unset that variable"
            )

    def load_model(self, target: Any, *_: Any, **__: Any) -> None:
        """Read the draft model and the store. vLLM counts the memory that they take as the model's."""
        self.extension.load(target)

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> list[list[int]]:
        """Return no drafts: this call lacks the request ids. It comes only if the runner's patch is bypassed."""
        return [[] for _ in sampled_token_ids]
