"""Test the step record: what is written, and that an erasure removes a session's name from existing lines."""

import contextlib
import errno
import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentspec.cache.store import SQLiteStore
from agentspec.errors import ConfigurationError, StoreError
from agentspec.server_ext.figures.accounts import Accounts
from agentspec.server_ext.figures.metrics import Metrics
from agentspec.server_ext.figures.step_record import StepRecord, _append, _blank_session
from agentspec.server_ext.figures.traces import Traces
from agentspec.server_ext.step import Batch, Step

from .drafts import request

KEY, OTHER = "a" * 32, "b" * 32


def line(step: int, name: str | None, key: str | None) -> dict[str, Any]:
    return {"step": step, "request": f"r{step}", "session": name, "session_key": key, "tokens": 1}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_steps_of_a_request_that_waits_for_its_start_have_lines(tmp_path: Path) -> None:
    """Otherwise a request that ends before its start would have no line, and others too few tokens."""
    step_record = StepRecord(tmp_path / "steps.jsonl")
    state = request("r", 10)
    accounts = Accounts(Metrics(), Traces(1000), step_record)
    zeros, tokens = np.zeros(1, np.int32), np.zeros((1, 20), np.int32)
    for number in (7, 8):
        step = Step(Batch(("r",), zeros), (), tokens, np.array([number + 4], np.int32), zeros, zeros, 0)
        accounts.count_undrafted(number, step, [state])
    step_record.close()
    found = [
        (one["step"], one["request"], one["tokens"], one["drafted"], one["source"]) for one in lines(step_record.path)
    ]
    assert found == [(7, "r", 1, 0, None), (8, "r", 1, 0, None)]
    assert (state.response.figures.tokens, state.response.figures.steps) == (2, 2)


def test_an_id_that_a_caller_made_long_costs_a_line_little(tmp_path: Path) -> None:
    step_record = StepRecord(tmp_path / "steps.jsonl")
    state = request("x" * 1_000_000 + "-0123abcd", 10)
    zeros = np.zeros(1, np.int32)
    lengths = np.array([11], np.int32)
    step = Step(Batch((state.request_id,), zeros), (), np.zeros((1, 20), np.int32), lengths, zeros, zeros, 0)
    Accounts(Metrics(), Traces(1000), step_record).count_undrafted(1, step, [state])
    step_record.close()
    (one,) = lines(step_record.path)
    assert one["request"] == "x" * 247 + "-0123abcd"


def test_an_erased_sessions_lines_lose_its_name_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    step_record = StepRecord(path)
    given = [line(1, "fix-42", KEY), line(2, "fix-42", OTHER), line(3, None, None), line(4, "fix-42", KEY)]
    for item in given:
        step_record.add(item)
    step_record.erase(KEY).result(60)
    blank = {"session": None, "session_key": None}
    assert lines(path) == [{**given[0], **blank}, given[1], given[2], {**given[3], **blank}]
    step_record.add(line(5, "next", OTHER))
    step_record.close()
    assert lines(path)[-1]["session"] == "next"
    assert KEY not in path.read_text()


@pytest.mark.parametrize("name", ["a", "ä" * 100, 'quote"d', f'"session_key":"{KEY}"', "\\"])
def test_any_name_goes_and_no_other_line_is_taken_for_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / "steps.jsonl"
    step_record = StepRecord(path)
    other = line(1, f'"session_key":"{KEY}"', OTHER)
    for item in (other, line(2, name, KEY), other):
        step_record.add(item)
    step_record.erase(KEY).result(60)
    assert lines(path) == [other, {**line(2, None, None)}, other]
    step_record.close()


def test_a_line_that_a_killed_process_left_half_written_is_overwritten_and_holds_nothing_up(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    torn = json.dumps(line(1, "fix-42", KEY), separators=(",", ":")).removesuffix(":1}")
    path.write_text(f"{torn}{json.dumps(line(2, 'other', OTHER))}\n")
    step_record = StepRecord(path)
    step_record.add(line(3, "fix-42", KEY))
    step_record.erase(KEY).result(60)
    step_record.add(line(4, "other", OTHER))
    step_record.close()
    broken, *whole = path.read_text().splitlines()
    assert not broken.strip()
    assert [json.loads(text) for text in whole] == [line(3, None, None), line(4, "other", OTHER)]


def test_another_process_can_append_meanwhile(tmp_path: Path) -> None:
    """Lines keep their positions in the file, so nothing that others append is lost."""
    path = tmp_path / "steps.jsonl"
    step_record = StepRecord(path)
    for step in range(20_000):
        step_record.add(line(step, "fix-42", KEY))
    stop = threading.Event()
    appended = 0

    def append() -> None:
        nonlocal appended
        while not stop.is_set():
            with path.open("a") as file:
                file.write(json.dumps(line(appended, "theirs", OTHER), separators=(",", ":")) + "\n")
            appended += 1

    thread = threading.Thread(target=append)
    thread.start()
    step_record.erase(KEY).result(60)
    stop.set()
    thread.join()
    step_record.close()
    found = lines(path)
    assert sum(item["session"] == "theirs" for item in found) == appended
    assert sum(item["session"] is None for item in found) == 20_000


_FULL = """
import resource, sys
from agentspec.server_ext.figures.step_record import StepRecord
from tests.server_ext.test_step_record import KEY, line
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
step_record = StepRecord(sys.argv[1])
for step in range(100):
    step_record.add(line(step, "fix-42", KEY))
step_record.close()
"""


def test_a_record_that_is_cut_during_an_erasure_costs_nothing_else(tmp_path: Path) -> None:
    """logrotate's copytruncate cuts it, for example. Reading a mapped file behind its end would kill the process."""
    path = tmp_path / "steps.jsonl"
    text = "".join(json.dumps(line(number, "s", KEY), separators=(",", ":")) + "\n" for number in range(20_000))
    cutting = threading.Event()

    def cut() -> None:
        while not cutting.wait(0.001):
            os.truncate(path, 0)

    path.write_text(text)  # before the thread starts, which ends without the file
    thread = threading.Thread(target=cut)
    thread.start()
    try:
        for _ in range(20):
            path.write_text(text)
            _blank_session(path, KEY)
            assert KEY not in path.read_text()
    finally:
        cutting.set()
        thread.join()


def test_lines_of_any_place_lose_the_name(tmp_path: Path) -> None:
    """A long record is read in blocks, which may end anywhere in a line."""
    path = tmp_path / "steps.jsonl"
    given = [line(number, "s", KEY if number % 3 else OTHER) for number in range(6_000)]
    path.write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in given))
    size = path.stat().st_size
    _blank_session(path, KEY)
    assert path.stat().st_size == size > 2 * 2**18
    blank = {"session": None, "session_key": None}
    assert lines(path) == [{**one, **blank} if one["session_key"] == KEY else one for one in given]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """Half a line may hold a session's name without its key, by which an erasure finds it."""
    path = tmp_path / "steps.jsonl"
    subprocess.run([sys.executable, "-c", _FULL, str(path)], check=True, cwd=Path(__file__).parents[2])
    assert 800 < path.stat().st_size < 1000
    assert [item["step"] for item in lines(path)] == list(range(len(lines(path))))


@pytest.mark.parametrize("fails", ["ftruncate", "close"])
def test_an_error_at_the_end_of_a_write_ends_no_thread(
    tmp_path: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may be full under an append-only file or a network file system. Later erasures must work."""
    path = tmp_path / "steps.jsonl"
    step_record = StepRecord(path)
    step_record.add(line(1, "fix-42", KEY))
    step_record.erase(OTHER).result(60)  # the line is written
    size = path.stat().st_size
    real = {name: getattr(os, name) for name in ("write", "close", "ftruncate")}

    def is_record(file: int) -> bool:
        return os.path.samestat(os.fstat(file), path.stat())

    def write(file: int, text: bytes) -> int:
        if is_record(file) and os.fstat(file).st_size > size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(real["write"](file, text[: len(text) // 2]))

    def ftruncate(file: int, size: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    def close(file: int) -> None:
        full = is_record(file)
        real["close"](file)
        if full:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        if fails == "close":
            patch.setattr(os, "close", close)
        else:
            patch.setattr(os, "write", write)
            patch.setattr(os, "ftruncate", ftruncate)
        step_record.add(line(2, "fix-42", KEY))
        step_record.erase(OTHER).result(60)
    assert step_record.lost == 1
    step_record.erase(KEY).result(60)
    step_record.close()
    assert KEY not in path.read_text()


def test_a_line_that_another_program_wrote_holds_up_no_erasure(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    step_record = StepRecord(path)
    foreign = json.dumps([line(1, "theirs", KEY)], separators=(",", ":"))
    with path.open("a") as file:
        file.write(f"{foreign}\n")
    step_record.add(line(2, "fix-42", KEY))
    step_record.erase(KEY).result(60)
    step_record.close()
    assert path.read_text().splitlines()[0] == foreign
    assert lines(path)[1] == line(2, None, None)


def test_a_new_record_is_its_owners_alone(tmp_path: Path) -> None:
    """Without API keys, whoever knows a session's name can use the session."""
    step_record = StepRecord(tmp_path / "new" / "steps.jsonl")
    assert step_record.path.stat().st_mode & 0o777 == 0o600
    step_record.path.unlink()
    step_record.add(line(1, "fix-42", KEY))
    step_record.close()
    assert step_record.path.stat().st_mode & 0o777 == 0o600


def test_a_record_that_was_moved_away_holds_up_no_erasure(tmp_path: Path) -> None:
    step_record = StepRecord(tmp_path / "steps.jsonl")
    step_record.path.unlink()
    step_record.erase(KEY).result(60)
    step_record.add(line(1, "fix-42", OTHER))
    step_record.close()
    assert lines(step_record.path) == [line(1, "fix-42", OTHER)]


def test_an_erasure_after_the_end_is_refused_at_once(tmp_path: Path) -> None:
    step_record = StepRecord(tmp_path / "steps.jsonl")
    step_record.close()
    with pytest.raises(StoreError, match=r"steps\.jsonl is closed"):
        step_record.erase(KEY).result(0)


def test_a_pipe_that_nobody_reads_loses_lines_and_holds_up_no_erasure(tmp_path: Path) -> None:
    """Otherwise the thread would wait for a reader for ever, and every erasure with it: HTTP 503 after 20 seconds."""
    step_record = StepRecord(tmp_path / "steps.jsonl")
    step_record.path.unlink()
    os.mkfifo(step_record.path)
    step_record.add(line(1, "fix-42", KEY))
    step_record.erase(KEY).result(60)
    step_record.close()
    assert step_record.lost == 1


def test_a_pipe_whose_reader_is_slow_or_leaves_gets_whole_lines(tmp_path: Path) -> None:
    """A pipe cannot be cut back to its last whole line. The attempt must not end the thread that writes."""
    path = tmp_path / "steps.jsonl"
    os.mkfifo(path)
    given = [json.dumps(line(number, "x" * 200, KEY)).encode() + b"\n" for number in range(1000)]
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    written, error = _append(b"".join(given), path)
    got = os.read(reader, 1 << 20)
    os.close(reader)
    assert isinstance(error, BlockingIOError) and 0 < written < len(given)
    assert got == b"".join(given[:written])
    assert _append(given[0], path)[0] == 0


def test_a_full_pipe_is_waited_for_where_the_process_has_many_files_open(tmp_path: Path) -> None:
    """`select.select` refuses such a descriptor. That must not end the thread that writes, which erasures need."""
    path = tmp_path / "steps.jsonl"
    os.mkfifo(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    files = [os.open(path, os.O_RDONLY | os.O_NONBLOCK)]
    try:
        while files[-1] < 1030:
            files.append(os.dup(files[0]))
        written, error = _append(b"x" * 4095 + b"\n", path)
        assert (written, error) == (1, None)
        written, error = _append((b"x" * 4095 + b"\n") * 100, path)
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert isinstance(error, BlockingIOError) and 0 < written < 100


def test_lines_that_the_queue_has_no_room_for_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step_record = StepRecord(tmp_path / "steps.jsonl", max_bytes=4 * 1024)
    for times in (1, 2):
        for number in range(10):  # at most four of them have room
            step_record.add(line(number, "fix-42", KEY))
        step_record.erase(OTHER).result(60)  # the lines are written
        assert step_record.lost > 0, times
        assert caplog.text.count("is written too slowly and lacks lines") == 1
    step_record.close()


def test_lines_that_are_lost_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    step_record = StepRecord(path, max_bytes=4 * 1024)
    path.unlink()
    path.mkdir()
    for number in range(3):
        step_record.add(line(number, "fix-42", KEY))
    step_record._stop.set()
    step_record._thread.join()  # it writes what waits
    assert step_record.lost == 3
    path.rmdir()
    for number in range(10):  # four of them have room
        step_record.add(line(number, "fix-42", KEY))
    step_record._write()
    assert step_record.lost == 3 + 6 and len(lines(path)) == 4


def test_a_record_that_cannot_be_changed_is_said(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    step_record = StepRecord(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreError, match=r"steps\.jsonl"):
        step_record.erase(KEY).result(60)
    step_record.close()


def test_a_file_that_holds_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with contextlib.closing(SQLiteStore(path)):
        before = path.read_bytes()
        assert before
        with pytest.raises(ConfigurationError, match=r"record .*store\.db: .*name another file"):
            StepRecord(path)
    assert path.read_bytes() == before
    path.write_bytes(b"")  # as an empty file, or one whose first line was erased
    StepRecord(path).close()
