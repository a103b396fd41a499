"""Take options out of the arguments of ``vllm serve``, and out of the YAML file that its ``--config`` names.

vLLM merges several spellings of one option: with dots, abbreviated, repeated, in the file. agentspec puts options of
its own into two of them, so it must find what the user said there, or that would be lost: who may share, for example.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentspec.errors import ConfigurationError
from agentspec.server_ext.settings import json_object

_FILE = "--config"
_LEAST_ABBREVIATION = len("--add")


class CommandLine:
    """Hold the arguments of ``vllm serve``, and what its file says. rest: the arguments that were not taken."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.rest = list(arguments)
        self._file: dict[str, Any] = {}
        self._file = _read_file(self.value(_FILE))

    def value(self, *names: str) -> Any:
        """Return an option's value, the last one as for vLLM, else the file's; None where it is missing."""
        values = [value for _, _, value in self._places(names)]
        return values[-1] if values else self.in_file(*names)

    def in_file(self, *names: str) -> Any:
        """Return what the file says of an option; None where it says nothing."""
        found = (self._file.get(name.lstrip("-")) for name in names)
        return next((value for value in found if value is not None), None)

    def begins_with(self, prefix: str) -> str | None:
        """Return an option of the arguments or the file whose name begins so, None if there is none."""
        return next((each for each in self._given() if _plain(each).startswith(prefix)), None)

    def take_object(self, *names: str) -> dict[str, Any] | None:
        """Remove an option from the arguments, and return the JSON object that it holds, else the file's.

        Where it stands several times the last one counts, as for vLLM. Raises ConfigurationError for a value that is no
        object, and for spellings that would hide another value from agentspec.
        """
        spelled = names[0]
        for argument in self._given():
            name = _plain(argument.partition("=")[0])
            abbreviated = len(name) >= _LEAST_ABBREVIATION and spelled.startswith(name) and name != spelled
            if abbreviated or name.startswith(tuple(f"{each}." for each in names)):
                raise ConfigurationError(f"{argument}: give it in full, as {spelled} '{{…}}'")
        given = self.value(*names)
        for begin, end, _ in reversed(self._places(names)):
            del self.rest[begin:end]
        if given is None or isinstance(given, Mapping):
            return None if given is None else dict(given)
        return json_object(spelled, str(given))

    def _given(self) -> list[str]:
        """Return the arguments, and the file's options as if they were some."""
        return [*self.rest, *(f"--{key}" for key in self._file)]

    def _places(self, names: Sequence[str]) -> list[tuple[int, int, str]]:
        """Return where these options stand: begin, end, and value."""
        places = []
        for i, argument in enumerate(self.rest):
            name, equals, value = argument.partition("=")
            if _plain(name) in names:
                end = i + (1 if equals else 2)
                places.append((i, end, value if equals else "".join(self.rest[i + 1 : end])))
        return places


def _plain(name: str) -> str:
    """Return an option's name with dashes: vLLM takes underscores, too."""
    begin, dot, rest = name.partition(".")
    return begin.replace("_", "-") + dot + rest if name.startswith("--") else name


def _read_file(path: Any) -> dict[str, Any]:
    """Return a file's options, with dashes. An unreadable file is empty: vLLM says what is wrong with it."""
    if not path or not str(path).endswith((".yaml", ".yml")):
        return {}
    try:
        import yaml  # vLLM needs it
    except ImportError:  # so vLLM is missing, which `run_vllm` says
        return {}
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {_plain(f"--{key}")[2:]: value for key, value in found.items()} if isinstance(found, dict) else {}
