"""Test the operator's public corpus: every tenant drafts from it, no request adds to it, and its memory counts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentspec.cache import DraftPolicy, Scope, SuffixCache
from agentspec.errors import InvalidInputError, InvalidTokenError

PUBLIC = list(range(500, 560))
SECRET = list(range(800, 860))


def draft(cache: SuffixCache, prompt: list[int], tenant: str | None = None, scope: Scope = "tenant") -> tuple[str, int]:
    """Return the source and the first token of the draft behind a prompt."""
    cache.start("q", prompt, tenant=tenant, scope=scope)
    found = cache.propose(["q"], 4)[0]
    cache.abort("q")
    return found.source, int(found.token_ids[0]) if len(found.token_ids) else -1


@pytest.mark.parametrize(
    ("tenant", "scope", "hit"),
    [("a", "tenant", True), (None, "tenant", True), ("a", "session", False), ("a", "none", False)],
)
def test_requests_that_share_draft_from_it(tenant: str | None, scope: Scope, hit: bool) -> None:
    cache = SuffixCache()
    found = cache.publish([PUBLIC, np.array(SECRET[:0], np.int32)], max_bytes=1 << 20)
    assert (found.texts, found.tokens, found.left_out) == (2, 60, 0)
    assert draft(cache, [1, 2, *PUBLIC[:20]], tenant, scope) == (("public", 520) if hit else ("", -1))


def test_nothing_that_a_caller_says_gets_into_it() -> None:
    cache = SuffixCache()
    cache.publish([PUBLIC], max_bytes=1 << 20)
    for session, tenant in (("s", "a"), (None, "a"), ("s", None)):
        cache.start("w", [*PUBLIC[:10], *SECRET[:30]], session=session, tenant=tenant, group="g")
        cache.propose(["w"], 4)
        cache.extend("w", SECRET[30:])
        turn = cache.finish("w")
        assert turn is not None
        cache.restore(turn)
    cache.catch_up()
    assert draft(cache, SECRET[30:50], "a") == ("global", 850)  # the tenant itself gets the draft
    assert draft(cache, SECRET[30:50], "b") == ("", -1)
    assert draft(cache, PUBLIC[:20], "b") == ("public", 520)


def test_what_a_tenant_learned_on_it_stays_the_tenants() -> None:
    """Whether drafts from the corpus were right tells what a tenant said."""
    cache = SuffixCache(policy=DraftPolicy(cost=0.2))
    cache.publish([PUBLIC], max_bytes=1 << 20)
    for _ in range(40):
        cache.start("teach", PUBLIC[:8], tenant="a")
        cache.propose(["teach"], 1)
        cache.extend("teach", [900])
        cache.abort("teach")
    assert draft(cache, PUBLIC[:8], "a") == ("", -1)
    assert draft(cache, PUBLIC[:8], "b") == ("public", 508)


def test_its_memory_counts_and_is_bounded() -> None:
    budget = 4 << 20
    cache = SuffixCache(max_bytes=budget)
    rng = np.random.default_rng(1)
    empty = cache.stats().bytes
    texts = [rng.integers(0, 30_000, 1000, np.int32) for _ in range(1000)]  # ten times the limit
    found = cache.publish(texts, max_bytes=1 << 20)
    assert 0 < found.texts < 150 and found.texts + found.left_out == 1000
    assert 0.5 * (1 << 20) < found.bytes <= 1 << 20
    assert cache.stats().bytes == empty + found.bytes == cache._core.recount()[1]
    for number in range(1000):
        cache.start("r", texts[number], session=f"s{number}", tenant=f"t{number % 7}")
        cache.extend("r", texts[-number])
        cache.finish("r")
    cache.catch_up()
    assert cache.stats().bytes <= budget and cache.stats().evictions > 100
    assert draft(cache, texts[0][:50].tolist(), "b") == ("public", int(texts[0][50]))
    cache.publish([PUBLIC], max_bytes=1 << 20)
    assert draft(cache, texts[0][:50].tolist(), "b")[0] != "public"
    assert cache.stats().bytes == cache._core.recount()[1]


def test_it_makes_room_for_itself_in_a_full_cache() -> None:
    """Publishing evicts at once, because no call may follow."""
    budget = 4 << 20
    cache = SuffixCache(max_bytes=budget)
    rng = np.random.default_rng(1)
    while not cache.stats().evictions:
        cache.start("r", rng.integers(0, 30_000, 4000, np.int32), session=f"s{cache.stats().tokens}", scope="session")
        cache.finish("r")
        cache.catch_up()
    before = cache.stats()
    cache.publish([rng.integers(0, 30_000, 1000, np.int32) for _ in range(100)], max_bytes=1 << 20)
    held = cache.stats()
    assert held.evictions > before.evictions and held.tokens < before.tokens
    assert held.bytes - held.leaving <= budget


def test_a_running_request_meets_it_and_its_successor() -> None:
    cache = SuffixCache()
    cache.start("r", PUBLIC[:10])
    assert not len(cache.propose(["r"], 4)[0].token_ids)
    cache.publish([PUBLIC], max_bytes=1 << 20)
    assert cache.propose(["r"], 4)[0].token_ids.tolist()[:1] == [510]
    cache.publish([[7, *PUBLIC[:10], 3, 4]], max_bytes=1 << 20)
    assert cache.candidates("r") == []  # drafts from the old corpus are dropped
    assert cache.propose(["r"], 4)[0].token_ids.tolist()[:1] == [3]
    cache.publish([], max_bytes=1 << 20)
    assert not len(cache.propose(["r"], 4)[0].token_ids)


def test_a_bad_text_changes_nothing() -> None:
    cache = SuffixCache()
    cache.publish([PUBLIC], max_bytes=1 << 20)
    before = cache.stats().bytes
    with pytest.raises(InvalidTokenError, match="text"):
        cache.publish([SECRET, [-1]], max_bytes=1 << 20)
    assert cache.stats().bytes == before and draft(cache, PUBLIC[:20]) == ("public", 520)


@pytest.mark.parametrize("wrong", [5, None, "ab", np.int32(3), np.array(3), iter([1]), [[1]], [1.5]])
def test_a_text_of_another_kind_is_refused(wrong: Any) -> None:
    cache = SuffixCache()
    cache.publish([PUBLIC], max_bytes=1 << 20)
    before = cache.stats().bytes
    with pytest.raises(InvalidTokenError, match=r"^text"):
        cache.publish([SECRET, wrong], max_bytes=1 << 20)
    assert cache.stats().bytes == before and draft(cache, PUBLIC[:20]) == ("public", 520)


@pytest.mark.parametrize("wrong", [None, "1", 1.5, -1, True, float("nan")])
def test_a_limit_of_another_kind_is_refused(wrong: Any) -> None:
    cache = SuffixCache()
    with pytest.raises(InvalidInputError, match=r"^max_bytes="):
        cache.publish([PUBLIC], max_bytes=wrong)
    with pytest.raises(InvalidInputError, match=r"^texts: "):
        cache.publish(5, max_bytes=1 << 20)  # type: ignore[arg-type]
    assert cache.publish([PUBLIC], max_bytes=np.int64(1 << 20)).texts == 1  # type: ignore[arg-type]


def test_a_snapshot_leaves_it_out(tmp_path: Path) -> None:
    cache = SuffixCache()
    cache.publish([PUBLIC], max_bytes=1 << 20)
    cache.save(tmp_path / "snapshot")
    assert draft(SuffixCache.load(tmp_path / "snapshot"), PUBLIC[:20]) == ("", -1)
