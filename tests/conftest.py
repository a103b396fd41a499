"""Fixtures of many tests."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def clock_off() -> Iterator[None]:
    """Let budgets in tokens alone decide how much a call does, so that answers do not depend on the machine."""
    from agentspec.cache import _native

    _native.watch_clock(False)
    yield
    _native.watch_clock(True)


@pytest.fixture
def clock_on() -> Iterator[None]:
    """Let calls end by the clock, as in serving. Tests beside the oracle leave it off."""
    from agentspec.cache import _native

    _native.watch_clock(True)
    yield
    _native.watch_clock(False)
