"""Write the step record: a file with a JSON line for each request and step, which `agentspec report` reads.

``{"step": 41, "request": "chatcmpl-…", "session": "fix-42", "session_key": "…", "source": "session", "drafted": 9,
"accepted": 7, "tokens": 8, "ns": 21500}``: ``source`` is where the first drafted token came from (null without a
draft), ``tokens`` what the step added to the output, ``ns`` the nanoseconds of the drafting call divided by its rows.
The lines of a session that was erased have neither its name nor its key.
"""

import atexit
import contextlib
import json
import logging
import os
import select
import stat
import threading
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from agentspec.errors import ConfigurationError, StoreError
from agentspec.files import expand_home, takes_json_lines

logger = logging.getLogger(__name__)

_LINE_BYTES = 1_024
"""Memory that one line takes before it is written, about."""
_FLUSH_SECONDS = 0.1
"""Pause between two writes of the lines that wait."""
_QUEUED_LINES = 200_000
_PIPE_SECONDS = 1.0
"""Longest wait for a full pipe."""
_BLOCK_BYTES = 1 << 18
"""Bytes of a step record that are searched at a time, because other threads wait for the interpreter meanwhile."""


class StepRecord:
    """Append lines to the file, and take erased sessions out of it.

    A thread of its own does both; the decode path only appends to a deque. max_bytes: limit of the lines in it.
    The constructor raises what `make_record` does.
    """

    def __init__(self, path: str | Path, max_bytes: int = _QUEUED_LINES * _LINE_BYTES) -> None:
        self.path = make_record(path)  # an unusable path fails here, at start, and not in the thread
        self._dropped = 0  # lines that the queue had no room for; counted by the thread that decodes
        self._unwritten = 0  # counted by the thread that writes
        self._most = max(1, max_bytes // _LINE_BYTES)
        self._queue: deque[dict[str, Any]] = deque()
        self._erasures: deque[tuple[str, Future[None]]] = deque()
        self._stop = threading.Event()
        self._failed = self._dropping = False
        self._thread = threading.Thread(target=self._run, name="agentspec-recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def lost(self) -> int:
        """Return how many lines were not written, because the disk was full or too slow."""
        return self._dropped + self._unwritten

    @property
    def bytes(self) -> int:
        """Return about how many bytes the waiting lines take."""
        return _LINE_BYTES * len(self._queue)

    def add(self, line: dict[str, Any]) -> None:
        """Queue one line. Drops it if the disk is too slow. Never blocks."""
        if len(self._queue) < self._most:
            self._queue.append(line)
        else:
            self._dropped += 1

    def erase(self, session_key: str) -> "Future[None]":
        """Remove a session's name and key from the lines that were added before. The future tells when it is done.

        The lines keep their lengths, so that other processes can go on appending to the file.
        """
        done: Future[None] = Future()
        if self._stop.is_set():
            done.set_exception(StoreError(f"the step record {self.path} is closed; erase the session after a restart"))
        else:
            self._erasures.append((session_key, done))
        return done

    def close(self) -> None:
        """Write the queued lines and stop."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)
        atexit.unregister(self.close)

    def _run(self) -> None:
        while not self._stop.wait(_FLUSH_SECONDS):
            self._write()
        self._write()

    def _write(self) -> None:
        """Append the waiting lines, then blank the sessions to be erased in all lines that are in the file.

        Never raises. An error would end the thread, and no erasure would complete until the server is restarted.
        """
        erasures = [self._erasures.popleft() for _ in range(len(self._erasures))]
        lines = []
        while self._queue:
            lines.append(json.dumps(self._queue.popleft(), separators=(",", ":")).encode() + b"\n")
        if lines:
            written, error = _append(b"".join(lines), self.path)
            self._unwritten += len(lines) - written
            if error is not None and not self._failed:  # log once: a full disk must not fill the log too
                logger.warning("agentspec: the step record %s cannot be written: %s", self.path, error)
                self._failed = True
        if self._dropped and not self._dropping:  # `add` does not log it, because a log may be slow
            self._dropping = True
            how = "raise the setting max_bytes, or name a file on a faster disk"
            logger.warning("agentspec: the step record %s is written too slowly and lacks lines; %s", self.path, how)
        for session_key, done in erasures:
            try:
                with contextlib.suppress(FileNotFoundError):  # moved away, and nothing was written since
                    _blank_session(self.path, session_key)
            except Exception as error:
                reason = error.strerror if isinstance(error, OSError) else error
                done.set_exception(StoreError(f"the step record {self.path} cannot be changed: {reason}"))
            else:
                done.set_result(None)


def make_record(path: str | Path) -> Path:
    """Make an empty step record where there is none.

    Raises ConfigurationError if the file cannot be written, or holds something else.
    """
    try:
        file = expand_home(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        if not takes_json_lines(file):
            raise ConfigurationError(f"record {path}: holds something other than a record; name another file")
        # It names sessions. A pipe without a reader is an error here, and would let the start wait.
        os.close(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o600))
        return file
    except OSError as error:
        raise ConfigurationError(f"record {path}: cannot be written: {error.strerror}; name another file") from None


def _append(lines: bytes, path: Path) -> tuple[int, OSError | None]:
    """Append lines to a file. Return how many were written, and the error if not all were.

    On a full disk, only the lines that fit whole are written, because in half a line an erasure could miss the name.
    A full pipe is waited for at most _PIPE_SECONDS, because erasures wait for this thread. A pipe that nobody reads is
    an error.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o600)
    except OSError as error:
        return 0, error
    written, regular, failure = 0, False, None
    try:
        regular = stat.S_ISREG(os.fstat(file).st_mode)
        while written < len(lines):  # a pipe takes a whole line or nothing of it
            end = len(lines) if regular else lines.index(b"\n", written) + 1
            try:
                written += os.write(file, lines[written:end])
            except BlockingIOError:
                room = select.poll()  # `select.select` refuses descriptors from 1024 on, which a busy server has
                room.register(file, select.POLLOUT)
                if not room.poll(1e3 * _PIPE_SECONDS):
                    raise
    except OSError as error:
        failure = error
        if regular:
            with contextlib.suppress(OSError):  # the file may be append-only, for example
                end, whole = os.lseek(file, 0, os.SEEK_CUR), lines.rfind(b"\n", 0, written) + 1
                if os.fstat(file).st_size == end:  # no other process has appended since
                    os.ftruncate(file, end - (written - whole))
    try:
        os.close(file)
    except OSError as error:  # a network's file system says here that it has no room for what was written
        written, failure = 0, failure or error
    return lines.count(b"\n", 0, written), failure


def _blank_session(path: Path, session_key: str) -> None:
    """Overwrite a session's name and key in all lines of a step record, and fill the lines up with spaces.

    A broken line with its key is overwritten whole. A last line without a line end is left alone: another process is
    writing it, and erases the session itself. The file may be cut meanwhile, as `logrotate` does; lines that it loses
    need not be overwritten. Pipes and devices keep nothing.
    """
    mode = path.stat().st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        return
    wanted = f'"session_key":{json.dumps(session_key)}'.encode()
    with path.open("r+b", buffering=0) as file:
        record = file.fileno()
        begin, text = 0, b""  # offset in the file of `text`, which was read and not searched
        while block := os.pread(record, _BLOCK_BYTES, begin + len(text)):
            text += block
            end = text.rfind(b"\n") + 1
            place = text.find(wanted, 0, end)
            while place >= 0:
                first, last = text.rfind(b"\n", 0, place) + 1, text.find(b"\n", place)
                if os.fstat(record).st_size < begin + last:  # it was cut
                    return
                os.pwrite(record, _without_session(text[first:last], session_key), begin + first)
                place = text.find(wanted, last, end)
            begin, text = begin + end, text[end:]


def _without_session(line: bytes, session_key: str) -> bytes:
    """Return a line of the same length without this session's name and key. A broken line becomes spaces."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):  # two lines in one, of which the first was cut off when its process was killed
        return b" " * len(line)
    if not isinstance(values, dict) or values.get("session_key") != session_key:
        return line
    blank = json.dumps({**values, "session": None, "session_key": None}, separators=(",", ":"))
    return blank.encode().ljust(len(line))
