"""Keep the samples of a rollout in a file of JSON lines, each (id, epoch, sample) exactly once.

A sample is one line, written whole by one system call as soon as it has its reward. So a run that is killed keeps every
such sample. The next run removes a line that was cut off, and then samples and scores what is missing.
"""

import errno
import json
import math
import os
import re
import stat
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

from agentspec.errors import InvalidInputError
from agentspec.files import replacing
from agentspec.json_lines import parse_line


class Key(NamedTuple):
    """Name a sample: the problem's id, the epoch and the sample's number in it, both from 0."""

    id: str
    epoch: int
    sample: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Hold one finished sample.

    prompt_ids, completion_ids: token ids. logprobs: log probability of each completion token, under the distribution
    that it was sampled from (vLLM's ``processed_logprobs``). finish_reason: vLLM's, such as "stop" or "length".
    weight_version: version of the weights that wrote it. reward: None without a reward function, or if it failed
    (reward_error says why). steps: decode steps that it took. drafted, accepted: numbers of draft tokens. sampling: the
    settings that decided its distribution: model, temperature, top_p, max_tokens, stop, revision, dtype, quantization
    and kv_cache_dtype; None in files of earlier releases. fields: the problem's fields. A value that JSON has no form
    for is written as its text, NaN and infinity as null, half of a surrogate pair as its escape (``\\udce9``).
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
_BEGIN = re.compile(rb'\{"id": "(?:[^"\\]|\\.)*(?:\\\Z)?')
_GOES_ON = b'", "epoch": '
"""How each line begins that `Journal.write` writes."""
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND
_TRIES = 10
"""Most times to open the file, because another process may replace it between opening and locking."""
_HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which an error of a reward may hold. UTF-8 has no form for it."""


class Journal:
    """Write samples to a file, and know which ones it holds.

    Opening a file that exists removes a last line that was cut off. Raises InvalidInputError that names a line which is
    not a sample or repeats one, for a file that another process writes, and for a pipe or a device, which cannot be
    read again (except /dev/null, which keeps nothing). The file is unchanged then. Forked processes have it closed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rewards: dict[Key, float | None] = {}
        self._prompts: dict[str, int] = {}  # hash of the token ids, by the problem's id
        self._sampling: dict[str, Any] = {}  # of its samples, as far as these say
        self._weights: dict[int, str | None] = {}  # version of the weights of the first sample, by the epoch
        self._file = -1
        self._open()
        self._close_in_forked_processes()
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode) and not path.samefile(os.devnull):
                raise InvalidInputError(f"{path}: is a pipe or a device, which cannot be read again; give a file")
            end = self._end_of_whole_lines()
            for number, sample in enumerate(self._read(end), 1):
                self._check_is_new(sample, f"line {number}")
                self._note(sample)
            self._mend_last_line(end)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, key: Key) -> bool:
        return key in self._rewards

    def __iter__(self) -> Iterator[Key]:
        return iter(self._rewards)

    def __len__(self) -> int:
        return len(self._rewards)

    def reward(self, key: Key) -> float | None:
        """Return the reward of a sample that it holds; None if it has none."""
        return self._rewards[key]

    def weight_version(self, epoch: int) -> str | None:
        """Return the version of the weights that wrote an epoch's first sample; None without one."""
        return self._weights.get(epoch)

    def without_reward(self) -> set[Key]:
        """Return the keys of the samples that have no reward."""
        return {key for key, reward in self._rewards.items() if reward is None}

    def write(self, sample: Sample) -> None:
        """Append a sample. Raises InvalidInputError if the file holds it, OSError if it cannot be written."""
        if sample.key in self._rewards:
            raise InvalidInputError(f"{self.path}: holds {tuple(sample.key)} already")
        line = _line(sample)
        written = 0
        try:
            while written < len(line):  # a second call comes only if the disk is full, and raises that error
                written += os.write(self._file, line[written:])
        except BaseException as error:
            if 0 < written < len(line):  # leave no part of a line
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            if not isinstance(error, OSError):
                raise
            why = f"{error.strerror}; the sample {tuple(sample.key)} was not written"
            raise OSError(error.errno, why, str(self.path)) from error
        self._note(sample)

    def replace(self, samples: Mapping[Key, Sample]) -> None:
        """Replace samples by others of the same keys. A kill leaves the file with all of the new ones or with none.

        Raises OSError if they cannot be written, as on a full disk; then the file is unchanged.
        """
        try:
            new = self._put_in_place(samples)
        except OSError as error:
            why = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
            raise OSError(error.errno, f"{why}; the rewards were not written", str(self.path)) from error
        self.close()
        self._file = new
        for sample in samples.values():
            self._note(sample)

    def _put_in_place(self, samples: Mapping[Key, Sample]) -> int:
        """Replace the file by a new one, in which these samples replace those of their keys. Return its descriptor."""
        file = -1
        try:
            with replacing(self.path, sync=True) as part:
                file = os.open(part, _FLAGS | os.O_TRUNC, 0o600)
                _lock(file)  # before it gets the name by which other processes open it
                os.fchmod(file, stat.S_IMODE(os.fstat(self._file).st_mode))
                with open(file, "ab", closefd=False) as new:
                    for sample in self.samples():
                        new.write(_line(samples.get(sample.key, sample)))
        except BaseException:
            if file >= 0:
                os.close(file)
            raise
        return file

    def holds_another_prompt(self, problem_id: str, prompt_ids: list[int]) -> bool:
        """Return whether the first sample of a problem was sampled from other token ids."""
        prompt = hash(str(prompt_ids))
        return self._prompts.get(problem_id, prompt) != prompt

    def check_sampling(self, asked: Mapping[str, Any]) -> None:
        """Raise InvalidInputError if the file's samples have other settings: one file has one distribution."""
        for name, value in asked.items():
            found = self._sampling.get(name, value)
            if found != value:
                raise InvalidInputError(
                    f"{self.path}: its samples have {name} {as_text(found)}, and this rollout asks for "
                    f"{as_text(value)}; ask for the same, or write to another file"
                )

    def samples(self, epoch: int | None = None) -> Iterator[Sample]:
        """Yield the samples in the order in which they were written. epoch: only those of this epoch."""
        return (sample for sample in self._read() if epoch is None or sample.epoch == epoch)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        """Open the file and lock it. Raises InvalidInputError if another process has it locked."""
        for _ in range(_TRIES):
            self._file = os.open(self.path, _FLAGS, 0o644)
            try:
                _lock(self._file)
                if self._is_at_path():
                    break
            except BlockingIOError:
                self.close()
                break
            except BaseException:
                self.close()
                raise
            self.close()
        if self._file < 0:
            raise InvalidInputError(f"{self.path}: another rollout writes it; write to another file")

    def _is_at_path(self) -> bool:
        """Return whether the open file still has its name, which another process's `replace` may give to a new one."""
        try:
            return os.path.samestat(os.fstat(self._file), self.path.stat())
        except FileNotFoundError:
            return False

    def _close_in_forked_processes(self) -> None:
        this = weakref.ref(self)

        def close() -> None:  # otherwise a forked process that outlives a kill, such as an engine, would hold the lock
            if (journal := this()) is not None:
                journal.close()

        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=close)

    def _check_is_new(self, sample: Sample, place: str) -> None:
        """Raise InvalidInputError for a sample that the file holds twice, such as after files were joined."""
        if sample.key in self._rewards:
            raise InvalidInputError(
                f"{self.path}, {place}: the sample {tuple(sample.key)} stands there twice; remove one, or write to "
                "another file"
            )

    def _note(self, sample: Sample) -> None:
        self._rewards[sample.key] = sample.reward
        self._weights.setdefault(sample.epoch, sample.weight_version)
        if sample.id not in self._prompts:
            self._prompts[sample.id] = hash(str(sample.prompt_ids))
        if sample.sampling is not None:  # earlier releases wrote fewer settings, or none
            self._sampling = sample.sampling | self._sampling

    def _read(self, end: int | None = None) -> Iterator[Sample]:
        """Yield the samples of the file's first ``end`` bytes; None: of all."""
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if end is not None:
                    end -= len(line)
                    if end < 0:
                        return
                try:
                    yield _parse(line)
                except (ValueError, TypeError, RecursionError) as error:
                    raise InvalidInputError(
                        f"{self.path}, line {number}: not a sample of a rollout ({error}); write to another file"
                    ) from None

    def _end_of_whole_lines(self) -> int:
        end = os.fstat(self._file).st_size
        while end > 0:
            begin = max(0, end - 65_536)
            newline = os.pread(self._file, end - begin, begin).rfind(b"\n")
            if newline >= 0:
                return begin + newline + 1
            end = begin
        return 0

    def _mend_last_line(self, begin: int) -> None:
        """Remove a last line that was cut off. If only its newline is missing, add that. begin: its first byte."""
        last = os.pread(self._file, os.fstat(self._file).st_size - begin, begin)
        if not last:
            return
        try:
            sample = _parse(last)
        except (ValueError, TypeError, RecursionError):
            if _is_json(last) or not _may_be_cut_off(last):
                raise InvalidInputError(
                    f"{self.path}: its last line is not a sample of a rollout; write to another file"
                ) from None
            os.ftruncate(self._file, begin)
        else:
            self._check_is_new(sample, "its last line")
            os.write(self._file, b"\n")
            self._note(sample)


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


def _lock(file: int) -> None:
    """Lock a file for this process if the system can. Raises BlockingIOError if another process has it locked."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        return


def _line(sample: Sample) -> bytes:
    """Return the line of a sample."""
    return _HALF.sub(lambda half: f"\\\\u{ord(half[0]):04x}", f"{as_text(_values(sample))}\n").encode()


def _parse(line: bytes) -> Sample:
    """Return the sample of a line. Raises ValueError, TypeError or RecursionError if it is none."""
    values = parse_line(line)
    if not isinstance(values, dict) or not values.keys() >= _NEEDED:
        raise ValueError(f"needs {', '.join(sorted(_NEEDED))}")
    sample = Sample(**values)
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


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _may_be_cut_off(line: bytes) -> bool:
    """Return whether a line is the beginning of one that `Journal.write` writes."""
    begin = _BEGIN.match(line)
    if begin is None:
        return b'{"id": "'.startswith(line)
    rest = line[begin.end() : begin.end() + len(_GOES_ON)]
    return _GOES_ON.startswith(rest)


def _values(sample: Sample) -> dict[str, Any]:
    """Return a sample's fields. ``asdict`` would copy thousands of tokens one by one, between two engine steps."""
    return {each.name: getattr(sample, each.name) for each in fields(sample)}
