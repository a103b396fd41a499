"""A model folder for vLLM that holds a shape and no weights: vLLM fills them at random (``load_format=dummy``)."""

import json
from pathlib import Path

from agentspec.errors import ConfigurationError
from agentspec.testing.replay_types import ModelShape


def write_model(folder: str | Path, shape: ModelShape, max_model_len: int) -> Path:
    """Write the ``config.json`` of a Llama of that shape; ``max_model_len`` in tokens. Returns the folder.

    Raises ConfigurationError for a shape that no such model can have.
    """
    if min(shape.vocab_size, shape.hidden, shape.layers, shape.heads) < 1 or shape.hidden % shape.heads:
        raise ConfigurationError(f"{shape}: every size must be at least 1, and heads must divide hidden")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": 4 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.hidden // shape.heads,
        "hidden_act": "silu",
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return path
