"""Forecast what speculation would bring on a client's sessions, with the cache that servers draft from."""

from __future__ import annotations

import json
import re
import sys
import threading
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from agentspec.cache.types import Int32Array
from agentspec.client.answers.reply import Reply, Speculation, total_speculation
from agentspec.client.messages import shown
from agentspec.draft_figures import DraftRates
from agentspec.errors import ConfigurationError, InvalidInputError

if TYPE_CHECKING:
    from agentspec.cache import SuffixCache
    from agentspec.simulate import Figures

TokensFrom: TypeAlias = Literal["server", "tokenizer", "approximation"]
Tokenize: TypeAlias = Callable[[str], Sequence[int]]

_MAX_BYTES = 64 << 20  # memory of the cache
_MAX_SESSIONS = 4_096
_MAX_PENDING_BYTES = 64 << 20  # memory of the calls since the last forecast
_MAX_TEXT_BYTES = 64 << 20  # memory of the texts whose tokens are remembered
_CALL_BYTES = 1_000  # memory of a call besides its messages
_MESSAGE_BYTES = 240  # memory of a message besides its text
_REFERENCE_BYTES = 8  # memory of each entry in a list of messages
_PIECE = re.compile(r"[^\S\r\n]?[^\W\d_]{1,5}|\d{1,3}|[^\S\r\n]?[^\s\w]{1,3}|_|[\r\n]+|[^\S\r\n]+")
_MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Forecast(DraftRates):
    """Hold what speculation would bring on the calls of a session, and what it brought where that is known.

    calls: model calls of the session that were replayed. Calls since the last forecast wait in memory, up to 64 MiB for
        all sessions together; beyond that the oldest are missing.
    tokens: tokens of their answers.
    steps: decode steps, each of which gives its accepted tokens and one more.
    drafted, accepted: draft tokens verified and accepted.
    accepted_by_source: `accepted` by the source of the token.
    tokens_from: where the tokens come from: the "server", a "tokenizer", or an "approximation" of one.
    measured: the sum of the servers' own figures; None without any.
    measured_calls: number of calls that `measured` adds up.
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
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    measured: Speculation | None = None
    measured_calls: int = 0
    seen: int = 0
    """Answers at the beginning of the history that were replayed already, or that a fork copied from its parent."""

    def add(self, found: Figures) -> None:
        """Add the figures of a replayed call."""
        self.calls += 1
        self.tokens += found.tokens
        self.steps += found.steps
        self.drafted += found.drafted
        self.accepted += found.accepted
        self.accepted_by_source.update(found.accepted_by_source)

    def add_measured(self, speculation: Speculation) -> None:
        """Add a server's own figures of a call."""
        self.measured = total_speculation([self.measured, speculation] if self.measured else [speculation])
        self.measured_calls += 1


@dataclass(frozen=True, slots=True)
class _PendingCall:
    """Hold one model call that was not replayed yet.

    sent: its messages, of which the first `resumed` came from the store. tokens: token ids of prompt and answer, if the
    server sent them. measured: the server's own figures, without the steps. size: about the bytes that it takes without
    its messages.
    """

    session: str
    group: str | None
    sent: Sequence[Mapping[str, Any]]
    resumed: int
    answer: Mapping[str, Any]
    tokens: tuple[Int32Array, Int32Array] | None
    measured: Speculation | None
    size: int


class _PendingCalls(deque[_PendingCall]):
    """Hold calls, oldest first, and count their memory. They are added and removed by the methods below only.

    bytes: about the memory that they take if nothing else holds their messages, which is so once their sessions are no
    longer used. A message counts once, however many calls share it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._shared: dict[int, tuple[int, int]] = {}  # by a message's id(): the calls that have it, and its bytes

    def append(self, call: _PendingCall) -> None:
        """Add a call."""
        super().append(call)
        self.bytes += call.size
        for message in (*call.sent, call.answer):
            uses, size = self._shared.get(id(message), (0, 0))
            if not uses:
                size = _MESSAGE_BYTES + _bytes_of(message)
                self.bytes += size
            self._shared[id(message)] = uses + 1, size

    def popleft(self) -> _PendingCall:
        """Remove the oldest call, and return it."""
        call = super().popleft()
        self._uncount(call)
        return call

    def discard(self, sessions: set[str]) -> None:
        """Remove the calls of these sessions."""
        kept = [call for call in self if call.session not in sessions]
        for call in self:
            if call.session in sessions:
                self._uncount(call)
        self.clear()
        self.extend(kept)

    def _uncount(self, call: _PendingCall) -> None:
        self.bytes -= call.size
        for message in (*call.sent, call.answer):
            uses, size = self._shared.pop(id(message), (1, 0))  # Ctrl-C may have cut off the counting
            if uses > 1:
                self._shared[id(message)] = uses - 1, size
            else:
                self.bytes -= size


class Forecaster:
    """Replay a client's calls in their order when a forecast is asked for.

    tokenizer: "server" takes the token ids that vLLM sends with its answers. A tokenizer.json, a model's folder or
    name, or a function from text to token ids tokenises the messages; None approximates that.
    max_bytes: memory of the calls that wait for a forecast; beyond it the oldest are forgotten.
    Raises ConfigurationError if the tokenizer cannot be loaded. Any thread may call the methods.
    """

    def __init__(self, tokenizer: str | Tokenize | None, max_bytes: int = _MAX_PENDING_BYTES) -> None:
        if not (tokenizer is None or isinstance(tokenizer, str) or callable(tokenizer)):
            raise ConfigurationError(
                "tokenizer: 'server', a tokenizer.json, a model's folder or name, or a function from text to ids"
                f" is needed, not {shown(tokenizer)}"
            )
        self.tokens_from: TokensFrom = "approximation" if tokenizer is None else "tokenizer"
        if tokenizer == "server":
            self.tokens_from = "server"
        encode = _loaded(tokenizer) if isinstance(tokenizer, str) and tokenizer != "server" else tokenizer
        self._texts = _TokenisedTexts(encode if callable(encode) else approximate_tokens)
        self._max_bytes = max_bytes
        self._noting = threading.Lock()  # guards `_pending`; never held during a replay, which takes seconds
        self._pending = _PendingCalls()
        self._replaying = threading.Lock()  # guards everything else
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
        answer: Mapping[str, Any] | None = None,
    ) -> None:
        """Remember a call until the next forecast. Never raises.

        sent: its messages. resumed: how many of them came from the store. answer: the reply's message as the session
        holds it. Give the session's own objects, so that each message of a session counts once.
        """
        answer = answer or reply.message
        tokens = None
        size = _CALL_BYTES
        if self.tokens_from == "server":
            tokens, sent = _server_tokens(reply), ()
            size += sum(part.nbytes for part in tokens or ())
        size += _REFERENCE_BYTES * len(sent)
        measured = reply.speculation and replace(reply.speculation, detail=())  # texts of all tokens take much memory
        call = _PendingCall(session or "", group, sent, resumed, answer, tokens, measured, size)
        with self._noting:
            self._pending.append(call)
            while self._pending.bytes > self._max_bytes:
                self._pending.popleft()

    def forecast(self, session: str, group: str | None, resumed: Sequence[Mapping[str, Any]]) -> Forecast:
        """Return the forecast of a session. resumed: the messages that came from the store. Takes CPU time."""
        with self._replaying:
            self._replay_pending()
            figures = self._figures_of(session, group, resumed)
            return Forecast(
                calls=figures.calls,
                tokens=figures.tokens,
                steps=figures.steps,
                drafted=figures.drafted,
                accepted=figures.accepted,
                accepted_by_source=dict(figures.accepted_by_source),
                tokens_from=self.tokens_from,
                measured=figures.measured,
                measured_calls=figures.measured_calls,
            )

    def forget(self, sessions: Iterable[str]) -> None:
        """Erase all that is held of these sessions. Waits for a forecast that is being made."""
        gone = set(sessions)
        with self._replaying:
            with self._noting:
                self._pending.discard(gone)
            self._texts.clear()
            for session in gone:
                self._sessions.pop(session, None)
                if self._cache is not None:
                    self._cache.remove_session(None, session)

    def _replay_pending(self) -> None:
        """Replay the calls that wait, oldest first. An error, such as the tokenizer's, costs that call alone."""
        for _ in range(len(self._pending)):
            with self._noting:
                if not self._pending:  # calls that were noted meanwhile have pushed out all that waited
                    return
                call = self._pending.popleft()
            self._replay_call(call)

    def _replay_call(self, call: _PendingCall) -> None:
        figures = self._figures_of(call.session, call.group, call.sent[: call.resumed])
        if call.tokens is not None:
            self._replay(figures, call.session, call.group, *call.tokens)
        elif self.tokens_from != "server":
            self._replay(figures, call.session, call.group, *self._in_tokens(call.sent, call.answer))
            figures.seen = max(figures.seen, _answers(call.sent) + 1)
        if call.measured is not None:
            figures.add_measured(call.measured)

    def _figures_of(self, session: str, group: str | None, resumed: Sequence[Mapping[str, Any]]) -> _SessionFigures:
        """Return a session's figures, after a replay of the answers to other clients that were read from the store.

        With the server's tokens these answers are left out, because the store does not have their tokens.
        """
        figures = self._sessions.setdefault(session, _SessionFigures())
        self._sessions.move_to_end(session)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        if self.tokens_from != "server" and len(resumed) > figures.seen:
            answers = [i for i, message in enumerate(resumed) if message["role"] == "assistant"]
            for i in answers[figures.seen :]:
                self._replay(figures, session, group, *self._in_tokens(resumed[:i], resumed[i]))
                figures.seen += 1
        return figures

    def _replay(
        self, figures: _SessionFigures, session: str, group: str | None, prompt: Int32Array, response: Int32Array
    ) -> None:
        from agentspec.cache import SuffixCache  # imported here: most clients never ask for a forecast
        from agentspec.simulate import Call, simulate

        if not len(response):
            return
        if self._cache is None:
            self._cache = SuffixCache(max_bytes=_MAX_BYTES)
        self._replayed += 1
        name = session or f"no session {self._replayed}"
        call = Call(self._replayed, name, 0, group, None, prompt, response)
        figures.add(simulate([call], self._cache, prefill_steps=True))

    def _in_tokens(self, sent: Sequence[Mapping[str, Any]], answer: Mapping[str, Any]) -> tuple[Int32Array, Int32Array]:
        parts = [self._texts.tokens_of(_in_prompt(message)) for message in sent]
        begin = self._texts.tokens_of(_header("assistant"))
        return np.concatenate([*parts, begin]), self._texts.tokens_of(_spoken(answer))


class _TokenisedTexts:
    """Tokenise texts, and remember their tokens, because each call of a session repeats the texts before."""

    def __init__(self, encode: Tokenize) -> None:
        self._encode = encode
        self._known: dict[str, Int32Array] = {}
        self._bytes = 0

    def tokens_of(self, text: str) -> Int32Array:
        """Return the tokens of a text."""
        found = self._known.get(text)
        if found is None:
            found = self._encoded(text)
            size = len(text) + found.nbytes
            if self._bytes + size > _MAX_TEXT_BYTES:
                self.clear()
            self._known[text] = found
            self._bytes += size
        return found

    def _encoded(self, text: str) -> Int32Array:
        token_ids = self._encode(text)
        try:
            return np.array(token_ids, np.int32).reshape(len(token_ids))
        except (OverflowError, TypeError, ValueError):
            raise InvalidInputError(f"tokenizer: its token ids are no list of int32: {shown(token_ids)}") from None

    def clear(self) -> None:
        """Forget all texts."""
        self._known.clear()
        self._bytes = 0


def approximate_tokens(text: str) -> list[int]:
    """Return token ids for a text, about as many as usual tokenizers make. Equal pieces of text have equal ids."""
    return [zlib.crc32(piece.encode()) % _MAX_TOKEN_ID for piece in _PIECE.findall(text)]


def _loaded(name: str) -> Tokenize:
    from agentspec.simulate import open_tokenizer

    return open_tokenizer(name, "tokenizer")


def _server_tokens(reply: Reply[Any]) -> tuple[Int32Array, Int32Array] | None:
    """Return the token ids of prompt and answer, if the server sent them."""
    prompt = (reply.raw.model_extra or {}).get("prompt_token_ids")
    response = (reply.raw.choices[0].model_extra or {}).get("token_ids")
    try:
        return (np.array(prompt, np.int32), np.array(response, np.int32)) if prompt and response else None
    except (OverflowError, TypeError, ValueError):
        return None


def _bytes_of(value: object) -> int:
    """Return about how many bytes a message, or a part of one, takes. Reads no text."""
    if isinstance(value, str):
        return sys.getsizeof(value) - sys.getsizeof("")  # a letter takes one to four bytes
    if isinstance(value, Mapping):
        return sum(map(_bytes_of, value.values()))
    return sum(map(_bytes_of, value)) if isinstance(value, list | tuple) else 0


def _answers(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def _header(role: object) -> str:
    """Return roughly the text that a chat template writes before a message."""
    return f"<|{role}|>\n"


def _in_prompt(message: Mapping[str, Any]) -> str:
    """Return roughly the text that a chat template makes of a message in a prompt."""
    return f"{_header(message['role'])}{_spoken(message)}\n"


def _spoken(message: Mapping[str, Any]) -> str:
    """Return the text of a message, with its tool calls as JSON."""
    content = message.get("content") or message.get("refusal") or ""
    texts = [content] if isinstance(content, str) else map(_text_of, content)
    calls: Iterable[Mapping[str, Any]] = message.get("tool_calls") or ()
    bodies = (call.get(str(call.get("type", "function")), call) for call in calls)
    return "\n".join([*texts, *(json.dumps(body, default=str) for body in bodies)])


def _text_of(part: object) -> str:
    """Return the text of a content part. An image, a sound or a file has its type alone, as a prompt has no base64."""
    if isinstance(part, Mapping):
        texts = (part.get(name) for name in ("text", "refusal", "type"))
        return next((text for text in texts if isinstance(text, str)), "")
    return part if isinstance(part, str) else json.dumps(part, default=str)
