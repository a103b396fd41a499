"""What a client knows of its server: whether agentspec's extension runs there. Plain state, no I/O."""

from __future__ import annotations

import time
from collections.abc import Mapping
from urllib.parse import quote

from openai import APIConnectionError, APIStatusError

PROBE_PATH = "/agentspec"
TIMEOUT_S = 2.0
RETRY_AFTER_S = 30.0
_PASSING = frozenset({408, 429})


def counts_path(request_id: str) -> str:
    """Where the server tells of one finished request."""
    return f"{PROBE_PATH}/requests/{quote(request_id, safe='')}"


class Extension:
    """The outcome of the probe.

    A server that answers has answered for good. One that could not be asked (no connection, 5xx) is taken
    to have no extension and is asked again at a call RETRY_AFTER_S seconds later.
    """

    def __init__(self) -> None:
        self.present = False
        self._ask_at = 0.0

    def due(self) -> bool:
        """Whether to ask now."""
        return time.monotonic() >= self._ask_at

    def answered(self, answer: object) -> None:
        """The server's answer to GET {base}/agentspec, as JSON or whatever else it was."""
        self.present = isinstance(answer, Mapping) and isinstance(answer.get("agentspec"), str)
        self._ask_at = float("inf")

    def failed(self, error: Exception) -> None:
        """Asking raised `error`."""
        passing = isinstance(error, APIConnectionError) or (
            isinstance(error, APIStatusError) and (error.status_code >= 500 or error.status_code in _PASSING)
        )
        self.present = False
        self._ask_at = time.monotonic() + RETRY_AFTER_S if passing else float("inf")
