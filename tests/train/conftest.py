"""Make a target of a few thousand random weights, and sessions in which each token decides the next."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 48
HIDDEN = 32


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of twenty sessions of three turns, in the format of `agentspec simulate`."""
    file = tmp_path_factory.mktemp("calls") / "calls.jsonl"
    with file.open("w") as out:
        for session in range(20):
            for turn in range(3):
                call = {"session": f"s{session}", "turn": turn, "continues": turn > 0, **texts(session * 3 + turn)}
                out.write(json.dumps(call) + "\n")
    return file


def texts(seed: int) -> dict[str, list[int]]:
    """Return a prompt of random tokens, and a response in which each token decides the next."""
    random = torch.Generator().manual_seed(seed)
    prompt = torch.randint(VOCABULARY, (int(torch.randint(3, 12, (), generator=random)),), generator=random).tolist()
    response = [int(torch.randint(VOCABULARY, (), generator=random))]
    while len(response) < 24 + seed % 7:
        response.append((response[-1] * 5 + 7) % VOCABULARY)
    return {"prompt_token_ids": prompt, "response_token_ids": response}


@pytest.fixture
def settings(target: Path, calls: Path, tmp_path: Path) -> dict[str, Any]:
    """Return the settings of a run that takes a second or two, as read from a YAML file."""
    return {
        "type": "arctic-lstm-speculator",
        "micro_batch_size": 4,
        "train_iters": 12,
        "loss": "cross_entropy",
        "model": {
            "name_or_path": str(target),
            "dtype": "float32",
            "method": "sum_lstm",
            "proj_dim": "32",
            "emb_dim": "32",
            "speculator_width": "32",
        },
        "data": {
            "sources": [{"type": "records", "path": str(calls)}],
            "train_eval_split": [0.8, 0.2],
            "cache_dir": str(tmp_path / "cache"),
        },
        "optimizer": {"lr": 1e-2},
        "checkpoint": {"output_dir": str(tmp_path / "speculator")},
    }
