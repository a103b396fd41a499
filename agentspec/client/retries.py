"""Bound the timeout and the retries of a loop's call by the seconds that are left of its budget."""

from __future__ import annotations

import email.utils
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import openai

from agentspec.client.request import check_retries

_RETRIED = frozenset({408, 409, 429})
_LONGEST_PAUSE_S = 120.0  # the OpenAI client doesn't retry where a server asks for more
_SHORTEST_TIMEOUT_S = 0.001  # the HTTP client refuses 0
_PHASES = ("connect", "read", "write", "pool")


def own_limits(options: Mapping[str, Any], connection: Any) -> tuple[object, int]:
    """Return the timeout and the number of retries that a call has without a budget: its own, else its client's."""
    timeout, retries = options.get("timeout", openai.NOT_GIVEN), options.get("max_retries")
    check_retries(retries)
    if isinstance(timeout, openai.NotGiven | openai.Omit):
        timeout = connection.timeout
    return timeout, retries if isinstance(retries, int) else connection.max_retries


def bounded_timeout(timeout: object, seconds: float) -> float | openai.Timeout:
    """Return a timeout of a call with no part longer than `seconds`. timeout: as the OpenAI client takes it."""
    seconds = max(seconds, _SHORTEST_TIMEOUT_S)
    if isinstance(timeout, tuple):  # HTTPX's form of one
        timeout = openai.Timeout(timeout)
    if isinstance(timeout, openai.Timeout):
        parts = {name: getattr(timeout, name) for name in _PHASES}
        return openai.Timeout(**{name: seconds if part is None else min(part, seconds) for name, part in parts.items()})
    return min(timeout, seconds) if isinstance(timeout, int | float) else seconds


def pause_before_retry(error: Exception, retries: int) -> float | None:
    """Return the seconds to wait before a failed call is made again; None if the OpenAI client would not make it again.

    retries: those that were made already. A server may say how long to wait, and whether to try again.
    """
    headers: Mapping[str, str] = {}
    if isinstance(error, openai.APIStatusError):
        headers = error.response.headers
        told = {"true": True, "false": False}.get(headers.get("x-should-retry", ""))
        if not (error.status_code in _RETRIED or error.status_code >= 500 if told is None else told):
            return None
    elif not isinstance(error, openai.APIConnectionError):
        return None
    asked = _asked_pause(headers)
    if asked is not None and asked > _LONGEST_PAUSE_S:
        return None
    if asked is not None and asked > 0:
        return asked
    return min(0.5 * 2.0 ** min(retries, 10), 8.0) * (1 - 0.25 * random.random())


def _asked_pause(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server's headers ask a client to wait; None if they don't say."""
    after = headers.get("retry-after", "")
    readings: tuple[Callable[[], float], ...] = (
        lambda: float(headers["retry-after-ms"]) / 1_000,
        lambda: float(after),
        lambda: email.utils.parsedate_to_datetime(after).timestamp() - time.time(),
    )
    for read in readings:
        try:
            return read()
        except (KeyError, ValueError, TypeError, OverflowError):
            continue
    return None
