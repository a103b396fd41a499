"""Test that the draft models run with torch and nothing else installed."""

import subprocess
import sys
from pathlib import Path

import torch

from agentspec.server_ext.speculator import DraftLoop, load_speculator
from tests.speculator.files import H, lstm

_SCRIPT = """
import pathlib
import sys
for name in ("vllm", "transformers", "safetensors", "huggingface_hub", "pydantic", "openai", "httpx", "redis",
             "msgpack", "numpy", "typer", "rich", "agentspec.cache", "agentspec.cache._native"):
    sys.modules[name] = None  # importing it fails, as where it is not installed
import torch
from agentspec.server_ext.speculator import DraftLoop, load_speculator, save_speculator
speculator = load_speculator(sys.argv[1])
save_speculator(speculator, sys.argv[1])
drafted = DraftLoop(speculator)(torch.ones(1, speculator.config.hidden_size), torch.tensor([3]))
print(drafted.tokens.tolist()[0])
(pathlib.Path(sys.argv[1]) / "pytorch_model.bin").write_text("damaged")
for folder in sys.argv[1:]:
    try:
        load_speculator(folder)
    except ValueError as error:
        print(error)
"""


def test_the_models_need_torch_alone(tmp_path: Path) -> None:
    folder = lstm().write(tmp_path)
    other = lstm().write(tmp_path / "safetensors")
    (other / "model.safetensors").write_bytes(b"")
    expected = DraftLoop(load_speculator(folder))(torch.ones(1, H), torch.tensor([3])).tokens.tolist()[0]
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(folder), str(other)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    drafted, damaged, error = done.stdout.splitlines()
    assert drafted == str(expected)
    assert damaged.startswith(f"{folder / 'pytorch_model.bin'}: cannot be read (")
    assert error == f"{other / 'model.safetensors'}: needs the package safetensors: pip install safetensors"
