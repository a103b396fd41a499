"""Compare agentspec's MLP speculator with the one that vLLM ships."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from agentspec.server_ext.speculator import load_speculator, save_speculator
from tests.speculator.files import H, N, V, mlp

pytestmark = [pytest.mark.engine, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]


def test_logits_are_those_of_vllms_layers(tmp_path: Path) -> None:
    """vLLM loads a scaled, untied one that agentspec saved, and its layers compute the same."""
    speculator = load_speculator(mlp(scaled=True).write(tmp_path / "published", prefix="speculator."))
    save_speculator(speculator, tmp_path / "saved")
    generator = torch.Generator().manual_seed(5)
    inputs = {
        "hidden": torch.randn(20, H, generator=generator) * 3,
        "tokens": torch.randint(V, (20, N), generator=generator),
    }
    torch.save(inputs, tmp_path / "inputs.pt")
    command = [sys.executable, "-m", "tests.speculator.vllm_mlp"]
    files = [tmp_path / "saved", tmp_path / "inputs.pt", tmp_path / "outputs.pt"]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = torch.load(tmp_path / "outputs.pt", weights_only=True)
    ours = torch.stack(speculator(inputs["hidden"], inputs["tokens"]))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
