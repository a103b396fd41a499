"""What the wrapped methods of vLLM's model runner ask of its drafter."""

from typing import Any

from agentspec.server_ext.vllm_adapter.forward import ForwardPass


class RunnerDrafter:
    """A drafter that vLLM's model runner, wrapped by ``hooks`` and ``empty_steps``, drives.

    No abstract class: whether a drafter is one is asked several times in every step, and of those that takes longer.
    """

    idle: bool = False
    """whether the latest step left every row without a draft"""

    def propose_for(self, runner: Any, forward: ForwardPass) -> list[list[int]]:
        """Drafts for the runner's batch, one list a row."""
        raise NotImplementedError

    def request_removed(self, request_id: str, state: Any) -> None:
        """The request has finished or was aborted. ``state``: vLLM's CachedRequestState, or None."""
        raise NotImplementedError


def drafter_of(runner: Any) -> RunnerDrafter | None:
    """The runner's drafter if it is one of ours; another one is left alone."""
    drafter = getattr(runner, "drafter", None)
    return drafter if isinstance(drafter, RunnerDrafter) else None
