"""Decide whether and how agentspec drafts in an engine, when vLLM makes the engine's speculative configuration.

``create_speculative_config`` does so. It translates methods of ArcticInference, lets agentspec draft beside those of
vLLM (``native_methods``), and chooses the draft limit by model where the user gave none (``draft_limit``). It refuses
options that exclude drafts (``conflicts``).
"""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from agentspec.errors import ConfigurationError, UnsupportedEngineError
from agentspec.server_ext.arctic_methods import is_known, translate, with_model
from agentspec.server_ext.figures.step_record import make_record
from agentspec.server_ext.identity.server_secrets import server_secret
from agentspec.server_ext.settings import Settings, check_draft_limit, load_settings, settle_store
from agentspec.server_ext.vllm_adapter.startup import native_methods
from agentspec.server_ext.vllm_adapter.startup.conflicts import conflict, is_server
from agentspec.server_ext.vllm_adapter.startup.draft_limit import default_draft_limit
from agentspec.server_ext.vllm_adapter.startup.given_method import (
    PROPOSER_PATH,
    SHORT_OPTIONS,
    given_config,
    is_own,
    named_drafter,
    own_config,
)

logger = logging.getLogger("vllm.agentspec")

SWITCH = "AGENTSPEC"
"""Environment variable that makes engines draft without any of agentspec's options (1), or not (0)."""


def engine_options(
    *, max_draft: int | None = None, speculative_config: Mapping[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """Return keyword arguments that make an offline ``vllm.LLM`` draft with agentspec.

    ``LLM(model, **engine_options(store="sqlite:///rollouts.db", tenant="me"))``; ``settings`` as in ``Settings``.
    max_draft: longest draft, in tokens; None: as many as the engine can verify, chosen by model. speculative_config: a
    method of vLLM's or ArcticInference's to draft beside; None: the suffix indexes draft alone.
    Raises ConfigurationError for a wrong setting.
    """
    check_given_limit(max_draft)
    given = {**settings, "max_draft": max_draft}
    additional = {"agentspec": {name: value for name, value in given.items() if value is not None}}
    load_settings(with_model(additional, speculative_config))
    config = own_config() if speculative_config is None else dict(speculative_config)
    return {"speculative_config": config, "additional_config": additional}


def uses_agentspec(vllm_config: Any) -> bool:
    """Return whether this engine drafts with agentspec."""
    spec = vllm_config.speculative_config
    if spec is None:
        return False
    own = spec.method == "custom_class" and spec.model == PROPOSER_PATH
    return own or native_methods.drafter_tokens(spec) is not None


def check_given_limit(max_draft: int | None) -> None:
    """Raise ConfigurationError for a draft limit out of range. None is accepted: the engine chooses."""
    if max_draft is not None:
        check_draft_limit(max_draft)


# --- Where vLLM makes its speculative configuration


def create_speculative_config(
    original: Callable[..., Any], engine_args: Any, target_model_config: Any, target_parallel_config: Any
) -> Any:
    """Let vLLM make its speculative configuration, and agentspec draft by it or beside it.

    Each step builds on what the steps before have written into ``engine_args``:

    1. Settle which method the options name, in a form that vLLM knows.
    2. Decide by that method and the settings whether agentspec drafts by its own method, beside another, or not.
    3. Complete agentspec's own method, or check the drafter beside which it drafts. Let vLLM make its configuration.
    4. Raise the draft limit in that configuration beside a method of vLLM's, which only now has its final name.
    5. Refuse options that exclude drafts, and prepare what the engine's processes share.
    """
    switch_on(engine_args, target_model_config, target_parallel_config)
    translate_method(engine_args)
    leave_pooling_models(engine_args, target_model_config)
    mode = _mode_of(engine_args)
    if mode == "own":
        set_draft_limit(engine_args, target_model_config, target_parallel_config)
    elif mode == "beside":
        native_methods.check_drafter(given_config(engine_args))
    spec = original(engine_args, target_model_config, target_parallel_config)
    if spec is None:
        if mode == "beside" and target_model_config.runner_type == "generate" and not is_switched_on():
            logger.warning(
                "agentspec: its settings are given, but no speculative method, so nothing is drafted: start the server "
                "with 'agentspec serve', give an LLM engine_options(), or set %s=1",
                SWITCH,
            )
        return None
    if mode == "off":
        if not switch_on_beside(spec, engine_args, target_model_config, target_parallel_config):
            return spec
        mode = "beside"
    if mode == "beside":
        draft_beside(spec, engine_args, target_model_config, target_parallel_config)
    if (reason := conflict(engine_args, target_model_config, target_parallel_config)) is not None:
        raise ConfigurationError(reason)
    engine_args.async_scheduling = False  # the suffix indexes need each step's tokens before they draft
    settings = settle_store(engine_args.additional_config)
    server_secret(settings)  # the processes that vLLM starts find it in the environment
    # The worker would find these errors a minute later, and they would stand in its log alone.
    if settings.record is not None:
        make_record(settings.record)
    check_draft_model(settings, target_model_config)
    if not is_server(engine_args):  # a server's routes log it, with who its callers are
        logger.info("agentspec: %s", what_drafts(spec, settings))
    return spec


def _mode_of(engine_args: Any) -> Literal["own", "beside", "off"]:
    """Return whether agentspec's own method drafts, or agentspec beside the method that vLLM finds, or neither."""
    if is_own(engine_args):
        return "own"
    return "beside" if _has_settings(engine_args) and load_settings(engine_args.additional_config).enabled else "off"


def is_switched_on(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether ``AGENTSPEC=1`` asks every engine to draft. Raises ConfigurationError for another value."""
    asked = environ.get(SWITCH) or "0"
    if asked not in ("0", "1"):
        raise ConfigurationError(f"{SWITCH}={asked!r}: 1 lets every vLLM engine draft with agentspec, 0 does nothing")
    return asked == "1"


def switch_on(
    engine_args: Any, model_config: Any, parallel_config: Any, environ: Mapping[str, str] = os.environ
) -> None:
    """Let an engine draft with agentspec where ``AGENTSPEC=1`` asks for it, without any option of the engine.

    So trainers that make their own engine need no change. An engine that cannot draft stays as it is, and so does one
    whose options name a drafter: see `switch_on_beside`.
    """
    if not is_switched_on(environ) or named_drafter(engine_args) is not None:
        return
    reason = conflict(engine_args, model_config, parallel_config, environ)
    if model_config.runner_type != "generate":
        logger.debug("agentspec: %s=1: this engine generates no text", SWITCH)
    elif reason is not None:
        logger.warning("agentspec: %s=1: no drafts: %s", SWITCH, reason)
    elif parallel_config.pipeline_parallel_size > 1:
        logger.warning("agentspec: %s=1: no drafts: vLLM cannot verify them over several pipeline stages", SWITCH)
    else:
        engine_args.speculative_config = own_config()
        logger.info("agentspec: %s=1: this engine drafts from suffix indexes", SWITCH)


def switch_on_beside(
    spec: Any, engine_args: Any, model_config: Any, parallel_config: Any, environ: Mapping[str, str] = os.environ
) -> bool:
    """Let agentspec draft beside a method of vLLM's where ``AGENTSPEC=1`` asks for it. Return whether it does.

    The engine keeps its method. spec: the SpeculativeConfig that vLLM made for it. It alone knows the method, which
    vLLM may find by the model, and which has several names in the user's options.
    """
    if not is_switched_on(environ) or _has_settings(engine_args):
        return False
    reason = conflict(engine_args, model_config, parallel_config, environ)
    if reason is None and parallel_config.pipeline_parallel_size > 1:
        reason = "vLLM cannot verify drafts over several pipeline stages"
    try:
        native_methods.check_method(spec)
    except (ConfigurationError, UnsupportedEngineError) as error:
        reason = reason or str(error)
    if reason is not None:
        logger.info("agentspec: %s=1: this engine keeps its method %s alone: %s", SWITCH, spec.method, reason)
        return False
    engine_args.additional_config = {"agentspec": {}, **(engine_args.additional_config or {})}
    logger.info("agentspec: %s=1: this engine drafts from suffix indexes beside %s", SWITCH, spec.method)
    return True


def translate_method(engine_args: Any) -> None:
    """Translate ``method: arctic`` and ``suffix`` into agentspec's own method and settings.

    An engine without agentspec settings (an "agentspec" section in ``additional_config``, which ``agentspec serve``
    always gives) keeps the method if ArcticInference is installed. Raises ConfigurationError for a key that the method
    does not know.
    """
    config = given_config(engine_args)
    additional = engine_args.additional_config
    additional = dict(additional) if isinstance(additional, Mapping) else {}
    if not is_known(config) or (not _has_settings(engine_args) and _has_arctic_inference()):
        return
    translation = translate(config, load_settings(with_model(additional, config)).max_draft)
    check_given_limit(translation.max_draft)
    given = {**translation.settings, **(additional.get("agentspec") or {})}
    additional["agentspec"] = given if translation.max_draft is None else {**given, "max_draft": translation.max_draft}
    load_settings(additional)  # report wrong settings now
    engine_args.additional_config = additional
    engine_args.speculative_config = own_config()
    for option in SHORT_OPTIONS.values():
        setattr(engine_args, option, None)


def _has_arctic_inference() -> bool:
    from vllm.utils.import_utils import has_arctic_inference

    return bool(has_arctic_inference())


def leave_pooling_models(engine_args: Any, model_config: Any) -> None:
    """Take agentspec's method from an engine whose model generates no text, such as an embedding model."""
    if is_own(engine_args) and model_config.runner_type != "generate":
        engine_args.speculative_config = None
        logger.info("agentspec: this model generates no text, so nothing is drafted")


def set_draft_limit(engine_args: Any, model_config: Any, parallel_config: Any) -> None:
    """Set ``num_speculative_tokens`` of agentspec's own method if the user gave no number.

    The limit is the longest draft that the engine can verify, and at least ``speculator_tokens``. Where the draft model
    drafts alone, it is the length of its drafts. Raises SpeculatorError if its config cannot be read.
    """
    if given_config(engine_args).get("num_speculative_tokens") is not None:
        return
    settings = load_settings(engine_args.additional_config)
    rule = settings.arctic_suffix_rule
    if settings.speculator is not None and rule is not None and rule.drafts_nothing:
        from agentspec.server_ext.speculator.checkpoint import drafted_tokens

        limit = settings.speculator_tokens or drafted_tokens(settings.speculator)
        limit = min(limit, settings.max_draft or limit)
    else:
        limit = settings.max_draft or default_draft_limit(engine_args, model_config, parallel_config)
    limit = max(limit, settings.speculator_tokens or 1)
    engine_args.speculative_config = {**engine_args.speculative_config, "num_speculative_tokens": limit}


def draft_beside(spec: Any, engine_args: Any, model_config: Any, parallel_config: Any) -> None:
    """Draft beside the method of vLLM that ``spec``, its SpeculativeConfig, names.

    Raises ConfigurationError or UnsupportedEngineError, with the remedy, if that cannot work.
    """
    native_methods.check_method(spec)
    settings = load_settings(engine_args.additional_config)
    if settings.speculator is not None:
        raise ConfigurationError(
            f"speculator and --speculative-config {spec.method!r}: there is one draft model; give one of them"
        )
    limit = settings.max_draft or default_draft_limit(engine_args, model_config, parallel_config)
    native_methods.adopt(spec, limit)


def _has_settings(engine_args: Any) -> bool:
    """Return whether the engine has agentspec's settings, which ``agentspec serve`` always gives."""
    additional = engine_args.additional_config
    return isinstance(additional, Mapping) and "agentspec" in additional


def check_draft_model(settings: Settings, model_config: Any) -> None:
    """Raise SpeculatorError where the speculator doesn't fit vLLM's ModelConfig or the settings; read no weights."""
    if not settings.enabled or settings.speculator is None:
        return
    from agentspec.server_ext.speculator.checkpoint import check_speculator

    check_speculator(
        settings.speculator,
        hidden_size=model_config.get_hidden_size(),
        vocab_size=model_config.get_vocab_size(),
        tokens=settings.speculator_tokens,
    )


# --- The line that says what drafts


def what_drafts(spec: Any, settings: Settings, *, has_keys: bool | None = None) -> str:
    """Return `describe`'s line for an engine that drafts with agentspec. spec: vLLM's SpeculativeConfig of it."""
    beside = native_methods.drafter_tokens(spec) is not None
    method = spec.method if beside else "speculator" if settings.speculator else None
    return describe(settings, method, spec.num_speculative_tokens, has_keys=has_keys)


def describe(settings: Settings, method: str | None, longest: int, *, has_keys: bool | None = None) -> str:
    """Return one line that says what drafts, how far, at what price, and who drafts from whose answers.

    method: the draft model beside the suffix indexes; None: there is none. longest: longest draft of a request, in
    tokens. has_keys: whether vLLM's server checks API keys; None: there is no server, so there are no callers.
    """
    if not settings.enabled:
        return "switched off (enabled: false), no drafts"
    sources = {"tenant": "session, group, tenant", "session": "session, family", "none": "own text"}[settings.scope]
    index = f"suffix index ({sources})"
    rule = settings.arctic_suffix_rule
    if rule is not None and rule.drafts_nothing:
        index = ""
    elif rule is not None:
        index += " by ArcticInference's rule"
    price = "measured" if settings.verify_cost is None else f"{settings.verify_cost:g}"
    drafters = " + ".join(part for part in (index, method) if part)
    line = f"{drafters}, up to {longest} tokens, price {price}"
    return line if has_keys is None else f"{line}; {_who_shares(settings, has_keys)}"


def _who_shares(settings: Settings, has_keys: bool) -> str:
    """Return the part of the line that says who drafts from whose answers."""
    told_apart = has_keys or settings.principal_header is not None or settings.api_keys_file is not None
    if settings.scope == "none":
        return "each request drafts from its own text alone"
    if settings.scope == "session":
        whose = "for its principal" if told_apart else "whoever names it, --api-key separates callers"
        return f"each session drafts from itself, its parent and children alone, {whose}"
    if settings.tenant is not None:
        sessions = "but not sessions" if told_apart else "--api-key keeps sessions apart"
        return f"all callers of tenant {settings.tenant!r} share answers, {sessions}"
    if settings.tenant_header or settings.api_keys_file:
        return "shared within each tenant"
    if settings.principal_header:
        return "shared within each principal"
    return "shared within each API key" if has_keys else "shared by all callers, --api-key separates them"
