"""Make a Llama-shaped model that answers everything with the same text, and takes prompts of 64 k tokens in seconds.

Coding agents send prompts of 20 to 50 thousand of the demo's tokens. A model with one layer, few dimensions and no
attention reads them fast, and agents are content with its answer, as they are not with that of random weights. The
answer has about as many tokens as theirs have, so that the server has the steps to index the prompt in.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

TOKENIZER = Path(__file__).parents[2] / "demo" / "model"
SENTENCE = "This function is written, and all of the tests expect a number without spaces"
CONTEXT = 65_536
_HIDDEN = 512
_OTHER = _HIDDEN - 1  # the dimension of all tokens that the answer lacks
_SURE = 10.0  # logit margin: the answer is the same at any temperature

CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|system|>' + tools | tojson + '<|end|>' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] in ['system', 'assistant'] %}{{ '<|' + message['role'] + '|>' }}"
    "{% else %}{{ '<|user|>' }}{% endif %}"
    "{{ (message['content'] or '') + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_model(folder: Path) -> Path:
    """Write the model and its tokenizer, which is the demo's. Return the folder."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    start, end = tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    chain = [start, *_answer(tokenizer)]
    assert len({*chain}) == len(chain) <= _OTHER, "a table of successors says no token twice"
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=_HIDDEN,
            intermediate_size=_HIDDEN,
            num_hidden_layers=1,
            num_attention_heads=2,
            head_dim=32,
            max_position_embeddings=CONTEXT,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.model.norm.weight.fill_(1.0)
        of_token, of_next = model.model.embed_tokens.weight, model.lm_head.weight
        of_token[:, _OTHER] = 1.0
        of_next[end, _OTHER] = _SURE
        for dimension, (token, following) in enumerate(zip(chain, [*chain[1:], end], strict=True)):
            of_token[token] = 0.0
            of_token[token, dimension] = 1.0
            of_next[following, dimension] = _SURE
    model.save_pretrained(folder)
    shutil.copy(TOKENIZER / "tokenizer.json", folder)
    settings = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    settings |= {"chat_template": CHAT_TEMPLATE, "model_max_length": CONTEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _answer(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of the sentence, and then of all other words that are one token."""
    answer: list[int] = tokenizer.encode(SENTENCE, add_special_tokens=False)
    for token, number in sorted(tokenizer.get_vocab().items()):
        word = " " + token[1:]
        alone = re.fullmatch("Ġ[a-z]{2,}", token) and tokenizer.encode(word, add_special_tokens=False) == [number]
        if alone and number not in answer:
            answer.append(number)
    return answer
