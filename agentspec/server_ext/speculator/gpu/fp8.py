"""Store linear layers in 8-bit floating point: half the bytes of bfloat16, and reading takes most of a draft's time.

Weights are E4M3 with one scale a tensor, inputs E4M3 with one scale a row, computed for each input: x = q * s, where
s = max|x| / 448 makes the largest value E4M3's largest (Micikevicius et al., FP8 Formats for Deep Learning,
arXiv:2209.05433). Scaling each row by itself costs nothing and keeps the draft of a request independent of the
others in its batch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from agentspec.server_ext.speculator.models import Speculator

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST = 1e-12
"""Smallest maximum of a row for its scale, so that zeros stay zeros."""

_ALIGNMENT = 16
"""Number that divides the rows and columns of a native FP8 product."""
_ROWS_AT_ONCE = 8192
"""Rows quantized together, because a whole head in float32 would take four times its memory."""
_NATIVE_FROM = (8, 9)
"""Compute capability of the first GPUs with FP8 tensor cores (Ada; then Hopper)."""


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight [N, K] as E4M3 [N, K] and its scale, float32 [1]."""
    least, most = torch.aminmax(weight)
    scale = (torch.maximum(-least, most).float().clamp(min=SMALLEST) / E4M3_MAX).reshape(1)
    quantized = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
    for begin in range(0, len(weight), _ROWS_AT_ONCE):
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        quantized[rows] = _to_e4m3(weight[rows].float() / scale)
    return quantized, scale


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [B, K] as E4M3 [B, K] and a scale for each row, float32 [B]."""
    x = x.float()
    scales = x.abs().amax(dim=-1).clamp(min=SMALLEST) / E4M3_MAX
    return _to_e4m3(x / scales.unsqueeze(-1)), scales


class Fp8Linear(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Multiply by an E4M3 weight, without bias: inputs [B, K] -> [B, N] in the input's dtype.

    GPUs with FP8 tensor cores multiply 8-bit numbers. Elsewhere the same numbers are multiplied in a wider type, so
    the result is the same up to the order of summation.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        quantized, scale = quantize_weight(weight.detach())
        self.register_buffer("weight", quantized)
        self.register_buffer("scale", scale)
        self.register_buffer("one", torch.ones_like(scale))
        self._native = has_fp8(weight.device) and all(size % _ALIGNMENT == 0 for size in weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        quantized, scales = quantize_rows(x)
        product = self._multiplied(quantized) if self._native else self._widened(quantized, x.dtype)
        return (product * scales.unsqueeze(-1)).to(x.dtype)

    def _multiplied(self, quantized: Tensor) -> Tensor:
        rows = len(quantized)
        padded = quantized.new_zeros(-(-rows // _ALIGNMENT) * _ALIGNMENT, self.in_features)
        padded[:rows] = quantized
        product = torch._scaled_mm(
            padded, self.weight.t(), scale_a=self.one, scale_b=self.scale, out_dtype=torch.bfloat16
        )
        return product[:rows]

    def _widened(self, quantized: Tensor, dtype: torch.dtype) -> Tensor:
        # 448 x 448 overflows half precision; bfloat16 and float32 hold every E4M3 number exactly
        wide = torch.float32 if dtype == torch.float16 else dtype
        return functional.linear(quantized.to(wide), self.weight.to(wide)) * self.scale


def has_fp8(device: torch.device) -> bool:
    """Return whether the device is a GPU with tensor cores for this FP8 (AMD's has another bias)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return bool(torch.cuda.get_device_capability(device) >= _NATIVE_FROM)


def use_fp8(speculator: Speculator, *, heads: bool, projections: bool) -> None:
    """Replace heads or projections by FP8 ones.

    The former weights are freed unless something else holds them too (an embedding tied to the head).
    """
    if heads:
        _replace_linears(speculator.heads)
    if projections:
        _replace_linears(speculator.projections)


def _replace_linears(parent: nn.Module) -> None:
    for name, child in parent.named_children():
        if isinstance(child, nn.Linear):
            setattr(parent, name, Fp8Linear(child.weight))
        else:
            _replace_linears(child)


def _to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
