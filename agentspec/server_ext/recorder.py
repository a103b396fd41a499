"""The step-by-step record: one JSON line for each request and verified step, written in the background.

``{"step": 41, "request": "chatcmpl-…", "session": "fix-42", "source": "session", "drafted": 9, "accepted": 7,
"tokens": 8, "ns": 21500}``: ``source`` is where the first drafted token came from (null without a draft),
``tokens`` what the step added to the output, ``ns`` the time of the drafting call divided by its rows.
"""

import atexit
import json
import logging
import threading
from collections import deque
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 0.1
_MAX_QUEUED = 200_000


class Recorder:
    """Appends lines to a file from its own thread; the decode path only appends to a deque."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()  # an unusable path shows here, at start, and not in the thread
        self._queue: deque[dict[str, Any]] = deque(maxlen=_MAX_QUEUED)
        self._stop = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="agentspec-recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add(self, line: dict[str, Any]) -> None:
        """Queue one line; the oldest is dropped when the disk cannot keep up. Never blocks."""
        self._queue.append(line)

    def close(self) -> None:
        """Write what is queued and stop."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._stop.wait(_FLUSH_SECONDS):
            self._write()
        self._write()

    def _write(self) -> None:
        lines = []
        while self._queue:
            lines.append(json.dumps(self._queue.popleft(), separators=(",", ":")))
        if not lines:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")
        except OSError as error:
            if not self._failed:  # once: a full disk must not fill the log too
                logger.warning("agentspec: the step record %s cannot be written: %s", self.path, error)
            self._failed = True
