"""Translate ArcticInference's speculative methods, ``arctic`` and ``suffix``, into agentspec's settings.

The setting ``arctic_suffix_rule`` holds ArcticInference's drafting rule; only this module sets it.

``{"method": "arctic", "model": …, "num_speculative_tokens": 3, "enable_suffix_decoding": true}``: a speculator, with or
without suffix decoding. ``num_speculative_tokens`` limits the speculator's drafts, as in ArcticInference. Suffix drafts
may be longer, up to ``suffix_speculative_tokens``, by default agentspec's usual limit. agentspec's own rule makes them,
unless a parameter of ArcticInference's rule is given.

``{"method": "suffix", "suffix_decoding_max_tree_depth": 24, …}``: suffix decoding by ArcticInference's rule, with these
parameters and their defaults. ``{"enable_suffix_decoding": true}`` alone is the same. One index serves all requests of
a principal, whatever their sessions; without API keys, all requests of the server. ArcticInference's limit on past
requests is replaced by agentspec's budget in tokens (``max_tokens``), except for 0, with which requests draft from
their own text only.

vLLM's other methods stay as they are configured: ``vllm_adapter.startup.native_methods``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentspec.cache.policy import MAX_DRAFT, ArcticSettings
from agentspec.errors import ConfigurationError

METHODS = ("arctic", "suffix")

# Maps agentspec's name of each of the rule's parameters to vLLM's and to ArcticInference's.
_RULE = {
    "max_depth": ("suffix_decoding_max_tree_depth", "suffix_cache_max_depth"),
    "max_spec_factor": ("suffix_decoding_max_spec_factor", "suffix_max_spec_factor"),
    "max_spec_offset": ("suffix_max_spec_offset",),
    "min_token_prob": ("suffix_decoding_min_token_prob", "suffix_min_token_prob"),
}
_REQUESTS = {"suffix_decoding_max_cached_requests": 0, "suffix_cache_max_requests": -1}
"""Names of the limit on past requests, with the least value of each; -1 means no limit."""
_KNOWN = {
    *("method", "model", "num_speculative_tokens", "enable_suffix_decoding", "disable_by_batch_size", *_REQUESTS),
    "suffix_speculative_tokens",
    *(name for names in _RULE.values() for name in names),
}
NOTHING = {"max_spec_factor": 0.0}
"""Parameters that make every suffix draft empty, so that only the draft model drafts."""
_SUFFIX_DEPTH, _ARCTIC_DEPTH = 24, 64
"""Default max_depth under vLLM's names for the parameters, and under ArcticInference's."""


@dataclass(frozen=True, slots=True)
class Translation:
    """Hold a translated config. max_draft: longest draft, in tokens; None: as long as the engine can verify."""

    max_draft: int | None
    settings: dict[str, Any]


def is_known(config: Mapping[str, Any]) -> bool:
    """Return whether `translate` is for this speculative config."""
    return named_method(config) in METHODS


def named_method(config: Mapping[str, Any]) -> Any:
    """Return the method; as in ArcticInference, suffix decoding without a method and a model is method "suffix"."""
    alone = config.get("model") is None and config.get("enable_suffix_decoding") is True
    return config.get("method") or ("suffix" if alone else None)


def with_model(additional: dict[str, Any], config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the ``additional_config`` with the draft model that one of METHODS names, if any, as its speculator.

    So that the settings can be checked before the method is translated: some belong to a speculator.
    """
    given = {} if config is None else dict(config)
    section = additional.get("agentspec", {})
    if (
        given.get("method") not in METHODS
        or not isinstance(given.get("model"), str)
        or not isinstance(section, Mapping)
    ):
        return additional
    return {**additional, "agentspec": {"speculator": given["model"], **section}}


def translate(config: Mapping[str, Any], max_draft: int | None = None) -> Translation:
    """Translate a speculative config of one of METHODS.

    max_draft: the operator's limit on a draft, in tokens. It lowers the config's own; None: as long as the engine can
    verify.

    Raises ConfigurationError that names the key.
    """
    method = named_method(config)
    if method not in METHODS:
        raise ConfigurationError(f"speculative method {method!r}: agentspec knows {', '.join(METHODS)}")
    unknown = sorted(set(config) - _KNOWN)
    if unknown:
        raise ConfigurationError(
            f"speculative-config: {', '.join(unknown)} is not known with method {method!r}; known are: "
            f"{', '.join(sorted(_KNOWN))}"
        )
    largest = _number(config, "disable_by_batch_size", 1)
    settings: dict[str, Any] = {} if largest is None else {"disable_by_batch_size": largest}
    return (_suffix if method == "suffix" else _arctic)(config, settings, max_draft)


def _suffix(config: Mapping[str, Any], settings: dict[str, Any], max_draft: int | None) -> Translation:
    """Translate method "suffix". settings: those that both methods have; extended here."""
    if config.get("enable_suffix_decoding") is False:
        raise ConfigurationError("speculative-config: enable_suffix_decoding is false, but the method is 'suffix'")
    rule = _rule(config)
    arctic_names = any(name.startswith(("suffix_cache_", "suffix_m")) for name in config)
    rule.setdefault("max_depth", _ARCTIC_DEPTH if arctic_names else _SUFFIX_DEPTH)
    settings["arctic_suffix_rule"] = rule
    if _cached_requests(config) == 0:
        settings["scope"] = "none"
    tokens = _number(config, "num_speculative_tokens", 1)
    longest = _number(config, "suffix_speculative_tokens", 0) or tokens or min(rule["max_depth"], MAX_DRAFT)
    return Translation(min(longest, max_draft or longest), settings)


def _arctic(config: Mapping[str, Any], settings: dict[str, Any], max_draft: int | None) -> Translation:
    """Translate method "arctic". settings: those that both methods have; extended here."""
    model = config.get("model")
    if not isinstance(model, str) or not model:
        raise ConfigurationError(
            f"speculative-config: model: method 'arctic' needs the speculator's folder or hub id, got {model!r}"
        )
    settings["speculator"] = model
    tokens = _number(config, "num_speculative_tokens", 1)
    if tokens is not None:
        settings["speculator_tokens"] = tokens
    suffix = config.get("enable_suffix_decoding", False)
    if not isinstance(suffix, bool):
        raise ConfigurationError(f"speculative-config: enable_suffix_decoding: true or false expected, got {suffix!r}")
    rule = _rule(config)
    if not suffix:
        given = sorted(name for name in config if name.startswith("suffix_"))
        if given:
            raise ConfigurationError(f"speculative-config: {', '.join(given)}: only with enable_suffix_decoding true")
        settings["arctic_suffix_rule"] = NOTHING
        return Translation(tokens or max_draft, settings)
    if rule:
        rule.setdefault("max_depth", _ARCTIC_DEPTH)
        settings["arctic_suffix_rule"] = rule
    if _cached_requests(config) == 0:
        settings["scope"] = "none"
    longest = _number(config, "suffix_speculative_tokens", 0)
    limit = None if max_draft is None else max(max_draft, tokens or 0)  # room for the draft model's drafts
    return Translation(min(longest, limit or longest) if longest else limit, settings)


def _rule(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rule's parameters that the config has."""
    rule: dict[str, Any] = {}
    for ours, names in _RULE.items():
        given = [name for name in names if config.get(name) is not None]
        if len(given) > 1:
            raise ConfigurationError(f"speculative-config: {' and '.join(given)} are the same: give one of them")
        if given:
            value = config[given[0]]
            if isinstance(value, bool) or not isinstance(value, int if ours == "max_depth" else int | float):
                raise ConfigurationError(f"speculative-config: {given[0]}: a number expected, got {value!r}")
            try:
                ArcticSettings(**{ours: value})
            except ConfigurationError as error:
                raise ConfigurationError(f"speculative-config: {given[0]}{str(error).removeprefix(ours)}") from None
            rule[ours] = value
    return rule


def _cached_requests(config: Mapping[str, Any]) -> int | None:
    given = (_number(config, name, least) for name, least in _REQUESTS.items())
    return next((limit for limit in given if limit is not None), None)


def _number(config: Mapping[str, Any], name: str, least: int) -> int | None:
    """Return a whole number of the config; None if it has none. Raises ConfigurationError for any other value."""
    value = config.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(
            f"speculative-config: {name}: a whole number of at least {least} expected, got {value!r}"
        )
    return value
