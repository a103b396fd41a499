"""Remember, for requests that ask for it, what each decode step drafted and where each token came from."""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from agentspec.cache import SOURCES

Packed: TypeAlias = Sequence[bytes]
"""Steps of a trace as arrays (`Trace.packed`)."""

_Values = TypeVar("_Values", "array[int]", bytearray)

_HIDDEN = -1
_SHARED = SOURCES.index("global")
_STEPS_ON_THEIR_WAY = 2
"""A draft waits for its verification, and a step may be drafting while a session is erased."""
_STEP_BYTES, _TOKEN_BYTES, _TRACE_BYTES = 16, 5, 512


class Trace:
    """Hold the decode steps of one request. session: the key of its session. tenant: whose texts it drafts from.

    Step i owns ``lengths[i]`` tokens, ``rejections[i]`` rejected ids, and ``accepted[i] + rejections[i]`` sources. Flat
    arrays take little memory, and `packed` copies them in no time however many steps there are.

    shares_corpus: whether the request drafts from a corpus that other principals share. Rejected tokens from there are
    redacted, because they may quote others; accepted ones are the request's own text.
    """

    def __init__(self, session: str | None, shares_corpus: bool, tenant: str | None = None) -> None:
        self.session = session
        self.tenant = tenant
        self.dropped = False
        self._shares = shares_corpus
        self._tokens, self._lengths, self._accepted = array("i"), array("i"), array("i")
        self._rejected, self._rejections = array("i"), array("i")
        self._sources = bytearray()  # step by step: sources of the accepted tokens, then of the rejected ones
        self._draft: tuple[Sequence[int], Sequence[int]] = ((), ())
        self._steps_left_to_hide = 0  # next steps whose rejected tokens are to be hidden

    @property
    def bytes(self) -> int:
        """Return about how many bytes this takes."""
        tokens = len(self._tokens) + len(self._rejected)
        return _TRACE_BYTES + _TOKEN_BYTES * tokens + _STEP_BYTES * len(self._lengths)

    def add(self, tokens: Sequence[int], drafted: int, accepted: int) -> None:
        """Add a step: its verified tokens, and how many of the draft were verified and accepted."""
        draft, sources = (part[:drafted] for part in self._draft)
        accepted = min(accepted, len(tokens), len(draft))
        rejected = self._redacted(draft[accepted:], sources[accepted:])
        if self._steps_left_to_hide:
            self._steps_left_to_hide -= 1
            rejected = [_HIDDEN] * len(rejected)
        self._push(tokens, accepted, rejected, sources)

    def drop(self) -> None:
        """Forget all steps, because the request goes on holding this until it ends."""
        self.dropped = True
        self._tokens, self._lengths, self._accepted = array("i"), array("i"), array("i")
        self._rejected, self._rejections, self._sources = array("i"), array("i"), bytearray()
        self._draft = ((), ())

    def hide_rejected(self) -> None:
        """Hide the rejected tokens, and those of drafts on their way. Accepted ones are the request's own text."""
        self._rejected = array("i", [_HIDDEN]) * len(self._rejected)
        self._steps_left_to_hide = _STEPS_ON_THEIR_WAY

    def cut(self, count: int) -> None:
        """Take back the last tokens, which the caller did not get. Those that were drafted count as rejected."""
        cut_steps = []
        while count > 0 and self._lengths:
            tokens, accepted, rejected, sources = self._pop()
            kept = max(len(tokens) - count, 0)
            count -= len(tokens) - kept
            left = min(accepted, kept)  # tokens that still count as accepted
            if left < accepted:
                rejected[:0] = array("i", self._redacted(tokens[left:accepted], sources[left:accepted]))
            cut_steps.append((tokens[:kept], left, rejected, sources))
        for step in reversed(cut_steps):
            self._push(*step)

    def _push(self, tokens: Sequence[int], accepted: int, rejected: Sequence[int], sources: Sequence[int]) -> None:
        """Add a step. accepted: how many of its tokens were drafted. sources: of these, then of ``rejected``."""
        self._tokens.extend(tokens)
        self._lengths.append(len(tokens))
        self._accepted.append(accepted)
        self._rejected.extend(rejected)
        self._rejections.append(len(rejected))
        self._sources.extend(sources)

    def _pop(self) -> tuple[array[int], int, array[int], bytearray]:
        """Remove the last step. Return what `_push` was given."""
        accepted, rejections = self._accepted.pop(), self._rejections.pop()
        tokens, rejected = _take(self._tokens, self._lengths.pop()), _take(self._rejected, rejections)
        return tokens, accepted, rejected, _take(self._sources, accepted + rejections)

    def _redacted(self, tokens: Sequence[int], sources: Sequence[int]) -> list[int]:
        """Return rejected tokens with -1 in place of those that may quote other principals."""
        if not self._shares:
            return list(tokens)
        return [_HIDDEN if source == _SHARED else token for token, source in zip(tokens, sources, strict=True)]

    def note_draft(self, tokens: Sequence[int], sources: Sequence[int]) -> None:
        """Note the draft that the next step may verify. sources: indices into SOURCES."""
        if not self.dropped:
            self._draft = (tokens, sources)

    def packed(self) -> Packed:
        """Return the steps for `steps_of`. Takes microseconds, because the engine's thread calls it between two steps.

        Another thread may drop the trace meanwhile; then parts of it are missing.
        """
        parts = (self._lengths, self._accepted, self._rejections, self._tokens, self._rejected)
        return [*(part.tobytes() for part in parts), bytes(self._sources)]


def _take(values: _Values, count: int) -> _Values:
    """Remove the last values. Return them."""
    begin = len(values) - count
    taken = values[begin:]
    del values[begin:]
    return taken


def steps_of(packed: Packed) -> list[dict[str, Any]]:
    """Return the steps of a packed trace as JSON.

    tokens: ids. sources: of the drafted ones, which come first; the last token of a step is the model's own. rejected,
    rejected_sources: drafted tokens that were not accepted, or lie behind the end of what the caller got; -1 for an id
    that is redacted.
    """
    *parts, all_sources = packed
    lengths, acceptances, rejections, tokens, all_rejected = (array("i", part) for part in parts)
    steps, at, rejected_at, source_at = [], 0, 0, 0
    for length, accepted, rejected in zip(lengths, acceptances, rejections, strict=False):
        sources = [SOURCES[source] for source in all_sources[source_at : source_at + accepted + rejected]]
        steps.append(
            {
                "tokens": tokens[at : at + length].tolist(),
                "sources": sources[:accepted],
                "rejected": all_rejected[rejected_at : rejected_at + rejected].tolist(),
                "rejected_sources": sources[accepted:],
            }
        )
        at, rejected_at, source_at = at + length, rejected_at + rejected, source_at + accepted + rejected
    return steps


class HoldsTrace(Protocol):
    """Hold the trace of a request, as its figures do (`RequestFigures`). None: it has none, or it was dropped."""

    trace: Trace | None


class Traces:
    """Keep the traces of the latest requests that asked for one. running: traced requests that have not ended.

    max_bytes: limit of all traces. Beyond it the oldest are dropped, whole.
    """

    def __init__(self, max_bytes: int) -> None:
        self.bytes = 0
        self.running = 0
        self._max_bytes = max_bytes
        self._held: deque[tuple[HoldsTrace, Trace]] = deque()  # oldest first
        self._lock = threading.Lock()  # sessions may be erased by another thread

    def begin(self, figures: HoldsTrace, session: str | None, shares_corpus: bool, tenant: str | None = None) -> Trace:
        """Return a new trace, kept with the figures of its request."""
        trace = figures.trace = Trace(session, shares_corpus, tenant)
        self.running += 1
        with self._lock:
            self._held.append((figures, trace))
            self._grow(trace.bytes)
        return trace

    def end(self) -> None:
        """Note that a traced request has ended."""
        self.running -= 1

    def add(self, trace: Trace, tokens: Sequence[int], drafted: int, accepted: int) -> None:
        """Add a step to a trace, unless it was dropped."""
        with self._lock:
            if not trace.dropped:
                before = trace.bytes
                trace.add(tokens, drafted, accepted)
                self._grow(trace.bytes - before)

    def cut(self, trace: Trace, count: int) -> None:
        """Take back the last tokens of a trace, unless it was dropped."""
        with self._lock:
            if not trace.dropped:
                before = trace.bytes
                trace.cut(count)
                self._grow(trace.bytes - before)

    def erase(self, session: str, tenants: Collection[str | None]) -> None:
        """Drop the traces of a session, and hide the rejected tokens of these tenants, which may quote it."""
        with self._lock:
            gone = [held for held in self._held if held[1].session == session]
            self._held = deque(held for held in self._held if held[1].session != session)
            for held in gone:
                self._drop(*held)
            for _, trace in self._held:
                if trace.tenant in tenants:
                    trace.hide_rejected()

    def _grow(self, size: int) -> None:
        self.bytes += size
        while self.bytes > self._max_bytes and self._held:
            self._drop(*self._held.popleft())

    def _drop(self, figures: HoldsTrace, trace: Trace) -> None:
        self.bytes -= trace.bytes
        trace.drop()
        figures.trace = None
