"""Engines get the time to save when the server is stopped, and no other engine gets more than vLLM gives it."""

from types import SimpleNamespace
from typing import Any

import pytest

from agentspec.server_ext.vllm_adapter.launch import PROPOSER_PATH
from agentspec.server_ext.vllm_adapter.shutdown import SAVE_SECONDS, init_engine_manager, shut_down_engines

OURS = SimpleNamespace(method="custom_class", model=PROPOSER_PATH)


@pytest.mark.parametrize(
    ("speculative_config", "draining", "given", "expected"),
    [
        (OURS, 0, 0, SAVE_SECONDS),
        (OURS, 0, 0.0, SAVE_SECONDS),
        (OURS, 0, None, None),
        (OURS, 0, 3, 3),
        (OURS, 30, 0, 0),
        (OURS, 30, 12.5, 12.5),
        (None, 0, 0, 0),
    ],
)
def test_the_time_that_engines_have_to_end(
    speculative_config: Any, draining: int, given: float | None, expected: float | None
) -> None:
    made: list[Any] = []
    ended: list[float | None] = []
    config = SimpleNamespace(speculative_config=speculative_config, shutdown_timeout=draining)
    manager = SimpleNamespace()
    init_engine_manager(lambda *args, **kwargs: made.append((args, kwargs)), manager, 1, vllm_config=config)
    assert made == [((manager, 1), {"vllm_config": config})]
    shut_down_engines(lambda _, timeout: ended.append(timeout), manager, given)
    assert ended == [expected]
