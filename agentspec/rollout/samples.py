"""Define a sample of a rollout, and the line of JSON in which a file keeps it."""

import json
import math
import re
import sys
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from agentspec.json_lines import parse_line


class Key(NamedTuple):
    """Name a sample: the problem's id, the epoch and the sample's number in it, both from 0."""

    id: str
    epoch: int
    sample: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Hold one finished sample.

    prompt_ids, completion_ids: token ids.
    logprobs: log probability of each completion token, under the distribution that it was sampled from (vLLM's
        ``processed_logprobs``).
    finish_reason: vLLM's, such as "stop" or "length". In the file, this text and the next two are "" where they are
        None.
    weight_version: version of the weights that wrote it.
    reward_error: why the reward failed.
    reward: None without a reward function, or if it failed.
    steps: decode steps that it took.
    drafted, accepted: numbers of draft tokens.
    sampling: the settings that decided its distribution: model, temperature, top_p, max_tokens, stop, revision, dtype,
        quantization and kv_cache_dtype; None in files of earlier releases.
    fields: the problem's fields. A value that JSON has no form for is written as its text, NaN and infinity as null,
        half of a surrogate pair as its escape (``\\udce9``).
    """

    id: str
    epoch: int
    sample: int
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str | None = None
    weight_version: str | None = None
    reward: float | None = None
    reward_error: str | None = None
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    sampling: dict[str, Any] | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """Return the sample's key."""
        return Key(self.id, self.epoch, self.sample)


_NEEDED = {"id", "epoch", "sample", "prompt_ids", "completion_ids", "logprobs", "text"}
_KINDS: tuple[tuple[str, Any, str], ...] = (
    ("text", str, "a text"),
    ("prompt_ids", list, "a list"),
    ("completion_ids", list, "a list"),
    ("logprobs", list, "a list"),
    ("fields", dict, "an object"),
    ("sampling", dict | None, "an object or null"),
)
"""Fields of a line, their types, and the names of these types in errors."""
_TEXTS = ("finish_reason", "weight_version", "reward_error")
"""Fields that are "" in a line for None: datasets refuses a text in a column whose first 10 MB are null."""
_BEGIN = re.compile(rb'\{"id": "(?:[^"\\]|\\.)*(?:\\\Z)?')
_GOES_ON = b'", "epoch": '
"""How each line begins."""
_HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which an error of a reward may hold. UTF-8 has no form for it."""


def as_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a sample's fields as they are read from its line. Raises any error of JSON or of a value's ``str``."""
    made: dict[str, Any] = json.loads(as_text(fields))
    return made


def as_text(value: Any) -> str:
    """Return a value as JSON. NaN and infinity become null, and other values that JSON lacks their text.

    Raises any error of JSON or of a value's ``str``.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, default=str)


def _finite(value: Any) -> Any:
    """Return a value with None in place of NaN and infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, dict):
        return {str(name) if isinstance(name, float) else name: _finite(each) for name, each in value.items()}
    return value


def line_of(sample: Sample) -> bytes:
    """Return the line of a sample."""
    return _HALF.sub(lambda half: f"\\\\u{ord(half[0]):04x}", f"{as_text(_values(sample))}\n").encode()


def parse_sample(line: bytes) -> Sample:
    """Return the sample of a line. Raises ValueError, TypeError or RecursionError if it is none."""
    values = parse_line(line)
    if not isinstance(values, dict) or not values.keys() >= _NEEDED:
        raise ValueError(f"needs {', '.join(sorted(_NEEDED))}")
    sample = Sample(**values | {name: values.get(name) or None for name in _TEXTS})
    if not (type(sample.id) is str and type(sample.epoch) is int and type(sample.sample) is int):
        raise ValueError("id: a text, epoch and sample: whole numbers expected")  # pandas makes a number of the id "7"
    if type(sample.reward) not in (float, int, type(None)):
        raise ValueError("reward: a number or null expected")
    if sample.reward is not None and not abs(sample.reward) <= sys.float_info.max:  # also refuses nan, which json reads
        raise ValueError("reward: a finite number expected")
    for name, kind, called in _KINDS:
        if not isinstance(getattr(sample, name), kind):
            raise ValueError(f"{name}: {called} expected")
    return sample


def may_be_cut_off(line: bytes) -> bool:
    """Return whether a line is the beginning of one of a sample."""
    begin = _BEGIN.match(line)
    if begin is None:
        return b'{"id": "'.startswith(line)
    rest = line[begin.end() : begin.end() + len(_GOES_ON)]
    return _GOES_ON.startswith(rest)


def _values(sample: Sample) -> dict[str, Any]:
    """Return the fields of a sample's line. ``asdict`` would copy thousands of tokens one by one, between two steps."""
    values = {each.name: getattr(sample, each.name) for each in fields(sample)}
    return values | {name: values[name] or "" for name in _TEXTS}
