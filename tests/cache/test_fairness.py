"""Test that a caller who holds much loses text before others do, whatever names it makes up."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agentspec.cache import Budget, FinishedTurn, SuffixCache
from agentspec.cache.types import Int32Array
from tests.timing import assert_fast, cpu

BUDGET = 2 << 20
QUIET = np.arange(1500, dtype=np.int32)
"""Text of a neighbour, said once. It takes less than a tenth of the budget."""


def say(cache: SuffixCache, text: Int32Array, **names: Any) -> None:
    cache.start("r", text[: len(text) // 2], **names)
    cache.extend("r", text[len(text) // 2 :])
    cache.finish("r")


def drafts(cache: SuffixCache, **names: Any) -> list[str]:
    """Return the sources of a draft in the middle of the neighbour's text."""
    cache.catch_up()
    cache.start("q", QUIET[1200:1300], **names)
    draft = cache.propose(["q"], 4)[0]
    cache.abort("q")
    return [draft.source] if draft.token_ids.tolist() == QUIET[1300:1304].tolist() else []


FLOODS: dict[str, Callable[[int], dict[str, Any]]] = {
    "sessions": lambda n: {"session": f"s{n}", "tenant": "loud", "owner": "loud", "tenant_owner": "loud"},
    "private sessions": lambda n: {"session": f"s{n}", "tenant": "loud", "owner": "loud", "scope": "session"},
    "groups": lambda n: {"group": f"g{n}", "tenant": "loud", "owner": "loud", "tenant_owner": "loud"},
    "salts": lambda n: {"session": "s", "tenant": f"t{n}", "owner": "loud", "tenant_owner": "loud"},
    "salts without sessions": lambda n: {"tenant": f"t{n}", "owner": "loud", "tenant_owner": "loud"},
    "sessions of a shared tenant": lambda n: {
        "session": f"s{n}",
        "tenant": "all",
        "owner": "loud",
        "tenant_owner": "all",
    },
}


@pytest.mark.parametrize("flood", FLOODS)
def test_ten_thousand_names_of_one_caller_leave_a_neighbours_session(flood: str) -> None:
    """The flood takes at least ten times the budget. Kinds of names with the same rule are tested with fewer."""
    names = 10_000 if flood in ("sessions", "salts") else 3_000
    cache = SuffixCache(max_bytes=BUDGET)
    quiet = {"session": "quiet", "tenant": "all", "owner": "quiet", "tenant_owner": "all"}
    say(cache, QUIET, **quiet)
    rng = np.random.default_rng(1)
    for number in range(names):
        say(cache, rng.integers(3000, 30_000, 100, np.int32), **FLOODS[flood](number))
        if number % 500 == 499:
            cache.catch_up()
            assert cache.stats().bytes <= BUDGET
    assert cache.stats().evictions > names / 2
    assert drafts(cache, **quiet) == ["session"]


def test_a_neighbours_corpus_stays() -> None:
    cache = SuffixCache(max_bytes=BUDGET)
    quiet = {"tenant": "quiet", "owner": "quiet", "tenant_owner": "quiet"}
    say(cache, QUIET, **quiet)
    rng = np.random.default_rng(1)
    for number in range(1500):
        say(cache, rng.integers(3000, 30_000, 400, np.int32), tenant="loud", owner="loud", tenant_owner="loud")
        if number % 500 == 0:
            cache.catch_up()
    assert cache.stats().evictions > 300
    assert drafts(cache, **quiet) == ["global"]


def test_what_one_caller_uses_longest_ago_still_goes_first() -> None:
    cache = SuffixCache(max_tokens=2700)
    for number in range(4):
        say(cache, QUIET[:500] + number, session=f"s{number}", scope="session", owner="a")
        assert cache.has_session(None, "s0") == (number < 3)
    assert [cache.has_session(None, f"s{n}") for n in range(4)] == [False, True, True, True]


def test_a_caller_who_says_little_and_often_does_not_displace_one_of_the_same_size() -> None:
    """If all callers hold about as much, the least recently used text goes, whoever said it."""
    cache = SuffixCache(max_tokens=2700)
    for number in range(4):
        say(cache, QUIET[:500], session=f"s{number}", scope="session", owner=f"caller {number}")
    assert [cache.has_session(None, f"s{n}") for n in range(4)] == [False, True, True, True]


def test_a_request_says_anew_whom_its_session_counts_for() -> None:
    """A restored session counts for its tenant, which other callers share, until a request names its owner."""

    def survivors(owner: str | None) -> list[bool]:
        cache = SuffixCache(max_tokens=6000)
        for number in range(4):
            turn = FinishedTurn("acme", f"s{number}", 0, QUIET[:100], QUIET[:100], scope="session", owner=owner)
            cache.restore(turn)
        if owner is None:  # requests name the loud caller as the owner of these two
            for number in (2, 3):
                cache.start("r", QUIET[:10], session=f"s{number}", tenant="acme", scope="session", owner="loud")
                cache.abort("r")
        for number in range(100):
            say(cache, QUIET[:500], session=f"loud {number}", tenant="acme", scope="session", owner="loud")
        return [cache.has_session("acme", f"s{n}") for n in range(4)]

    assert survivors(None) == [True, True, False, False]
    assert survivors("quiet") == [True, True, True, True]
    assert survivors("loud") == [False, False, False, False]


def test_owners_are_in_a_snapshot(tmp_path: Any) -> None:
    cache = SuffixCache(max_tokens=3000)
    say(cache, QUIET[:500], session="quiet", scope="session", owner="quiet")
    for number in range(3):
        say(cache, QUIET[:500], session=f"s{number}", scope="session", owner="loud")
    cache.save(tmp_path / "snapshot")
    loaded = SuffixCache.load(tmp_path / "snapshot", max_tokens=3000)
    for number in range(50):
        say(loaded, QUIET[:500], session=f"new {number}", scope="session", owner="loud")
    assert loaded.has_session(None, "quiet") and not loaded.has_session(None, "s2")


def test_owners_who_hold_nothing_take_no_memory() -> None:
    cache = SuffixCache()
    empty = cache.stats().bytes
    for number in range(1000):
        cache.start("r", [1, 2], session="s", tenant="t", owner=f"owner {number}", tenant_owner=f"owner {number}")
        cache.abort("r")
    one = cache.stats().bytes
    assert one < empty + 4000 and cache._core.recount()[1] == one


@pytest.mark.alone
def test_an_eviction_costs_the_same_whoever_is_there() -> None:
    def cost(owners: int) -> float:
        cache = SuffixCache(per_session=Budget())
        for number in range(6_000):
            name = f"caller {number % owners}"
            cache.restore(FinishedTurn(name, f"s{number}", 0, QUIET[:16], QUIET[:16], scope="session", owner=name))

        def evict() -> None:
            for tokens in range(cache.stats().tokens, 1000, -500):
                cache.resize(max_tokens=tokens)

        return cpu(evict) / cache.stats().evictions

    cost(10)  # warm up: the first call creates what all need
    assert_fast(lambda: {"ratio": cost(6_000) / cost(10)}, ratio=6.0)  # a search among all owners: some hundred
