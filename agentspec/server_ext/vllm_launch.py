"""Export ``engine_options``: ``LLM(MODEL, **engine_options())`` drafts with agentspec."""

from agentspec.server_ext.vllm_adapter.startup.speculative_config import engine_options

__all__ = ["engine_options"]
