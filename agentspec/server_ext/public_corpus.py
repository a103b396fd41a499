"""Read the operator's public texts and let all requests that share anything draft from them.

The setting ``public`` names a file. If its name ends in ``.json`` or ``.jsonl``, or these with ``.gz``, each line is a
JSON object: what ``agentspec sessions export`` wrote, or one with ``token_ids``, ``text``, or the fields of recorded
calls (``prompt_token_ids`` and ``response_token_ids``, ``prompt`` and ``response``). Any other file is plain text, in
UTF-8. Text is tokenized with the served model's tokenizer.
"""

import io
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from agentspec.cache import SuffixCache
from agentspec.cache.arguments import MAX_VOCAB, as_tokens
from agentspec.cache.types import Int32Array
from agentspec.errors import AgentSpecError, InvalidInputError, first_line
from agentspec.files import decompressed

logger = logging.getLogger(__name__)

Tokenize = Callable[[str], Sequence[int]]
"""Function that returns a text's token ids. Raises InvalidInputError for a text that it refuses."""

_LINES_AT_ONCE = 64 << 10
"""Approximate number of characters of plain text that become one text, of whole lines unless these are longer."""
_END_OF_IDS = MAX_VOCAB - 1
"""First token id that the cache refuses (`as_prompt`). One such id would make it refuse the whole corpus."""
_TOKEN_FIELDS = ("token_ids", "prompt_token_ids", "response_token_ids")
_TEXT_FIELDS = ("text", "prompt", "response")


class PublicCorpus:
    """Read a file of public texts into a cache, in a thread of its own, once.

    path: the file. max_bytes: most memory that the texts may take; later ones are left out. tokenize: called for text
    in the file; None: such text is skipped. Errors are logged and counted, never raised.
    """

    def __init__(self, path: str | Path, cache: SuffixCache, max_bytes: int, tokenize: Tokenize | None = None) -> None:
        self._path, self._cache = Path(path).expanduser(), cache
        self._max_bytes, self._tokenize = max_bytes, tokenize
        self._stats: dict[str, Any] = {"state": "waiting", "texts": 0, "tokens": 0, "bytes": 0, "left_out": 0}
        self._skipped = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="agentspec-public", daemon=True)

    def start(self) -> None:
        """Begin to read. Call it after the snapshot was loaded, because that needs an empty cache."""
        self._stats["state"] = "loading"
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the file was read. Return whether it was within ``timeout`` seconds (None: no limit)."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def stats(self) -> dict[str, Any]:
        """Return the state ("waiting", "loading", "ready" or "failed") and counters, as JSON.

        left_out: texts beyond the limit. skipped: texts that cannot be used.
        """
        return {**self._stats, "skipped": self._skipped}

    def close(self) -> None:
        """Stop reading."""
        self._closing = True

    def _run(self) -> None:
        """Read the file into the cache, and log the result. The thread runs this."""
        begin = time.monotonic()
        try:
            found = self._cache.publish(self._texts(), max_bytes=self._max_bytes)
        except Exception as error:
            self._stats["state"] = "failed"
            if not self._closing:
                logger.error("agentspec: public %s: not used: %s", self._path, first_line(error))
            return
        counts = {name: getattr(found, name) for name in found.__slots__}
        self._stats = {"state": "ready", **counts}
        took = time.monotonic() - begin
        logger.info("agentspec: public corpus of %d texts, %d tokens, in %.1f s", found.texts, found.tokens, took)
        if found.left_out:
            what = "%d public texts are left out: the corpus takes at most half of max_bytes"
            logger.warning(f"agentspec: {what}", found.left_out)

    def _texts(self) -> Iterator[Int32Array]:
        """Yield the tokens of each text that can be used. Raises InterruptedError once closed."""
        for where, make in read_texts(self._path):
            if self._closing:
                raise InterruptedError
            try:
                text = make(self._tokenize)
            except AgentSpecError as error:
                self._skipped += 1
                if self._skipped == 1:  # the counter shows the others
                    logger.warning("agentspec: public %s, %s: skipped: %s", self._path, where, error)
                continue
            yield text


def read_texts(path: Path) -> Iterator[tuple[str, Callable[[Tokenize | None], Int32Array]]]:
    """Yield, for each text of a file, its place in the file and a function that returns its tokens, int32 [n].

    The function takes the tokenizer and raises InvalidInputError, naming the field, for a text that cannot be used.
    Raises OSError for a file that cannot be read.
    """
    with path.open("rb") as raw, io.TextIOWrapper(decompressed(raw), encoding="utf-8-sig", errors="replace") as file:
        if Path(path.name.removesuffix(".gz")).suffix not in (".json", ".jsonl"):
            for number, text in _pieces(file):
                yield f"line {number}", partial(_tokens_of, {"text": text})
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                for where, value in _objects(f"line {number}", line):
                    yield where, partial(_tokens_of, value)


def _pieces(file: IO[str]) -> Iterator[tuple[int, str]]:
    """Yield whole lines of about _LINES_AT_ONCE characters, with the number of the first."""
    begin, lines, size = 1, list[str](), 0
    number = 1  # of the line that is read; a long one comes in several parts
    for part in iter(lambda: file.readline(_LINES_AT_ONCE), ""):
        lines.append(part)
        size += len(part)
        number += part.endswith("\n")
        if size >= _LINES_AT_ONCE:
            yield begin, "".join(lines)
            begin, lines, size = number, [], 0
    if lines:
        yield begin, "".join(lines)


def _objects(where: str, line: str) -> Iterator[tuple[str, Any]]:
    """Yield the texts of one line of JSON: the turns of an exported session, or the line itself."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    turns = value.get("turns") if isinstance(value, Mapping) else None
    if not isinstance(turns, list):
        yield where, value
        return
    for number, turn in enumerate(turns):
        if isinstance(turn, Mapping):  # an exported turn calls its token ids prompt and response
            turn = {f"{name}_token_ids": turn.get(name) for name in ("prompt", "response")}
        yield f"{where}, turns.{number}", turn


def _tokens_of(value: Any, tokenize: Tokenize | None) -> Int32Array:
    """Return the tokens of one text, given as JSON. Raises InvalidInputError that names the field."""
    if not isinstance(value, Mapping):
        raise InvalidInputError("give a JSON object with token_ids or text")
    tokens: list[int] = []
    for name in _TOKEN_FIELDS:
        if value.get(name) is not None:
            tokens.extend(as_tokens(value[name], name, _END_OF_IDS).tolist())
    if not tokens:
        for name in _TEXT_FIELDS:
            text = value.get(name)
            if text is None:
                continue
            if not isinstance(text, str):
                raise InvalidInputError(f"{name}: give a string, not {type(text).__name__}")
            if tokenize is None:
                raise InvalidInputError(f"{name}: the server has no tokenizer; give token_ids")
            try:
                tokens.extend(tokenize(text))
            except InvalidInputError as error:
                raise InvalidInputError(f"{name}: {error}") from error
    if not tokens:
        raise InvalidInputError(f"none of {', '.join(_TOKEN_FIELDS + _TEXT_FIELDS)} is there")
    return as_tokens(tokens, "tokens", _END_OF_IDS)
