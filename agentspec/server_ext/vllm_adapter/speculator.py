"""The speculator in vLLM's worker: the target's hidden states in, drafted tokens out."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from agentspec.server_ext.fusion import ModelDraft
from agentspec.server_ext.fusion.draft_model import FREE, Int64
from agentspec.server_ext.settings import Settings
from agentspec.server_ext.vllm_adapter.forward import BoundModel, ForwardPass, ModelDrafter
from agentspec.server_ext.vllm_adapter.ranks import RankLink, tensor_parallel_group

logger = logging.getLogger("vllm.agentspec")


class SpeculatorDrafter(ModelDrafter):
    """Loads the speculator of the settings and runs its draft loop. Raises SpeculatorError where it does not fit."""

    def __init__(self, settings: Settings, model_config: Any) -> None:
        self._settings = settings
        self._model_config = model_config
        self.loop: Any = None
        self.link: RankLink | None = None
        self.device: Any = None
        self._dtype: Any = None

    def load(self, target: Any) -> None:
        import torch

        from agentspec.server_ext.speculator import DraftLoop, load_speculator
        from agentspec.server_ext.speculator.parallel import Ranks

        assert self._settings.speculator is not None
        self.device = next(target.parameters()).device
        name = self._settings.speculator_dtype
        speculator = load_speculator(
            self._settings.speculator,
            hidden_size=self._model_config.get_hidden_size(),
            vocab_size=self._model_config.get_vocab_size(),
            dtype=self._model_config.dtype if name == "auto" else getattr(torch, name),
            device=self.device,
        )
        self._dtype = next(speculator.parameters()).dtype
        settings, cuda, group = self._settings, self.device.type == "cuda", tensor_parallel_group()
        self.loop = DraftLoop(
            speculator,
            positions=settings.speculator_tokens,
            fp8_head=settings.speculator_fp8 != "off",
            fp8_projections=settings.speculator_fp8 == "all",
            kernels=cuda if settings.speculator_kernels is None else settings.speculator_kernels,
            graphs=cuda if settings.speculator_graphs is None else settings.speculator_graphs,
            parallel=None if group is None else Ranks.of(group.device_group),
        )
        if group is not None:
            self.link = RankLink(group.cpu_group, group.ranks[0], self.loop.positions)
        self.loop.warm_up()
        logger.info("agentspec: speculator %s drafts %d tokens", self._settings.speculator, self.loop.positions)

    def bind(self, forward: ForwardPass) -> "BoundSpeculator":
        return BoundSpeculator(self, forward)

    def follow(self, forward: ForwardPass) -> None:
        assert self.link is not None
        rows, proposals = self.link.hear()
        if rows:
            self.run(forward, rows, proposals)

    def run(self, forward: ForwardPass, rows: Sequence[int], proposals: Int64) -> Any:
        """The draft loop for these rows of the batch; its DraftedTokens are on the device."""
        import torch

        inputs = np.column_stack((forward.positions(rows), forward.newest(rows), proposals)).astype(np.int64)
        given = torch.from_numpy(inputs)
        if self.device.type != "cpu":
            given = given.pin_memory().to(self.device, non_blocking=True)
        hidden = forward.sample_hidden_states.index_select(0, given[:, 0])
        proposal = given[:, 2:] if (proposals != FREE).any() else None
        return self.loop(hidden.to(self._dtype), given[:, 1], proposal)


class BoundSpeculator(BoundModel):
    """The speculator in one step, on the first rank."""

    def __init__(self, drafter: SpeculatorDrafter, forward: ForwardPass) -> None:
        self.positions = drafter.loop.positions
        self.overlaps = drafter.device.type != "cpu"
        self._drafter = drafter
        self._forward = forward
        self._told = False

    def launch(self, rows: Sequence[int], proposals: Int64) -> Callable[[], ModelDraft]:
        self._tell(rows, proposals)
        drafted = self._drafter.run(self._forward, rows, proposals)
        if not self.overlaps:
            return lambda: ModelDraft(*(part.numpy() for part in drafted))
        return _fetch(drafted)

    def close(self) -> None:
        if not self._told:
            self._tell([], np.zeros((0, self.positions), dtype=np.int64))

    def _tell(self, rows: Sequence[int], proposals: Int64) -> None:
        self._told = True
        if self._drafter.link is not None:
            self._drafter.link.tell(rows, proposals)


def _fetch(drafted: Any) -> Callable[[], ModelDraft]:
    """Start copying the answer to the host, as one small tensor: the only thing in a step that is waited for."""
    import torch

    whole = torch.stack([part.to(torch.float64) for part in drafted])  # token ids are exact in it
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
