"""What the cache answers in these tests does not depend on the machine's speed; `clock_on` brings the clock back."""

import pytest


@pytest.fixture(autouse=True)
def _no_clock(clock_off: None) -> None:
    """Let no call end by the clock: on a slow machine, text would be indexed later than a test expects."""
