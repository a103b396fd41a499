"""Drafters for the demo's model whose layers are random: multi-token prediction and EAGLE heads.

They mostly draft what the target has just chosen, so that some of their tokens are right: code repeats itself.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_CONFIGURATION = """from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""
_KEPT = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("max_position_embeddings", "rms_norm_eps", "rope_parameters", "vocab_size", "hidden_act", "tie_word_embeddings"),
    *("eos_token_id", "pad_token_id", "dtype"),
)
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def write_mtp_model(source: Path, folder: Path) -> None:
    """Write a model folder for vLLM's method `mtp` that answers as the Llama in ``source`` does.

    Serve it with --trust-remote-code: transformers doesn't know the family.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    given = json.loads((source / "config.json").read_text())
    config = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
        "num_nextn_predict_layers": 1,
        **{name: given[name] for name in _KEPT},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_mimo.py").write_text(_CONFIGURATION)
    weights = load_file(source / "model.safetensors")
    width = given["hidden_size"]
    for layer in range(given["num_hidden_layers"]):
        for name in _PROJECTIONS:  # the family has biases there
            weights[f"model.layers.{layer}.{name}.bias"] = torch.zeros(width, dtype=torch.float16)
    layer_weights = _last_layer(weights, given["num_hidden_layers"])
    mtp = _random_like(layer_weights)
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm", "post_attention_layernorm")
    mtp |= {f"{name}.weight": torch.ones(width) for name in norms}
    mtp["input_proj.weight"] = torch.cat([torch.eye(width) * 0.1, torch.eye(width)], dim=1)
    weights |= {f"model.mtp_layers.0.{name}": value.half() for name, value in mtp.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_eagle_head(source: Path, folder: Path) -> None:
    """Write the folder of a head for vLLM's method `eagle` and the Llama in ``source``."""
    folder.mkdir(parents=True, exist_ok=True)
    given = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**given, "num_hidden_layers": 1}))
    weights = load_file(source / "model.safetensors")
    width = given["hidden_size"]
    layer = _random_like(_last_layer(weights, given["num_hidden_layers"]))
    del layer["input_layernorm.weight"]  # such a head has none
    layer["post_attention_layernorm.weight"] = torch.ones(width)
    head = {f"layers.0.{name}": value for name, value in layer.items()}
    head["fc.weight"] = torch.cat([torch.eye(width) * 0.1, torch.eye(width)], dim=1)
    head["embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    save_file({name: value.half() for name, value in head.items()}, folder / "model.safetensors")


def _last_layer(weights: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """Return the weights of the last of a Llama's layers, without its number."""
    prefix = f"model.layers.{layers - 1}."
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def _random_like(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return random weights of the same shapes."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(value.shape, generator=generator) * 0.05 for name, value in weights.items()}
