"""Run draft models beside the suffix index in vLLM's worker: the target's hidden states in, drafted tokens out.

``SpeculatorDrafter``  agentspec's own speculators (MLP, LSTM)
``MedusaDrafter``      vLLM's Medusa heads on the target's last hidden state, asked like a speculator
``NgramDrafter``       vLLM's prompt look-up, which needs the batch's token ids only

Drafters with attention of their own (EAGLE, MTP, draft models) cannot run inside a ``custom_class``;
docs/other-drafters.md says why.
"""

import copy
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import SpeculatorError
from agentspec.server_ext.fusion import ModelDraft
from agentspec.server_ext.fusion.draft_model import FREE, Int64
from agentspec.server_ext.settings import MedusaSettings, NgramSettings, Settings
from agentspec.server_ext.vllm_adapter.step_reader import ForwardPass

logger = logging.getLogger("vllm.agentspec")

_NGRAM_PROBABILITY = 0.5
"""Probability given to every n-gram token, because n-gram gives none. The acceptance rate is learned by position."""


class BoundModel(ABC):
    """Ask a draft model once, in one step; see ``fusion.StepModel``."""

    positions: int
    overlaps: bool

    @abstractmethod
    def launch(self, rows: Sequence[int], proposals: Int64) -> Callable[[], ModelDraft]:
        """Begin to draft for these rows of the engine's batch. Calling the result waits for the answer."""

    def close(self) -> None:
        """End the step, whether the model was asked or not."""
        return None


class ModelDrafter(ABC):
    """Run a draft model beside the suffix index, in one worker.

    out_of_step: the error with which this rank left the model, while the other tensor-parallel ranks still run it.
    """

    out_of_step: Exception | None = None

    @abstractmethod
    def load(self, target: Any) -> None:
        """Read the weights, before vLLM serves, or again if they were lost. ``target``: the served model."""

    @abstractmethod
    def bind(self, forward: ForwardPass) -> BoundModel:
        """Return the model, ready to be asked about this pass. Call it on the rank whose drafts vLLM takes."""

    def follow(self, forward: ForwardPass) -> None:
        """Do this rank's part of the first rank's draft. Call it on the other tensor-parallel ranks."""
        return None


def build_draft_model(settings: Settings, vllm_config: Any) -> ModelDrafter | None:
    """Return the draft model of the settings, not loaded yet; None where they name none."""
    if not settings.enabled:
        return None
    if isinstance(settings.drafter, NgramSettings):
        return NgramDrafter(settings.drafter, vllm_config)
    if isinstance(settings.drafter, MedusaSettings):
        return MedusaDrafter(settings.drafter, vllm_config)
    return None if settings.speculator is None else SpeculatorDrafter(settings, vllm_config.model_config)


# --- Tensor parallelism


def tensor_parallel_group() -> Any:
    """Return vLLM's GroupCoordinator of the tensor-parallel ranks, or None where there is one alone."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return group if group.world_size > 1 else None


class RankLink:
    """Tell the other tensor-parallel ranks what the first rank asks of the draft model.

    The suffix index and the decisions live on the first rank, a sharded model on all ranks. So in every step the first
    rank sends over the group's CPU connection the rows that it asks about and the tokens that it proposes, or that it
    asks nothing.

    group: vLLM's GroupCoordinator. positions: n, tokens that the model drafts.
    """

    def __init__(self, group: Any, positions: int) -> None:
        self._group = group.cpu_group
        self._first = group.ranks[0]
        self._positions = positions

    def tell(self, rows: Sequence[int], proposals: Int64) -> None:
        """Send the R rows and ``proposals``, int64 [R, n], of this step from the first rank."""
        import torch

        self._broadcast(torch.tensor([len(rows)]))
        if rows:
            self._broadcast(torch.from_numpy(np.column_stack((np.asarray(rows, dtype=np.int64), proposals))))

    def hear(self) -> tuple[list[int], Int64]:
        """Return the rows and proposals that the first rank sent. Call it on the other ranks."""
        import torch

        count = torch.zeros(1, dtype=torch.int64)
        self._broadcast(count)
        plan = torch.zeros((int(count), 1 + self._positions), dtype=torch.int64)
        if len(plan):
            self._broadcast(plan)
        told: Int64 = plan.numpy()
        return told[:, 0].tolist(), told[:, 1:]

    def _broadcast(self, tensor: Any) -> None:
        import torch

        torch.distributed.broadcast(tensor.contiguous(), src=self._first, group=self._group)


# --- Speculators


class SpeculatorDrafter(ModelDrafter):
    """Load the speculator of the settings and run its draft loop. Raises SpeculatorError where it does not fit."""

    def __init__(self, settings: Settings, model_config: Any) -> None:
        self._settings = settings
        self._model_config = model_config
        self.loop: Any = None
        self.link: RankLink | None = None
        self.device: Any = None
        self._dtype: Any = None

    def load(self, target: Any) -> None:
        import torch

        from agentspec.server_ext.speculator import DraftLoop, Ranks, load_speculator

        settings, group = self._settings, tensor_parallel_group()
        assert settings.speculator is not None
        self.loop = None  # frees what an earlier call loaded
        self.device = next(target.parameters()).device
        name = settings.speculator_dtype
        speculator = load_speculator(
            settings.speculator,
            hidden_size=self._model_config.get_hidden_size(),
            vocab_size=self._model_config.get_vocab_size(),
            dtype=self._model_config.dtype if name == "auto" else getattr(torch, name),
            device=self.device,
        )
        self._dtype = next(speculator.parameters()).dtype
        self.loop = DraftLoop(
            speculator,
            positions=settings.speculator_tokens,
            fp8_head=settings.speculator_fp8 != "off",
            fp8_projections=settings.speculator_fp8 == "all",
            parallel=None if group is None else Ranks.of(group.device_group),
        )
        self.link = None if group is None else RankLink(group, self.loop.positions)
        self.loop.warm_up()
        logger.info("agentspec: speculator %s drafts %d tokens", settings.speculator, self.loop.positions)

    def bind(self, forward: ForwardPass) -> "BoundSpeculator":
        return BoundSpeculator(self, forward)

    def follow(self, forward: ForwardPass) -> None:
        assert self.link is not None
        with self.together():
            rows, proposals = self.link.hear()
            if rows:
                self.run(forward, rows, proposals)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Remember an error in what all tensor-parallel ranks do together."""
        try:
            yield
        except Exception as error:
            if self.link is not None:
                self.out_of_step = error
            raise

    def run(self, forward: ForwardPass, rows: Sequence[int], proposals: Int64) -> Any:
        """Run the draft loop for these rows of the batch. Return its DraftedTokens, on the device."""
        import torch

        inputs = np.column_stack((forward.positions(rows), forward.newest(rows), proposals)).astype(np.int64)
        given = torch.from_numpy(inputs)
        if self.device.type != "cpu":
            given = given.pin_memory().to(self.device, non_blocking=True)
        hidden = forward.sample_hidden_states.index_select(0, given[:, 0])
        proposal = given[:, 2:] if (proposals != FREE).any() else None
        return self.loop(hidden.to(self._dtype), given[:, 1], proposal)


class BoundSpeculator(BoundModel):
    """Ask the speculator in one step, on the first rank."""

    def __init__(self, drafter: SpeculatorDrafter, forward: ForwardPass) -> None:
        self.positions = drafter.loop.positions
        self.overlaps = drafter.device.type != "cpu"
        self._drafter = drafter
        self._forward = forward
        self._told = False

    def launch(self, rows: Sequence[int], proposals: Int64) -> Callable[[], ModelDraft]:
        with self._drafter.together():
            self._tell(rows, proposals)
            drafted = self._drafter.run(self._forward, rows, proposals)
        if not self.overlaps:
            return lambda: ModelDraft(*(part.numpy() for part in drafted))
        return _fetch(drafted)

    def close(self) -> None:
        if not self._told:
            with self._drafter.together():
                self._tell([], np.zeros((0, self.positions), dtype=np.int64))

    def _tell(self, rows: Sequence[int], proposals: Int64) -> None:
        self._told = True
        if self._drafter.link is not None:
            self._drafter.link.tell(rows, proposals)


def _fetch(drafted: Any) -> Callable[[], ModelDraft]:
    """Start copying the answer to the host as one small tensor. A step waits for nothing else."""
    import torch

    whole = torch.stack([part.to(torch.float64) for part in drafted])  # float64 holds token ids exactly
    host = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
    host.copy_(whole, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> ModelDraft:
        done.synchronize()
        tokens, probabilities, top, top_probabilities = host.numpy()
        return ModelDraft(
            tokens.astype(np.int64),
            probabilities.astype(np.float32),
            top.astype(np.int64),
            top_probabilities.astype(np.float32),
        )

    return wait


# --- vLLM's own drafters


def native_config(vllm_config: Any, **speculative: Any) -> Any:
    """Return a copy of the engine's configuration with one of vLLM's own speculative methods.

    ``speculative``: fields of vLLM's SpeculativeConfig. Raises what SpeculativeConfig raises for them.
    """
    from vllm.config import SpeculativeConfig

    config = copy.copy(vllm_config)  # vLLM's ``replace`` would derive all fields anew
    config.speculative_config = SpeculativeConfig(
        target_model_config=vllm_config.model_config,
        target_parallel_config=vllm_config.parallel_config,
        **speculative,
    )
    return config


class MedusaDrafter(SpeculatorDrafter):
    """Run vLLM's Medusa heads in place of a speculator. Raises SpeculatorError where they do not fit."""

    def __init__(self, settings: MedusaSettings, vllm_config: Any) -> None:
        self._medusa = settings
        self._vllm_config = vllm_config
        self.link: RankLink | None = None

    def load(self, target: Any) -> None:
        self.loop = None  # frees what an earlier call loaded
        self.device = next(target.parameters()).device
        self.loop = MedusaLoop(self._medusa, self._vllm_config, self.device)
        self._dtype = self.loop.dtype
        group = tensor_parallel_group()
        self.link = None if group is None else RankLink(group, self.loop.positions)
        logger.info("agentspec: Medusa heads %s draft %d tokens", self._medusa.model, self.loop.positions)


class MedusaLoop:
    """Run vLLM's Medusa heads behind the interface of a speculator's DraftLoop.

    Head k does not see the tokens before its own, so a token proposed at one position does not change the draft at the
    next.
    """

    def __init__(self, settings: MedusaSettings, vllm_config: Any, device: Any) -> None:
        from vllm.config import set_current_vllm_config

        try:
            from vllm.v1.spec_decode.medusa import MedusaProposer
        except ImportError as error:
            raise SpeculatorError(
                "drafter: this vLLM has no Medusa heads; 0.32 is the last version that has them"
            ) from error
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
            with set_current_vllm_config(config):  # vLLM's loader reads it
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
        """Return the DraftedTokens of B rows. hidden [B, H]: the state that produced the newest token.

        ``tokens`` are not read. Under tensor parallelism only the first rank gets logits; the answer of the other
        ranks is not used.
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


class NgramDrafter(ModelDrafter):
    """Run vLLM's NgramProposer on the host, for the rows asked about only."""

    def __init__(self, settings: NgramSettings, vllm_config: Any) -> None:
        self._settings = settings
        self._vllm_config = vllm_config
        self.positions = settings.num_speculative_tokens
        self.native: Any = None

    def load(self, target: Any) -> None:
        limit_numba_threads()
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        fields = self._settings.model_dump(exclude_none=True)
        try:
            self.native = NgramProposer(native_config(self._vllm_config, **fields))
        except ValueError as error:
            raise SpeculatorError(f"drafter: vLLM refuses it: {error}") from error
        # Compile now. vLLM's own warm-up asks for no row, so the first step would wait seconds for the compiler.
        self.native.propose(self.positions, [[0]], np.ones(1, dtype=np.int32), np.zeros((1, 1), dtype=np.int32))

    def bind(self, forward: ForwardPass) -> "BoundNgram":
        return BoundNgram(self, forward.input_batch)


class BoundNgram(BoundModel):
    """Look up n-grams in one step. ``batch``: vLLM's InputBatch."""

    overlaps = False

    def __init__(self, drafter: NgramDrafter, batch: Any) -> None:
        self.positions = drafter.positions
        self._native = drafter.native
        self._batch = batch

    def launch(self, rows: Sequence[int], proposals: Int64) -> Callable[[], ModelDraft]:
        wanted: list[list[int]] = [[] for _ in range(self._batch.num_reqs)]
        for row in rows:
            wanted[row] = [0]  # vLLM only checks that it is not empty
        lengths, tokens = self._batch.num_tokens_no_spec, self._batch.token_ids_cpu
        found = self._native.propose(self.positions, wanted, lengths, tokens)
        return lambda: _ngram_draft([found[row] for row in rows], proposals)


def limit_numba_threads() -> None:
    """Let numba start as many threads as torch has. Too late once numba is imported.

    Where numba counts the cores itself, its first use sets OpenMP's number of threads to that for the whole worker,
    torch included.
    """
    import torch

    if "numba" not in sys.modules:
        os.environ.setdefault("NUMBA_NUM_THREADS", str(torch.get_num_threads()))


def _ngram_draft(found: Sequence[Sequence[int]], proposals: Int64) -> ModelDraft:
    """Return the n-gram drafts as a ModelDraft. Probability 0 from the first token on that n-gram did not draft."""
    own: Int64 = np.zeros(proposals.shape, dtype=np.int64)
    given = np.zeros(proposals.shape, dtype=bool)
    for row, tokens in enumerate(found):
        own[row, : len(tokens)] = tokens
        given[row, : len(tokens)] = True
    forced = proposals != FREE
    agrees = given & (~forced | (proposals == own))
    before = np.ones_like(agrees)
    before[:, 1:] = np.logical_and.accumulate(agrees, axis=1)[:, :-1]
    probabilities: NDArray[np.float32] = np.where(agrees & before, _NGRAM_PROBABILITY, 0.0).astype(np.float32)
    tops: NDArray[np.float32] = np.where(given & before, _NGRAM_PROBABILITY, 0.0).astype(np.float32)
    return ModelDraft(np.where(forced, proposals, own), probabilities, own, tops)
