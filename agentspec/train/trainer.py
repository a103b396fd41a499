"""Train a speculator: choose the positions of each step, compute the loss, update the weights.

A run that was cut off and resumed has the same batches and weights as one that was not.
"""

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from agentspec.errors import ConfigurationError
from agentspec.files import replacing
from agentspec.server_ext.speculator import Speculator, SpeculatorConfig, build_speculator
from agentspec.server_ext.speculator.config import METHODS
from agentspec.train.config import Model, TrainingConfig
from agentspec.train.files import readable, writable
from agentspec.train.hidden_states import HiddenStates, Response, TargetShape, fitting

PIECE = 256
"""Most positions of a piece: the length of ArcticTraining's sequences."""
ETA = 3.0
"""Speed at which the LK loss turns from divergence to acceptance; the paper's best setting."""
_MAX_NORM = 1.0
_SAVED = frozenset({"settings", "data", "speculator", "optimizer", "step", "seconds", "sizes"})


@dataclass(frozen=True, slots=True)
class Piece:
    """Select positions ``first`` to ``last`` of a response, each with at least one token behind it."""

    response: Response
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Hold the M rows of several pieces. N of them are starts, from which a draft is made.

    ``hidden``: [M, H]. ``tokens``: int64 [M]. ``starts``: int64 [N], row indices. ``left``: int64 [N], number of rows
    of the same response behind each start.
    """

    hidden: Tensor
    tokens: Tensor
    starts: Tensor
    left: Tensor

    def row(self, k: int) -> Tensor:
        """Return int64 [N]: the row k behind each start, or the response's last row if the response ends before."""
        return self.starts + self.left.clamp(max=k)

    def inputs(self, n: int) -> Tensor:
        """Return int64 [N, n]: each draft's input tokens, from the response. Behind its end the last token repeats."""
        return torch.stack([self.tokens[self.row(k)] for k in range(n)], dim=1)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on another device."""
        return Batch(*(part.to(device) for part in (self.hidden, self.tokens, self.starts, self.left)))


def pieces(responses: Sequence[Response]) -> list[Piece]:
    """Cut all responses into pieces. No draft starts at a response's last token, because nothing follows it."""
    return [
        Piece(response, first, min(first + PIECE, response.length - 1))
        for response in responses
        for first in range(0, response.length - 1, PIECE)
    ]


def collate(data: HiddenStates, chosen: Sequence[Piece], n: int) -> Batch:
    """Return the batch of these pieces for drafts of n tokens, with up to n rows behind each piece."""
    hidden, tokens, starts, left = [], [], [], []
    at = 0
    for piece in chosen:
        end = min(piece.last + n, piece.response.length)
        states, ids = data.rows(piece.response, piece.first, end)
        hidden.append(states)
        tokens.append(ids)
        first = torch.arange(piece.last - piece.first)
        starts.append(at + first)
        left.append(end - piece.first - 1 - first)
        at += end - piece.first
    return Batch(torch.cat(hidden), torch.cat(tokens), torch.cat(starts), torch.cat(left))


def draws(count: int, seed: int, begin: int) -> Iterator[int]:
    """Yield indices below ``count`` without end, each epoch in its own random order, from draw ``begin`` on.

    An index depends on its draw number only, so a resumed run draws the same indices as an unbroken one.
    """
    epoch, at = divmod(begin, count)
    while True:
        order = torch.randperm(
            count, generator=torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        ).tolist()
        yield from order[at:]
        epoch, at = epoch + 1, 0


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the published loss: minus the log probability of the response's own token.

    logits: [N, V]. labels: int64 [N]. Returns float32 [N].
    """
    return functional.cross_entropy(logits.float(), labels, reduction="none")


def lk(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the adaptive LK loss (Samarin et al., "LK Losses", arXiv 2602.23881), which raises the acceptance rate.

    With p the target's distribution and q the draft's, a draft sampled from q is accepted with probability
    a = sum(min(p, q)), one minus their total variation. The gradient of a vanishes where p and q hardly overlap. So the
    loss mixes in the Kullback-Leibler divergence, whose gradient does not::

        l * KL(p || q) + (1 - l) * (1 - a)   with   l = exp(-ETA * a), taken as a constant

    (The code computes the cross-entropy of p and q in place of the divergence: it has the same gradient.)
    logits: [N, V] of the draft. target: float32 [N, V], p. Returns the loss, float32 [N], and a, without a gradient.
    """
    log_q = functional.log_softmax(logits.float(), -1)
    overlap = torch.minimum(log_q.exp(), target).sum(-1)
    divergence = -(target * log_q).sum(-1)
    accepted = overlap.detach()
    weight = torch.exp(-ETA * accepted)
    return weight * divergence + (1.0 - weight) * (1.0 - overlap), accepted


def worth(accepted: Tensor) -> Tensor:
    """Return the derivative of a draft's expected accepted tokens by the acceptance rate of each position.

    A token counts only if all before it are accepted, so the expected number is a1 + a1 a2 + a1 a2 a3 + ...
    accepted: [N, n], the rates. Returns [N, n].
    """
    reached = torch.ones_like(accepted)
    reached[:, 1:] = accepted[:, :-1].cumprod(1)
    behind = torch.ones_like(accepted)
    for k in range(accepted.shape[1] - 2, -1, -1):
        behind[:, k] += accepted[:, k + 1] * behind[:, k + 1]
    return reached * behind


def speculator_config(model: Model, target: TargetShape) -> SpeculatorConfig:
    """Return the speculator's shape for ``model`` and its target. Raises SpeculatorError for an impossible one."""
    return SpeculatorConfig(
        kind=METHODS[model.method],
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
    """Return the factor of the learning rate in a step (from 0 on): a linear rise, then a cosine down to zero."""
    rising = max(1, round(total * warmup))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1.0 + math.cos(math.pi * (step - rising) / max(1, total - rising)))


class StartedRun(NamedTuple):
    """Hold what a run that was cut off began with.

    sizes: bytes of the sources' files. data_key: identifies the data.
    """

    sizes: list[int]
    data_key: str


def started_run(config: TrainingConfig) -> StartedRun | None:
    """Return what the run that this one resumes began with; None without a checkpoint.

    Raises InvalidInputError for a damaged checkpoint, ConfigurationError for one of other settings.
    """
    state = _saved(config, mmap=True)
    return None if state is None else StartedRun(state["sizes"], state["data"])


def checkpoint_file(config: TrainingConfig) -> Path:
    """Return the file from which a run that was cut off goes on."""
    return config.checkpoint.output_dir / "training.pt"


def _saved(config: TrainingConfig, **options: Any) -> dict[str, Any] | None:
    """Return what the checkpoint of an earlier run with the same settings holds; None without one."""
    file = checkpoint_file(config)
    if not file.exists():
        return None
    with readable(file):
        state: dict[str, Any] = torch.load(file, weights_only=True, **options)
        if not isinstance(state, dict) or not state.keys() >= _SAVED:
            raise ValueError("no checkpoint of a training")
    if state["settings"] != _settings(config):
        raise of_another_run(config)
    return state


def _settings(config: TrainingConfig) -> str:
    """Return a digest of the settings that a checkpoint must share with a run: all but those of data and folders."""
    without: dict[str, Any] = {"checkpoint": True, "data": True, "model": {"revision", "hf_overrides"}}
    settings = config.model_dump(mode="json", exclude=without)
    if config.model.variant:  # otherwise as before there were these fields, so that such trainings go on
        settings["variant"] = config.model.variant
    return hashlib.sha256(repr(settings).encode()).hexdigest()


def of_another_run(config: TrainingConfig) -> ConfigurationError:
    """Return the error about a checkpoint of a run that this one cannot resume."""
    file = checkpoint_file(config)
    return ConfigurationError(
        f"checkpoint.output_dir: {file} belongs to a run of other settings or data; name another folder, or remove that"
        " file"
    )


class Trainer:
    """Train one speculator on ``device``.

    head: the target's head [V, H], which the LK loss needs; None: the loss is cross_entropy. data_key: identifies the
    data. sizes: sizes in bytes of the files that the data were read from, which the checkpoint keeps.
    """

    def __init__(
        self,
        config: TrainingConfig,
        shape: SpeculatorConfig,
        data: HiddenStates,
        head: Tensor | None,
        device: torch.device,
        data_key: str,
        sizes: Sequence[int],
    ) -> None:
        self.config = config
        self.step = 0
        self.seconds = 0.0
        self._device = device
        self._data_key = data_key
        self._sizes = list(sizes)
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
        self._file = checkpoint_file(config)

    def resume(self) -> bool:
        """Load the checkpoint of an earlier run with the same settings. Return whether there was one.

        Raises InvalidInputError for a damaged checkpoint, ConfigurationError for one of other settings or data.
        """
        state = _saved(self.config, map_location="cpu")  # a full device would count as a damaged file
        if state is None:
            return False
        if state["data"] != self._data_key:
            raise of_another_run(self.config)
        self.speculator.load_state_dict(state["speculator"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self._draws = draws(len(self._pieces), self.config.seed, self.step * self._per_step)
        return True

    def save(self) -> None:
        """Write a checkpoint of everything that the rest of the run depends on. Raises as ``check_weights`` does."""
        self.check_weights()
        state = {
            "settings": _settings(self.config),
            "data": self._data_key,
            "speculator": self.speculator.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "sizes": self._sizes,
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with writable(self._file), replacing(self._file, sync=True) as partial:
            torch.save(state, partial)

    def forget(self) -> None:
        """Remove the checkpoint at the end of the run."""
        self._file.unlink(missing_ok=True)

    def check_weights(self) -> None:
        """Raise ConfigurationError if a weight is not finite, so that no such weights are saved."""
        for parameter in self.speculator.parameters():
            if not bool(parameter.isfinite().all()):
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise ConfigurationError(
                    f"optimizer: after update {self.step} the weights are not finite in {dtype}: write a smaller lr or"
                    " weight_decay"
                )

    def train_step(self) -> float:
        """Update the weights once. Return the mean loss of a draft.

        Raises ConfigurationError if that is not finite, or if its pieces do not fit into the device's memory.
        """
        began = time.perf_counter()
        factor = rate_factor(self.step, self.config.train_iters, self.config.scheduler.warmup_ratio)
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.optimizer.lr * factor
        parts = self.config.gradient_accumulation_steps
        total = 0.0
        for _ in range(parts):
            chosen = [self._pieces[i] for i in islice(self._draws, self.config.micro_batch_size)]
            batch = collate(self._data, chosen, self.speculator.config.n_predict)
            with fitting("micro_batch_size", "a smaller one, and more gradient_accumulation_steps"):
                loss = self._loss(batch.to(self._device)) / parts
                loss.backward()
            total += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(self.speculator.parameters(), _MAX_NORM))
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise ConfigurationError(
                f"optimizer.lr: update {self.step + 1} has a loss of {total:g} and a gradient of {norm:g}: write a "
                "smaller rate; if it is the first update, another model.dtype, in which the hidden states are finite"
            )
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        self.seconds += time.perf_counter() - began
        return total

    def _loss(self, batch: Batch) -> Tensor:
        """Return the loss: the sum of each position's mean cross-entropy, or the mean LK loss of whole drafts."""
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


def _optimizer(speculator: Speculator, config: TrainingConfig) -> torch.optim.Optimizer:
    """Return AdamW, without weight decay for the weights and biases of norms."""
    matrices = [p for p in speculator.parameters() if p.ndim > 1]
    vectors = [p for p in speculator.parameters() if p.ndim == 1]
    options = config.optimizer
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas)


def _distributions(hidden: Tensor, head: Tensor) -> Tensor:
    """Return float32 [M, V]: the target's distribution of the token that each row of ``hidden`` [M, H] produces."""
    with torch.no_grad():
        return (hidden.to(head.dtype) @ head.T).float().softmax(-1)
