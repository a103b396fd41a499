"""Make suffix caches serve turns, and keep their snapshot."""

from pathlib import Path

import numpy as np

from agentspec.cache import FinishedTurn, SuffixCache
from agentspec.cache.types import Int32Array
from agentspec.server_ext.persistence.warm_restart import SnapshotKeeper, snapshot_identity

NUMBERS = np.random.default_rng(7)
PHRASES = NUMBERS.integers(0, 900, (40, 12), np.int32)


def text(tokens: int) -> Int32Array:
    pieces: list[Int32Array] = []
    for _ in range(tokens // 12 + 1):
        fresh = NUMBERS.integers(0, 900, 12, np.int32)
        pieces.append(PHRASES[NUMBERS.integers(40)] if NUMBERS.random() < 0.7 else fresh)
    return np.concatenate(pieces, dtype=np.int32)[:tokens]


def converse(caches: list[SuffixCache], record: int, tokens: int = 150) -> FinishedTurn:
    """Let all caches serve the same request. Return its turn."""
    prompt, response = text(40), text(tokens)
    turns = []
    for cache in caches:
        cache.start("r", prompt, session=f"s{record % 5}", tenant="t")
        at = 0
        while at < len(response):
            draft = cache.propose(["r"], 8)[0].token_ids
            count = min(len(draft), len(response) - at)
            wrong = np.flatnonzero(draft[:count] != response[at : at + count])
            step = (int(wrong[0]) if len(wrong) else count) + 1
            cache.extend("r", response[at : at + step])
            at += step
        turn = cache.finish("r", name=("w", record))
        assert turn is not None
        turns.append(turn)
        cache.catch_up()
    return turns[0]


def drafts(cache: SuffixCache) -> list[object]:
    seen: list[object] = []
    for number, phrase in enumerate(PHRASES):
        cache.start("q", phrase[:6], session=f"s{number % 5}", tenant="t")
        draft = cache.propose(["q"], 8)[0]
        seen.append((draft.token_ids.tolist(), draft.probabilities.tolist(), draft.sources.tolist()))
        cache.abort("q")
    return seen


def make() -> SuffixCache:
    return SuffixCache(vocab_size=1000)


def keep(path: Path, cache: SuffixCache, note: bytes = b"") -> SnapshotKeeper:
    keeper = SnapshotKeeper(path, cache, snapshot_identity("model", cache), note=lambda: note)
    keeper.wait_loaded()
    keeper.start()
    return keeper
