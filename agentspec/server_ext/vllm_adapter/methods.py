"""vLLM's speculative config -> agentspec, where vLLM makes it of what its user wrote."""

import functools
from collections.abc import Mapping
from typing import Any

from agentspec.server_ext.settings import load_settings
from agentspec.server_ext.speculative_methods import METHODS, NATIVE_METHODS, translate
from agentspec.server_ext.vllm_adapter.draft_limit import default_draft_limit
from agentspec.server_ext.vllm_launch import PROPOSER_PATH, check_given_limit, speculative_config


def take_over_methods() -> None:
    """Let ``method: arctic`` and ``method: suffix`` mean agentspec, ``ngram`` and ``medusa`` vLLM's beside the trees.

    Everywhere where the engine has agentspec settings (an "agentspec" section in ``additional_config``, which
    ``agentspec serve`` always gives), and for the first two where ArcticInference is not installed. Otherwise they
    stay whose they were.
    """
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_speculative_config
    if getattr(original, "_agentspec_hooked", False):
        return

    @functools.wraps(original)
    def create_speculative_config(self: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
        take_over(self)
        fill_in_draft_limit(self, target_model_config, target_parallel_config)
        return original(self, target_model_config, target_parallel_config)

    create_speculative_config._agentspec_hooked = True  # type: ignore[attr-defined]
    EngineArgs.create_speculative_config = create_speculative_config


def take_over(engine_args: Any) -> None:
    """The same for one EngineArgs. Raises ConfigurationError for what the method does not know."""
    config = {str(key).replace("-", "_"): value for key, value in (engine_args.speculative_config or {}).items()}
    aliases = {"method": "spec_method", "model": "spec_model", "num_speculative_tokens": "spec_tokens"}
    for key, alias in aliases.items():
        value = getattr(engine_args, alias, None)
        if value is not None:
            config.setdefault(key, value)
    additional = engine_args.additional_config
    additional = dict(additional) if isinstance(additional, Mapping) else {}
    method = config.get("method")
    asked = "agentspec" in additional or (method not in NATIVE_METHODS and not _has_arctic_inference())
    if method not in METHODS or not asked:
        return
    translation = translate(config)
    additional["agentspec"] = {**translation.settings, **(additional.get("agentspec") or {})}
    load_settings(additional)  # a wrong setting shows now
    engine_args.additional_config = additional
    check_given_limit(translation.max_draft)
    engine_args.speculative_config = speculative_config(translation.max_draft)
    for alias in aliases.values():
        setattr(engine_args, alias, None)


def fill_in_draft_limit(engine_args: Any, model_config: Any, parallel_config: Any) -> None:
    """Set ``num_speculative_tokens`` where agentspec drafts and nobody gave a number.

    It becomes what the engine can verify of this model, and is not less than what a draft model was told to draft.
    """
    config = engine_args.speculative_config or {}
    given = {str(key).replace("-", "_"): value for key, value in config.items()}
    if given.get("model") != PROPOSER_PATH or given.get("num_speculative_tokens") is not None:
        return
    if getattr(engine_args, "spec_tokens", None) is not None:  # vLLM's --spec-tokens
        return
    settings = load_settings(engine_args.additional_config)
    wanted = settings.speculator_tokens or 1
    if settings.drafter is not None:
        wanted = settings.drafter.num_speculative_tokens
    limit = max(default_draft_limit(engine_args, model_config, parallel_config), wanted)
    engine_args.speculative_config = {**config, "num_speculative_tokens": limit}


def _has_arctic_inference() -> bool:
    from vllm.utils.import_utils import has_arctic_inference

    return bool(has_arctic_inference())
