"""Write folders of drafters for the demo's model that only tests need.

Multi-token prediction, EAGLE and DFlash heads have random layers. The first two mostly draft what the target has just
chosen, and the last one a token that is frequent in code, so that some of their tokens are right.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

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


def write_dflash_head(source: Path, folder: Path) -> None:
    """Write the folder of a head for vLLM's method `dflash` and the Llama in ``source``.

    It reads the states behind three of the target's layers. Its mask token, which it mostly drafts, is " =".
    """
    folder.mkdir(parents=True, exist_ok=True)
    (mask,) = Tokenizer.from_file(str(source / "tokenizer.json")).encode(" =").ids
    given = json.loads((source / "config.json").read_text())
    head_config = {
        **given,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "dflash_config": {"target_layer_ids": [1, 2, 3], "mask_token_id": mask},
    }
    (folder / "config.json").write_text(json.dumps(head_config))
    width = given["hidden_size"]
    layer = _random_like(_last_layer(load_file(source / "model.safetensors"), given["num_hidden_layers"]))
    layer |= {f"{name}.weight": torch.ones(width) for name in ("input_layernorm", "post_attention_layernorm")}
    layer |= {f"self_attn.{name}.weight": torch.ones(given["head_dim"]) for name in ("q_norm", "k_norm")}
    head = {f"layers.0.{name}": value for name, value in layer.items()}
    head |= {f"{name}.weight": torch.ones(width) for name in ("hidden_norm", "norm")}
    head["fc.weight"] = torch.cat([torch.zeros(width, 2 * width), torch.eye(width)], dim=1)
    save_file({name: value.half() for name, value in head.items()}, folder / "model.safetensors")


def write_split_draft_model(source: Path, folder: Path) -> None:
    """Write the Llama in ``source`` with one more head, which changes no logit: its output has weights of zero.

    So an odd number of heads splits over two ranks. The folder serves for parallel drafting, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "generation_config.json", folder / "generation_config.json")
    given = json.loads((source / "config.json").read_text())
    heads = given["num_attention_heads"] + 1
    counts = {"num_attention_heads": heads, "num_key_value_heads": heads}
    (folder / "config.json").write_text(json.dumps({**given, **counts, "pard_token": 2}))
    weights = load_file(source / "model.safetensors")
    for name, value in weights.items():
        if name.endswith(tuple(f"{projection}.weight" for projection in _PROJECTIONS)):
            weights[name] = torch.cat([value, torch.zeros(given["head_dim"], value.shape[1], dtype=value.dtype)])
        elif name.endswith("self_attn.o_proj.weight"):
            added = torch.zeros(value.shape[0], given["head_dim"], dtype=value.dtype)
            weights[name] = torch.cat([value, added], dim=1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _last_layer(weights: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """Return the weights of the last of a Llama's layers, without its number."""
    prefix = f"model.layers.{layers - 1}."
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def _random_like(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return random weights of the same shapes."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(value.shape, generator=generator) * 0.05 for name, value in weights.items()}
