"""Test files that are replaced whole, and lines that gzip may have compressed."""

import errno
import gzip
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agentspec.errors import InvalidInputError
from agentspec.files import locked, read_lines, replacing

HOLDER = """
import sys
from pathlib import Path
from agentspec.files import locked
with locked(Path(sys.argv[1]), lambda: None):
    print("locked", flush=True)
    sys.stdin.read()
"""
FULL = OSError(errno.ENOSPC, "No space left on device")


def test_a_file_is_replaced_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    for text in ("one", "two"):
        with replacing(path) as part:
            part.write_text(text)
            assert path.exists() is (text == "two")
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()])
def test_an_error_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file.txt"
    path.write_text("before")
    with pytest.raises(type(error)), replacing(path) as part:
        part.write_text("hal")
        raise error
    assert path.read_text() == "before"
    with pytest.raises(FileNotFoundError), replacing(path):
        pass  # nothing was written
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_told_with_the_files_name(tmp_path: Path) -> None:
    for given in ((errno.ENOSPC, "No space left"), (errno.ENOSPC, "No space left", tmp_path / "file.txt.part")):
        with pytest.raises(OSError, match="No space left") as error, replacing(tmp_path / "file.txt"):
            raise OSError(*given)
        assert error.value.filename == str(tmp_path / "file.txt")
    with pytest.raises(OSError, match="Not another's"), replacing(tmp_path / "file.txt"):
        raise OSError(errno.ENOENT, "Not another's", "other.txt")


def test_what_a_power_failure_must_not_lose_is_synced_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "file.txt", list[bool]()

    def fsync(_: int) -> None:
        synced.append(path.exists())
        raise FULL

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space"), replacing(path, sync=True) as part:
        part.write_text("text")
    assert synced == [False] and list(tmp_path.iterdir()) == []
    with replacing(path) as part:
        part.write_text("text")
    assert synced == [False]


def test_a_link_goes_on_naming_its_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "folder" / "file.txt")
    with replacing(link) as part:
        part.write_text("text")
    assert link.is_symlink() and (tmp_path / "folder" / "file.txt").read_text() == "text"


@pytest.mark.parametrize("name", ["file.jsonl", "file.gz"])
@pytest.mark.parametrize("compressed", [False, True])
def test_lines_are_read_whatever_the_files_name_is(tmp_path: Path, name: str, compressed: bool) -> None:
    path, text = tmp_path / name, b"one\n\ntwo"
    path.write_bytes(gzip.compress(text) if compressed else text)
    read: list[int] = []
    assert list(read_lines(path, read.append)) == [b"one\n", b"\n", b"two"]
    assert read[-1] == path.stat().st_size


def test_lines_may_come_from_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(b"one\ntwo\n"))
    writer.start()
    assert list(read_lines(path, lambda read: pytest.fail("a pipe has no position"))) == [b"one\n", b"two\n"]
    writer.join()


@pytest.mark.parametrize("keep", [slice(0, -9), slice(0, 12), slice(0, 3)])
def test_a_damaged_file_is_named(tmp_path: Path, keep: slice) -> None:
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(bytes(range(256)) * 50)[keep])
    with pytest.raises(InvalidInputError, match=r"file\.gz: cannot be read: .*; compress it again"):
        list(read_lines(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="none: cannot be read: No such file or directory; give a file"):
        list(read_lines(tmp_path / "none"))
    with pytest.raises(InvalidInputError, match=f"{tmp_path}: cannot be read: Is a directory"):
        list(read_lines(tmp_path))


@pytest.mark.parametrize("killed", [False, True])
def test_a_folder_is_locked_until_its_process_ends(tmp_path: Path, killed: bool) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"

        def refuse() -> None:
            raise InvalidInputError("busy")

        with pytest.raises(InvalidInputError, match="busy"), locked(tmp_path, refuse):
            pass
        end = holder.kill if killed else holder.stdin.close
        with locked(tmp_path, end):  # this waits for the holder
            assert holder.wait() == (-9 if killed else 0)
            assert [file.name for file in tmp_path.iterdir()] == [".lock"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_nobody_writes_and_one_without_locks_are_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, code in (("os.open", errno.EROFS), ("fcntl.lockf", errno.ENOLCK)):
        with monkeypatch.context() as patch:
            patch.setattr(place, lambda *_, code=code: (_ for _ in ()).throw(OSError(code, "no")))
            with locked(tmp_path, lambda: pytest.fail("busy")):
                assert tmp_path.is_dir()


def test_links_that_lead_to_each_other_are_an_error_that_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError, match="loop") as error, replacing(tmp_path / "loop"):
        pass
    assert error.value.errno == errno.ELOOP
