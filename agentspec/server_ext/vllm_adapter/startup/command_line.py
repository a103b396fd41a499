"""Find options among the arguments of ``vllm serve`` and in the file of its option ``--config``."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentspec.errors import ConfigurationError
from agentspec.server_ext.settings import json_object

_FILE = "--config"
_LEAST_ABBREVIATION = len("--ad")


class CommandLine:
    """Hold the arguments of ``vllm serve`` and the options in its ``--config`` file.

    rest: the arguments that were not taken. ``--config=FILE`` is two of them, because vLLM does not read the file
    otherwise.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        parts = (each.split("=", 1) if each.startswith(f"{_FILE}=") else [each] for each in arguments)
        self.rest = list(itertools.chain.from_iterable(parts))
        self._file: dict[str, Any] = {}
        self._file = _read_file(self.value(_FILE))

    def value(self, *names: str) -> Any:
        """Return an option's last value in the arguments, which is vLLM's choice, else the file's, else None."""
        values = [value for _, _, value in self._places(names)]
        return values[-1] if values else self.in_file(*names)

    def in_file(self, *names: str) -> Any:
        """Return the file's value of an option; None where it has none."""
        found = (self._file.get(name.lstrip("-")) for name in names)
        return next((value for value in found if value is not None), None)

    def spelling(self, name: str) -> str | None:
        """Return how the arguments spell an option, None if it is not among them."""
        places = self._places((name,))
        return self.rest[places[0][0]].partition("=")[0] if places else None

    def begins_with(self, prefix: str) -> str | None:
        """Return the first option in the arguments or the file whose name begins with ``prefix``; None without one."""
        return next((each for each in self._given() if plain_name(each).startswith(prefix)), None)

    def abbreviates(self, *names: str) -> bool:
        """Return whether the arguments or the file abbreviate one of these options, which ``value`` does not see."""
        given = {plain_name(argument.partition("=")[0]) for argument in self._given() if argument.startswith("--")}
        return any(name.startswith(each) and name != each != "--" for name in names for each in given)

    def take_object(self, *names: str) -> dict[str, Any] | None:
        """Remove an option from the arguments, and return the JSON object that it holds, else the file's.

        If it was given several times, the last one counts, as for vLLM. Raises ConfigurationError for a value that is
        not an object, and for dotted or abbreviated spellings, whose values agentspec would not see.
        """
        spelled = names[0]
        for argument in self._given():
            name = plain_name(argument.partition("=")[0])
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
        """Return the arguments, then the names of the file's options, spelled as arguments."""
        return [*self.rest, *(f"--{key}" for key in self._file)]

    def _places(self, names: Sequence[str]) -> list[tuple[int, int, str]]:
        """Return where these options are among the arguments: begin, end, and value of each."""
        places = []
        for i, argument in enumerate(self.rest):
            name, equals, value = argument.partition("=")
            if plain_name(name) in names:
                end = i + (1 if equals else 2)
                places.append((i, end, value if equals else "".join(self.rest[i + 1 : end])))
        return places


def plain_name(name: str) -> str:
    """Return an option's name with dashes: vLLM takes underscores, too."""
    begin, dot, rest = name.partition(".")
    return begin.replace("_", "-") + dot + rest if name.startswith("--") else name


def _read_file(path: Any) -> dict[str, Any]:
    """Return a YAML file's options, with dashes. Any other or unreadable file has none: vLLM says what is wrong."""
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
    return {plain_name(f"--{key}")[2:]: value for key, value in found.items()} if isinstance(found, dict) else {}
