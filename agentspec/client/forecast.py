"""Forecast what speculation would bring on a client's sessions, by the cache that servers draft from."""

from __future__ import annotations

import json
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from agentspec.cache.types import Int32Array, ReplayRates
from agentspec.client.reply import Reply, Speculation, total_speculation

if TYPE_CHECKING:
    from agentspec.cache import SuffixCache

TokensFrom: TypeAlias = Literal["server", "tokenizer", "approximation"]
Tokenize: TypeAlias = Callable[[str], Sequence[int]]

_MAX_BYTES = 64 << 20  # of the cache
_MAX_SESSIONS = 4_096
_MAX_PENDING_CALLS, _MAX_PENDING_TOKENS = 256, 1 << 20
_CACHED_TEXTS = 4_096
_PIECE = re.compile(r"[^\S\r\n]?[^\W\d_]{1,5}|\d{1,3}|[^\S\r\n]?[^\s\w]{1,3}|_|[\r\n]+|[^\S\r\n]+")
_LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Forecast(ReplayRates):
    """Hold what speculation would bring on the calls of a session, and what it brought where that is known.

    calls: model calls of the session that were replayed. tokens: tokens of their answers. steps: decode steps, each of
    which gives its accepted tokens and one more. drafted, accepted: draft tokens verified and accepted.
    accepted_by_source: `accepted` by the source of the token. tokens_from: who made the tokens: the "server", a
    "tokenizer", or an "approximation" of one. measured: the sum of the servers' own figures; None without any.
    measured_calls: how many of the calls `measured` is about.
    """

    calls: int
    tokens: int
    steps: int
    drafted: int
    accepted: int
    accepted_by_source: dict[str, int]
    tokens_from: TokensFrom
    measured: Speculation | None
    measured_calls: int


@dataclass(slots=True)
class _SessionFigures:
    """Add up the calls of one session."""

    calls: int = 0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    measured: list[Speculation] = field(default_factory=list)  # one at most, their sum
    measured_calls: int = 0


@dataclass(frozen=True, slots=True)
class _Said:
    """Hold one model call that was not replayed yet, as tokens or as messages."""

    session: str
    group: str | None
    prompt: Int32Array | Sequence[Mapping[str, Any]]
    response: Int32Array | Mapping[str, Any]


class Forecaster:
    """Replay a client's calls in their order, when somebody asks for a forecast.

    tokenizer: "server" takes the token ids that vLLM sends with its answers. A tokenizer.json, a model's folder or
    name, or a function from text to token ids tokenises what the sessions say; None approximates that.
    Raises ConfigurationError if the tokenizer cannot be loaded. Any thread may call the methods.
    """

    def __init__(self, tokenizer: str | Tokenize | None) -> None:
        self.tokens_from: TokensFrom = "approximation" if tokenizer is None else "tokenizer"
        if tokenizer == "server":
            self.tokens_from = "server"
        encode = _loaded(tokenizer) if isinstance(tokenizer, str) and tokenizer != "server" else tokenizer
        self._tokens_of = lru_cache(_CACHED_TEXTS)(_as_array(encode if callable(encode) else approximate_tokens))
        self._lock = threading.Lock()
        self._pending: list[_Said] = []
        self._pending_tokens = 0
        self._cache: SuffixCache | None = None
        self._replayed = 0
        self._sessions: OrderedDict[str, _SessionFigures] = OrderedDict()

    def note(
        self,
        session: str | None,
        group: str | None,
        sent: Sequence[Mapping[str, Any]],
        reply: Reply[Any],
        resumed: int = 0,
    ) -> None:
        """Remember a call until the next forecast. sent: its messages. resumed: how many of them came from the store.

        Takes some microseconds, and never raises.
        """
        name = session or ""
        with self._lock:
            self._begin(name, group, sent[:resumed])
            if reply.speculation is not None:
                figures = self._sessions[name]
                figures.measured = [total_speculation([*figures.measured, reply.speculation])]
                figures.measured_calls += 1
            if self.tokens_from != "server":
                self._add(_Said(name, group, sent, reply.message), 0)
            elif (tokens := _server_tokens(reply)) is not None:
                self._add(_Said(name, group, *tokens), len(tokens[0]))

    def forecast(self, session: str, group: str | None, resumed: Sequence[Mapping[str, Any]]) -> Forecast:
        """Return the forecast of a session. resumed: the messages that came from the store. Takes CPU time."""
        with self._lock:
            self._begin(session, group, resumed)
            self._replay()
            figures = self._sessions[session]
            return Forecast(
                calls=figures.calls,
                tokens=figures.tokens,
                steps=figures.steps,
                drafted=figures.drafted,
                accepted=figures.accepted,
                accepted_by_source=dict(figures.accepted_by_source),
                tokens_from=self.tokens_from,
                measured=figures.measured[0] if figures.measured else None,
                measured_calls=figures.measured_calls,
            )

    def forget(self, session: str) -> None:
        """Erase what is held of a session."""
        with self._lock:
            self._sessions.pop(session, None)
            self._pending = [said for said in self._pending if said.session != session]
            self._tokens_of.cache_clear()
            if self._cache is not None:
                self._cache.remove_session(None, session)

    def _begin(self, session: str, group: str | None, resumed: Sequence[Mapping[str, Any]]) -> None:
        """Add the calls that earlier processes made. The server's tokens of these are not known."""
        if session in self._sessions:
            self._sessions.move_to_end(session)
            return
        self._sessions[session] = _SessionFigures()
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        if self.tokens_from != "server":
            for i, message in enumerate(resumed):
                if message["role"] == "assistant":
                    self._add(_Said(session, group, resumed[:i], message), 0)

    def _add(self, said: _Said, tokens: int) -> None:
        self._pending.append(said)
        self._pending_tokens += tokens
        if len(self._pending) > _MAX_PENDING_CALLS or self._pending_tokens > _MAX_PENDING_TOKENS:
            self._replay()

    def _replay(self) -> None:
        from agentspec.cache import SuffixCache, _native  # imported here: most clients never ask for a forecast
        from agentspec.simulate import Call, simulate

        if self._cache is None:
            self._cache = SuffixCache(max_bytes=_MAX_BYTES)
        pending, self._pending, self._pending_tokens = self._pending, [], 0
        _native.watch_clock(False)  # otherwise a slow machine indexes later and drafts less
        try:
            for said in pending:
                prompt, response = self._in_tokens(said)
                figures = self._sessions.get(said.session)
                if figures is None or not len(response):
                    continue
                self._replayed += 1
                session = said.session or f"no session {self._replayed}"
                call = Call(self._replayed, session, 0, said.group, None, prompt, response)
                found = simulate([call], self._cache, prefill_steps=True)
                figures.calls += 1
                for name in ("tokens", "steps", "drafted", "accepted"):
                    setattr(figures, name, getattr(figures, name) + getattr(found, name))
                for source, count in found.accepted_by_source.items():
                    figures.accepted_by_source[source] = figures.accepted_by_source.get(source, 0) + count
        finally:
            _native.watch_clock(True)

    def _in_tokens(self, said: _Said) -> tuple[Int32Array, Int32Array]:
        if isinstance(said.prompt, np.ndarray) and isinstance(said.response, np.ndarray):
            return said.prompt, said.response
        assert isinstance(said.response, Mapping)
        parts = [self._tokens_of(_shown(message)) for message in said.prompt]
        begin = self._tokens_of(_head("assistant"))
        return np.concatenate([*parts, begin]), self._tokens_of(_spoken(said.response))


def approximate_tokens(text: str) -> list[int]:
    """Return about as many tokens as usual tokenizers make of a text; equal pieces have equal ids."""
    return [zlib.crc32(piece.encode()) % _LARGEST for piece in _PIECE.findall(text)]


def _loaded(name: str) -> Tokenize:
    from agentspec.simulate import open_tokenizer

    return open_tokenizer(name, "tokenizer")


def _as_array(encode: Tokenize) -> Callable[[str], Int32Array]:
    return lambda text: np.array(encode(text), np.int32)


def _server_tokens(reply: Reply[Any]) -> tuple[Int32Array, Int32Array] | None:
    """Return the token ids of prompt and answer, if the server sent them."""
    prompt = (reply.raw.model_extra or {}).get("prompt_token_ids")
    response = (reply.raw.choices[0].model_extra or {}).get("token_ids")
    try:
        return (np.array(prompt, np.int32), np.array(response, np.int32)) if prompt and response else None
    except (OverflowError, TypeError, ValueError):
        return None


def _head(role: object) -> str:
    return f"<|{role}|>\n"


def _shown(message: Mapping[str, Any]) -> str:
    return f"{_head(message['role'])}{_spoken(message)}\n"


def _spoken(message: Mapping[str, Any]) -> str:
    """Return what a message says: its text, and tool calls as JSON."""
    content = message.get("content") or message.get("refusal") or ""
    said: Iterable[object] = [content] if isinstance(content, str) else content
    calls: Iterable[Mapping[str, Any]] = message.get("tool_calls") or ()
    parts = [*said, *(call.get(str(call.get("type", "function")), call) for call in calls)]
    return "\n".join(part if isinstance(part, str) else _text_of(part) for part in parts)


def _text_of(part: object) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    return json.dumps(part, default=str)
