"""The tokenizer of `--tokenizer`: text to token ids, by the libraries that serve the model, where installed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentspec.errors import ConfigurationError, first_line

Tokenizer = Callable[[str], Sequence[int]]


def open_tokenizer(name: str) -> Tokenizer:
    """A tokenizer.json file, a folder that holds one, or the name of a model for transformers.

    Special tokens are taken from the text where it has them; none are added.
    Raises ConfigurationError naming what to install or to give.
    """
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return _from_file(file) if file.is_file() else _by_name(name)
    except ImportError as error:
        library = "tokenizers" if file.is_file() else "transformers"
        raise ConfigurationError(
            f"--tokenizer needs the package {library}: pip install {library}, or give token ids"
        ) from error
    except Exception as error:  # the libraries raise whatever they like
        raise ConfigurationError(
            f"--tokenizer {name}: cannot be loaded ({first_line(error)}); "
            "give a tokenizer.json or the folder of a model"
        ) from error


def _from_file(file: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Fast

    fast: Any = Fast.from_file(str(file))
    return lambda text: list(fast.encode(text, add_special_tokens=False).ids)


def _by_name(name: str) -> Tokenizer:
    from transformers import AutoTokenizer

    slow: Any = AutoTokenizer.from_pretrained(name)
    return lambda text: list(slow.encode(text, add_special_tokens=False))
