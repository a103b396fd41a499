"""The tokens that a model's tokenizer and generation settings single out: ends of text and turn, tool calls, masks."""

from typing import Any

from agentspec.errors import ConfigurationError, first_line


def special_tokens(model: str, tokenizer: str, revision: str | None) -> set[int]:
    """Ids of the tokenizer's special tokens and of the model's ends of text. Raises ConfigurationError."""
    try:
        from transformers import AutoTokenizer, GenerationConfig
    except ImportError as error:
        raise ConfigurationError(
            "special tokens are read with the package transformers: pip install transformers"
        ) from error
    try:
        loaded: Any = AutoTokenizer.from_pretrained(tokenizer, revision=revision)
    except Exception as error:  # the library raises whatever it likes
        raise ConfigurationError(
            f"tokenizer {tokenizer}: cannot be loaded ({first_line(error)}); "
            "give --model and --tokenizer as the server has them"
        ) from error
    found = set(loaded.all_special_ids)
    found.update(token for token, added in loaded.added_tokens_decoder.items() if added.special)
    try:
        ends = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # a model need not have that file
        ends = None
    found.update([ends] if isinstance(ends, int) else ends or [])
    return found
