"""The training loop: same batches and same weights whether it is cut off in between or not."""

import hashlib
import math
import time
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from agentspec.errors import ConfigurationError
from agentspec.server_ext.speculator import Speculator, SpeculatorConfig, build_speculator
from agentspec.train.batches import Batch, collate, draws, pieces
from agentspec.train.config import Model, TrainingConfig
from agentspec.train.files import whole
from agentspec.train.hidden_states import HiddenStates
from agentspec.train.losses import cross_entropy, lk, worth
from agentspec.train.target import TargetShape

_MAX_NORM = 1.0


def speculator_config(model: Model, target: TargetShape) -> SpeculatorConfig:
    """The shape that ``model`` asks for, on that target. Raises SpeculatorError for one that cannot be."""
    return SpeculatorConfig(
        kind="lstm" if model.method == "sum_lstm" else "mlp",
        hidden_size=target.hidden_size,
        inner_size=model.speculator_width,
        n_predict=model.n_speculator_heads,
        vocab_size=target.vocab_size,
        emb_size=model.emb_dim,
        proj_size=model.proj_dim,
        tie_weights=model.speculator_tie_weights,
        tie_lstm_embs=model.tie_lstm_embs,
        scale_input=model.speculator_scale_input,
        base_model=model.name_or_path,
        base_model_archs=target.architectures,
    )


def rate_factor(step: int, total: int, warmup: float) -> float:
    """Share of the learning rate in a step, counted from 0: a linear rise, then a cosine that ends at zero."""
    rising = max(1, round(total * warmup))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(1, total - rising)))


class Trainer:
    """One speculator in training, on ``device``.

    head: the target's head [V, H], which the LK loss needs. data_key: names the data.
    Raises ConfigurationError for a checkpoint of other settings or data.
    """

    def __init__(
        self,
        config: TrainingConfig,
        shape: SpeculatorConfig,
        data: HiddenStates,
        head: Tensor | None,
        device: torch.device,
        data_key: str,
    ) -> None:
        self.config = config
        self.step = 0
        self.seconds = 0.0
        self._device = device
        self._data_key = data_key
        self._data = data
        self._pieces = pieces(data.responses)
        self._head = None if head is None else head.to(device)
        torch.manual_seed(config.seed)
        self.speculator: Speculator = build_speculator(shape)
        self.speculator.reset_parameters()
        self.speculator.to(device).train()
        self._optimizer = _optimizer(self.speculator, config)
        self._per_step = config.micro_batch_size * config.gradient_accumulation_steps
        self._draws = draws(len(self._pieces), config.seed, 0)
        self._file = config.checkpoint.output_dir / "training.pt"

    def resume(self) -> bool:
        """Go on where an earlier run of the same settings was cut off; whether there was one."""
        if not self._file.exists():
            return False
        state = torch.load(self._file, map_location=self._device, weights_only=True)
        if state["settings"] != self._settings():
            raise ConfigurationError(
                f"checkpoint.output_dir: {self._file} belongs to a run of other settings or data; "
                "name another folder, or remove that file"
            )
        self.speculator.load_state_dict(state["speculator"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self._draws = draws(len(self._pieces), self.config.seed, self.step * self._per_step)
        return True

    def save(self) -> None:
        """Keep everything that the rest of the run depends on; half a file never takes the place of a whole one."""
        state = {
            "settings": self._settings(),
            "speculator": self.speculator.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with whole(self._file) as partial:
            torch.save(state, partial)

    def forget(self) -> None:
        """Remove what ``save`` wrote: the run is at its end."""
        self._file.unlink(missing_ok=True)

    def train_step(self) -> float:
        """One update of the weights; returns the loss of a draft."""
        began = time.perf_counter()
        factor = rate_factor(self.step, self.config.train_iters, self.config.scheduler.warmup_ratio)
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.optimizer.lr * factor
        parts = self.config.gradient_accumulation_steps
        total = 0.0
        for _ in range(parts):
            chosen = [self._pieces[i] for i in islice(self._draws, self.config.micro_batch_size)]
            loss = self._loss(collate(self._data, chosen, self.speculator.config.n_predict).to(self._device)) / parts
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.speculator.parameters(), _MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        self.seconds += time.perf_counter() - began
        return total

    def _loss(self, batch: Batch) -> Tensor:
        """Sum over the positions of a draft of the mean loss there; with LK, in terms of whole drafts."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            drafted = self.speculator(
                batch.hidden[batch.starts].float(), batch.inputs(self.speculator.config.n_predict)
            )
        there = torch.stack([batch.left > k for k in range(len(drafted))], dim=1)
        rows = [batch.row(k + 1) for k in range(len(drafted))]
        if self._head is None:
            each = [cross_entropy(logits, batch.tokens[row]) for logits, row in zip(drafted, rows, strict=True)]
            return ((torch.stack(each, dim=1) * there).sum(0) / there.sum(0).clamp(min=1)).sum()
        target = _distributions(batch.hidden, self._head)
        pairs = [lk(logits, target[row]) for logits, row in zip(drafted, rows, strict=True)]
        losses, accepted = (torch.stack(part, dim=1) * there for part in zip(*pairs, strict=True))
        return (losses * worth(accepted)).sum(1).mean()

    def _settings(self) -> str:
        """What a checkpoint must have in common with this run: all settings but where and how often it is kept."""
        settings: dict[str, Any] = self.config.model_dump(mode="json", exclude={"checkpoint", "data"})
        return hashlib.sha256(repr((settings, self._data_key)).encode()).hexdigest()


def _optimizer(speculator: Speculator, config: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW; norms' weights and biases do not decay."""
    matrices = [p for p in speculator.parameters() if p.ndim > 1]
    vectors = [p for p in speculator.parameters() if p.ndim == 1]
    options = config.optimizer
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas)


def _distributions(hidden: Tensor, head: Tensor) -> Tensor:
    """float32 [M, V]: the target's distribution of the token of each row of ``hidden`` [M, H]."""
    with torch.no_grad():
        return (hidden.to(head.dtype) @ head.T).float().softmax(-1)
