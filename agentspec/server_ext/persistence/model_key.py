"""Find the keys of models and adapters, under which servers share logs. They don't depend on where the files lie."""

import contextlib
import hashlib
import json
import logging
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentspec.cache.store import model_key

logger = logging.getLogger("vllm.agentspec")

_CONFIGS = ("config.json", "params.json")
_TOKENIZERS = (
    *("tokenizer*", "vocab*", "merges*", "tekken*", "special_tokens*", "added_tokens*"),
    *("spiece*", "sentencepiece*", "*.tiktoken", "*.model", "*.spm"),
)
_NOT_THE_MODEL = frozenset(
    {"_name_or_path", "name_or_path", "base_model_name_or_path", "_commit_hash", "transformers_version"}
)
"""Keys of a config that say where the model came from."""
_ENDS_BYTES = 1 << 20
"""Bytes at the beginning and at the end of an adapter's weights that identify them."""
_HEAD_BYTES = 32 << 20
"""Bytes at the beginning of a single file, such as a GGUF file, that identify it: config and tokenizer are there."""


@lru_cache(maxsize=16)
def find_model_key(
    model: str,
    tokenizer: str | None = None,
    *,
    revision: str | None = None,
    tokenizer_revision: str | None = None,
    overrides: str = "",
    given: str | None = None,
) -> str:
    """Return the key of a model, 16 hexadecimal digits: hashes of its config and of its tokenizer's files.

    model, tokenizer: a folder, a single file, or a hub id, whose missing files are downloaded; tokenizer None: the
    model's. tokenizer_revision None: ``revision``, as in vLLM, also for a tokenizer of another repository. overrides:
    what the server changes in the config. given: used in place of the config (setting ``model_key``). If the files
    cannot be found, the name is used in their place, and the log says so.
    """
    config = f"given {given}" if given is not None else f"config {_config(model, revision)} {overrides}"
    return model_key(config, _tokenizer(tokenizer or model, tokenizer_revision or revision))


def overrides_text(overrides: Any) -> str:
    """Return what the server changes in a model's config (``--hf-overrides``) as `find_model_key` takes it."""
    return json.dumps(overrides, sort_keys=True, default=_name) if overrides else ""


def _name(value: Any) -> str:
    """Return the name of a function or a class, without its address, which differs from run to run; else the text."""
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else str(value)


def adapter_key(name: str, path: str) -> str:
    """Return the key of a LoRA adapter: its name and a hash of its files. path: a folder or a hub id.

    The name is not enough, because another adapter may get it later. The path is not, because another server may have
    the adapter elsewhere.
    """
    try:
        files = [file for file in sorted(Path(path).iterdir()) if file.suffix in (".json", ".safetensors", ".bin")]
        state = tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
        return f"{name}@{_adapter_digest(state)}"
    except OSError:  # the path is a hub id, which is the same on all servers
        return f"{name}@{path}"


@lru_cache(maxsize=4096)
def _adapter_digest(state: tuple[tuple[str, int, int], ...]) -> str:
    """Return a hash of an adapter's files. state: their paths, sizes and times of change."""
    digest = hashlib.sha256()
    for path, size, _ in state:
        file = Path(path)
        if file.suffix == ".json":
            digest.update(f"{file.name}:{_config_digest(file.read_bytes())}:".encode())
            continue
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_ENDS_BYTES))
            opened.seek(max(0, size - _ENDS_BYTES))
            digest.update(opened.read(_ENDS_BYTES))
    return digest.hexdigest()


def _config(model: str, revision: str | None) -> str:
    """Return a hash of a model's config; its name if it has none here or on the hub."""
    place = _find(model, revision, _CONFIGS)
    if place is None:
        return _by_name("config", model, revision)
    if place.is_file():
        return _file_digest(place)
    for file in _CONFIGS:
        if (place / file).is_file():
            return _config_digest((place / file).read_bytes())
    return _by_name("config", model, revision)


def _tokenizer(name: str, revision: str | None) -> str:
    """Return a hash of a tokenizer's files; its name if they are neither here nor on the hub."""
    place = _find(name, revision, _TOKENIZERS)
    if place is None:
        return _by_name("tokenizer", name, revision)
    if place.is_file():
        return _file_digest(place)
    digest = hashlib.sha256()
    for file in sorted(place.iterdir()):
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in _TOKENIZERS):
            content = file.read_bytes()
            digest.update(f"{file.name}:{len(content)}:".encode())
            digest.update(content)
    return digest.hexdigest()


def _find(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path | None:
    """Return the folder or file of a model or tokenizer; None if it is neither here nor on the hub."""
    if Path(name).exists():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # the hub's client raises its own errors, the network's and the file system's
        logger.debug("agentspec: %s is not on the hub: %s", name, error)
        return None


def _by_name(what: str, name: str, revision: str | None) -> str:
    logger.warning(
        "agentspec: the %s of %s is not found, so stored turns are shared under this name only; "
        "set model_key to share them with servers that have the model elsewhere",
        what,
        name,
    )
    return f"{name}@{revision or 'default'}"


def _config_digest(content: bytes) -> str:
    with contextlib.suppress(ValueError):  # the file's next reader says what is wrong with it
        content = json.dumps(_bare(json.loads(content)), sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()


def _bare(value: Any) -> Any:
    """Return a value of a config without the keys in _NOT_THE_MODEL, at any depth."""
    if isinstance(value, dict):
        return {key: _bare(item) for key, item in value.items() if key not in _NOT_THE_MODEL}
    return [_bare(item) for item in value] if isinstance(value, list) else value


def _file_digest(file: Path) -> str:
    with file.open("rb") as opened:
        head = opened.read(_HEAD_BYTES)
    return hashlib.sha256(head + str(file.stat().st_size).encode()).hexdigest()
