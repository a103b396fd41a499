"""Test turns that another process has just stored, and tenants that are loaded and forgotten."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from agentspec.cache import FinishedTurn, SuffixCache
from agentspec.errors import InvalidInputError


def turn(number: int, session: str | None = "s", group: str | None = None, tenant: str | None = "t") -> FinishedTurn:
    """Return a turn whose 15 tokens count up from its number."""
    prompt, response = np.arange(number, number + 5), np.arange(number + 5, number + 15)
    return FinishedTurn(
        tenant, session, 0, prompt.astype(np.int32), response.astype(np.int32), group, writer="w", number=number
    )


def source_behind(cache: SuffixCache, number: int, **names: str) -> str:
    """Return the source of the draft behind the beginning of the turn with this number."""
    cache.start("probe", list(range(number, number + 7)), **names)  # type: ignore[arg-type]
    draft = cache.propose(["probe"], 1, cost=0.0)[0]
    cache.abort("probe")
    assert draft.token_ids.tolist() in ([], [number + 7])
    return draft.source


def test_a_followed_turn_goes_only_where_something_is_held() -> None:
    cache = SuffixCache()
    cache.restore(turn(100), held_only=True)
    assert cache.tenants() == [] and cache.stats().tokens == 0  # the cache doesn't hold the tenant
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


def sure_of(cache: SuffixCache, tenant: str = "t") -> float:
    """Return the probability of the first token of a draft that copies a turn of the tenant."""
    cache.start("probe", [1, 2, 3], tenant=tenant)
    draft = cache.propose(["probe"], 1, cost=0.0)[0]
    cache.abort("probe")
    assert draft.token_ids.tolist() == [4]
    return float(draft.probabilities[0])


def run(cache: SuffixCache, number: int, tenant: str = "t") -> FinishedTurn:
    """Run a turn that repeats the others, verified greedily, and return it."""
    response = list(range(4, 24))
    cache.start("request", [1, 2, 3], session=f"s{number}", tenant=tenant)
    while response:
        drafted = cache.propose(["request"], 8)[0].token_ids.tolist()
        right = next((i for i, (a, b) in enumerate(zip(drafted, response, strict=False)) if a != b), len(drafted))
        cache.extend("request", response[: right + 1])
        response = response[right + 1 :]
    turn = cache.finish("request", name=("w", number))
    assert turn is not None
    return turn


def test_a_replica_learns_from_turns_that_ran_elsewhere() -> None:
    there, learning, restoring = SuffixCache(), SuffixCache(), SuffixCache()
    for number in range(12):
        finished = run(there, number)
        assert learning.learn_from(finished) == (20 if number else 0)  # at first the cache doesn't know the tenant
        for cache in (learning, restoring):
            cache.restore(finished)
            cache.catch_up()
    assert sure_of(learning) == pytest.approx(sure_of(there), abs=0.02)
    assert sure_of(restoring) < sure_of(there) - 0.05


def test_learning_from_a_turn_keeps_nothing_of_it_and_happens_once() -> None:
    cache = SuffixCache()
    cache.restore(turn(100))
    before = cache.stats()
    assert cache.learn_from(turn(200)) == 10
    assert (cache.stats().tokens, cache.stats().requests, cache.stats().pending) == (before.tokens, 0, before.pending)
    assert source_behind(cache, 200, tenant="t") == ""
    cache.restore(turn(200))
    assert cache.learn_from(turn(200)) == 0


def test_nobody_learns_from_another_tenants_turns_or_from_private_ones() -> None:
    ours, theirs = SuffixCache(), SuffixCache()
    for number in range(12):
        for cache, tenant in ((ours, "t"), (theirs, "t"), (ours, "other")):
            run(cache, number + 100 * (tenant == "other"), tenant)
    finished = run(theirs, 99)
    before = sure_of(ours, "other")
    assert ours.learn_from(finished) == 20
    assert sure_of(ours, "other") == before
    assert ours.learn_from(replace(finished, scope="session")) == 0
    assert ours.learn_from(replace(finished, tenant="nobody")) == 0


def test_a_session_that_its_client_ends_while_a_turn_of_it_is_learned_from_goes_then() -> None:
    response = np.random.default_rng(1).integers(0, 1000, 20_000, np.int32)
    for _ in range(10):  # a busy machine may learn before this thread goes on, or begin later
        cache = SuffixCache()
        cache.restore(turn(100))
        learning = threading.Thread(target=cache.learn_from, args=(replace(turn(200), response=response),))
        learning.start()
        time.sleep(0.05)
        cache.free_session("t", "s")
        in_time = cache.has_session("t", "s") and learning.is_alive()
        learning.join()
        assert not cache.has_session("t", "s")
        if in_time:
            return
    raise AssertionError("the session was never there while a turn of it was learned from")
