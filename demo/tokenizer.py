"""Train the demo model's tokenizer: byte-level BPE that keeps each word of an identifier one token."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.sessions import Message

END, PAD = "<|end|>", "<|pad|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = [PAD, END, *ROLES.values()]
MAX_POSITIONS = 4096

# Nothing is trimmed or added between messages, so each prompt extends the one before it token by token.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] in ['system', 'assistant'] %}{{ '<|' + message['role'] + '|>' }}"
    "{% else %}{{ '<|user|>' }}{% endif %}"
    "{{ (message['content'] or '') + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# A word of an identifier must be the same token wherever the identifier stands, or copying it is much harder
# to learn: a space joins the word after it only when no underscore follows that word.
_PIECES = (
    r" ?[A-Za-z]+(?![A-Za-z_])|_+[A-Za-z]*|[A-Za-z]+"  # words, and parts of identifiers
    r"|\d{1,2}"
    r"|\n *"  # a line break and the indentation after it
    r"| ?[^\sA-Za-z0-9_]+|\s"
)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer on the texts. It can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files from which Hugging Face loads a tokenizer."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that must exist. Raises KeyError without it."""
    number = tokenizer.token_to_id(token)
    if number is None:
        raise KeyError(token)
    return int(number)


def encode(tokenizer: Tokenizer, messages: list[Message]) -> tuple[list[int], list[bool]]:
    """Return the token ids of a conversation and, for each, whether the model is trained to predict it."""
    ids: list[int] = []
    learn: list[bool] = []
    for message in messages:
        content = tokenizer.encode(message.content + END).ids
        ids += [token_id(tokenizer, ROLES[message.role]), *content]
        learn += [False, *([message.learn] * len(content))]
    return ids, learn
