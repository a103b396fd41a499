"""Find the texts of a prompt that its response may quote in another spelling.

- A tool call quotes a file, or an answer before, as a JSON string, with ``\\n`` for the end of a line.
- A file was shown with a number in front of each line, and the response quotes it without.
- A tool's result has the file as a string in JSON, or in Python's form, and the response quotes the file as it is.
- A patch quotes a file's lines with ``-`` or a space in front.

Such quotes have other tokens than the prompt, so nearly every line would end a draft. So this module also tokenizes the
prompt's texts in the spellings that responses use, and the request drafts from them as source ``quote``.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from agentspec.errors import InvalidInputError
from agentspec.server_ext.api.session_texts import encode_text
from agentspec.server_ext.step import Int32

_KEPT_BYTES = 32_000_000
_ENTRY_BYTES = 400  # of a remembered text, beside its tokens
_LONGEST_TOKEN = 6  # most characters a token, on average, of a text that is read whole
_LEAST_TEXT = 24  # characters
_ESCAPED = re.compile(r'["\\\x00-\x1f]')  # characters that JSON escapes
_NUMBER = r" *L?(\d{1,9})(?:\t|→|\| ?|[:-])"
_NUMBERED = re.compile(_NUMBER)
# A string without an end counts up to the end of its line, so that a search takes linear time.
_STRING = re.compile(r"""["](?:[^"\\\n]|\\.)*["]?|['](?:[^'\\\n]|\\.)*[']?""")
_SEVERAL_LINES = re.compile(r"\n|\\n")  # as such, or in a string
_HAS_NUMBERS = re.compile(rf"\n{_NUMBER}")
_BODY_HAS_NUMBERS = re.compile(rb"\\n *L?\d{1,9}(?:\\t|\\u2192|\xe2\x86\x92|[|:-])")
_PATCH_SIGNS = ("apply_patch", "*** Begin Patch", "```diff", "```patch", "unified diff", "diff --git", "--- a/")
_BODY_SIGNS = (
    *(b'"tools"', b'"response_format"', b'"format"', b'"structured_outputs"'),
    *(sign.encode() for sign in _PATCH_SIGNS),
)
_TOOL_RESULTS = ("tool_result", "function_call_output", "custom_tool_call_output")
_INSTRUCTIONS = ("system", "developer")
"""Roles whose texts are not read, because they are seldom quoted."""


@dataclass(frozen=True)
class Form:
    """Hold the form of a response. json: it is or contains JSON. patch: it is or contains a patch."""

    json: bool = False
    patch: bool = False

    @classmethod
    def of(cls, request: Any) -> "Form":
        """Return the form of the response to a request, a body as parsed from JSON."""
        if not isinstance(request, dict):
            return cls()
        return cls(_calls_tools(request) or _wants_json(request), _calls_for_patches(request))

    def __bytes__(self) -> bytes:
        return bytes((self.json, self.patch))


class Quotes:
    """Read what requests may quote. Safe for any thread.

    tokenizer: the served model's. most: most tokens that a request may quote. Texts that were read lately are
    remembered, so that a conversation's next turn costs only its new texts. They are remembered for each caller apart,
    because the time until a response begins would tell one caller that another had sent the text.
    """

    def __init__(self, tokenizer: Any, most: int) -> None:
        self._tokenizer, self._most = tokenizer, most
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, tuple[str, Int32]] = OrderedDict()  # the caller and the tokens of a text
        self._held = 0

    @property
    def held_bytes(self) -> int:
        """Return the memory that the remembered texts take, about."""
        return self._held

    def read(self, body: bytes, owner: str | None) -> Int32:
        """Return the tokens that a response to the request in this body may quote, int32 [Q].

        owner: the caller's principal, which a ``cache_salt`` in the body separates further. None: it is not known, so
        nothing is remembered. If there are more tokens than ``most``, those of the newest texts are kept. Raises the
        tokenizer's errors. A body that is not valid has no tokens; vLLM refuses it.
        """
        left, parts, seen = self._most, list[Int32](), set[bytes]()
        try:
            request = json.loads(body) if self._most else None
        except (ValueError, RecursionError):
            request = None
        form = Form.of(request)
        salt = request.get("cache_salt") if isinstance(request, dict) else None
        whose = repr((owner, salt if isinstance(salt, str) else None)).encode()
        kind = blake2b(whose, digest_size=32, key=bytes(form)).digest()
        for text in reversed(quotable_texts(request, form)):
            if left == 0:
                break
            text = text[: _LONGEST_TOKEN * self._most]
            key = blake2b(text.encode(errors="surrogatepass"), digest_size=16, key=kind).digest()
            if key not in seen:
                seen.add(key)
                tokens = self._encode(text, form) if owner is None else self._tokens_of(key, owner, text, form)
                parts.append(tokens[:left])
                left -= len(parts[-1])
        return np.concatenate(parts[::-1]) if parts else np.zeros(0, np.int32)

    def forget(self, owner: str) -> None:
        """Forget the texts of a caller."""
        with self._lock:
            for key in [key for key, (whose, _) in self._known.items() if whose == owner]:
                self._held -= self._known.pop(key)[1].nbytes + _ENTRY_BYTES

    def forget_all(self) -> None:
        """Forget the texts of all callers."""
        with self._lock:
            self._known.clear()
            self._held = 0

    def _tokens_of(self, key: bytes, owner: str, text: str, form: Form) -> Int32:
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known[1]
        fresh = self._encode(text, form)
        with self._lock:
            if key not in self._known:
                self._known[key] = owner, fresh
                self._held += fresh.nbytes + _ENTRY_BYTES
            while self._held > _KEPT_BYTES:
                self._held -= self._known.popitem(last=False)[1][1].nbytes + _ENTRY_BYTES
        return fresh

    def _encode(self, text: str, form: Form) -> Int32:
        tokens: list[int] = []
        with suppress(InvalidInputError):  # half of a surrogate pair, which vLLM refuses
            for spelling in spellings(text, form):
                if len(tokens) >= self._most:
                    break
                spelling = spelling[: _LONGEST_TOKEN * self._most]  # JSON has six characters for one, at most
                tokens += encode_text(spelling, self._tokenizer, "messages")
        return np.array(tokens[: self._most], np.int32)


def may_quote(body: bytes) -> bool:
    """Return whether `Quotes.read` may find something in a request's body. Takes 1 ms for 100 kB."""
    return any(sign in body for sign in _BODY_SIGNS) or _BODY_HAS_NUMBERS.search(body) is not None


def spellings(text: str, form: Form) -> list[str]:
    """Return the spellings, other than its own, in which a response of this form may quote a text.

    If a text has its content in strings, as JSON has, the strings are taken in its place.
    """
    found = list[str]()
    for shown, part in _strings_in(text) or [(text, text)]:
        plain = without_numbers(part)
        respelled = list[str]()
        if form.patch and "\n" in plain:
            lines = [f"-{plain}".replace("\n", "\n-"), f" {plain}".replace("\n", "\n ")]
            respelled += map(as_json_string, lines) if form.json else lines
        respelled += [as_json_string(plain), plain] if form.json else [plain]
        # Look in the part alone: a search of the whole text for each string of thousands would take minutes.
        found += [spelling for spelling in respelled if spelling not in shown]
    return list(dict.fromkeys(found))


def as_json_string(text: str) -> str:
    """Return a text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def without_numbers(text: str) -> str:
    """Return a text without the numbers of its lines.

    A line has one if it begins with a number, and the line above or below with that number's neighbour.
    """
    lines = text.split("\n")
    found = [_NUMBERED.match(line) for line in lines]
    numbers = [None, *(int(match[1]) if match else None for match in found), None]
    for i, match in enumerate(found):
        if match and (numbers[i] == int(match[1]) - 1 or numbers[i + 2] == int(match[1]) + 1):
            lines[i] = lines[i][match.end() :]
    return "\n".join(lines)


def quotable_texts(request: Any, form: Form) -> list[str]:
    """Return the texts of a request that a response of this form may quote in another spelling, the oldest first.

    request: the body of a chat completion, of OpenAI's responses or of Anthropic's messages. Texts that are short, or
    that have no other spelling, are left out.
    """
    found: list[str] = []
    for item in _items(request):
        if isinstance(item, dict) and item.get("role") not in _INSTRUCTIONS and item.get("type") != "reasoning":
            texts = [*_strings(item.get("content")), *_strings(item.get("output"))]
            found += filter(_is_prose, texts) if item.get("role") == "assistant" else texts
    respelled = _ESCAPED if form.json else _SEVERAL_LINES if form.patch else _HAS_NUMBERS
    return [text for text in found if len(text) >= _LEAST_TEXT and respelled.search(text)]


def _items(request: Any) -> list[Any]:
    """Return the messages of a request's body."""
    if not isinstance(request, dict):
        return []
    items = request.get("messages", request.get("input"))
    return items if isinstance(items, list) else [{"content": items}]


def _calls_for_patches(request: dict[str, Any]) -> bool:
    """Return whether a request shows signs of patches, in instructions, tools or messages other than tool results."""
    left = [request.get(field) for field in ("tools", "instructions", "system")] + _items(request)
    while left:
        value = left.pop()
        if isinstance(value, str):
            if any(sign in value for sign in _PATCH_SIGNS):
                return True
        elif isinstance(value, list):
            left += value
        elif isinstance(value, dict) and value.get("role") != "tool" and value.get("type") not in _TOOL_RESULTS:
            left += value.values()
    return False


def _calls_tools(request: dict[str, Any]) -> bool:
    choice = request.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return bool(request.get("tools")) and kind != "none"


def _wants_json(request: dict[str, Any]) -> bool:
    """Return whether the response must be JSON, by OpenAI's two APIs, by Anthropic's, or by vLLM's own field."""
    formats = [request.get("response_format")]
    formats += [part.get("format") for part in map(request.get, ("text", "output_config")) if isinstance(part, dict)]
    structure = request.get("structured_outputs")
    if isinstance(structure, dict) and (structure.get("json") or structure.get("json_object")):
        return True
    return any(str(wanted.get("type")).startswith("json") for wanted in formats if isinstance(wanted, dict))


def _strings(content: Any) -> Iterator[str]:
    """Yield the texts of a message's content: a string, or parts, which may have contents themselves."""
    left = [content]
    while left:  # no recursion, because a body may be nested too deeply for one
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            for part in reversed(value):
                if isinstance(part, dict):
                    left += [part.get("content"), part.get("text")]


def _is_prose(text: str) -> bool:
    """Return whether a text of the model is neither JSON nor a patch. Those are spelled as responses spell them."""
    return not text.lstrip().startswith(("{", "[")) and not any(sign in text for sign in _PATCH_SIGNS)


def _strings_in(text: str) -> list[tuple[str, str]]:
    """Return the strings of several lines in a text, if they are more than a third of it, as in JSON.

    Each string comes as the text shows it, with its quotes, and decoded.
    """
    found = [
        each for each in _STRING.findall(text) if len(each) >= _LEAST_TEXT and each[0] == each[-1] and "\\n" in each
    ]
    return [(string, _value(string)) for string in found] if 3 * sum(map(len, found)) > len(text) else []


def _value(string: str) -> str:
    """Return the text of a string in JSON, or of one in Python's form, which has escapes that JSON lacks."""
    try:
        return str(json.loads(string))
    except ValueError:
        return string[1:-1].encode("latin-1", "backslashreplace").decode("unicode_escape", "replace")
