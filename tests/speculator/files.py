"""Make small checkpoints in the published layouts, with random weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

H, I, V, N = 24, 16, 50, 3  # noqa: E741  # the names of the formulas
GATES = ("forget", "input", "output", "cell")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Hold a checkpoint: its config.json, and its tensors [float32] by the names of the reference."""

    kind: str
    config: dict[str, Any]
    weights: dict[str, torch.Tensor]

    def reference_weights(self) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
        """Return the tensors as float64 arrays."""
        return {name: value.double().numpy() for name, value in self.weights.items()}

    def write(self, folder: Path, *, prefix: str = "", without: tuple[str, ...] = ()) -> Path:
        """Write pytorch_model.bin and config.json, and return the folder. without: names of tensors to leave out."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        kept = {prefix + name: value for name, value in self.weights.items() if name not in without}
        torch.save(kept, folder / "pytorch_model.bin")
        return folder


def lstm(seed: int = 0, *, tied: bool = True, scaled: bool = True) -> Checkpoint:
    """Return a checkpoint like Snowflake's LSTM speculators: widths are strings, tied tensors have all their names."""
    random = _Random(seed)
    weights = {f"{gate}_emb.0.weight": random(V, I) for gate in GATES}
    if tied:
        weights = dict.fromkeys(weights, random(V, I))
    for gate in GATES:
        weights[f"{gate}_proj.0.weight"], weights[f"{gate}_proj.1.weight"] = random(I, H), random(I, I)
    for name in ("cell_ln.0", "state_ln.0"):
        weights[f"{name}.weight"], weights[f"{name}.bias"] = 1 + random(I), random(I)
    weights |= dict.fromkeys((f"head.{k}.weight" for k in range(N)), random(V, I))
    config = {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
        "base_model_name_or_path": "some/target",
        "input_hidden_dim": H,
        "inner_dim": str(I),
        "proj_dim": str(I),
        "emb_dim": str(I),
        "model_type": "mlp_speculator",
        "n_candidates": N,
        "n_predict": N,
        "scale_input": scaled,
        "tie_weights": True,
        "tie_lstm_embs": tied,
        "top_k_tokens_per_head": [1] * N,
        "torch_dtype": "bfloat16",
        "vocab_size": V,
        "method": "sum_lstm",
    }
    return Checkpoint("sum_lstm", config, weights)


def mlp(seed: int = 0, *, tied: bool = False, scaled: bool = False, inner: int = I) -> Checkpoint:
    """Return a checkpoint like IBM's accelerators. emb_dim: the target's width. inner: inner width; 0: the target's."""
    random, width = _Random(seed), inner or H
    weights: dict[str, torch.Tensor] = {}
    for k in range(N):
        parts = {
            f"emb.{k}.weight": random(V, width),
            f"proj.{k}.weight": random(width, width if k else H),
            f"head.{k}.weight": random(V, width),
            f"ln.{k}.weight": 1 + random(width),
            f"ln.{k}.bias": random(width),
        }
        for name in parts:
            first = name.replace(f".{k}.", ".1." if name.startswith("proj") else ".0.")
            weights[name] = weights[first] if tied and first in weights else parts[name]
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "emb_dim": H,
        "inner_dim": inner,
        "model_type": "mlp_speculator",
        "n_candidates": 5,
        "n_predict": N,
        "scale_input": scaled,
        "tie_weights": tied,
        "top_k_tokens_per_head": [5, 4, 3],
        "vocab_size": V,
    }
    return Checkpoint("mlp", config, weights)


def rnn(seed: int = 0, *, layers: int = 2) -> Checkpoint:
    """Return a tied ``sum_rnn`` as ArcticTraining saves it: single layers have numbers too, widths have dots."""
    random = _Random(seed)
    weights = {"emb.0.0.weight": random(V, I), "proj.0.0.weight": random(I, H), "proj.1.0.weight": random(I, I)}
    weights |= {"ln.0.0.weight": 1 + random(I), "ln.0.0.bias": random(I)}
    for layer in range(1, layers):
        for name in ("emb.0", "proj.0", "proj.1"):
            weights[f"{name}.{3 * layer - 2}.weight"] = 1 + random(I)
            weights[f"{name}.{3 * layer - 2}.bias"] = random(I)
            weights[f"{name}.{3 * layer}.weight"] = random(I, I)
        weights[f"ln.0.{3 * layer - 1}.weight"] = random(I, I)
        weights[f"ln.0.{3 * layer}.weight"], weights[f"ln.0.{3 * layer}.bias"] = 1 + random(I), random(I)
    weights |= dict.fromkeys((f"head.{k}.weight" for k in range(N)), random(V, I))
    sizes = ".".join([str(I)] * layers)
    config = lstm().config | {"method": "sum_rnn", "tie_lstm_embs": False, "scale_input": False}
    return Checkpoint("sum_rnn", config | {"inner_dim": sizes, "proj_dim": sizes, "emb_dim": sizes}, weights)


class _Random:
    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator) * 0.3
