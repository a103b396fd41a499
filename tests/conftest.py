"""Provide the fixtures of all tests."""

import os
from collections.abc import Iterator

import pytest

from agentspec.addresses import bypass_proxies

bypass_proxies(os.environ)  # of this process and of those that tests start: their servers are on this machine
for _name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):  # typer, once imported, would print to a terminal
    os.environ.pop(_name, None)


@pytest.fixture(autouse=True)
def clock_off() -> Iterator[None]:
    """Let budgets in tokens alone decide how much a call of the cache does.

    By the clock, a slow machine would index text later than a test expects. It runs in processes that tests start.
    """
    from agentspec.cache.core import without_clock

    with without_clock():
        yield


@pytest.fixture(autouse=True)
def environment_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what code sets for the processes that it starts."""
    for name in ("AGENTSPEC_STORE", "AGENTSPEC_SETTINGS"):
        before = os.environ.get(name)
        monkeypatch.setenv(name, before or "")
        if before is None:
            monkeypatch.delenv(name)


@pytest.fixture
def clock_on(clock_off: None) -> None:
    """Let calls end by the clock, as in serving."""
    from agentspec.cache import _native

    _native.watch_clock(True)
