"""What a cache makes of turns that another process has just stored, and tenants that are loaded and forgotten."""

import numpy as np
import pytest

from agentspec.cache import FinishedTurn, SuffixCache
from agentspec.errors import InvalidInputError


def turn(number: int, session: str | None = "s", group: str | None = None, tenant: str | None = "t") -> FinishedTurn:
    """A turn that can be told from others: ten tokens, and two more after each of them."""
    prompt, response = np.arange(number, number + 5), np.arange(number + 5, number + 15)
    return FinishedTurn(
        tenant, session, 0, prompt.astype(np.int32), response.astype(np.int32), group, writer="w", number=number
    )


def source_behind(cache: SuffixCache, number: int, **names: str) -> str:
    """The source that drafts what the turn with this number said."""
    cache.start("probe", list(range(number, number + 7)), **names)  # type: ignore[arg-type]
    draft = cache.propose(["probe"], 1, cost=0.0)[0]
    cache.abort("probe")
    assert draft.token_ids.tolist() in ([], [number + 7])
    return draft.source


def test_a_followed_turn_goes_only_where_something_is_held() -> None:
    cache = SuffixCache()
    cache.restore(turn(100), held_only=True)
    assert cache.tenants() == [] and cache.stats().tokens == 0  # nobody of the tenant was here
    cache.restore(turn(200, session="a"))
    cache.restore(turn(300, session="b", group="g"), held_only=True)  # neither session nor group is held
    assert not cache.has_session("t", "b")
    assert cache.needs_load("t", "b") and cache.needs_load("t", group="g")
    assert source_behind(cache, 300, tenant="t", session="x", group="g") == "global"
    cache.restore(turn(400, session="a"), held_only=True)
    assert source_behind(cache, 400, tenant="t", session="a") == "session"
    cache.restore(turn(500, session="c", group="g"))
    cache.restore(turn(600, session="b", group="g"), held_only=True)
    assert source_behind(cache, 600, tenant="t", session="x", group="g") == "group"
    assert not cache.has_session("t", "b")
    before = cache.stats().tokens
    for number, session, group in ((400, "a", None), (600, "b", "g")):
        cache.restore(turn(number, session=session, group=group), held_only=True)
    assert cache.stats().tokens == before
    assert source_behind(cache, 400, tenant="u", session="a") == ""


def test_an_erased_session_leaves_the_corpus_though_only_its_followed_turns_are_there() -> None:
    cache = SuffixCache()
    cache.restore(turn(200, session="a"))
    cache.restore(turn(300, session="b"), held_only=True)
    cache.catch_up()
    assert source_behind(cache, 300, tenant="t") == "global"
    cache.remove_session("t", "b")
    assert source_behind(cache, 300, tenant="t") == ""
    assert source_behind(cache, 200, tenant="t") == "global"


def test_a_followed_turn_does_not_count_as_use() -> None:
    cache = SuffixCache()
    for number, name in ((1000, "old"), (2000, "new")):
        cache.restore(turn(number, session=name, tenant=None))
    for number in range(3000, 3400, 20):
        cache.restore(turn(number, session="old", tenant=None), held_only=True)
    cache.resize(max_tokens=cache.stats().tokens * 6 // 10)
    cache.catch_up()
    assert cache.has_session(None, "new") and not cache.has_session(None, "old")


def test_a_private_turn_reaches_its_held_session_only() -> None:
    cache = SuffixCache()
    private = FinishedTurn("t", "s", 0, np.arange(5, dtype=np.int32), np.arange(5, 15, dtype=np.int32), scope="session")
    cache.restore(turn(100, session="other"))
    held = cache.stats().tokens
    cache.restore(private, held_only=True)
    assert cache.stats().tokens == held
    cache.restore(turn(200))
    cache.restore(private, held_only=True)
    assert source_behind(cache, 0, tenant="t", session="s") == "session"
    assert source_behind(cache, 0, tenant="t") == ""


def test_a_tenants_corpus_is_loaded_on_demand() -> None:
    cache = SuffixCache()
    assert cache.needs_load("t") and cache.needs_load(None)
    cache.mark_loaded("t")  # unknown to the cache: nothing to mark
    assert cache.needs_load("t")
    cache.restore(turn(100))
    cache.restore(turn(200, tenant=None))
    for tenant in ("t", None):
        assert cache.needs_load(tenant)
        cache.mark_loaded(tenant)
        assert not cache.needs_load(tenant)
    assert cache.needs_load("t", "s") and cache.needs_load("t", group="g")
    with pytest.raises(InvalidInputError, match="session='s', group='g'"):
        cache.needs_load("t", "s", group="g")
    cache.resize(max_tokens=1)
    cache.catch_up()
    assert cache.needs_load("t")  # all of its corpus was evicted


def test_a_tenant_is_forgotten_whole_unless_requests_of_it_run() -> None:
    cache = SuffixCache()
    empty = cache.stats()
    for tenant in ("t", "u"):
        for number in range(100):
            cache.restore(turn(100 * number, session=f"s{number}", group=f"g{number % 7}", tenant=tenant))
        cache.mark_loaded(tenant)
    cache.start("r", [1, 2, 3], tenant="t")
    assert not cache.forget_tenant("t")
    assert cache.tenants() == ["u", "t"] and cache.has_session("t", "s1")
    cache.abort("r")
    assert cache.forget_tenant("t") and cache.forget_tenant("nobody")
    assert cache.tenants() == ["u"]
    assert cache.needs_load("t") and not cache.needs_load("u")
    assert not cache.has_session("t", "s1") and cache.has_session("u", "s1")
    assert source_behind(cache, 100, tenant="t", session="s1") == ""
    assert source_behind(cache, 100, tenant="u", session="s1") == "session"
    assert cache.forget_tenant("t") and cache.forget_tenant("u")
    cache.catch_up()
    assert (cache.stats().tokens, cache.stats().bytes) == (0, empty.bytes)
    cache.restore(turn(100))
    assert source_behind(cache, 100, tenant="t") == "global"
