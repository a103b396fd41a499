"""Keep the samples of a rollout in a file of JSON lines, each (id, epoch, sample) exactly once.

A sample is one line, written whole by one system call as soon as it has its reward. So a run that is killed keeps every
such sample. The next run removes a line that was cut off, and then samples and scores what is missing.
"""

import errno
import io
import itertools
import json
import logging
import os
import stat
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from agentspec.errors import InvalidInputError
from agentspec.files import replacing, unfinished_copy
from agentspec.rollout.samples import Key, Sample, as_text, line_of, may_be_cut_off, parse_sample

logger = logging.getLogger(__name__)

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND
_TRIES = 10
"""Most times to open the file, because another process may replace it between opening and locking."""


class Journal:
    """Write samples to a file, and know which ones it holds.

    Opening a file that exists removes a last line that was cut off. Raises InvalidInputError that names a line which is
    not a sample or repeats one, and for a file that another process writes. Raises it also for a pipe or a device,
    which cannot be read again, except /dev/null. The file is unchanged then. Forked processes have it closed.
    """

    def __init__(self, path: Path) -> None:
        path = path.absolute()  # a reward may change the working directory
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rewards: dict[Key, float | None] = {}
        self._prompts: dict[str, int] = {}  # hash of the token ids, by the problem's id
        self._sampling: dict[str, Any] = {}  # of its samples, as far as these say
        self._weights: dict[int, str | None] = {}  # version of the weights of the first sample, by the epoch
        self._begins: dict[int, int] = {}  # first byte of the first sample, by the epoch; missing: read the whole file
        self._file = -1
        self._open()
        self._close_in_forked_processes()
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode) and not path.samefile(os.devnull):
                raise InvalidInputError(f"{path}: is a pipe or a device, which cannot be read again; give a file")
            unfinished_copy(path).unlink(missing_ok=True)  # of a process that was killed
            end = self._end_of_whole_lines()
            for number, (begin, sample) in enumerate(self._read(end=end), 1):
                self._check_is_new(sample, f"line {number}")
                self._note(sample, begin)
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
        self._keep_its_name()
        line = line_of(sample)
        begin = os.fstat(self._file).st_size
        written = 0
        try:
            while written < len(line):  # a second call comes only if the disk is full, and raises that error
                written += os.write(self._file, line[written:])
        except BaseException as error:
            written = os.fstat(self._file).st_size - begin  # Ctrl-C may come between the call and its result
            if written == len(line):
                self._note(sample, begin)
            elif written > 0:  # leave no part of a line
                os.ftruncate(self._file, begin)
            if not isinstance(error, OSError):
                raise
            why = f"{error.strerror}; the sample {tuple(sample.key)} was not written"
            raise OSError(error.errno, why, str(self.path)) from error
        self._note(sample, begin)

    def replace(self, samples: Mapping[Key, Sample]) -> None:
        """Replace samples by others of the same keys. A kill leaves the file with all of the new ones or with none.

        Raises OSError if they cannot be written, as on a full disk; then the file is unchanged.
        """
        self._keep_its_name()
        self._put_in_place(self.path, samples, "the rewards were not written")
        for sample in samples.values():
            self._note(sample)

    def _keep_its_name(self) -> None:
        """Write all samples under a name again if the file was removed or renamed, or another one has its name."""
        if self._is_at_path():
            return
        names = (self.path.with_suffix(f".{number}{self.path.suffix}") for number in itertools.count(1))
        path = next(path for path in itertools.chain([self.path], names) if not os.path.lexists(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        former = self.path
        self._put_in_place(path, {}, "it was removed or renamed, and its samples were not written again")
        what = "was replaced by another file" if path != former else "was removed or renamed"
        message = "agentspec: %s %s while the rollout wrote it; all its samples are in %s now, and the rollout goes on"
        logger.warning(message, former, what, path)

    def _put_in_place(self, path: Path, samples: Mapping[Key, Sample], otherwise: str) -> None:
        """Go on in a new file, in which these samples replace those of their keys. otherwise: what an OSError means."""
        try:
            file = self._rewritten(path, samples)
        except OSError as error:
            why = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
            raise OSError(error.errno, f"{why}; {otherwise}", str(path)) from error
        self._go_on_in(file, path)

    def _go_on_in(self, file: int, path: Path) -> None:
        self.close()
        self._file, self.path = file, path
        self._begins.clear()  # its lines may have other lengths

    def _rewritten(self, path: Path, samples: Mapping[Key, Sample]) -> int:
        file = -1
        try:
            with replacing(path, sync=True) as part:
                file = os.open(part, _FLAGS | os.O_TRUNC, 0o600)
                _lock(file)  # before it gets the name by which other processes open it
                os.fchmod(file, stat.S_IMODE(os.fstat(self._file).st_mode))
                with open(file, "ab", closefd=False) as new:
                    for sample in self.samples():
                        new.write(line_of(samples.get(sample.key, sample)))
        except BaseException:
            if file >= 0 and _is_at(file, path):  # Ctrl-C came once it was in place
                self._go_on_in(file, path)
            elif file >= 0:
                os.close(file)
            raise
        return file

    def holds_another_prompt(self, problem_id: str, prompt_ids: list[int]) -> bool:
        """Return whether the first sample of a problem was sampled from other token ids."""
        prompt = hash(str(prompt_ids))
        return self._prompts.get(problem_id, prompt) != prompt

    def has_other_weights(self, digest: str) -> bool:
        """Return whether its first samples are of a model whose files had another digest (``sampling["weights"]``)."""
        return bool(self._sampling.get("weights", digest) != digest)

    def check_sampling(self, asked: Mapping[str, Any]) -> None:
        """Raise InvalidInputError if the file's samples have other settings: one file has one distribution."""
        for name, value in asked.items():
            found = self._sampling.get(name, value)
            if found != value and name != "weights":
                raise InvalidInputError(
                    f"{self.path}: its samples have {name} {as_text(found)}, and this rollout asks for "
                    f"{as_text(value)}; ask for the same, or write to another file"
                )

    def samples(self, epoch: int | None = None) -> Iterator[Sample]:
        """Yield the samples in the order in which they were written. epoch: only those of this epoch."""
        for _, sample in self._read(0 if epoch is None else self._begins.get(epoch, 0)):
            if epoch is None or sample.epoch == epoch:
                yield sample

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
        return _is_at(self._file, self.path)

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

    def _note(self, sample: Sample, begin: int | None = None) -> None:
        """Note a sample that the file holds. begin: its first byte; None: the file held it before."""
        if begin is not None and sample.epoch not in self._weights:
            self._begins[sample.epoch] = begin
        self._rewards[sample.key] = sample.reward
        self._weights.setdefault(sample.epoch, sample.weight_version)
        if sample.id not in self._prompts:
            self._prompts[sample.id] = hash(str(sample.prompt_ids))
        if sample.sampling is not None:  # earlier releases wrote fewer settings, or none
            self._sampling = sample.sampling | self._sampling

    def _read(self, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Sample]]:
        """Yield the samples between two bytes of the file, each with its first byte. end: None: to the file's end."""
        file = os.dup(self._file) if self._file >= 0 else os.open(self.path, os.O_RDONLY)
        first = begin
        with io.BufferedReader(_Lines(file, begin)) as lines:
            for number, line in enumerate(lines, 1):
                if end is not None and begin + len(line) > end:
                    return
                try:
                    yield begin, parse_sample(line)
                except (ValueError, TypeError, RecursionError) as error:
                    place = f"byte {begin}" if first else f"line {number}"
                    raise InvalidInputError(
                        f"{self.path}, {place}: not a sample of a rollout ({error}); write to another file"
                    ) from None
                begin += len(line)

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
            sample = parse_sample(last)
        except (ValueError, TypeError, RecursionError):
            if _is_json(last) or not may_be_cut_off(last):
                raise InvalidInputError(
                    f"{self.path}: its last line is not a sample of a rollout; write to another file"
                ) from None
            os.ftruncate(self._file, begin)
        else:
            self._check_is_new(sample, "its last line")
            os.write(self._file, b"\n")
            self._note(sample, begin)


class _Lines(io.RawIOBase):
    """Read an open file from a byte on, whatever name it has by now. Close the descriptor at the end."""

    def __init__(self, file: int, begin: int) -> None:
        self._file, self._at = file, begin

    def close(self) -> None:
        if not self.closed:
            os.close(self._file)
        super().close()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        read = os.preadv(self._file, [buffer], self._at)
        self._at += read
        return read


def _is_at(file: int, path: Path) -> bool:
    """Return whether an open file has this name."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


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


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
