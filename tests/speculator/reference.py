"""Compute speculators in float64 numpy, straight from the formulas and by published names.

The formulas are from arXiv:2404.19124, the layouts from published checkpoints. No code is shared with the modules.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = Mapping[str, Array]


def norm(x: Array, weight: Array | float = 1.0, bias: Array | float = 0.0) -> Array:
    """Return LN(x) = w * x / sqrt(mean(x^2) + 1e-6) + b."""
    return np.asarray(weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) + bias)


def gelu(x: Array) -> Array:
    """Return x * Phi(x), exactly."""
    return np.asarray(0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0))))


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def alpha(n: int, width: int) -> float:
    """Return e/s, where s = 0.5^(0.5/n) and e = sqrt((1 - s^2) * D/2)."""
    s: float = 0.5 ** (0.5 / n)
    return math.sqrt((1 - s * s) * width / 2) / s


def start(hidden: Array, config: Mapping[str, Any]) -> Array:
    return norm(hidden) / math.sqrt(2.0) if config["scale_input"] else hidden


def mlp_logits(weights: Weights, config: Mapping[str, Any], hidden: Array, tokens: NDArray[np.int64]) -> list[Array]:
    """Return teacher-forced logits of IBM's MLP: hidden [N, H], tokens [N, n] -> n times [N, V]."""
    n, h = config["n_predict"], start(hidden, config)
    result = []
    for k in range(n):
        a = h @ weights[f"proj.{k}.weight"].T
        a = a + alpha(n, a.shape[-1]) * weights[f"emb.{k}.weight"][tokens[:, k]]
        h = gelu(norm(a, weights[f"ln.{k}.weight"], weights[f"ln.{k}.bias"]))
        result.append(h @ weights[f"head.{k}.weight"].T)
    return result


def rnn_logits(weights: Weights, config: Mapping[str, Any], hidden: Array, tokens: NDArray[np.int64]) -> list[Array]:
    """Return teacher-forced logits of a tied ``sum_rnn``, whose parts may have layers."""
    n, h = config["n_predict"], start(hidden, config)
    widths = [int(part) for part in str(config["inner_dim"]).split(".")]
    result = []
    for k in range(n):
        a = _more(weights, f"proj.{min(k, 1)}", h @ weights[f"proj.{min(k, 1)}.0.weight"].T, config["proj_dim"])
        z = _more(weights, "emb.0", weights["emb.0.0.weight"][tokens[:, k]], config["emb_dim"])
        h = norm(a + alpha(n, widths[0]) * z, weights["ln.0.0.weight"], weights["ln.0.0.bias"])
        for layer in range(1, len(widths)):
            h = gelu(h) @ weights[f"ln.0.{3 * layer - 1}.weight"].T
            h = norm(h, weights[f"ln.0.{3 * layer}.weight"], weights[f"ln.0.{3 * layer}.bias"])
        h = gelu(h)
        result.append(h @ weights[f"head.{k}.weight"].T)
    return result


def _more(weights: Weights, name: str, x: Array, sizes: str) -> Array:
    """Apply the layers behind the first one: LN, GELU, Linear."""
    for layer in range(1, len(str(sizes).split("."))):
        x = gelu(norm(x, weights[f"{name}.{3 * layer - 2}.weight"], weights[f"{name}.{3 * layer - 2}.bias"]))
        x = x @ weights[f"{name}.{3 * layer}.weight"].T
    return x


def lstm_logits(weights: Weights, config: Mapping[str, Any], hidden: Array, tokens: NDArray[np.int64]) -> list[Array]:
    """Return teacher-forced logits of an LSTM speculator (``sum_lstm``)."""
    n, h = config["n_predict"], start(hidden, config)
    cell: Array | float = 0.0
    result = []
    for k in range(n):

        def gate(name: str, k: int = k, h: Array = h) -> Array:
            a = h @ weights[f"{name}_proj.{min(k, 1)}.weight"].T
            embedded: Array = weights[f"{name}_emb.0.weight"][tokens[:, k]]
            return np.asarray(a + alpha(n, a.shape[-1]) * embedded)

        candidate = gelu(norm(gate("cell"), weights["cell_ln.0.weight"], weights["cell_ln.0.bias"]))
        cell = cell * sigmoid(gate("forget")) + candidate * sigmoid(gate("input"))
        h = gelu(norm(cell, weights["state_ln.0.weight"], weights["state_ln.0.bias"])) * sigmoid(gate("output"))
        result.append(h @ weights[f"head.{k}.weight"].T)
    return result


LOGITS = {"mlp": mlp_logits, "sum_rnn": rnn_logits, "sum_lstm": lstm_logits}


def logits(
    kind: str, weights: Weights, config: Mapping[str, Any], hidden: Array, tokens: NDArray[np.int64]
) -> list[Array]:
    """Return teacher-forced logits of ``kind``: mlp, sum_rnn or sum_lstm."""
    return LOGITS[kind](weights, config, hidden, tokens)


def draft(
    kind: str, weights: Weights, config: Mapping[str, Any], hidden: Array, token: int, proposal: Sequence[int] = ()
) -> list[tuple[int, float, int, float]]:
    """Return for each position the token taken, its probability, the likeliest token and its probability.

    hidden: [H]. proposal: token to take at each position; -1: the likeliest."""
    n = config["n_predict"]
    tokens = np.zeros((1, n), dtype=np.int64)
    tokens[0, 0] = token
    taken: list[tuple[int, float, int, float]] = []
    for k in range(n):
        row = logits(kind, weights, config, hidden[None], tokens)[k][0]
        chances = np.exp(row - row.max())
        chances /= chances.sum()
        top = int(row.argmax())
        wanted = proposal[k] if k < len(proposal) else -1
        now = top if wanted < 0 else wanted
        taken.append((now, float(chances[now]), top, float(chances[top])))
        if k + 1 < n:
            tokens[0, k + 1] = now
    return taken
