"""Make real vLLM configurations of small models from a config.json alone: no weights, no GPU."""

import json
from pathlib import Path
from typing import Any

from agentspec.server_ext import vllm_adapter

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 32768,
}
# Like Qwen3-Next-80B, without the experts.
HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 512,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16",
}
MAMBA = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "state_size": 64,
    "num_heads": 8,
    "head_dim": 64,
    "n_groups": 1,
    "expand": 2,
    "vocab_size": 1000,
}


def engine_args(folder: Path, model: dict[str, Any], **options: Any) -> Any:
    """Return vLLM's EngineArgs for a model with this config.json, with agentspec's plugin loaded."""
    from vllm.engine.arg_utils import EngineArgs

    vllm_adapter.register()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model))
    return EngineArgs(model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, **options)
