"""Test that the Triton kernels agree with plain torch, in Triton's interpreter without a GPU, and compile for a GPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agentspec.server_ext.speculator import DraftLoop
from agentspec.server_ext.speculator.gpu import Optimizations, fused_kernels
from tests.speculator.shapes import inputs, small

triton = pytest.importorskip("triton")

_CHECKS = Path(__file__).with_name("kernel_checks.py")


def test_kernels_agree_with_plain_torch() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # the interpreter's arrays are small
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(_CHECKS)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


def test_where_triton_cannot_run_the_loop_drafts_in_plain_torch(caplog: pytest.LogCaptureFixture) -> None:
    loop = DraftLoop(small(), optimizations=Optimizations(fused_kernels))
    loop.warm_up()
    assert not loop.uses_kernels
    assert "Triton cannot run on cpu" in caplog.text
    given = inputs(3)
    assert torch.equal(loop(*given).tokens, DraftLoop(small())(*given).tokens)


_FLOATS = "cell_weight cell_bias state_weight state_bias bias projected embedded cell hidden next_cell x out"
_TYPES = {
    **dict.fromkeys(_FLOATS.split(), "*bf16"),
    **dict.fromkeys(("row_scales", "weight_scale", "scales", "parts", "probabilities"), "*fp32"),
    **dict.fromkeys(("given", "wanted", "vocabulary", "tokens"), "*i64"),
    **dict.fromkeys(("inner", "outputs", "rows", "count", "first", "stride", "width"), "i32"),
    **dict.fromkeys(("alpha", "eps"), "fp32"),
    "quantized": "*fp8e4nv",
}
_PRODUCT = {"EVEN": True, "BLOCK_V": 128, "BLOCK_B": 16}
_FP8 = {"inputs": "*fp8e4nv", "weight": "*fp8e4nv"}


@pytest.mark.parametrize(
    ("name", "types", "constants"),
    [
        ("lstm_kernel", {}, {"TIED": False, "QUANTIZE": True, "BLOCK": 1024}),
        ("mlp_kernel", {"weight": "*bf16"}, {"QUANTIZE": True, "BLOCK": 1024}),
        ("quantize_kernel", {}, {"BLOCK": 1024}),
        ("linear_kernel", _FP8, {**_PRODUCT, "SCALED": True, "BLOCK_K": 128}),
        ("head_kernel", _FP8, {**_PRODUCT, "SCALED": True, "BLOCK_K": 128}),
        ("head_kernel", _FP8, {**_PRODUCT, "SCALED": True, "BLOCK_K": 128, "EVEN": False, "BLOCK_B": 64}),
        ("head_kernel", {"inputs": "*bf16", "weight": "*bf16"}, {**_PRODUCT, "SCALED": False, "BLOCK_K": 64}),
        ("merge_kernel", {"out": "*fp32"}, {"BLOCK": 1024}),
        ("choose_kernel", {}, {"MAPPED": True, "BLOCK": 1024}),
        ("choose_kernel", {}, {"MAPPED": False, "BLOCK": 1}),
    ],
)
def test_kernels_compile_for_an_h100(name: str, types: dict[str, str], constants: dict[str, Any]) -> None:
    """The interpreter accepts Python that the compiler does not. Compiling for a GPU needs none."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from agentspec.server_ext.speculator.gpu import kernels

    kernel = getattr(kernels, name)
    signature = {
        parameter: "constexpr" if parameter in constants else {**_TYPES, **types}[parameter]
        for parameter in kernel.arg_names
    }
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (parameter, kind) in enumerate(signature.items())
        if kind.startswith("*") or parameter in ("inner", "outputs")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": 4, "num_stages": 4}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"]
    if "inputs" in types:  # products run on the tensor cores, in the weights' own precision, and prefetch
        ptx = compiled.asm["ptx"]
        assert f".{'e4m3' if types is _FP8 else 'bf16'}.{'e4m3' if types is _FP8 else 'bf16'}" in ptx
        assert "wgmma.mma_async" in ptx and "cp.async" in ptx
