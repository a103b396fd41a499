"""What both kinds of speculator are made of. Each class is one place to put a faster one with the same call."""

import torch
from torch import Tensor, nn
from torch.nn import functional

EPSILON = 1e-6


class Norm(nn.Module):  # type: ignore[misc]  # torch is not followed
    """LN(x) = w * x / sqrt(mean(x^2) + 1e-6) + b: by root mean square, not centred. x [..., I]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, EPSILON) + self.bias


def scale_input(hidden: Tensor) -> Tensor:
    """The target's hidden state [..., H], normalised and halved in power: LN without parameters, over sqrt(2)."""
    return functional.rms_norm(hidden, hidden.shape[-1:], None, EPSILON) / 2.0**0.5


class SumNormGelu(nn.Module):  # type: ignore[misc]
    """GELU(LN(projected + alpha * embedded)), both [B, I]: one step of an MLP speculator."""

    def __init__(self, size: int, alpha: float) -> None:
        super().__init__()
        self.norm = Norm(size)
        self.alpha = alpha

    def forward(self, projected: Tensor, embedded: Tensor) -> Tensor:
        return functional.gelu(self.norm(torch.add(projected, embedded, alpha=self.alpha)))


class LSTMCell(nn.Module):  # type: ignore[misc]
    """The gates of an LSTM speculator (``sum_lstm`` in ArcticTraining).

    Of a = projected + alpha * z, in the order forget, input, output, cell::

        c' = c * sig(a_forget) + GELU(LN_cell(a_cell)) * sig(a_input)
        h' = GELU(LN_state(c')) * sig(a_output)
    """

    def __init__(self, size: int, alpha: float) -> None:
        super().__init__()
        self.cell_norm = Norm(size)
        self.state_norm = Norm(size)
        self.alpha = alpha

    def forward(self, projected: Tensor, embedded: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """projected [B, 4I], embedded [B, I] (one for all gates) or [B, 4I], cell [B, I]. Returns h', c'."""
        gates = projected.unflatten(-1, (4, -1)) + self.alpha * embedded.unflatten(-1, (-1, cell.shape[-1]))
        forget, update, output, candidate = gates.unbind(-2)
        cell = cell * forget.sigmoid() + functional.gelu(self.cell_norm(candidate)) * update.sigmoid()
        return functional.gelu(self.state_norm(cell)) * output.sigmoid(), cell
