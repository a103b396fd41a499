"""Read the speculative method that an engine's options give, and write agentspec's own."""

from collections.abc import Mapping
from typing import Any

from agentspec.server_ext.arctic_methods import named_method

PROPOSER_PATH = "agentspec.server_ext.vllm_adapter.AgentSpecProposer"
"""Class that vLLM loads as its ``custom_class``."""

SHORT_OPTIONS = {"method": "spec_method", "model": "spec_model", "num_speculative_tokens": "spec_tokens"}
"""Options of vLLM that give a key of the speculative config, such as --spec-method."""


def own_config() -> dict[str, Any]:
    """Return a ``speculative_config`` for vLLM that names agentspec's proposer.

    ``create_speculative_config`` adds the longest draft. Here it would become the number of the drafter's tokens where
    the served checkpoint names a drafter of its own (the speculators format).
    """
    return {"method": "custom_class", "model": PROPOSER_PATH}


def with_underscores(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a speculative config whose keys have underscores; vLLM takes dashes too."""
    return {str(key).replace("-", "_"): value for key, value in (config or {}).items()}


def given_config(engine_args: Any) -> dict[str, Any]:
    """Return the speculative config that the options of vLLM's EngineArgs give, whichever options they are."""
    config = with_underscores(getattr(engine_args, "speculative_config", None))
    for key, option in SHORT_OPTIONS.items():
        value = getattr(engine_args, option, None)
        if value is not None:
            config.setdefault(key, value)
    return config


def named_drafter(engine_args: Any) -> str | None:
    """Return the drafter that the options name: a method, else a model, by which vLLM finds the method. None: none."""
    config = given_config(engine_args)
    return named_method(config) or config.get("model")


def is_own(engine_args: Any) -> bool:
    """Return whether the engine's speculative method is agentspec's own."""
    return bool(given_config(engine_args).get("model") == PROPOSER_PATH)
