"""Read chats as vLLM's server does: the tokenizer, and messages as chat templates take them."""

import copy
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

logger = logging.getLogger("vllm.agentspec")

_PIECE = 16_384
"""Most characters that are encoded in one go: 5 to 15 ms, and some megabytes of memory."""
_PAUSE = 1e-4
"""Time between two pieces, in seconds, so that another thread gets its turn."""


class ServedTokenizer:
    """Turn texts into tokens and back, as the served model's tokenizer does. Safe for any thread.

    This is a copy of vLLM's tokenizer, which must not work in our threads. vLLM either pools it, and then it copies
    itself for each further thread and keeps the copies. Or both sides change its truncation, so that texts are cut.
    source: vLLM's.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self._tokenizer = _copied(source)
        self._lock = threading.Lock()

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the tokens of a text. A long text is cut at ends of lines, each part of which is encoded by itself."""
        tokens: list[int] = []
        for piece in _pieces(text):
            if tokens:
                time.sleep(_PAUSE)
            with self._lock:
                tokens += self._tokenizer.encode(piece, add_special_tokens=add_special_tokens and not tokens)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        with self._lock:
            return str(self._tokenizer.decode(tokens))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: Literal[False], **options: Any
    ) -> str:
        """Return a chat by the model's template, as text.

        Takes no lock: the text is made by the template alone, and a template may take seconds for a long chat.
        """
        return str(self._tokenizer.apply_chat_template(messages, tokenize=tokenize, **options))


def _pieces(text: str) -> Iterator[str]:
    """Yield the parts of a text, of at most _PIECE characters, cut behind a line if possible, or in front of a word."""
    begin = 0
    while len(text) - begin > _PIECE:
        cut = text.rfind("\n", begin, begin + _PIECE) + 1
        while cut > begin and text[cut].isspace():  # tokens may hold several ends of lines, and indentation
            cut = text.rfind("\n", begin, cut - 1) + 1
        if cut <= begin:
            cut = text.rfind(" ", begin + 1, begin + _PIECE)
        yield text[begin : cut if cut > begin else begin + _PIECE]
        begin = cut if cut > begin else begin + _PIECE
    yield text[begin:]


def _copied(tokenizer: Any) -> Any:
    """Return a copy of a tokenizer of transformers, without vLLM's pool; any other as it is."""
    try:
        from transformers import PreTrainedTokenizerBase

        return copy.deepcopy(_unpooled(tokenizer)) if isinstance(tokenizer, PreTrainedTokenizerBase) else tokenizer
    except Exception:  # a model's own class may refuse it in any way
        logger.warning("agentspec: the tokenizer cannot be copied, so threads of vLLM's wait for ours", exc_info=True)
        return tokenizer


def _unpooled(tokenizer: Any) -> Any:
    """Return a tokenizer as it was before vLLM made a pool of it (``maybe_make_thread_pool``)."""
    from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin

    if not isinstance(tokenizer, ThreadSafeHFTokenizerMixin):
        return tokenizer
    kind: Any = type(tokenizer).__bases__[0]
    plain = kind.__new__(kind)
    plain.__dict__.update(vars(tokenizer))
    return plain


def tokenizer_of(engine_client: Any) -> ServedTokenizer | None:
    """Return the served model's tokenizer, or None where vLLM runs without one (``--skip-tokenizer-init``)."""
    try:
        source = engine_client.get_tokenizer()
    except ValueError:
        return None
    if source is None:
        return None
    held: ServedTokenizer | None = getattr(engine_client, "agentspec_tokenizer", None)
    if held is None or held.source is not source:
        held = engine_client.agentspec_tokenizer = ServedTokenizer(source)
    return held


def templated(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return chat messages in the form in which vLLM's server gives them to a chat template.

    Text parts become one text, arguments of tool calls objects, and thoughts have the names of older templates, too.
    """
    return [_templated(dict(message)) for message in messages]


def _templated(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    texts = [part["text"] for part in content if _is_text(part)] if isinstance(content, list) else []
    if content is None or (texts and len(texts) == len(content)):
        message["content"] = "\n".join(texts)
    thoughts = message.get("reasoning", message.get("reasoning_content"))
    if thoughts is not None:
        message["reasoning"] = message["reasoning_content"] = thoughts
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_templated_call(call) for call in calls]
        if not calls:
            del message["tool_calls"]
    return message


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _templated_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, Mapping) else {}}}
