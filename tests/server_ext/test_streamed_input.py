"""Test that a response with streamed input ends in vLLM as it would without drafts."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from agentspec.server_ext.vllm_adapter.startup.given_method import PROPOSER_PATH
from agentspec.server_ext.vllm_adapter.worker.streamed_input import handle_stopped_request


def ended(computed: int, *, resumable: bool = True, method: str = "custom_class") -> Any:
    """Return a request of 20 tokens, once vLLM has handled its end. computed: tokens that it counted as computed."""
    request = SimpleNamespace(
        resumable=resumable,
        num_computed_tokens=computed,
        num_tokens=20,
        is_prefill_chunk=False,
        spec_token_ids=[],
        is_finished=lambda: False,
    )
    spec = SimpleNamespace(method=method, model=PROPOSER_PATH)
    scheduler = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=spec))
    seen: list[int] = []

    def original(scheduler: Any, request: Any) -> bool:
        seen.append(request.num_computed_tokens)
        return False

    assert handle_stopped_request(original, scheduler, request) is False
    assert seen == [request.num_computed_tokens]  # vLLM reads it to append the next input
    return request


def has_draft(request: Any) -> bool:
    """Return whether vLLM keeps the draft that the worker made in the step that ended the response."""
    grammars = SimpleNamespace(validate_tokens=lambda request, tokens: tokens)
    scheduler: Any = SimpleNamespace(requests={"r": request}, structured_output_manager=grammars)
    Scheduler.update_draft_token_ids(scheduler, DraftTokenIds(["r"], [[1, 2, 3]]))
    return bool(request.spec_token_ids)


@pytest.mark.parametrize(("computed", "left"), [(19, 19), (20, 19), (26, 19), (0, 0)])
def test_all_tokens_but_the_last_are_computed_at_most(computed: int, left: int) -> None:
    """Of a response without drafts they are. A preempted request has none."""
    assert ended(computed).num_computed_tokens == left


def test_a_draft_from_behind_the_end_is_dropped() -> None:
    assert not has_draft(ended(19))


@pytest.mark.parametrize("other", [{"resumable": False}, {"method": "ngram"}])
def test_other_requests_and_engines_are_left_alone(other: dict[str, Any]) -> None:
    request = ended(26, **other)
    assert request.num_computed_tokens == 26 and has_draft(request)
