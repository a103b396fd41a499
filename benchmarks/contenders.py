"""Our cache and the peer's behind the same few calls, so that both do the same work."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import peer
from trace_files import Tokens

from agentspec.cache import DraftPolicy, SuffixCache

TENANT = "bench"
DEPTH = 64
MAX_DRAFT = 32
_NOTHING = np.zeros(0, np.int32)


class Ours:
    """SuffixCache, all requests of one tenant. `filled`: seconds it took to take in documents."""

    def __init__(self, policy: DraftPolicy) -> None:
        self.cache = SuffixCache(policy=policy)
        self.filled = 0.0

    def fill(self, documents: Sequence[Tokens]) -> None:
        """Takes in finished responses."""
        begin = perf_counter()
        for document in documents:
            self.cache.start("fill", _NOTHING, tenant=TENANT)
            self.cache.extend("fill", document)
            self.cache.finish("fill")
        self.cache.catch_up()
        self.filled += perf_counter() - begin

    def start(self, name: str, prompt: Tokens, session: str | None = None) -> None:
        self.cache.start(name, prompt, session=session, tenant=TENANT)

    def step(self, names: Sequence[str], table: Tokens, length: int, room: int = MAX_DRAFT) -> None:
        """A decode step as the engine makes it: row i of the table holds request i, `length` tokens of it."""
        count = len(names)
        limits = np.full(count, MAX_DRAFT, np.int32)
        self.cache.step(names, table, np.arange(count), np.full(count, length), np.full(count, room), limits)

    def propose(self, name: str) -> None:
        self.cache.propose([name], MAX_DRAFT)

    def extend(self, name: str, tokens: Tokens) -> None:
        self.cache.extend(name, tokens)

    def stop(self, name: str) -> None:
        self.cache.finish(name)

    def forget(self, name: str) -> None:
        """Ends a request of which nothing stays."""
        self.cache.abort(name)


class Peer:
    """ArcticInference's SuffixDecodingCache with its defaults, depth 64."""

    def __init__(self, folder: Path | None) -> None:
        self.cache: Any = peer.load(folder).SuffixDecodingCache(max_tree_depth=DEPTH)
        self.filled = 0.0
        self._documents = 0

    def fill(self, documents: Sequence[Tokens]) -> None:
        begin = perf_counter()
        for document in documents:
            self._documents += 1
            self.cache.start_request(self._documents, _NOTHING)
            self.cache.add_active_response(self._documents, document)
            self.cache.stop_request(self._documents)
        self.filled += perf_counter() - begin

    def start(self, name: str, prompt: Tokens) -> None:
        self.cache.start_request(name, prompt)

    def speculate(self, name: str, context: Tokens) -> None:
        """`context`: the last tokens of prompt and response, at most the depth."""
        self.cache.speculate(name, context, max_spec_tokens=MAX_DRAFT)

    def extend(self, name: str, tokens: Tokens) -> None:
        self.cache.add_active_response(name, tokens)

    def forget(self, name: str) -> None:
        self.cache.stop_request(name)
        self.cache.evict_cached_response(name)


def take(documents: Iterator[Tokens], tokens: int) -> list[Tokens]:
    """The next documents, of that many tokens altogether or a few more."""
    taken: list[Tokens] = []
    while tokens > 0:
        taken.append(next(documents))
        tokens -= len(taken[-1])
    return taken
