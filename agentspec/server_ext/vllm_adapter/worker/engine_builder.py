"""Build the drafting engine of a served model: its suffix cache, its store, its snapshot and its tokenizer."""

import functools
import json
from typing import Any, cast

from agentspec.cache.store import LogNames, open_store, snapshot_path
from agentspec.errors import InvalidInputError, first_line
from agentspec.server_ext.engine import DraftingEngine, make_cache
from agentspec.server_ext.identity.server_secrets import keep_secret, server_secret, warn_of_other_secret
from agentspec.server_ext.persistence.model_key import find_model_key, overrides_text
from agentspec.server_ext.persistence.persistence import Persistence
from agentspec.server_ext.pricing import EngineLimits
from agentspec.server_ext.public_corpus import Tokenize
from agentspec.server_ext.settings import MemoryShares, Settings, load_settings


def build_engine(vllm_config: Any, settings: Settings, max_draft: int, limits: EngineLimits) -> DraftingEngine:
    """Return the engine of this model, on the store of the settings."""
    secret = server_secret(settings)
    logs = LogNames(served_model_key(vllm_config), secret)
    shares = MemoryShares.of(settings.max_bytes, settings.store)
    store, retention = open_store(settings.store, memory_bytes=shares.store), settings.retention()
    keep_secret(store, secret)
    cache = make_cache(settings, vllm_config.model_config.get_vocab_size(), max_draft)
    persistence = Persistence(cache, store, logs, settings.preload_records, retention, shares.queue)
    persistence.submit(functools.partial(warn_of_other_secret, secret=secret))
    number = vllm_config.parallel_config.data_parallel_index
    snapshot = snapshot_path(settings.store, logs.of(settings.tenant), number)
    tokenize = served_tokenizer(vllm_config.model_config)
    return DraftingEngine(settings, persistence, limits, snapshot, tokenize, step_options(vllm_config))


def step_options(vllm_config: Any) -> str:
    """Return the device and the options that decide how long steps take, as JSON."""
    import torch
    from vllm.platforms import current_platform

    try:
        device = current_platform.get_device_name()
    except Exception:  # a platform may not tell it, or fail to ask its driver
        device = ""
    model, parallel, compilation = vllm_config.model_config, vllm_config.parallel_config, vllm_config.compilation_config
    options = {
        "device": device,
        "threads": torch.get_num_threads(),
        "model": model.model,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "cache": vllm_config.cache_config.cache_dtype,
        "eager": model.enforce_eager,
        "graphs": compilation.cudagraph_mode,
        "compiled": compilation.mode,
        "tensor": parallel.tensor_parallel_size,
        "pipeline": parallel.pipeline_parallel_size,
        "data": parallel.data_parallel_size,
    }
    return json.dumps({name: str(option) for name, option in options.items()})


def served_tokenizer(model_config: Any) -> Tokenize | None:
    """Return the served tokenizer without special tokens, loaded when it is called first; None if vLLM has none."""
    if model_config.skip_tokenizer_init:
        return None

    @functools.cache
    def load() -> Any:
        from transformers import AutoTokenizer

        revision, trusted = model_config.tokenizer_revision, model_config.trust_remote_code
        return AutoTokenizer.from_pretrained(model_config.tokenizer, revision=revision, trust_remote_code=trusted)

    def tokenize(text: str) -> list[int]:
        tokenizer = load()
        try:
            return cast(list[int], tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # the libraries raise whatever they like, e.g. for half of a surrogate pair
            raise InvalidInputError(f"the tokenizer refuses it: {first_line(error)}") from error

    return tokenize


def served_model_key(vllm_config: Any) -> str:
    """Return the key of the served model and its tokenizer (`find_model_key`)."""
    model = vllm_config.model_config
    return find_model_key(
        model.model,
        model.tokenizer,
        revision=model.revision,
        tokenizer_revision=model.tokenizer_revision,
        overrides=overrides_text(model.hf_overrides),
        given=load_settings(vllm_config.additional_config).model_key,
    )
