"""Let one of vLLM's own speculative methods stay as the user configured it, while agentspec drafts beside it.

For vLLM's own methods one number, ``num_speculative_tokens``, says both how many tokens the drafter drafts and how long
a draft can be. agentspec's drafts are longer. So vLLM makes its configuration with the user's number, and ``adopt``
then raises the number to the longest draft and remembers the user's. The sizes that concern the drafter (its buffers,
its KV slots, how far it looks ahead in a prompt) are computed with the remembered number; PATCHES names those places.
"""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentspec.cache.policy import MAX_DRAFT
from agentspec.errors import ConfigurationError, UnsupportedEngineError
from agentspec.server_ext.arctic_methods import METHODS

NATIVE_METHODS = ("eagle", "eagle3", "mtp", "draft_model", "dflash", "medusa", "ngram")
"""vLLM's methods beside which agentspec drafts, by the names that vLLM's SpeculativeConfig has after it was made."""

_SPECULATOR = "mlp_speculator"
"""vLLM's name of the method of MLP and LSTM speculators, and the ``model_type`` in their config.json."""

_REFUSED = {
    _SPECULATOR: 'give it to agentspec: {"method": "arctic", "model": …} (docs/speculator.md)',
    "ngram_gpu": 'use "ngram", or leave the method out: the suffix index finds what it finds',
    "extract_hidden_states": "it drafts nothing; start plain 'vllm serve' with it",
    "dspark": "only vLLM's V2 model runner has it; start plain 'vllm serve' with it, or use another method",
}
"""The remedy for each method of vLLM's beside which agentspec does not draft."""

_DRAFTER_TOKENS = "agentspec_drafter_tokens"
"""Attribute of vLLM's SpeculativeConfig: the user's ``num_speculative_tokens``. Only an adopted method has it."""


def drafter_tokens(speculative_config: Any) -> int | None:
    """Return how many tokens vLLM's own drafter drafts; None where agentspec does not draft beside one."""
    tokens: int | None = getattr(speculative_config, _DRAFTER_TOKENS, None)
    return tokens


def adopt(speculative_config: Any, longest: int) -> None:
    """Let drafts have up to ``longest`` tokens, and at least as many as vLLM's drafter drafts."""
    tokens = speculative_config.num_speculative_tokens
    setattr(speculative_config, _DRAFTER_TOKENS, tokens)
    speculative_config.num_speculative_tokens = max(tokens, longest)


def check_name(config: Mapping[str, Any]) -> None:
    """Raise an error with the remedy for a user's speculative config whose method cannot work, before vLLM starts.

    A config without a method passes if it names a model, by which vLLM finds the method. Raises ConfigurationError or
    UnsupportedEngineError.
    """
    method = config.get("method")
    if not isinstance(method, str | None):
        raise ConfigurationError(f"--speculative-config: method: a text expected, got {method!r}")
    if method in _REFUSED:
        raise _unsupported(str(method))
    if method == "custom_class" or (method is None and not config.get("model")):
        raise ConfigurationError(
            f"--speculative-config: method {method!r}: name one that agentspec stands for ({', '.join(METHODS)}) or "
            f"drafts beside ({', '.join(NATIVE_METHODS)}), give only --max-draft for the longest draft, or start plain "
            "'vllm serve'"
        )
    check_drafter(config)


def check_drafter(config: Mapping[str, Any]) -> None:
    """Raise ConfigurationError if the model of one of vLLM's methods is a speculator in a local folder.

    vLLM would find its architecture unknown, half a minute later.
    """
    model = config.get("model")
    try:
        values = json.loads((Path(str(model)) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a hub id, or something that vLLM has its own words for
        return
    if isinstance(values, dict) and values.get("model_type") == _SPECULATOR:
        given = "vLLM's methods" if config.get("method") is None else f"method {config['method']!r}"
        raise ConfigurationError(
            f"--speculative-config: model: {model} is an MLP or LSTM speculator, which {given} cannot run: give it as "
            f"{json.dumps({'method': 'arctic', 'model': model, 'enable_suffix_decoding': True})} (docs/speculator.md)"
        )


def _unsupported(method: str) -> UnsupportedEngineError:
    remedy = _REFUSED.get(method, f"known are: {', '.join((*METHODS, *NATIVE_METHODS))}")
    if method in METHODS:  # otherwise it would have become agentspec's own (`translate_method`)
        remedy = "ArcticInference is installed; --additional-config '{\"agentspec\": {}}' puts agentspec in its place"
    return UnsupportedEngineError(f"--speculative-config: agentspec does not draft beside {method!r}: {remedy}")


def check_method(speculative_config: Any) -> None:
    """Raise an error with the remedy for vLLM's SpeculativeConfig that agentspec cannot draft beside.

    Raises ConfigurationError or UnsupportedEngineError.
    """
    method = speculative_config.method
    if method not in NATIVE_METHODS:
        raise _unsupported(method)
    if (tokens := speculative_config.num_speculative_tokens) > MAX_DRAFT:
        raise ConfigurationError(
            f"--speculative-config: num_speculative_tokens {tokens}: drafts have at most {MAX_DRAFT}; give as "
            "many as the drafter is to draft, which are few for most (docs/other-drafters.md)"
        )
    sampling = getattr(speculative_config, "rejection_sample_method", "standard")
    if sampling != "standard":
        raise UnsupportedEngineError(
            f"--speculative-config: rejection_sample_method {sampling!r}: drafts from suffix indexes have no "
            "probabilities, so only \"standard\" verifies them; leave it out, or start plain 'vllm serve'"
        )
    if getattr(speculative_config, "enable_adaptive_verification", False):
        raise UnsupportedEngineError(
            "--speculative-config: enable_adaptive_verification: only vLLM's V2 model runner has it; leave it out "
            "(agentspec cuts each draft where it stops paying), or start plain 'vllm serve'"
        )


def as_configured(vllm_config: Any) -> Any:
    """Return vLLM's configuration with the user's ``num_speculative_tokens``: a shallow copy where agentspec drafts."""
    tokens = drafter_tokens(vllm_config.speculative_config)
    if tokens is None:
        return vllm_config
    result = copy.copy(vllm_config)
    result.speculative_config = _with_tokens(vllm_config.speculative_config, tokens)
    return result


def _with_tokens(speculative_config: Any, tokens: int) -> Any:
    result = copy.copy(speculative_config)
    result.num_speculative_tokens = tokens
    return result


# --- What vLLM computes for the drafter


def config_property(original: Callable[[Any], int], vllm_config: Any) -> int:
    """Compute a property of VllmConfig that concerns the drafter."""
    return int(original(as_configured(vllm_config)))


def method_property(original: Callable[[Any], Any], speculative_config: Any) -> Any:
    """Compute a property of SpeculativeConfig that concerns the drafter."""
    tokens = drafter_tokens(speculative_config)
    return original(speculative_config if tokens is None else _with_tokens(speculative_config, tokens))


def init_proposer(original: Callable[..., None], proposer: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    """Make vLLM's drafter, of a method whose drafter has layers, for the number of tokens that it drafts."""
    original(proposer, as_configured(vllm_config), *args, **kwargs)


def use_v2_model_runner(original: Callable[[Any], bool], vllm_config: Any) -> bool:
    """Choose the V1 model runner where agentspec drafts beside one of vLLM's methods.

    Options that need the other one were refused before (``conflicts``).
    """
    return drafter_tokens(vllm_config.speculative_config) is None and bool(original(vllm_config))
