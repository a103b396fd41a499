"""Run the operations of a draft step on Triton kernels: five launches a position instead of some thirty.

Drafting a token takes as long as reading the draft model's weights takes. What lies between two matrix products
(normalisation, gates, activation, quantization, the choice of a token) moves few bytes, but each of its launches leaves
the memory idle for some microseconds. So everything behind a projection is one launch, the quantization of the state
for the next products included. The head's product keeps of each block of the vocabulary only what choosing a token
needs (`selection`), so logits are neither written nor read again.

Everything here has a twin in plain torch with the same call. ``TRITON_INTERPRET=1``, set before triton is first
imported, runs it on a CPU.
"""

import copy

import torch
import triton
from torch import Tensor, nn

from agentspec.errors import SpeculatorError
from agentspec.server_ext.speculator import selection
from agentspec.server_ext.speculator.gpu import kernels
from agentspec.server_ext.speculator.gpu.fp8 import E4M3, Fp8Linear, has_fp8
from agentspec.server_ext.speculator.models import EPSILON, LSTMCell, Speculator, SumNormGelu
from agentspec.server_ext.speculator.selection import DraftedTokens, Operations

MOST_ROWS = 64
"""Most rows of these products' input. With more, computing takes longer than reading, and libraries are faster."""

_LEAST_ROWS = 16
"""Least width of a tensor core's right operand in Triton."""
_BLOCK_BYTES = 128
"""Bytes of a weight's row that are read together: a cache line."""
_HEAD_BLOCK, _LINEAR_BLOCK = 128, 64
"""Rows of the weight that a program multiplies. A head has hundreds of such blocks. A projection's are smaller, so that
no multiprocessor is without work."""
_STAGES = 4
"""Pieces of the weight in flight at once: with 8 to 16 KiB each, enough to keep the memory busy."""


class QuantizedState:
    """Hold the newest state in E4M3. The cell that computes it stores it for the products that read it next."""

    __slots__ = ("_hidden", "_quantized")

    def __init__(self) -> None:
        self._hidden: Tensor | None = None
        self._quantized: tuple[Tensor, Tensor] | None = None

    def note(self, hidden: Tensor, quantized: tuple[Tensor, Tensor]) -> None:
        """Remember the newest state, hidden [B, I], as E4M3 [B, I] and the scale of each row, float32 [B]."""
        self._hidden, self._quantized = hidden, quantized

    def of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x as E4M3 and its scales: the noted ones if x is the noted state itself, else quantized now."""
        if x is self._hidden and self._quantized is not None:
            return self._quantized
        x = x.contiguous()
        quantized, scales = _quantized_like(x)
        rows, inner = x.shape
        kernels.quantize_kernel[(rows,)](x, quantized, scales, inner, **_row_block(inner))
        return quantized, scales


class FusedLSTMCell(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Run `models.LSTMCell` in one launch. state: holder of the new state in E4M3; None: no product reads E4M3."""

    def __init__(self, cell: LSTMCell, state: QuantizedState | None) -> None:
        super().__init__()
        self.cell = cell
        self._state = state

    def forward(self, projected: Tensor, embedded: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        rows, inner = cell.shape
        hidden, next_cell = torch.empty_like(cell), torch.empty_like(cell)
        quantized, scales = (hidden, hidden) if self._state is None else _quantized_like(hidden)
        cell_norm, state_norm = self.cell.cell_norm, self.cell.state_norm
        kernels.lstm_kernel[(rows,)](
            projected.contiguous(), embedded.contiguous(), cell.contiguous(),
            cell_norm.weight, cell_norm.bias, state_norm.weight, state_norm.bias,
            hidden, next_cell, quantized, scales, inner, self.cell.alpha, EPSILON,
            TIED=embedded.shape[-1] == inner, QUANTIZE=self._state is not None, **_row_block(inner),
        )  # fmt: skip
        if self._state is not None:
            self._state.note(hidden, (quantized, scales))
        return hidden, next_cell


class FusedSumNormGelu(nn.Module):  # type: ignore[misc]
    """Run `models.SumNormGelu` in one launch. state: see FusedLSTMCell."""

    def __init__(self, mix: SumNormGelu, state: QuantizedState | None) -> None:
        super().__init__()
        self.mix = mix
        self._state = state

    def forward(self, projected: Tensor, embedded: Tensor) -> Tensor:
        rows, inner = projected.shape
        hidden = torch.empty_like(projected)
        quantized, scales = (hidden, hidden) if self._state is None else _quantized_like(hidden)
        norm = self.mix.norm
        kernels.mlp_kernel[(rows,)](
            projected.contiguous(), embedded.contiguous(), norm.weight, norm.bias, hidden, quantized, scales,
            inner, self.mix.alpha, EPSILON, QUANTIZE=self._state is not None, **_row_block(inner),
        )  # fmt: skip
        if self._state is not None:
            self._state.note(hidden, (quantized, scales))
        return hidden


class FusedFp8Linear(nn.Module):  # type: ignore[misc]
    """Run `fp8.Fp8Linear` for few rows in at most two launches, on E4M3 tensor cores and without padding."""

    def __init__(self, linear: Fp8Linear, state: QuantizedState) -> None:
        super().__init__()
        self.linear = linear
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        rows, outputs = len(x), self.linear.out_features
        if rows > MOST_ROWS:
            return self.linear(x)
        quantized, scales = self.state.of(x)
        out = x.new_empty(rows, outputs)
        kernels.linear_kernel[(triton.cdiv(outputs, _LINEAR_BLOCK),)](
            quantized, self.linear.weight, scales, self.linear.scale, out, rows, outputs, self.linear.in_features,
            SCALED=True, **_product_blocks(self.linear.weight, rows, _LINEAR_BLOCK),
        )  # fmt: skip
        return out


def fuse(speculator: Speculator) -> Speculator:
    """Return a speculator with the same weights and fused cells, and fused FP8 layers where tensor cores take them.

    Torch still computes projections in wider types. Raises SpeculatorError if Triton has no device to run on.
    """
    device = next(speculator.parameters()).device
    interpreted = triton.knobs.runtime.interpret
    if device.type != "cuda" and not interpreted:
        raise SpeculatorError(f"Triton cannot run on {device}")
    in_fp8 = any(isinstance(module, Fp8Linear) for module in speculator.modules())
    weights = {id(tensor): tensor for tensor in (*speculator.parameters(), *speculator.buffers())}
    fused: Speculator = copy.deepcopy(speculator, weights)  # new modules around the same weights
    _fuse_children(fused, QuantizedState() if in_fp8 and (interpreted or has_fp8(device)) else None)
    return fused


def _fuse_children(parent: nn.Module, state: QuantizedState | None) -> None:
    for name, child in parent.named_children():
        if isinstance(child, LSTMCell):
            setattr(parent, name, FusedLSTMCell(child, state))
        elif isinstance(child, SumNormGelu):
            setattr(parent, name, FusedSumNormGelu(child, state))
        elif isinstance(child, Fp8Linear) and state is not None:
            setattr(parent, name, FusedFp8Linear(child, state))
        else:
            _fuse_children(child, state)


def score(head: nn.Module, x: Tensor, wanted: Tensor) -> Tensor:
    """Do what `selection.score` does, in one launch, with a part for each block of the head: float32 [P, B, 4].

    head: a linear layer of any kind; x [B, I]; wanted int64 [B], any stride.
    """
    if len(x) > MOST_ROWS or isinstance(head, Fp8Linear):
        return selection.score(head, x, wanted)
    if isinstance(head, FusedFp8Linear):
        weight, weight_scale = head.linear.weight, head.linear.scale
        inputs, scales = head.state.of(x)
    else:
        weight = weight_scale = scales = head.weight
        inputs = x.contiguous()
    outputs, inner = weight.shape
    rows = len(x)
    parts = torch.empty(triton.cdiv(outputs, _HEAD_BLOCK), rows, 4, dtype=torch.float32, device=x.device)
    kernels.head_kernel[(len(parts),)](
        inputs, weight, scales, weight_scale, wanted, wanted.stride(0), parts, rows, outputs, inner,
        SCALED=weight.dtype == E4M3, **_product_blocks(weight, rows, _HEAD_BLOCK),
    )  # fmt: skip
    return parts


def merge(parts: Tensor, first: int) -> Tensor:
    """Do what `selection.merge` does, in one launch."""
    count, rows, _ = parts.shape
    merged = torch.empty(rows, 4, dtype=torch.float32, device=parts.device)
    kernels.merge_kernel[(rows,)](parts, merged, count, rows, first, BLOCK=triton.next_power_of_2(count))
    return merged


def choose(parts: Tensor, given: Tensor, vocabulary: Tensor | None) -> DraftedTokens:
    """Do what `selection.choose` does, in one launch. given int64 [B], any stride."""
    count, rows, _ = parts.shape
    tokens = torch.empty(2, rows, dtype=torch.int64, device=parts.device)
    probabilities = torch.empty(2, rows, dtype=torch.float32, device=parts.device)
    kernels.choose_kernel[(rows,)](
        parts, given, given.stride(0), tokens if vocabulary is None else vocabulary, tokens, probabilities, count, rows,
        MAPPED=vocabulary is not None, BLOCK=triton.next_power_of_2(count),
    )  # fmt: skip
    return DraftedTokens(tokens[0], probabilities[0], tokens[1], probabilities[1])


FUSED = Operations(fuse, score, merge, choose)


def _quantized_like(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=E4M3), torch.empty(len(x), dtype=torch.float32, device=x.device)


def _row_block(inner: int) -> dict[str, int]:
    """Return BLOCK for a kernel with one program a row, and enough warps to hold it in registers."""
    block = triton.next_power_of_2(inner)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


def _product_blocks(weight: Tensor, rows: int, block: int) -> dict[str, int | bool]:
    """Return the kernel's block sizes for a product of ``rows`` inputs. block: rows of the weight for one program."""
    step = _BLOCK_BYTES // weight.element_size()
    return {
        "EVEN": weight.shape[1] % step == 0,
        "BLOCK_V": block,
        "BLOCK_K": step,
        "BLOCK_B": max(triton.next_power_of_2(rows), _LEAST_ROWS),
        "num_warps": 4,
        "num_stages": _STAGES,
    }
