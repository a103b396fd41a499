"""Run vLLM's own drafter beside the suffix index, as vLLM would: with its layers, its KV cache and its metadata.

vLLM calls ``propose_draft_token_ids`` before the sampled tokens are on the host, or after, depending on the method. The
patches of the runner hold that call back until the tokens are there (``runner.bookkeeping_sync``). Then the suffix
indexes draft, fusion decides how many tokens vLLM's drafter is to draft, and the held call runs with that number.

A drafter with a KV cache takes in the tokens of every step, whether it drafts or not. In a step without a draft of its
own, its first forward pass can wait for a while (``skipped_passes``). Each draft token behind the first takes a further
pass. The n-gram drafter and Medusa heads have no KV cache, and rest in such a step.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.server_ext.fusion import ModelDraft
from agentspec.server_ext.fusion.calibrator import UNKNOWN
from agentspec.server_ext.fusion.draft_model import RESTS, Int64, TokenChoices
from agentspec.server_ext.vllm_adapter.startup.native_methods import drafter_tokens
from agentspec.server_ext.vllm_adapter.worker.draft_models import (
    BoundModel,
    ModelDrafter,
    RankLink,
    tensor_parallel_group,
)
from agentspec.server_ext.vllm_adapter.worker.skipped_passes import SkippedPasses
from agentspec.server_ext.vllm_adapter.worker.step_reader import ForwardPass

logger = logging.getLogger("vllm.agentspec")

_FAILURES = 5
"""Disable vLLM's drafter after this many errors."""
_CANNOT_RUN = TokenChoices(0, 0)


class NativeDrafter(ModelDrafter):
    """Run the drafter of one model runner.

    positions: most tokens that it drafts for a row. choices: how many it can be asked for in a step in which it cannot
    skip its pass.
    """

    def __init__(self, runner: Any) -> None:
        config = runner.vllm_config
        spec, group = config.speculative_config, tensor_parallel_group()
        tokens = drafter_tokens(spec)
        assert tokens is not None
        self.positions = tokens
        self._runner = runner
        self._keeps_up = bool(spec.use_eagle() or spec.uses_draft_model())
        """whether it has a KV cache, which has to take in every step"""
        self._query_tokens = tokens + bool(spec.use_dflash())
        """positions that it computes behind the text; DFlash computes the newest token's again"""
        self.parallel = group is not None
        self._ranks_agree = config.parallel_config.data_parallel_size == 1
        """whether this engine alone decides when the drafter runs; data-parallel ranks of an MoE wait for each other"""
        self.choices = self._usual_choices(spec)
        self._skipped = SkippedPasses(runner, runner.drafter) if self.choices.cheapest == 0 else None
        self.link = RankLink(group, 0) if group is not None and self.choices.cheapest != self.choices.most else None
        self._failed = 0
        native = runner.drafter
        native.num_speculative_tokens = tokens
        self._probabilities: list[Any] = []
        """probabilities of the running draft's tokens so far: a tensor for each pass"""
        if self._tells_probabilities(native):
            native._greedy_sample = self._greedy_sample
        # vLLM verifies all drafts without their probabilities, so the drafter's likeliest tokens are its best drafts.
        native._enable_probabilistic_draft_probs = False

    def load(self, target: Any) -> None:
        """Compile vLLM's n-gram drafter. Other drafters need nothing more: vLLM has read their weights."""
        native = self._runner.drafter
        if type(native).__name__ == "NgramProposer":
            # vLLM's own warm-up drafts for no row, so the first step would wait seconds for the compiler.
            native.propose(self.positions, [[0]], np.ones(1, dtype=np.int32), np.zeros((1, 1), dtype=np.int32))

    def bind(self, forward: ForwardPass) -> "BoundNative":
        if not self._fits(forward):
            return BoundNative(self, forward, _CANNOT_RUN)
        may_skip = self._skipped is not None and self._skipped.may_skip(forward)
        return BoundNative(self, forward, TokenChoices(1, self.positions, may_rest=True) if may_skip else self.choices)

    def follow(self, forward: ForwardPass) -> None:
        if not self._fits(forward):
            self._keep_ranks_going()
            return
        with self.together():
            tokens = self.choices.most if self.link is None else self.link.hear_number()
            self.run(forward, tokens)

    def ask(self, forward: ForwardPass, tokens: int) -> tuple[list[list[int]], NDArray[np.float32] | None]:
        """Return up to ``tokens`` tokens for each row, or no rows. Call it on the rank whose drafts vLLM takes.

        tokens: one of the bound model's choices. The second result is the drafter's probability of each token,
        [rows, tokens]; None: the drafter gives none.
        """
        if self._failed >= _FAILURES or not self._fits(forward):
            self._keep_ranks_going()
            return [], None
        try:
            with self.together():
                if self.link is not None:
                    self.link.tell_number(tokens)
                drafted = self.run(forward, tokens)
        except Exception:
            self._failed += 1
            if self._skipped is not None:
                self._skipped.forget()
            raise
        if drafted is None or isinstance(drafted, list):
            return drafted or [], None
        return drafted.tolist(), self._probabilities_of(drafted)

    def run(self, forward: ForwardPass, tokens: int) -> Any:
        """Run vLLM's drafter for ``tokens`` tokens of each row, and return its result. RESTS: leave it out."""
        if tokens == RESTS:
            if self._skipped is not None:
                self._skipped.skip(forward)
            return None
        assert forward.native is not None
        if self._skipped is not None:
            self._skipped.prepare(forward)
        self._probabilities.clear()
        runner, scheduled = self._runner, forward.scheduler_output
        configured = scheduled.num_spec_tokens_to_schedule
        scheduled.num_spec_tokens_to_schedule = tokens
        try:
            return forward.native()
        finally:
            scheduled.num_spec_tokens_to_schedule = configured
            runner._draft_probs = runner._draft_prob_req_ids = None

    def _tells_probabilities(self, native: Any) -> bool:
        """Return whether the drafter chooses as ``_greedy_sample`` does: its largest logit of the whole vocabulary."""
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

        if getattr(type(native), "_greedy_sample", None) is not SpecDecodeBaseProposer._greedy_sample:
            return False
        return not (native.use_local_argmax_reduction or getattr(native, "use_heterogeneous_vocab", False))

    def _greedy_sample(self, hidden_states: Any) -> Any:
        """Choose the likeliest tokens, as vLLM's drafter does, and keep their probabilities."""
        logits = self._runner.drafter.model.compute_logits(hidden_states)
        highest, tokens = logits.max(dim=-1)
        # In 16 bits the likeliest half of all tokens would have one probability: 1.
        self._probabilities.append((highest.float() - logits.float().logsumexp(dim=-1)).exp())
        return tokens

    def _probabilities_of(self, drafted: Any) -> NDArray[np.float32] | None:
        """Return the probabilities of the tokens that were just drafted, [rows, tokens]; None where there are none."""
        import torch

        kept = self._probabilities
        if not kept or sum(part.numel() for part in kept) != drafted.numel():
            return None
        together = kept[0] if len(kept) == 1 else torch.stack(kept, dim=1)
        found: NDArray[np.float32] = together.view(drafted.shape).float().cpu().numpy()
        return found

    def _fits(self, forward: ForwardPass) -> bool:
        """Return whether every row's draft stays within the longest text of the drafter, which fails beyond that."""
        if not self._keeps_up:
            return True
        longest = forward.common_attn_metadata.max_seq_len + self._query_tokens
        return bool(longest <= self._runner.effective_drafter_max_model_len)

    def _keep_ranks_going(self) -> None:
        """Run the drafter on one dummy token where other data-parallel ranks may run theirs and wait for this one."""
        if self._keeps_up and not self._ranks_agree:
            self._runner.drafter.dummy_run(num_tokens=1)

    def _usual_choices(self, spec: Any) -> TokenChoices:
        """Return how many tokens the drafter can be asked for in a step in which it cannot skip its pass."""
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

        drafter = type(self._runner.drafter)
        if not self._keeps_up:
            return TokenChoices(self.positions, self.positions, may_rest=True)
        if spec.parallel_drafting or drafter.propose is not SpecDecodeBaseProposer.propose or not self._ranks_agree:
            return TokenChoices(self.positions, self.positions)
        return TokenChoices(0, self.positions)


class BoundNative(BoundModel):
    """Ask vLLM's drafter in one step, on the first rank."""

    overlaps = False

    def __init__(self, drafter: NativeDrafter, forward: ForwardPass, choices: TokenChoices) -> None:
        self.positions = drafter.positions
        self.choices: TokenChoices = choices
        self._drafter = drafter
        self._forward = forward
        self._asked = False

    def launch(self, rows: Sequence[int], proposals: Int64) -> Callable[[], ModelDraft]:
        """Draft ``proposals.shape[1]`` tokens for the whole batch, and return those of ``rows``."""
        self._asked = True
        drafted, known = self._drafter.ask(self._forward, proposals.shape[1])
        chosen = [drafted[row] for row in rows] if drafted else []
        answer = as_model_draft(chosen, proposals, None if known is None else known[list(rows)])
        return lambda: answer

    def rest(self) -> None:
        self._asked = True
        self._drafter.ask(self._forward, RESTS)

    def close(self) -> None:
        if not self._asked:
            self._drafter.ask(self._forward, self.choices.cheapest)


def as_model_draft(
    drafted: Sequence[Sequence[int]], proposals: Int64, known: NDArray[np.float32] | None = None
) -> ModelDraft:
    """Return drafts of vLLM's as a ModelDraft of the shape of ``proposals``. Probability 0 where a draft is shorter.

    known: float32 [rows, tokens], the probability of each token; None: the drafter gives none, and UNKNOWN stands for
    all.
    """
    tokens: Int64 = np.zeros(proposals.shape, dtype=np.int64)
    probabilities: NDArray[np.float32] = np.zeros(proposals.shape, dtype=np.float32)
    for row, draft in enumerate(drafted):
        tokens[row, : len(draft)] = draft
        probabilities[row, : len(draft)] = UNKNOWN if known is None else known[row, : len(draft)]
    return ModelDraft(tokens, probabilities, tokens, probabilities)


def limit_numba_threads() -> None:
    """Let numba start as many threads as torch has. Does nothing once numba is imported.

    By itself numba counts the cores, and its first use sets OpenMP's number of threads to that for the whole worker,
    torch included.
    """
    import torch

    if "numba" not in sys.modules:
        os.environ.setdefault("NUMBA_NUM_THREADS", str(torch.get_num_threads()))
