"""Test that no call takes long where a tenant holds hundreds of thousands of short responses, or of groups.

Times are CPU time of a thread. In brackets: what it was when tables grew, were copied or were searched in one go.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from agentspec.cache import FinishedTurn, SuffixCache
from tests.timing import assert_fast, beside, cpu

RESPONSES = 200_000


def turns(count: int, *, sessions: int = 5000, groups: int = 0) -> Iterator[FinishedTurn]:
    rng = np.random.default_rng(1)
    for number in range(count):
        text, group = rng.integers(0, 50_000, 10, np.int32), f"g{number % groups}" if groups else None
        session = f"s{number % sessions}"
        yield FinishedTurn("t", session, 0, text[:4], text[4:], group=group, writer="w", number=number)


def filled(count: int = RESPONSES, *, sessions: int = 5000, groups: int = 0) -> tuple[SuffixCache, float]:
    """Return a cache that holds the turns, and how long restoring one took at most."""
    cache, most = SuffixCache(vocab_size=50_000, max_bytes=None), 0.0
    for number, turn in enumerate(turns(count, sessions=sessions, groups=groups)):
        most = max(most, cpu(partial(cache.restore, turn)))
        if number % 4096 == 0:
            cache.catch_up()
    cache.catch_up()
    return cache, most


@pytest.mark.alone
@pytest.mark.usefixtures("clock_on")
def test_adding_saving_and_evicting_them(tmp_path: Path) -> None:
    def measure() -> dict[str, float]:
        cache, restore = filled()
        cache.start("r", [1, 2, 3], tenant="t")
        saving = partial(cache.save, tmp_path / "snapshot")
        beside_save, _ = beside(saving, lambda: cache.propose(["r"], 8), pause=0.0005)
        cache.abort("r")
        resize = cpu(lambda: cache.resize(max_bytes=4 << 20))
        times = [1.0]
        while cache.stats().bytes > 4 << 20:
            times.append(cpu(lambda: cache.catch_up(2048, seconds=0.0005)))
        assert cache.stats().bytes <= 4 << 20
        return {"restore": restore, "save": max(beside_save), "resize": resize, "evict": max(times)}

    assert_fast(measure, restore=5.0, save=2.0, resize=10.0, evict=5.0)  # 1 (37), .5 (10), 1 (60) and 1 ms


@pytest.mark.alone
@pytest.mark.usefixtures("clock_on")
def test_erasing_a_session_of_very_many() -> None:
    def measure() -> dict[str, float]:
        cache, _ = filled(100_000, sessions=2)
        held = cache.stats().tokens
        cache.start("r", [1, 2, 3], tenant="t")
        erasing = partial(cache.remove_session, "t", "s1")
        steps, _ = beside(erasing, lambda: cache.propose(["r"], 8), pause=0.0005)
        assert cache.stats().tokens < 0.6 * held
        return {"step": max(steps)}

    assert_fast(measure, step=5.0)


@pytest.mark.alone
@pytest.mark.usefixtures("clock_on")
def test_erasing_a_session_beside_very_many_groups() -> None:
    def measure() -> dict[str, float]:
        cache, _ = filled(20_000, sessions=20_000, groups=20_000)
        cache.start("r", [1, 2, 3], tenant="t")
        erasing = partial(cache.remove_session, "t", "s1")
        steps, _ = beside(erasing, lambda: cache.propose(["r"], 8), pause=0.0005)
        assert not cache.has_session("t", "s1")
        return {"step": max(steps)}

    assert_fast(measure, step=2.0)  # .3 ms (10)


def test_each_of_them_is_held_once_and_found_again() -> None:
    """A turn is named, so that applying it twice does nothing, while others come, are evicted and are erased."""
    cache, rng = SuffixCache(vocab_size=50_000, max_bytes=None, max_tokens=20_000), np.random.default_rng(2)
    every = list(turns(6000, sessions=40))
    for number, turn in enumerate(every):
        cache.restore(turn)
        held = cache.stats().tokens
        cache.restore(turn)
        assert cache.stats().tokens == held
        if number % 500 == 499:
            cache.remove_session("t", f"s{rng.integers(40)}")
            cache.catch_up()
    assert 10_000 < cache.stats().tokens <= 20_000
    cache.remove_session("t", every[-1].session or "")
    held = cache.stats().tokens
    cache.restore(every[-1])  # it is gone, so it can come back
    assert cache.stats().tokens > held
