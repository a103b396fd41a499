"""Let engines save what they hold when a server is stopped.

By default (``--shutdown-timeout 0``) vLLM tells its engines to abort their requests, and kills them at the same moment.
Then nothing is saved: no snapshot, and no turn of the last milliseconds.
"""

from collections.abc import Callable
from typing import Any

from agentspec.server_ext.vllm_adapter.launch import uses_agentspec

SAVE_SECONDS = 10.0
"""Longest time that engines have to end once their requests are aborted."""

_SAVES = "agentspec_saves"
"""Attribute of vLLM's manager of engine processes: whether they draft with agentspec and abort requests at once."""


def init_engine_manager(original: Callable[..., None], manager: Any, *args: Any, **kwargs: Any) -> None:
    """Note whether the engines have something to save. vLLM's manager does not keep their configuration."""
    config = next((value for value in (*args, *kwargs.values()) if hasattr(value, "speculative_config")), None)
    # With a time for requests to finish, engines are to be killed when it is over.
    setattr(manager, _SAVES, config is not None and uses_agentspec(config) and not config.shutdown_timeout)
    original(manager, *args, **kwargs)


def shut_down_engines(original: Callable[..., None], manager: Any, timeout: float | None = None) -> None:
    """End the engines, with time to save in place of none."""
    if timeout == 0 and getattr(manager, _SAVES, False):
        timeout = SAVE_SECONDS
    original(manager, timeout=timeout)
