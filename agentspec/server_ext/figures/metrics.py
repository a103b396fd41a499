"""Count drafted and accepted tokens for an engine and for each request, and write the step-by-step record.

Plain numbers without locks, updated once a step.
"""

import atexit
import contextlib
import json
import logging
import os
import threading
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentspec.cache import SOURCES
from agentspec.errors import ConfigurationError, StoreError
from agentspec.server_ext.figures.traces import Trace

logger = logging.getLogger(__name__)

_KEPT_REQUESTS = 4_096
_REQUEST_BYTES = 1_024
"""Memory that the figures of one request take, about."""
_LINE_BYTES = 1_024
"""Memory that one line of the step record takes before it is written, about."""
_FLUSH_SECONDS = 0.1
"""Pause between two writes of the lines of a step record that wait."""
_QUEUED_LINES = 200_000
_BLOCK_BYTES = 1 << 18
"""So much of a step record is searched at a time: other threads wait for the interpreter meanwhile."""


FiguresKey = tuple[str | None, str, str]


@dataclass(slots=True)
class RequestFigures:
    """Count what drafting did for one request (for all its samples together).

    key: who sent it, the id that the API returned, and the call, which tells it from others with that id. running: its
    samples that have not ended. trace: its steps, if it asked for them.
    """

    key: FiguresKey = (None, "", "")
    running: int = 0
    tokens: int = 0
    steps: int = 0
    drafts: int = 0
    drafted: list[int] = field(default_factory=lambda: [0] * len(SOURCES))
    accepted: list[int] = field(default_factory=lambda: [0] * len(SOURCES))
    trace: Trace | None = None

    def take_back(self, tokens: int) -> None:
        """Leave out tokens that the caller did not get, and those accepted tokens that must have been among them."""
        self.tokens -= tokens
        while (over := sum(self.accepted) - max(self.tokens - 1, 0)) > 0:  # the first token is never a draft's
            most = max(self.accepted)
            self.accepted[self.accepted.index(most)] = max(most - over, 0)

    def as_dict(self, request_id: str) -> dict[str, Any]:
        """Return the figures as JSON: tokens, verification steps, steps with a draft, drafted and accepted tokens."""
        return {
            "request_id": request_id,
            "tokens": self.tokens,
            "steps": self.steps,
            "drafts": self.drafts,
            "drafted": sum(self.drafted),
            "accepted": sum(self.accepted),
            "drafted_by_source": dict(zip(SOURCES, self.drafted, strict=True)),
            "accepted_by_source": dict(zip(SOURCES, self.accepted, strict=True)),
            **({} if self.trace is None else {"detail": self.trace.as_list()}),
        }


class Histogram:
    """Count durations in buckets. bounds: upper bounds of the buckets but the last, in seconds."""

    __slots__ = ("_counts", "_sum")

    bounds = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 1e-1)

    def __init__(self) -> None:
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self.bounds, seconds)] += 1
        self._sum += seconds

    def as_dict(self) -> dict[str, Any]:
        """Return bounds, counts (one more than bounds, not cumulative) and the sum of all durations, as JSON."""
        return {"bounds": list(self.bounds), "counts": list(self._counts), "sum": self._sum}


class Metrics:
    """Hold counters and durations since start, and figures of running and of the latest finished requests.

    Figures are kept by caller, id and call: a caller may choose the ids of its requests, and use one again, but gets at
    nobody else's figures. max_bytes: limit of what finished requests take.
    """

    def __init__(self, max_bytes: int = _KEPT_REQUESTS * _REQUEST_BYTES) -> None:
        self._kept = min(_KEPT_REQUESTS, max_bytes // _REQUEST_BYTES)
        self.counters: Counter[str] = Counter(started=0, finished=0, drafts=0, sessions_ended=0)
        self.drafted = [0] * len(SOURCES)
        self.accepted = [0] * len(SOURCES)
        self.draft_seconds = Histogram()
        self.beside_seconds = Histogram()
        self._running: dict[FiguresKey, RequestFigures] = {}
        self._finished: OrderedDict[FiguresKey, RequestFigures] = OrderedDict()
        self._latest: dict[tuple[str | None, str], FiguresKey] = {}  # of the figures that are kept for a caller's id

    def begin(self, api_id: str, caller: str | None, call: str = "") -> RequestFigures:
        """Return the figures for a new engine request. The samples of one API request, or call, share them."""
        key = (caller, api_id, call)
        figures = self._running.get(key) or self._finished.pop(key, None) or RequestFigures(key)
        figures.running += 1
        self._running[key] = figures
        self._latest[caller, api_id] = key
        return figures

    def end(self, figures: RequestFigures) -> None:
        """Count an engine request of these figures as finished. Forget figures of the request that finished first."""
        figures.running -= 1
        if figures.running == 0 and self._running.pop(figures.key, None) is not None:
            self._finished[figures.key] = figures
            if len(self._finished) > self._kept:
                (caller, api_id, _), oldest = self._finished.popitem(last=False)
                if self._latest.get((caller, api_id)) == oldest.key:
                    del self._latest[caller, api_id]

    def add_step(
        self, figures: RequestFigures, tokens: int, drafted: Sequence[int], accepted: Sequence[int]
    ) -> tuple[int, int]:
        """Add one step of one request. drafted, accepted: counts by source. Returns their sums."""
        figures.tokens += tokens
        figures.steps += 1
        total = right = 0
        for source, n in enumerate(drafted):
            if n:
                ok = accepted[source]
                figures.drafted[source] += n
                figures.accepted[source] += ok
                self.drafted[source] += n
                self.accepted[source] += ok
                total, right = total + n, right + ok
        if total:
            figures.drafts += 1
            self.counters["drafts"] += 1
        return total, right

    @property
    def bytes(self) -> int:
        """Return the memory that the figures of requests take, about."""
        return _REQUEST_BYTES * (len(self._running) + len(self._finished))

    def stats(self) -> dict[str, Any]:
        """Return counters since start, drafted and accepted tokens by source, and durations, as JSON."""
        return {
            "counters": {**self.counters, "drafted": sum(self.drafted), "accepted": sum(self.accepted)},
            "drafted_by_source": dict(zip(SOURCES, self.drafted, strict=True)),
            "accepted_by_source": dict(zip(SOURCES, self.accepted, strict=True)),
            "seconds": {"draft": self.draft_seconds.as_dict(), "beside": self.beside_seconds.as_dict()},
        }

    def request(
        self, request_id: str, caller: str | None = None, *, call: str | None = None, any_caller: bool = False
    ) -> dict[str, Any] | None:
        """Return the figures of one API request of this caller, or None if it is unknown or forgotten.

        call: the one of several with this id; None: the one that began last.
        """
        keys = [self._latest.get((caller, request_id)) if call is None else (caller, request_id, call)]
        if any_caller:
            keys = [key for (_, held), key in self._latest.items() if held == request_id]
        for key in filter(None, keys):
            figures = self._running.get(key) or self._finished.get(key)
            if figures is not None:
                return figures.as_dict(request_id)
        return None


class Recorder:
    """Write the step-by-step record: a JSON line for each request and step.

    ``{"step": 41, "request": "chatcmpl-…", "session": "fix-42", "session_key": "…", "source": "session", "drafted": 9,
    "accepted": 7, "tokens": 8, "ns": 21500}``: ``source`` is where the first drafted token came from (null without a
    draft), ``tokens`` what the step added to the output, ``ns`` the nanoseconds of the drafting call divided by its
    rows. The lines of a session that was erased have neither its name nor its key.

    A thread of its own writes the file; the decode path only appends to a deque. max_bytes: limit of what waits there.
    The constructor raises what `make_record` does.
    """

    def __init__(self, path: str | Path, max_bytes: int = _QUEUED_LINES * _LINE_BYTES) -> None:
        self.path = make_record(path)  # an unusable path fails here, at start, and not in the thread
        self._dropped = 0  # lines that the queue had no room for; counted by the thread that decodes
        self._unwritten = 0  # counted by the recorder's thread
        self._most = max(1, max_bytes // _LINE_BYTES)
        self._queue: deque[dict[str, Any]] = deque()
        self._erasures: deque[tuple[str, Future[None]]] = deque()
        self._stop = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="agentspec-recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def lost(self) -> int:
        """Return how many lines were not written, because the disk was full or too slow."""
        return self._dropped + self._unwritten

    @property
    def bytes(self) -> int:
        """Return the memory that waiting lines take, about."""
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
        self._erasures.append((session_key, done))
        return done

    def close(self) -> None:
        """Write the queued lines and stop."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._stop.wait(_FLUSH_SECONDS):
            self._write()
        self._write()

    def _write(self) -> None:
        erasures = [self._erasures.popleft() for _ in range(len(self._erasures))]
        lines = []
        while self._queue:
            lines.append(json.dumps(self._queue.popleft(), separators=(",", ":")).encode() + b"\n")
        if lines:
            written, error = _append(b"".join(lines), self.path)
            self._unwritten += len(lines) - written
            if error is not None and not self._failed:  # log once, because a full disk must not fill the log too
                logger.warning("agentspec: the step record %s cannot be written: %s", self.path, error)
                self._failed = True
        for session_key, done in erasures:
            try:
                with contextlib.suppress(FileNotFoundError):  # moved away, and nothing was written since
                    _blank_session(self.path, session_key)
            except OSError as error:
                done.set_exception(StoreError(f"the step record {self.path} cannot be changed: {error.strerror}"))
            else:
                done.set_result(None)


def make_record(path: str | Path) -> Path:
    """Make an empty step record where there is none. Raises ConfigurationError if the file cannot be written."""
    file = Path(path).expanduser()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # It names sessions. A pipe without a reader is an error here, and would let the start wait.
        os.close(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o600))
        return file
    except OSError as error:
        raise ConfigurationError(f"record {file}: cannot be written: {error.strerror}; name another file") from None


def _append(lines: bytes, path: Path) -> tuple[int, OSError | None]:
    """Append lines to a file. Return how many were written, and why not all.

    Where the disk is full, those that fit are: of half a line an erasure could miss the name.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        return 0, error
    written, failure = 0, None
    try:
        while written < len(lines):
            written += os.write(file, lines[written:])
    except OSError as error:
        failure = error
        end, whole = os.lseek(file, 0, os.SEEK_CUR), lines.rfind(b"\n", 0, written) + 1
        if os.fstat(file).st_size == end:  # no other process has appended since
            os.ftruncate(file, end - (written - whole))
    finally:
        os.close(file)
    return lines.count(b"\n", 0, written), failure


def _blank_session(path: Path, session_key: str) -> None:
    """Overwrite a session's name and key in all lines of a step record, and fill the lines up with spaces.

    A broken line that has its key is overwritten whole. A last line without its end is another process's, which erases
    the session itself. The file may be cut meanwhile, as `logrotate` does; what it loses need not be overwritten.
    """
    wanted = f'"session_key":{json.dumps(session_key)}'.encode()
    with path.open("r+b", buffering=0) as file:
        record = file.fileno()
        begin, text = 0, b""  # where the lines begin that were read and not looked at
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
    """Return a line without this session's name and key, and spaces in place of a broken one. The length stays."""
    try:
        values = json.loads(line)
    except ValueError:  # two lines in one, of which the first was cut off when its process was killed
        return b" " * len(line)
    if values.get("session_key") != session_key:
        return line
    blank = json.dumps({**values, "session": None, "session_key": None}, separators=(",", ":"))
    return blank.encode().ljust(len(line))
