"""Run draft models beside the suffix index in vLLM's worker: agentspec's own speculators (MLP, LSTM).

``native_drafters`` has the drafters of vLLM.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from agentspec.server_ext import UNFORCED
from agentspec.server_ext.fusion import ModelDraft
from agentspec.server_ext.fusion.draft_model import Int64, TokenChoices
from agentspec.server_ext.settings import Settings
from agentspec.server_ext.vllm_adapter.worker.step_reader import ForwardPass

logger = logging.getLogger("vllm.agentspec")


class BoundModel(ABC):
    """Ask a draft model once, in one step; see ``fusion.StepModel``."""

    positions: int
    overlaps: bool
    choices: TokenChoices | None = None

    @abstractmethod
    def launch(self, rows: Sequence[int], proposals: Int64) -> Callable[[], ModelDraft]:
        """Begin to draft for these rows of the engine's batch. Calling the result waits for the answer."""

    def rest(self) -> None:
        """Leave the model out of this step. Call it only if ``choices.may_rest``."""
        raise NotImplementedError

    def close(self) -> None:
        """End the step, whether the model was asked or not."""
        return None


class ModelDrafter(ABC):
    """Run a draft model beside the suffix index, in one worker.

    parallel: whether other tensor-parallel ranks run the model together with this one. out_of_step: the error that
    made this rank leave the model while the others still run it; None: none did.
    """

    parallel = False
    out_of_step: Exception | None = None

    @abstractmethod
    def load(self, target: Any) -> None:
        """Read the weights, before vLLM serves and again if they were lost. ``target``: the served model."""

    @abstractmethod
    def bind(self, forward: ForwardPass) -> BoundModel:
        """Return the model, ready to be asked about this pass. Call it on the rank whose drafts vLLM takes."""

    def follow(self, forward: ForwardPass) -> None:
        """Do this rank's part of the first rank's draft. Call it on the other tensor-parallel ranks."""
        return None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Remember an error of the block, which all tensor-parallel ranks run together, as ``out_of_step``."""
        try:
            yield
        except Exception as error:
            if self.parallel:
                self.out_of_step = error
            raise


def build_draft_model(settings: Settings, vllm_config: Any) -> ModelDrafter | None:
    """Return the speculator of the settings; None if they name none, or agentspec is switched off."""
    if not settings.enabled or settings.speculator is None:
        return None
    return SpeculatorDrafter(settings, vllm_config.model_config)


# --- Tensor parallelism


def tensor_parallel_group() -> Any:
    """Return vLLM's GroupCoordinator of the tensor-parallel ranks; None if there is only one rank."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return group if group.world_size > 1 else None


class RankLink:
    """Tell the other tensor-parallel ranks what the first rank asks of the draft model.

    The suffix index and the decisions are on the first rank, and a sharded model is on all ranks. So in every step the
    first rank sends the rows that it asks about and the tokens that it proposes, or that it asks for nothing. It uses
    the group's CPU connection.

    group: vLLM's GroupCoordinator. positions: n, tokens that the model drafts.
    """

    def __init__(self, group: Any, positions: int) -> None:
        self._group = group.cpu_group
        self._first = group.ranks[0]
        self._positions = positions

    def tell(self, rows: Sequence[int], proposals: Int64) -> None:
        """Send the R rows and ``proposals``, int64 [R, n], of this step from the first rank."""
        import torch

        self.tell_number(len(rows))
        if rows:
            self._broadcast(torch.from_numpy(np.column_stack((np.asarray(rows, dtype=np.int64), proposals))))

    def hear(self) -> tuple[list[int], Int64]:
        """Return the rows and proposals that the first rank sent. Call it on the other ranks."""
        import torch

        plan = torch.zeros((self.hear_number(), 1 + self._positions), dtype=torch.int64)
        if len(plan):
            self._broadcast(plan)
        told: Int64 = plan.numpy()
        return told[:, 0].tolist(), told[:, 1:]

    def tell_number(self, number: int) -> None:
        """Send one number from the first rank."""
        import torch

        self._broadcast(torch.tensor([number]))

    def hear_number(self) -> int:
        """Return the number that the first rank sent. Call it on the other ranks."""
        import torch

        number = torch.zeros(1, dtype=torch.int64)
        self._broadcast(number)
        return int(number)

    def _broadcast(self, tensor: Any) -> None:
        import torch

        torch.distributed.broadcast(tensor.contiguous(), src=self._first, group=self._group)


# --- Speculators


class SpeculatorDrafter(ModelDrafter):
    """Load the speculator of the settings and run its draft loop. Raises SpeculatorError if it does not fit."""

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
        self.loop = None  # frees the weights of an earlier call
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
        self.parallel = group is not None
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

    def run(self, forward: ForwardPass, rows: Sequence[int], proposals: Int64) -> Any:
        """Run the draft loop for these rows of the batch. Return its DraftedTokens, on the device."""
        import torch

        inputs = np.column_stack((forward.positions(rows), forward.newest(rows), proposals)).astype(np.int64)
        given = torch.from_numpy(inputs)
        if self.device.type != "cpu":
            given = given.pin_memory().to(self.device, non_blocking=True)
        hidden = forward.sample_hidden_states.index_select(0, given[:, 0])
        proposal = given[:, 2:] if (proposals != UNFORCED).any() else None
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
    """Start copying the answer to the host as one small tensor. Return the function that waits for it.

    A step waits for nothing else.
    """
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
