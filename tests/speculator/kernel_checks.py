"""Compare the fused kernels with their twins in plain torch. `test_kernels` runs this in a process of its own,
because Triton's interpreter is switched on for good when triton is first imported."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from agentspec.server_ext.speculator import DraftLoop, draft_loop, load_speculator, selection
from agentspec.server_ext.speculator.gpu import Optimizations, fused, fused_kernels, kernels, self_check
from agentspec.server_ext.speculator.gpu.fp8 import Fp8Linear, quantize_rows
from agentspec.server_ext.speculator.gpu.fused import FusedFp8Linear, FusedLSTMCell, FusedSumNormGelu, QuantizedState
from agentspec.server_ext.speculator.models import LSTMCell, Norm, SumNormGelu
from tests.speculator.shapes import inputs, small

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXACT = DEVICE.type == "cpu"
"""Whether sums are exact. A GPU has quicker exponentials, and its tensor cores sum FP8 products in fewer bits."""
CLOSE = {"rtol": 1e-5, "atol": 1e-5} if EXACT else {"rtol": 1e-4, "atol": 1e-4}
INNER = (64, 100, 384)
"""Inner sizes: a power of two, a multiple of 4 only, and one between two powers of two."""


@pytest.fixture(autouse=True, scope="module")
def _exact_rounding() -> Iterator[None]:
    """Correct Triton's interpreter: it drops the carry when E4M3 rounds up to a power of two (7.9 gives 4, not 8)."""
    convert = interpreter._convert_float

    def to_e4m3_as_torch(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(values, source, target, mode)
        return torch.tensor(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = to_e4m3_as_torch
    yield
    interpreter._convert_float = convert


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device(DEVICE), torch.inference_mode():
        yield


@pytest.fixture
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare and warm up few rows in Triton's interpreter, which takes milliseconds for each row of each kernel."""
    if EXACT:
        monkeypatch.setattr(draft_loop, "SIZES", (1,))
        monkeypatch.setattr(self_check, "BATCHES", (3,))


def _shaken(*norms: Norm) -> None:
    for norm in norms:
        norm.weight.normal_(1.0, 0.3)
        norm.bias.normal_(0.0, 0.3)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("gates", [1, 4])
def test_lstm_cell(inner: int, gates: int) -> None:
    cell = LSTMCell(inner, alpha=3.0)
    _shaken(cell.cell_norm, cell.state_norm)
    state = QuantizedState()
    inputs = torch.randn(3, 4 * inner), torch.randn(3, gates * inner), torch.randn(3, inner)
    hidden, following = FusedLSTMCell(cell, state)(*inputs)
    wanted, wanted_following = cell(*inputs)
    torch.testing.assert_close(hidden, wanted, **CLOSE)
    torch.testing.assert_close(following, wanted_following, **CLOSE)
    _is_quantized(state.of(hidden), wanted)


@pytest.mark.parametrize("inner", INNER)
def test_sum_norm_gelu(inner: int) -> None:
    mix = SumNormGelu(inner, alpha=0.7)
    _shaken(mix.norm)
    state = QuantizedState()
    inputs = torch.randn(5, inner), torch.randn(5, inner)
    hidden, wanted = FusedSumNormGelu(mix, state)(*inputs), mix(*inputs)
    torch.testing.assert_close(hidden, wanted, **CLOSE)
    _is_quantized(state.of(hidden), wanted)
    _is_quantized(state.of(hidden + 1.0), wanted + 1.0)  # another tensor than the one kept


def test_bfloat16_is_rounded_once() -> None:
    """Check that the fused cell is at least as near to the exact result as the plain one, which rounds at each step."""
    cell = LSTMCell(96, alpha=3.0).bfloat16()
    inputs = [torch.randn(4, size).bfloat16() for size in (4 * 96, 96, 96)]
    exact = copy.deepcopy(cell).double()(*(tensor.double() for tensor in inputs))[0]
    fused_error = (FusedLSTMCell(cell, None)(*inputs)[0].double() - exact).abs().max()
    assert fused_error <= (cell(*inputs)[0].double() - exact).abs().max()


@pytest.mark.parametrize("inner", INNER)
def test_quantize_rows(inner: int) -> None:
    x = torch.randn(4, inner) * torch.tensor([[1e-6], [1.0], [1e4], [0.0]])
    _is_quantized(QuantizedState().of(x), x)


def _is_quantized(found: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor) -> None:
    """Check that `found` is `quantize_rows(x)`. A few values between two of E4M3 may round the other way."""
    wanted, scales = quantize_rows(x)
    torch.testing.assert_close(found[1], scales, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(found[0].float(), wanted.float(), rtol=0.125, atol=2.0**-9)
    assert (found[0].float() != wanted.float()).float().mean() < 0.02


@pytest.mark.parametrize(("rows", "inner", "outputs"), [(1, 128, 160), (3, 80, 70), (17, 128, 70)])
def test_fp8_linear(rows: int, inner: int, outputs: int) -> None:
    linear = Fp8Linear(torch.randn(outputs, inner))
    x = torch.randn(rows, inner)
    found, wanted = FusedFp8Linear(linear, QuantizedState())(x), linear(x)
    assert (found - wanted).norm() <= (1e-5 if EXACT else 1e-2) * wanted.norm()


def test_more_rows_than_pay_take_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "MOST_ROWS", 2)
    linear = Fp8Linear(torch.randn(160, 64))
    layer = FusedFp8Linear(linear, QuantizedState())
    x, wanted = torch.randn(3, 64), torch.tensor([-1, 3, 159])
    assert torch.equal(layer(x), linear(x))
    parts = fused.score(layer, x, wanted)
    assert torch.equal(parts, selection.score(linear, x, wanted))
    for mine, twin in zip(fused.choose(parts, wanted, None), selection.choose(parts, wanted, None), strict=True):
        torch.testing.assert_close(mine, twin)
    assert torch.equal(fused.score(linear, x[:1], wanted[:1]), selection.score(linear, x[:1], wanted[:1]))


@pytest.mark.parametrize(
    ("rows", "inner", "outputs", "first"), [(1, 64, 300, 0), (5, 72, 300, 48), (17, 64, 128, 0), (3, 72, 70, 16)]
)
def test_score_merge_choose(rows: int, inner: int, outputs: int, first: int) -> None:
    head = torch.nn.Linear(inner, outputs, bias=False)
    head.weight.copy_(torch.randint(-3, 4, (outputs, inner)))  # sums are exact in any order, so that ties are ties
    head.weight[7] = head.weight[61]
    x = torch.randint(-3, 4, (rows, inner)) / 16.0
    x[0] = head.weight[7] / 8.0
    given = torch.randint(-1, outputs + 5, (rows, 3))[:, 1]
    wanted_parts, parts = selection.score(head, x, given), fused.score(head, x, given)
    assert len(parts) == -(-outputs // 128)
    merged = fused.merge(parts, first)
    torch.testing.assert_close(merged, selection.merge(wanted_parts, first), **CLOSE)
    assert int(merged[0, 1]) == first + 7
    for vocabulary in (None, torch.randperm(5 * outputs)[:outputs]):
        found, wanted = fused.choose(parts, given, vocabulary), selection.choose(wanted_parts, given, vocabulary)
        for mine, twin in zip(found, wanted, strict=True):
            assert mine.dtype == twin.dtype
            torch.testing.assert_close(mine, twin, rtol=1e-4, atol=1e-7)


def test_logits_that_are_no_numbers_still_give_a_token() -> None:
    head = torch.nn.Linear(64, 200, bias=False)
    parts = fused.score(head, torch.full((2, 64), torch.nan), torch.zeros(2, dtype=torch.int64))
    tokens = fused.choose(parts, torch.full((2,), -1), None).tokens
    assert ((tokens >= 0) & (tokens < 200)).all()


@pytest.mark.usefixtures("_few_rows")
@pytest.mark.parametrize(("kind", "fp8"), [("lstm", False), ("lstm", True), ("mlp", True)])
def test_the_loop_drafts_the_same(kind: str, fp8: bool) -> None:
    plain, loop = (
        DraftLoop(
            small(kind, reduced=True).to(DEVICE),
            fp8_head=fp8,
            fp8_projections=fp8,
            optimizations=Optimizations(fused_kernels if with_kernels else None),
        )
        for with_kernels in (False, True)
    )
    loop.warm_up()
    assert loop.uses_kernels
    given = [tensor.to(DEVICE) for tensor in inputs(6)]
    wanted, found = plain(*given), loop(*given)
    if fp8 and not EXACT:
        assert (found.top == wanted.top).float().mean() > 0.8
        return
    tolerance = 0.02 if fp8 else 1e-4  # a state that rounds the other way moves a probability a little
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=1e-7)


@pytest.mark.usefixtures("_few_rows")
@pytest.mark.parametrize(("dtype", "fp8"), [(torch.float16, False), (torch.float32, True)])
def test_the_kernels_pass_their_self_check_on_a_trained_speculator(dtype: torch.dtype, fp8: bool) -> None:
    loop = DraftLoop(
        load_speculator("demo/drafter", dtype=dtype, device=DEVICE),
        fp8_head=fp8,
        fp8_projections=fp8,
        optimizations=Optimizations(fused_kernels),
    )
    loop.warm_up()
    assert loop.uses_kernels


@pytest.mark.usefixtures("_few_rows")
def test_a_kernel_that_is_broken_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swap the order of the cell's gates: the self-check must reject the kernels."""
    launch = kernels.lstm_kernel.run

    def swapped(projected: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        return launch(projected.roll(projected.shape[-1] // 4, -1).contiguous(), *arguments, **options)

    monkeypatch.setattr(kernels.lstm_kernel, "run", swapped)
    loop = DraftLoop(small(reduced=True).to(DEVICE), optimizations=Optimizations(fused_kernels))
    loop.warm_up()
    assert not loop.uses_kernels
