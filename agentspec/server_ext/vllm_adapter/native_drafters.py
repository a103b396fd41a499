"""vLLM's own drafters beside the trees: those that can be built and asked inside a ``custom_class``.

``ngram``   vLLM's prompt look-up: needs the batch's token ids alone
``medusa``  heads on the target's last hidden state: in a step it is what a speculator is, so it shares its adapter

Drafters with attention of their own (EAGLE, MTP, draft models) cannot be had this way; docs/other-drafters.md says why.
"""

import copy
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import SpeculatorError
from agentspec.server_ext.drafter_settings import MedusaSettings, NgramSettings
from agentspec.server_ext.fusion.draft_model import FREE, Int64, ModelDraft
from agentspec.server_ext.vllm_adapter.forward import BoundModel, ForwardPass, ModelDrafter
from agentspec.server_ext.vllm_adapter.ranks import RankLink, tensor_parallel_group
from agentspec.server_ext.vllm_adapter.speculator import SpeculatorDrafter

logger = logging.getLogger("vllm.agentspec")

_UNKNOWN = 0.5
"""The probability that stands for a token of n-gram's, which gives none: what it is worth is learned by position."""


def native_config(vllm_config: Any, **speculative: Any) -> Any:
    """The engine's configuration as it would be with a native speculative method; the engine's own stays as it is.

    ``speculative``: fields of vLLM's SpeculativeConfig. Raises what vLLM raises for them.
    """
    from vllm.config import SpeculativeConfig

    config = copy.copy(vllm_config)  # not vLLM's ``replace``, which would derive everything anew
    config.speculative_config = SpeculativeConfig(
        target_model_config=vllm_config.model_config,
        target_parallel_config=vllm_config.parallel_config,
        **speculative,
    )
    return config


def spare_threads() -> None:
    """Let numba start as many threads as torch has. Where it counts the cores itself, its first use sets OpenMP's
    number of threads to that for the whole worker, torch included. Too late once numba is imported."""
    import torch

    if "numba" not in sys.modules:
        os.environ.setdefault("NUMBA_NUM_THREADS", str(torch.get_num_threads()))


class NgramDrafter(ModelDrafter):
    """vLLM's NgramProposer, on the host. Answers for the rows asked, whatever else is in the batch."""

    def __init__(self, settings: NgramSettings, vllm_config: Any) -> None:
        self._settings = settings
        self._vllm_config = vllm_config
        self.positions = settings.num_speculative_tokens
        self.native: Any = None

    def load(self, target: Any) -> None:
        spare_threads()
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        fields = self._settings.model_dump(exclude_none=True)
        try:
            self.native = NgramProposer(native_config(self._vllm_config, **fields))
        except ValueError as error:
            raise SpeculatorError(f"drafter: vLLM refuses it: {error}") from error
        # vLLM's own warm-up asks for no row at all, and the first step would wait seconds for the compiler.
        self.native.propose(self.positions, [[0]], np.ones(1, dtype=np.int32), np.zeros((1, 1), dtype=np.int32))

    def bind(self, forward: ForwardPass) -> "BoundNgram":
        return BoundNgram(self, forward.input_batch)


class BoundNgram(BoundModel):
    """N-gram look-up in one step. ``batch``: vLLM's InputBatch."""

    overlaps = False

    def __init__(self, drafter: NgramDrafter, batch: Any) -> None:
        self.positions = drafter.positions
        self._native = drafter.native
        self._batch = batch

    def launch(self, rows: Sequence[int], proposals: Int64) -> Callable[[], ModelDraft]:
        wanted: list[list[int]] = [[] for _ in range(self._batch.num_reqs)]
        for row in rows:
            wanted[row] = [0]  # vLLM only asks whether it is empty
        lengths, tokens = self._batch.num_tokens_no_spec, self._batch.token_ids_cpu
        found = self._native.propose(self.positions, wanted, lengths, tokens)
        return lambda: _ngram_draft([found[row] for row in rows], proposals)


def _ngram_draft(found: Sequence[Sequence[int]], proposals: Int64) -> ModelDraft:
    """What was found, as a model's opinion: sure of nothing behind its end, or behind another token than its own."""
    own: Int64 = np.zeros(proposals.shape, dtype=np.int64)
    given = np.zeros(proposals.shape, dtype=bool)
    for row, tokens in enumerate(found):
        own[row, : len(tokens)] = tokens
        given[row, : len(tokens)] = True
    forced = proposals != FREE
    agrees = given & (~forced | (proposals == own))
    before = np.ones_like(agrees)
    before[:, 1:] = np.logical_and.accumulate(agrees, axis=1)[:, :-1]
    probabilities: NDArray[np.float32] = np.where(agrees & before, _UNKNOWN, 0.0).astype(np.float32)
    tops: NDArray[np.float32] = np.where(given & before, _UNKNOWN, 0.0).astype(np.float32)
    return ModelDraft(np.where(forced, proposals, own), probabilities, own, tops)


class MedusaDrafter(SpeculatorDrafter):
    """vLLM's Medusa heads in the place of a speculator. Raises SpeculatorError where they do not fit the target."""

    def __init__(self, settings: MedusaSettings, vllm_config: Any) -> None:
        self._medusa = settings
        self._vllm_config = vllm_config
        self.link: RankLink | None = None

    def load(self, target: Any) -> None:
        self.device = next(target.parameters()).device
        self.loop = MedusaLoop(self._medusa, self._vllm_config, self.device)
        self._dtype = self.loop.dtype
        group = tensor_parallel_group()
        if group is not None:
            self.link = RankLink(group.cpu_group, group.ranks[0], self.loop.positions)
        logger.info("agentspec: Medusa heads %s draft %d tokens", self._medusa.model, self.loop.positions)


class MedusaLoop:
    """vLLM's Medusa heads behind the face of a speculator's DraftLoop. Head k guesses without knowing the tokens before
    its own: what is proposed at one position changes nothing at the next."""

    def __init__(self, settings: MedusaSettings, vllm_config: Any, device: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.v1.spec_decode.medusa import MedusaProposer

        try:
            config = native_config(vllm_config, **settings.model_dump(exclude_none=True))
            given = config.speculative_config.draft_model_config.get_hidden_size()
            wanted = vllm_config.model_config.get_hidden_size()
            if given != wanted:
                raise SpeculatorError(
                    f"drafter: hidden_size of {settings.model} is {given}, the served model's is {wanted}; "
                    "give heads that were trained for it"
                )
            native = MedusaProposer(config, device)
            with set_current_vllm_config(config):  # the loader asks for it
                native.load_model(None)
        except SpeculatorError:
            raise
        except Exception as error:  # vLLM, transformers and the hub raise whatever they like
            raise SpeculatorError(
                f"drafter: vLLM cannot load {settings.model} as Medusa heads: {error}; "
                f"see that it has num_speculative_tokens={settings.num_speculative_tokens} heads of this vocabulary"
            ) from error
        self.positions = settings.num_speculative_tokens
        self.dtype = native.dtype
        self._model: Any = native.model
        self._vocab_size = vllm_config.model_config.get_vocab_size()

    def __call__(self, hidden: Any, tokens: Any, proposal: Any = None) -> Any:
        """DraftedTokens of B rows. hidden [B, H]: the state that produced the newest token; ``tokens`` are not needed.

        Under tensor parallelism only the first rank gets logits; the others' answer is not asked for.
        """
        import torch

        from agentspec.server_ext.speculator.selection import DraftedTokens, choose, part_of

        with torch.inference_mode():
            heads = self._model.compute_logits(self._model(hidden))
            if not heads:
                nothing = hidden.new_zeros((len(hidden), self.positions), dtype=torch.float32)
                return DraftedTokens(nothing.long(), nothing, nothing.long(), nothing)
            logits = torch.stack(heads, dim=1)[..., : self._vocab_size]
            given = tokens.new_full(logits.shape[:2], FREE) if proposal is None else proposal
            wanted = given.flatten()
            chosen = choose(part_of(logits.flatten(0, 1), wanted), wanted, None)
            return DraftedTokens(*(column.view(given.shape) for column in chosen))
