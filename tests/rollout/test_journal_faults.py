"""Test what other processes, kills and full disks do to the file of samples."""

import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from agentspec.errors import AgentSpecError
from agentspec.rollout import Journal, Key
from tests.rollout.test_journal import sample

WRITER = """
import sys
from pathlib import Path
from agentspec.rollout import Journal, Key, Sample
with Journal(Path(sys.argv[1])) as journal:
    print(len(journal), flush=True)
    for number in range(100_000):
        if Key("p", 0, number) not in journal:
            journal.write(Sample("p", 0, number, [1] * 50, [2] * 500, [-0.5] * 500, "text \\u00e9" * 100))
"""

FORKING_WRITER = """
import os, sys, time
from pathlib import Path
from agentspec.rollout import Journal
with Journal(Path(sys.argv[1])):
    if not os.fork():
        print(os.getpid(), flush=True)
    time.sleep(60)
"""


def open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def test_two_rollouts_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    with Journal(path), pytest.raises(AgentSpecError, match="another rollout writes it"):
        Journal(path)
    Journal(path).close()


def test_a_start_that_is_interrupted_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files()
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Journal(tmp_path / "rollouts.jsonl")
    assert open_files() <= before


def test_a_file_that_is_replaced_while_it_is_opened_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of a deleted file would keep no other process out, and its samples would be lost."""
    path = tmp_path / "rollouts.jsonl"
    before = open_files()
    first = Journal(path)
    first.write(sample(0))
    lock = fcntl.flock
    opened: list[int] = []

    def late(file: int, how: int) -> None:
        if not opened:
            opened.append(file)
            first.replace({Key("p", 0, 0): sample(0, reward=0.5)})
            first.close()
        lock(file, how)

    monkeypatch.setattr("fcntl.flock", late)
    with Journal(path) as journal:
        assert journal.reward(Key("p", 0, 0)) == 0.5
        journal.write(sample(1))
        with pytest.raises(AgentSpecError, match="another rollout writes it"):
            Journal(path)
    assert len(path.read_text().splitlines()) == 2 and open_files() <= before


def test_a_file_is_locked_throughout_its_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rollouts.jsonl"
    close, refused = os.close, []

    def closed(file: int) -> None:
        close(file)
        monkeypatch.setattr(os, "close", close)
        with pytest.raises(AgentSpecError, match="another rollout writes it"):
            Journal(path)
        refused.append(file)

    with Journal(path) as journal:
        journal.write(sample(0))
        monkeypatch.setattr(os, "close", closed)
        journal.replace({Key("p", 0, 0): sample(0, reward=0.5)})
        assert refused


def test_a_full_disk_leaves_the_file_as_it_was_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rollouts.jsonl"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Journal(path) as journal:
        journal.write(sample(0))
        whole = path.read_bytes()
        before = open_files()
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="the disk is full") as error:
            journal.replace({Key("p", 0, 0): sample(0, reward=0.5)})
        assert open_files() <= before
        assert error.value.filename == str(path)
        assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == whole
        assert journal.reward(Key("p", 0, 0)) is None
        monkeypatch.undo()
        journal.write(sample(1))
        journal.replace({Key("p", 0, 0): sample(0, reward=0.5)})
        assert list(journal.samples()) == [sample(0, reward=0.5), sample(1)]


def test_a_process_that_was_forked_off_and_survives_a_kill_does_not_hold_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    writer = subprocess.Popen([sys.executable, "-c", FORKING_WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    forked = int(writer.stdout.readline())
    try:
        writer.kill()
        writer.wait()
        with Journal(path) as journal:
            assert len(journal) == 0
    finally:
        os.kill(forked, signal.SIGKILL)
        writer.stdout.close()


def test_a_file_system_without_locks_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")  # some mounts of Lustre say so

    monkeypatch.setattr("fcntl.flock", flock)
    with Journal(tmp_path / "rollouts.jsonl") as journal:
        journal.write(sample())


def test_kill_9_loses_no_finished_sample_and_repeats_none(tmp_path: Path) -> None:
    path, random_ = tmp_path / "rollouts.jsonl", random.Random(5)
    before = 0
    for _ in range(5):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        resumed = int(writer.stdout.readline())
        assert resumed >= before
        before = resumed
        size = path.stat().st_size
        while path.stat().st_size < size + 10_000:  # a few samples more, however busy the machine
            time.sleep(0.001)
        time.sleep(0.1 * random_.random())
        writer.kill()
        writer.wait()
        writer.stdout.close()
    with Journal(path) as journal:
        keys = [one.key for one in journal.samples()]
    assert len(keys) > 5 and keys == [Key("p", 0, number) for number in range(len(keys))]


@pytest.mark.parametrize("free", [20, 1])
def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    path = tmp_path / "rollouts.jsonl"
    with Journal(path) as journal:
        journal.write(sample(0))
        whole, write, room = path.read_bytes(), os.write, free

        def full(file: int, data: bytes) -> int:
            """Write as much as there is room for. Raise an error if there is none, as a file system does."""
            nonlocal room
            written = write(file, data[:room])
            room -= written
            if not written:
                raise OSError(errno.ENOSPC, "No space left on device")
            return written

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left on device") as error:
            journal.write(sample(1))
        assert error.value.filename == str(path)  # it tells the program that this is an error of the user's
        monkeypatch.undo()
        assert path.read_bytes() == whole
        journal.write(sample(1))
        assert len(list(journal.samples())) == 2


def test_a_write_that_is_interrupted_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rollouts.jsonl"
    with Journal(path) as journal:
        journal.write(sample(0))
        whole, write = path.read_bytes(), os.write

        def interrupted(file: int, data: bytes) -> int:
            if len(data) < 20:
                raise KeyboardInterrupt
            return write(file, data[:-10])

        monkeypatch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            journal.write(sample(1))
        assert path.read_bytes() == whole and sample(1).key not in journal


def test_a_limit_of_the_files_size_is_no_full_disk(tmp_path: Path) -> None:
    """`ulimit -f` cuts the line that reaches the limit, as a full disk does."""
    program = """
import resource, sys
from pathlib import Path
from agentspec.rollout import Journal, Sample

with Journal(Path(sys.argv[1])) as journal:
    journal.write(Sample("p", 0, 0, [1], [2], [0.0], "x"))
    size = Path(sys.argv[1]).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, size + 20))
    try:
        journal.write(Sample("p", 0, 1, [1], [2], [0.0], "x"))
    except OSError as error:
        print(error.strerror)
"""
    path = tmp_path / "rollouts.jsonl"
    printed = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert printed.stdout == "File too large; the sample ('p', 0, 1) was not written\n"
    assert [json.loads(line)["sample"] for line in path.read_text().splitlines()] == [0]


def test_an_error_of_the_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota may be used up, or the disk full before this line. The program must not print a traceback."""
    path = tmp_path / "rollouts.jsonl"

    def write(*_: object) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with Journal(path) as journal:
        monkeypatch.setattr(os, "write", write)
        with pytest.raises(OSError, match=r"Disk quota exceeded; the sample \('p', 0, 1\) was not written") as error:
            journal.write(sample(1))
        assert (error.value.filename, error.value.errno) == (str(path), errno.EDQUOT)
        assert path.read_bytes() == b"" and len(journal) == 0


def test_a_file_that_is_removed_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "folder" / "rollouts.jsonl"
    with Journal(path) as journal:
        journal.write(sample(0))
        path.unlink()
        path.parent.rmdir()
        journal.write(sample(1))
        assert [found.sample for found in journal.samples()] == [0, 1]
        assert journal.path == path
        with pytest.raises(AgentSpecError, match="another rollout writes it"):
            Journal(path)
    with Journal(path) as journal:
        assert len(journal) == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"agentspec: {path} was removed or renamed while the rollout wrote it; all its samples are in {path} now, and "
        "the rollout goes on"
    ]


@pytest.mark.parametrize("replace", [False, True])
def test_a_file_whose_name_another_one_has_goes_on_under_a_new_name(tmp_path: Path, replace: bool) -> None:
    path = tmp_path / "rollouts.jsonl"
    with Journal(path) as journal:
        journal.write(sample(0))
        path.rename(tmp_path / "moved.jsonl")
        path.write_text("mine\n")
        if replace:
            journal.replace({Key("p", 0, 0): sample(0)})
        journal.write(sample(1))
        assert journal.path == tmp_path / "rollouts.1.jsonl"
        assert [found.sample for found in journal.samples()] == [0, 1]
    assert path.read_text() == "mine\n"
    with Journal(tmp_path / "rollouts.1.jsonl") as journal:
        assert len(journal) == 2


@contextmanager
def interrupted_behind_replacing() -> Iterator[None]:
    """Let Ctrl-C come as soon as a file was put in the place of another one."""
    replace = Path.replace

    def interrupted(part: Path, target: Path) -> None:
        replace(part, target)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", interrupted)
        yield


def test_an_interruption_behind_a_new_name_goes_on_under_that(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    with Journal(path) as journal:
        journal.write(sample(0))
        path.rename(tmp_path / "moved.jsonl")
        path.touch()  # another program's
        with interrupted_behind_replacing():
            journal.write(sample(1))
        journal.write(sample(1))
        assert journal.path == tmp_path / "rollouts.1.jsonl"
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["moved.jsonl", "rollouts.1.jsonl", "rollouts.jsonl"]


def test_a_copy_that_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl.part").write_text("half of the samples")
    with Journal(tmp_path / "rollouts.jsonl"):
        assert [path.name for path in tmp_path.iterdir()] == ["rollouts.jsonl"]


def test_an_interruption_behind_the_replacement_goes_on_in_the_new_file(tmp_path: Path) -> None:
    """The journal would take its own new file for another program's, and write all samples again."""
    path = tmp_path / "rollouts.jsonl"
    with Journal(path) as journal:
        journal.write(sample(0))
        with interrupted_behind_replacing():
            journal.replace({sample(0).key: sample(0)})
        journal.write(sample(1))
        assert [each.sample for each in journal.samples()] == [0, 1]
    assert [file.name for file in tmp_path.iterdir()] == ["rollouts.jsonl"]
