"""Test budgets, eviction and erasure."""

from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from agentspec.cache import Budget, Scope, SuffixCache
from agentspec.errors import ConfigurationError
from tests.timing import assert_fast, cpu


def run(
    cache: SuffixCache,
    response: list[int],
    *,
    prompt: tuple[int, ...] = (),
    session: str | None = None,
    group: str | None = None,
    tenant: str | None = None,
    scope: Scope = "tenant",
) -> None:
    cache.start("run", list(prompt), session=session, group=group, tenant=tenant, scope=scope)
    cache.extend("run", response)
    cache.finish("run")


def finds(cache: SuffixCache, context: list[int], **names: Any) -> list[int]:
    """Return the draft behind a context, of at most one token."""
    cache.start("probe", [], **names)
    cache.extend("probe", context)
    tokens: list[int] = cache.propose(["probe"], 1)[0].token_ids.tolist()
    cache.abort("probe")
    return tokens


def test_a_session_over_its_budget_keeps_its_newest_part() -> None:
    cache = SuffixCache(per_session=Budget(tokens=400))
    for turn in range(20):
        run(cache, [100 * turn + n for n in range(50)], session="s", scope="session")
        assert cache.stats().tokens <= 2 * 400  # its own text, and its family's responses
    assert finds(cache, [1910, 1911, 1912], session="s") == [1913]
    assert finds(cache, [10, 11, 12], session="s") == []


def test_tenants_count_in_the_budget() -> None:
    """Ten times as many tenants as fit begin: the least recently used go, but one with a running request stays."""
    cache = SuffixCache(vocab_size=1000, max_bytes=4 << 20)
    cache.start("stays", [5, 6, 7], tenant="first")
    run(cache, [1, 2, 3, 4], tenant="first")
    for number in range(20_000):
        run(cache, [1, 2, 3, 4], tenant=f"t{number}")
    assert cache.stats().bytes <= 4 << 20 and 500 < cache.stats().tenants < 10_000
    assert finds(cache, [1, 2, 3], tenant="t19999") == [4]
    assert finds(cache, [1, 2, 3], tenant="first") == [4]
    assert finds(cache, [1, 2, 3], tenant="t0") == []


def test_a_forgotten_tenant_leaves_nothing() -> None:
    cache = SuffixCache(max_bytes=4 << 20)
    run(cache, list(range(1000, 1030)), session="s", group="g", tenant="old")
    for number in range(10_000):
        run(cache, [7, 8], tenant=f"t{number}")
    assert not cache.has_session("old", "s") and cache.stats().sessions == 0
    cache.remove_session("old", "s")
    for names in ({"session": "s"}, {"session": "other", "group": "g"}, {}):
        assert finds(cache, [1000, 1001, 1002], tenant="old", **names) == []
    run(cache, [1, 2, 3, 4], session="s", tenant="old")
    assert finds(cache, [1, 2, 3], session="s", tenant="old") == [4]
    cache.remove_session("old", "s")
    assert finds(cache, [1, 2, 3], tenant="old") == []


def test_a_tenant_alone_in_a_small_budget_keeps_what_it_learned() -> None:
    """Its texts are evicted instead."""
    cache, rng = SuffixCache(max_bytes=30_000), np.random.default_rng(1)
    for _ in range(300):
        cache.start("r", rng.integers(0, 900, 8), tenant="t")
        cache.extend("r", rng.integers(0, 900, 20))
        cache.propose(["r"], 4)
        cache.extend("r", [1, 2, 3])
        cache.finish("r")
        cache.catch_up()
        assert cache.stats().tenants == 1 and cache.stats().tokens > 0
    assert cache.stats().evictions > 200


def test_tenants_make_room_for_a_running_request() -> None:
    cache = SuffixCache(max_bytes=2_000_000)
    for number in range(20):
        run(cache, list(range(30)), tenant=f"t{number}")
    cache.start("long", np.arange(400_000, dtype=np.int32), tenant="newest", scope="session")
    cache.catch_up()
    assert (cache.stats().tenants, cache.stats().tokens) == (1, 0)


def test_a_smaller_budget_holds_for_tenants_that_are_idle() -> None:
    cache = SuffixCache()
    for tenant in ("a", "b"):
        run(cache, list(range(1000)), session="s", tenant=tenant)
    cache.catch_up()
    assert cache.stats().tokens > 2000
    cache.resize(per_tenant=Budget(tokens=500))
    cache.catch_up()
    assert cache.stats().tokens <= 1000


def test_a_tenant_that_waits_to_be_cut_may_be_forgotten() -> None:
    cache = SuffixCache()
    for tenant in ("a", "b"):
        run(cache, list(range(1000)), tenant=tenant)
    cache.resize(per_tenant=Budget(tokens=500))
    assert cache.forget_tenant("a")
    cache.catch_up()
    assert (cache.stats().tenants, cache.stats().tokens) == (1, 0)


def test_what_tenants_learned_is_saved_and_counted_once(tmp_path: Path) -> None:
    cache = SuffixCache(vocab_size=1000)
    for number in range(130):
        scope: Scope = "session" if number % 3 == 0 else "tenant"
        cache.start("run", list(range(20)), session="s", tenant=f"t{number:03}", scope=scope)
        for _ in range(3):
            cache.propose(["run"], 8)
            cache.extend("run", [1, 2, 3])
        cache.finish("run")
    sizes = []
    for turn in range(4):
        cache.save(tmp_path / "snapshot")
        sizes.append((tmp_path / "snapshot").stat().st_size)
        cache = SuffixCache.load(tmp_path / "snapshot", vocab_size=1000)
        run(cache, [1, 2, 3], tenant=f"new{turn}")
    assert max(sizes) - min(sizes) < 16 << 10


@pytest.mark.alone
def test_many_tenants_in_turn_do_not_make_starting_dear() -> None:
    """Creating 2 MB of learned weights at each start would take a hundred times as long."""

    def start(tenants: int) -> float:
        cache, times = SuffixCache(vocab_size=1000), []
        for number in range(3_000):
            tenant = f"t{number % tenants}"
            times.append(cpu(lambda tenant=tenant: cache.start("run", [1, 2, 3], tenant=tenant)))  # type: ignore[misc]
            cache.finish("run")
        return median(times)

    assert_fast(lambda: {"ratio": start(100) / start(1)}, ratio=5.0)


def test_a_tenant_over_its_budget_takes_nothing_from_others() -> None:
    cache = SuffixCache(per_tenant=Budget(tokens=300))
    run(cache, [7, 8, 9, 10], tenant="small")
    for number in range(20):
        run(cache, [100 * number + n for n in range(30)], session=f"s{number}", tenant="big")
    cache.catch_up()
    assert cache.stats().tokens <= 300 + 40
    assert finds(cache, [7, 8, 9], tenant="small") == [10]
    assert finds(cache, [1910, 1911, 1912], tenant="big") == [1913]
    assert finds(cache, [10, 11, 12], tenant="big") == []


def test_a_budget_in_bytes() -> None:
    cache = SuffixCache(max_bytes=200_000)
    for number in range(60):
        run(cache, [500 * number + n for n in range(500)], tenant="t")
    cache.catch_up()
    assert cache.stats().tokens < 60 * 500
    assert finds(cache, [29_900, 29_901], tenant="t") == [29_902]
    assert finds(cache, [400, 401], tenant="t") == []


def test_resizing_evicts_little_by_little() -> None:
    cache = SuffixCache()
    for number in range(200):
        run(cache, [100 * number + n for n in range(20)], tenant="t")
    cache.catch_up()
    before = cache.stats()
    cache.resize(max_tokens=before.tokens // 2)
    calls = 0
    while cache.catch_up(100):
        calls += 1
    assert calls > 10  # in slices
    after = cache.stats()
    assert after.tokens <= before.tokens // 2 and after.bytes < before.bytes
    assert finds(cache, [19_910, 19_911], tenant="t") == [19_912]
    assert finds(cache, [110, 111], tenant="t") == []


def test_resizing_forgets_tenants_that_are_within_their_own_budgets() -> None:
    """The search for tenants over their budgets goes on after it has evicted the present tenant."""
    cache = SuffixCache(per_tenant=Budget(bytes=2**40))
    for number in range(1000):
        run(cache, [1, 2, 3], tenant=f"t{number:03}")
    most = cache.stats().bytes // 10
    cache.resize(max_bytes=most, per_tenant=Budget(bytes=2**40))
    cache.catch_up()
    assert cache.stats().bytes <= most
    assert "t999" in cache.tenants() and "t000" not in cache.tenants()


def test_tenants_over_a_new_budget_are_cut_one_by_one() -> None:
    cache = SuffixCache()
    for number in range(400):
        run(cache, [10 * number + n for n in range(10)], tenant=f"t{number % 4}")
    cache.resize(per_tenant=Budget(tokens=200))
    cache.catch_up()
    assert cache.stats().tokens <= 4 * 200
    assert all(finds(cache, [3960 + 10 * n + 7, 3960 + 10 * n + 8], tenant=f"t{n}") for n in range(4))


@pytest.mark.alone
def test_a_look_for_work_costs_the_same_however_many_tenants_are_within_budget() -> None:
    def look(tenants: int) -> float:
        cache = SuffixCache(per_tenant=Budget(tokens=1000))
        for number in range(tenants):
            run(cache, [1, 2, 3], tenant=f"t{number}")
        cache.catch_up()
        return median(cpu(lambda: cache.catch_up(64, seconds=0.001)) for _ in range(100))

    assert_fast(lambda: {"ratio": look(4000) / look(40)}, ratio=4.0)


def test_a_running_request_keeps_its_session_and_group() -> None:
    cache = SuffixCache(max_tokens=200)
    run(cache, [1, 2, 3, 4, 5], session="s", group="g", tenant="t")
    cache.start("r", [], session="s", group="g", tenant="t")
    for number in range(50):
        run(cache, [100 * number + n for n in range(20)], session=f"other{number}", tenant="t")
    cache.extend("r", [1, 2])
    draft = cache.propose(["r"], 2)[0]
    assert draft.token_ids.tolist() == [3, 4] and draft.source in ("session", "group")


def test_a_group_is_shared_within_its_tenant_only() -> None:
    cache = SuffixCache()
    run(cache, [1, 2, 3, 4, 5], session="a", group="g", tenant="t")
    for _ in range(3):
        run(cache, [1, 2, 9, 9, 9], session="b", group="h", tenant="t")
    assert finds(cache, [1, 2], session="c", group="g", tenant="t") == [3]
    assert finds(cache, [1, 2], session="c", group="h", tenant="t") == [9]
    assert finds(cache, [1, 2], session="c", group="g", tenant="u") == []
    assert finds(cache, [1, 2], session="c", group="g") == []
    run(cache, [1, 2, 4, 4, 4], session="a", group="g")
    assert finds(cache, [1, 2], session="c", group="g") == [4]  # requests without a tenant share one
    assert finds(cache, [1, 2], session="c", group="g", scope="session") == []


def test_erasing_a_session_reaches_its_groups() -> None:
    cache = SuffixCache()
    run(cache, [1, 2, 3, 4, 5], session="a", group="g", tenant="t")
    run(cache, [6, 7, 8, 9], session="b", group="g", tenant="t")
    cache.remove_session("t", "a")
    assert finds(cache, [1, 2], group="g", tenant="t") == []
    assert finds(cache, [6, 7], group="g", tenant="t") == [8]
    cache.remove_session("t", "b")
    assert cache.stats().tokens == 0


def test_erasing_in_the_middle_of_many() -> None:
    rng = np.random.default_rng(3)
    texts = {f"s{i}": [1000 * i + int(t) for t in rng.integers(0, 900, 60)] for i in range(1, 30)}
    cache = SuffixCache()
    for name, text in texts.items():
        run(cache, text, session=name, tenant="t")
    for name in list(texts)[5:20]:
        cache.remove_session("t", name)
    for number, (name, text) in enumerate(texts.items()):
        assert finds(cache, text[20:24], tenant="t") == ([] if 5 <= number < 20 else [text[24]]), name


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_bytes": -1}, "max_bytes"),
        ({"per_tenant": Budget(tokens=0)}, "per_tenant.tokens"),
        ({"per_session": Budget(bytes=1.5)}, "per_session.bytes"),  # type: ignore[arg-type]
    ],
)
def test_bad_budgets_are_named(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigurationError, match=field):
        SuffixCache(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=field):
        SuffixCache().resize(**arguments)  # type: ignore[arg-type]


def test_a_sweep_that_takes_long_ends_early_and_is_taken_up_again() -> None:
    """In runs of one token each position is found by a long comparison, so the clock ends each call."""
    from agentspec.cache import _native

    cache = SuffixCache(max_tokens=80_000)
    _native.watch_clock(True)
    try:
        for number in range(4):
            run(cache, [7] * 8_000 + [number], tenant="t")
        while cache.catch_up(4096):
            pass
        cache.resize(max_tokens=1000)
        calls = 0
        while cache.catch_up(4096):
            calls += 1
        assert cache.stats().tokens <= 1000 and cache.stats().pending == 0
        assert calls > 4 * 8_000 // 4096  # more than the budget alone would need
    finally:
        _native.watch_clock(False)
    assert finds(cache, [7], tenant="t") == []


def test_long_repeats_are_indexed_in_small_pieces_and_wholly() -> None:
    """A second, equal run of one token takes long comparisons to index, so the clock ends each call."""
    from agentspec.cache import _native

    cache = SuffixCache()
    run(cache, [7] * 20_000 + [1], tenant="t")
    while cache.catch_up(1024):
        pass
    run(cache, [7] * 20_000 + [2], tenant="t")
    _native.watch_clock(True)
    try:
        calls = 0
        while cache.catch_up(seconds=0.0003):
            calls += 1
    finally:
        _native.watch_clock(False)
    assert cache.stats().pending == 0
    assert calls > 40  # more than the budget alone would need
    assert finds(cache, [7], tenant="t") == [7]
