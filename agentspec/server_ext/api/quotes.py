"""Find what the arguments of a tool call may quote: texts of the prompt, spelled as JSON strings.

A model that edits a file by a tool call quotes the file in the call's arguments. There it is a JSON string, with
``\\n`` for the end of a line and ``\\"`` for a quotation mark. These are other tokens than the file's in the prompt, so
nearly every line ends a draft. Here the prompt's texts become tokens in this spelling, too, and the request drafts from
them as source ``quote``. Numbers in front of lines, which many tools print and no call quotes, are left out.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import numpy as np

from agentspec.errors import InvalidInputError
from agentspec.server_ext.api.session_texts import encode_text
from agentspec.server_ext.step import Int32

_KEPT_BYTES = 8_000_000
_ENTRY_BYTES = 256  # of a text that is remembered, beside its tokens
_LONGEST_TOKEN = 16  # characters of a token, at most, on average over a text that is read whole
_LEAST_TEXT = 24  # characters
_ESCAPED = re.compile(r'["\\\x00-\x1f]')  # what JSON spells otherwise
_NUMBERED = re.compile(r" *L?(\d{1,9})(?:\t|→|\| ?|:)")
_SAYS_NOTHING_NEW = ("assistant", "system", "developer")
"""Roles whose texts are not read: what the model said in calls is JSON already, and instructions are seldom quoted."""


class Quotes:
    """Read what requests may quote. Safe for any thread.

    tokenizer: the served model's. most: tokens for a request, at most. Texts that were read lately are remembered, so
    that a conversation's next turn costs what is new in it.
    """

    def __init__(self, tokenizer: Any, most: int) -> None:
        self._tokenizer, self._most = tokenizer, most
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Int32] = OrderedDict()
        self._held = 0

    @property
    def held_bytes(self) -> int:
        """Return the memory that the remembered texts take, about."""
        return self._held

    def read(self, body: bytes) -> Int32:
        """Return the tokens that the request in this body may quote, int32 [Q]; none if it calls no tools.

        Of more than ``most``, those of the newest texts. Raises what the tokenizer does, and nothing for a body that
        is wrong: vLLM says so.
        """
        left, parts, seen = self._most, list[Int32](), set[bytes]()
        try:
            texts = quotable_texts(json.loads(body))
        except (ValueError, RecursionError):
            texts = []
        for text in reversed(texts):
            if left == 0:
                break
            text = text[: _LONGEST_TOKEN * self._most]
            key = blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
            if key not in seen:
                seen.add(key)
                parts.append(self._tokens_of(key, text)[:left])
                left -= len(parts[-1])
        return np.concatenate(parts[::-1]) if parts else np.zeros(0, np.int32)

    def _tokens_of(self, key: bytes, text: str) -> Int32:
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
        try:
            fresh = np.array(encode_text(spelled(text), self._tokenizer, "messages")[: self._most], np.int32)
        except InvalidInputError:  # half of a surrogate pair, which vLLM refuses
            fresh = np.zeros(0, np.int32)
        with self._lock:
            if self._known.setdefault(key, fresh) is fresh:
                self._held += fresh.nbytes + _ENTRY_BYTES
            while self._held > _KEPT_BYTES:
                self._held -= self._known.popitem(last=False)[1].nbytes + _ENTRY_BYTES
        return fresh


def spelled(text: str) -> str:
    """Return a text as the inside of a JSON string, without the numbers of its lines.

    A line has one if it begins with a number, and the line above or below with that number's neighbour.
    """
    lines = text.split("\n")
    found = [_NUMBERED.match(line) for line in lines]
    numbers = [None, *(int(match[1]) if match else None for match in found), None]
    for i, match in enumerate(found):
        if match and (numbers[i] == int(match[1]) - 1 or numbers[i + 2] == int(match[1]) + 1):
            lines[i] = lines[i][match.end() :]
    return json.dumps("\n".join(lines), ensure_ascii=False)[1:-1]


def quotable_texts(request: Any) -> list[str]:
    """Return the texts that a request with tools, or one that wants JSON, may quote, the oldest first.

    request: the body of a chat completion, of OpenAI's responses or of Anthropic's messages. Texts that JSON spells as
    they are, or that are short, are left out.
    """
    if not isinstance(request, dict) or not (_calls_tools(request) or _wants_json(request)):
        return []
    items = request.get("messages", request.get("input"))
    items = items if isinstance(items, list) else [{"content": items}]
    found: list[str] = []
    for item in items:
        if isinstance(item, dict) and item.get("role") not in _SAYS_NOTHING_NEW and item.get("type") != "reasoning":
            found += [*_strings(item.get("content")), *_strings(item.get("output"))]
    return [text for text in found if len(text) >= _LEAST_TEXT and _ESCAPED.search(text)]


def _calls_tools(request: dict[str, Any]) -> bool:
    choice = request.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return bool(request.get("tools")) and kind != "none"


def _wants_json(request: dict[str, Any]) -> bool:
    wanted = request.get("response_format")
    return isinstance(wanted, dict) and str(wanted.get("type")).startswith("json")


def _strings(content: Any) -> Iterator[str]:
    """Yield the texts of a message's content: a string, or parts, which may have contents themselves."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, dict):
                yield from _strings(part.get("text"))
                yield from _strings(part.get("content"))
