"""Test weights in 8 bits: the error is bounded, choices are mostly the same, and the wide weights are freed."""

import copy
import gc
import weakref

import pytest
import torch

from agentspec.server_ext.speculator import DraftLoop
from agentspec.server_ext.speculator.gpu.fp8 import Fp8Linear, quantize_rows, quantize_weight
from tests.speculator.shapes import inputs, small


def test_a_weight_keeps_its_relative_precision() -> None:
    weight = torch.randn(9000, 32, generator=torch.Generator().manual_seed(0)) * 0.02
    quantized, scale = quantize_weight(weight)
    back = quantized.float() * scale
    assert quantized.dtype == torch.float8_e4m3fn and quantized.float().abs().max() == 448.0
    # three bits of mantissa: half a step is 1/16 of the value; below the least normal number it is 2^-10
    assert ((back - weight).abs() <= torch.maximum(weight.abs() / 16, 2.0**-10 * scale) * 1.001).all()


def test_rows_have_scales_of_their_own() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-5], [1.0], [1e6], [0.0]])
    quantized, scales = quantize_rows(x)
    back = quantized.float() * scales.unsqueeze(-1)
    assert torch.equal(back[3], torch.zeros(64))
    assert ((back - x).norm(dim=1)[:3] < 0.04 * x.norm(dim=1)[:3]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_is_near_the_wide_one(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    wide = torch.nn.Linear(256, 160, bias=False)
    wide.weight.data.normal_(generator=random)
    wide = wide.to(dtype)
    x = torch.randn(5, 256, generator=random).to(dtype)
    found, wanted = Fp8Linear(wide.weight)(x), wide(x)
    assert found.dtype == dtype
    assert (found.float() - wanted.float()).norm() < 0.05 * wanted.float().norm()


def test_a_row_does_not_depend_on_its_batch() -> None:
    layer = Fp8Linear(torch.randn(48, 64, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    crowded = torch.cat((x, 1e4 * x))
    torch.testing.assert_close(layer(crowded)[:3], layer(x))


@pytest.mark.parametrize("kind", ["lstm", "mlp"])
@pytest.mark.parametrize("reduced", [False, True])
def test_most_drafts_stay_the_same(kind: str, reduced: bool) -> None:
    speculator = small(kind, reduced=reduced)
    hidden, tokens, _ = inputs(64)
    wide = DraftLoop(copy.deepcopy(speculator))(hidden, tokens)
    for projections in (False, True):
        narrow = DraftLoop(copy.deepcopy(speculator), fp8_head=True, fp8_projections=projections)
        found = narrow(hidden, tokens, wide.tokens)  # both see the same tokens
        sure = wide.top_probabilities > 0.2
        assert (found.top == wide.top)[sure].float().mean() > 0.95
        assert (found.top == wide.top).float().mean() > 0.8
        assert (found.probabilities - wide.probabilities).abs().mean() < 0.05


def test_the_wide_weights_are_freed_unless_shared() -> None:
    speculator = small("mlp")
    speculator.embeddings[0][0].weight = speculator.heads[0].weight  # an embedding tied to the head
    tied, alone = weakref.ref(speculator.heads[0].weight), weakref.ref(speculator.heads[1].weight)
    projection = weakref.ref(speculator.projections[0][0].weight)
    DraftLoop(speculator, fp8_head=True)
    gc.collect()
    assert tied() is speculator.embeddings[0][0].weight and alone() is None
    assert projection() is not None
    DraftLoop(speculator, fp8_projections=True)
    gc.collect()
    assert projection() is None
