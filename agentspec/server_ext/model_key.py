"""What tells one model's tokens from another's in the store: the model's name and its tokenizer's fingerprint."""

import hashlib
from pathlib import Path


def model_name(name: str) -> str:
    """The model's hub id, or the absolute path of its folder, so that two spellings of one folder share a key."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def tokenizer_fingerprint(name: str, revision: str | None) -> str:
    """What tells one tokenizer from another: a hash of its files where they are local, else name and revision."""
    folder = Path(name)
    if not folder.is_dir():
        return f"{name}@{revision or 'default'}"
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.name.startswith(("tokenizer", "vocab", "merges", "tekken", "special_tokens", "added_tokens")):
            digest.update(f"{file.name}:{file.stat().st_size}:".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
