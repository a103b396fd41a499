"""vLLM's drafter object: engine state -> Step, drafts -> engine."""

import logging
from collections.abc import Sequence
from typing import Any

from agentspec.server_ext.engine import DraftingEngine
from agentspec.server_ext.settings import check_draft_limit, load_settings
from agentspec.server_ext.vllm_adapter.batch import BatchReader, end_tokens
from agentspec.server_ext.vllm_adapter.engine import build_engine, check_engine, draft_model, is_first_rank
from agentspec.server_ext.vllm_adapter.forward import ForwardPass
from agentspec.server_ext.vllm_adapter.hooks import install_hooks
from agentspec.server_ext.vllm_adapter.runner import RunnerDrafter

logger = logging.getLogger("vllm.agentspec")


class AgentSpecProposer(RunnerDrafter):
    """vLLM's drafter object: ``--speculative-config '{"method": "custom_class", "model": PROPOSER_PATH, …}'``.

    Raises UnsupportedEngineError or ConfigurationError at start, with the remedy; later it never raises.
    """

    def __init__(self, vllm_config: Any) -> None:
        check_engine(vllm_config)
        self.settings = load_settings(vllm_config.additional_config)
        self.max_draft = check_draft_limit(vllm_config.speculative_config.num_speculative_tokens)
        self._reported = False
        # Under tensor parallelism vLLM takes the drafts of the first rank: the trees live only there.
        self.engine = build_engine(vllm_config, self.settings, self.max_draft) if is_first_rank() else None
        self.draft_model = draft_model(self.settings, vllm_config)
        knows = self.engine.knows if self.engine is not None else bool
        limit = vllm_config.model_config.max_model_len
        self._reader = BatchReader(self.max_draft, limit, self.settings.tenant, self.settings.scope, knows)
        install_hooks()

    def load_model(self, target: Any, *_: Any, **__: Any) -> None:
        """Called by vLLM before it serves: the moment to read the draft model and the store."""
        if self.draft_model is not None:
            self.draft_model.load(target)
        if self.engine is not None:
            restored = self.engine.warm_up()
            logger.info("agentspec: %d stored turns restored, tenant %s", restored, self.settings.tenant or "-")

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> list[list[int]]:
        """vLLM's own entry, which says too little: only reached if the wrapped runner was bypassed."""
        return [[] for _ in sampled_token_ids]

    def propose_for(self, runner: Any, forward: ForwardPass) -> list[list[int]]:
        """Drafts for the runner's batch, one list a row. Never raises."""
        self.idle = True
        if self.settings.enabled:
            try:
                if self.engine is not None:
                    return self._drafts(self.engine, runner, forward)
                if self.draft_model is not None:
                    self.draft_model.follow(forward)
            except Exception:  # the engine's state was not as expected: no drafts, said once
                self._report()
        return [[] for _ in forward.sampled]

    def _drafts(self, engine: DraftingEngine, runner: Any, forward: ForwardPass) -> list[list[int]]:
        bound = None if self.draft_model is None else self.draft_model.bind(forward)
        try:
            step = self._reader.read(runner, forward.scheduler_output, forward.sampled)
            drafts = engine.propose(step, bound)
        finally:
            if bound is not None:
                bound.close()
        self.idle = not any(drafts)
        if len(drafts) == len(forward.sampled):
            return drafts
        return _spread(drafts, step.batch.rows.tolist(), len(forward.sampled))

    def _report(self) -> None:
        if self.engine is not None:
            self.engine.metrics.counters["errors_adapter"] += 1
        if not self._reported:
            self._reported = True
            logger.exception("agentspec: reading the engine's state failed, it goes on without drafts")

    def request_removed(self, request_id: str, state: Any) -> None:
        """The request has finished or was aborted. ``state``: vLLM's CachedRequestState, or None."""
        if self.engine is not None:
            self.engine.finish(request_id, None if state is None else returned_tokens(state))


def _spread(drafts: Sequence[list[int]], rows: Sequence[int], count: int) -> list[list[int]]:
    """The drafts of some rows of a batch of ``count``, with empty ones for the others."""
    result: list[list[int]] = [[] for _ in range(count)]
    for row, draft in zip(rows, drafts, strict=True):
        result[row] = draft
    return result


def returned_tokens(state: Any) -> int:
    """How many tokens of the response vLLM returned: accepted drafts may run past a stop or ``max_tokens``."""
    output = state.output_token_ids
    params = state.sampling_params
    if params is None:
        return len(output)
    end = len(output) if params.max_tokens is None else min(len(output), params.max_tokens)
    stops = end_tokens(params)
    for i in range(min(params.min_tokens or 0, end), end):
        if output[i] in stops:
            return i + 1
    return end
