"""Compute logits of vLLM's own MLP speculator: ``python -m tests.speculator.vllm_mlp FOLDER INPUTS OUTPUTS``.

The logits are teacher-forced. vLLM 0.32 still ships the model's layers, weights, constants and loading, but not the
loop over them, so that is written out here. It runs in its own process, as vLLM's layers need its process groups.
"""

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.model_executor.models.mlp_speculator import MLPSpeculator
from vllm.transformers_utils.configs.mlp_speculator import MLPSpeculatorConfig


def main(folder: Path, inputs: Path, outputs: Path) -> None:
    given = torch.load(inputs, weights_only=True)
    with set_current_vllm_config(VllmConfig()), tempfile.TemporaryDirectory() as meeting, torch.no_grad():
        init_distributed_environment(1, 0, f"file://{meeting}/meeting", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        config = MLPSpeculatorConfig.from_pretrained(folder)
        model = MLPSpeculator(vllm_config=SimpleNamespace(model_config=SimpleNamespace(hf_config=config)))
        model.load_weights(torch.load(folder / "pytorch_model.bin", weights_only=True).items())
        state, tokens = given["hidden"], given["tokens"]
        if config.scale_input:
            state = model.ln0(state) / 2**0.5
        logits = []
        for k in range(config.n_predict):
            state = model.proj[k](state) * model.state_weight + model.emb[k](tokens[:, k]) * model.emb_weight
            state = model.activation(model.ln[k](state))
            logits.append(state @ model.head[k].weight[: config.vocab_size].T)
        torch.save(torch.stack(logits), outputs)


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
