"""Write a client's record: a JSON line for each reply, with its text, for `agentspec report`."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

from agentspec.client.answers.reply import Reply
from agentspec.errors import ConfigurationError
from agentspec.files import create_private, expand_home, takes_json_lines

logger = logging.getLogger(__name__)


class ReplyRecord:
    """Append replies to a file. It holds their texts, so a new one is readable for its owner alone.

    A file that others may read already keeps its mode, and a warning is logged.
    Raises ConfigurationError for a path that names no file, and for a file that cannot be written or holds something
    else.
    """

    def __init__(self, path: str | Path) -> None:
        if not path or not isinstance(path, str | Path) or "\0" in str(path):
            raise ConfigurationError(f"record: the name of a file is needed, not {path!r}")
        try:
            path = expand_home(path)
            if not takes_json_lines(path):
                raise ConfigurationError(f"record {path}: holds something other than a record; name another file")
            if warning := create_private(path):
                logger.warning("agentspec: record: %s", warning)
            # Half a surrogate pair becomes a JSON escape. Some gateways divide a character between two chunks.
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise ConfigurationError(f"record {path}: cannot be written: {error.strerror}; name another file") from None
        self._lock = threading.Lock()
        self._cut = False  # whether the file may end within a line, because a write failed

    def add(self, reply: Reply[Any], parent: str | None, seconds: float) -> None:
        """Write one reply. seconds: from the request to the reply's end. Logs errors, and never raises."""
        figures = reply.speculation
        line: dict[str, Any] = {
            "time": time.time(),
            "session": reply.session,
            "parent": parent,
            "model": reply.raw.model,
            "seconds": seconds,
            "prompt_tokens": reply.usage.prompt_tokens if reply.usage else None,
            "tokens": reply.usage.completion_tokens if reply.usage else None,
            "text": reply.text,
        }
        if figures is not None:
            line |= {
                "tokens": figures.tokens,
                "steps": figures.steps,
                "drafted_by_source": figures.drafted_by_source,
                "accepted_by_source": figures.accepted_by_source,
                "detail": figures.detail,
            }
        try:
            text = json.dumps(line, ensure_ascii=False, separators=(",", ":"))
            with self._lock:
                begin, self._cut = "\n" if self._cut else "", True
                self._file.write(f"{begin}{text}\n")
                self._file.flush()
                self._cut = False
        except (OSError, ValueError) as error:
            logger.warning("agentspec: a reply cannot be recorded: %s", error)

    def close(self) -> None:
        """Close the file. Logs errors, and never raises."""
        try:
            with self._lock:
                self._file.close()
        except OSError as error:  # what could not be written before is written now, or fails again
            logger.warning("agentspec: the end of the record cannot be written: %s", error)
