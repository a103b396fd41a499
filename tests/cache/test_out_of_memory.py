"""Test that a call for which memory runs out costs what the cache holds, and leaves nothing half-changed.

Nor does a start that is interrupted.
"""

import subprocess
import sys

import numpy as np
import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.names import Names
from agentspec.cache.running import RequestSlots
from agentspec.errors import UnknownRequestError

PROGRAM = """
import random, resource, sys
import numpy as np
from agentspec.cache import SuffixCache

seed = int(sys.argv[1])
rng, choice = np.random.default_rng(seed), random.Random(seed)
cache = SuffixCache(vocab_size=50_000, max_bytes=None)
number = failed = 0

def text(most):
    return rng.integers(0, 50_000, choice.randrange(1, most), np.int32)

def run(requests):
    global number, failed
    for _ in range(requests):
        name = str(number)
        number += 1
        try:
            cache.start(name, text(3000), session=f"s{number % 7}", tenant="t")
            cache.extend(name, text(2000))
            cache.propose([name], 8)
            cache.finish(name)
            cache.catch_up()
        except MemoryError:
            failed += 1
            if cache.stats().requests:
                cache.abort(name)

run(choice.randrange(20, 60))
_, hard = resource.getrlimit(resource.RLIMIT_AS)
pages = int(open("/proc/self/statm").read().split()[0])
cache.start("outlives", text(100), session="other", tenant="t")
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + choice.randrange(600_000), hard))
run(20)
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
assert failed
try:
    cache.extend("outlives", text(100))
except IndexError as error:
    assert "memory had run out" in str(error)
else:
    raise AssertionError("the cache still knows what it has forgotten")
cache.abort("outlives")
run(150)
said = text(2000)
for name in ("a", "b"):
    cache.start(name, said[:20], session=f"again-{name}", tenant="t")
    if name == "a":
        cache.extend(name, said[20:])
        cache.finish(name)
        cache.catch_up()
(draft,) = cache.propose(["b"], 8, cost=0.0)
assert draft.token_ids.tolist() == said[20:28].tolist()
cache.finish("b")
for session in range(7):
    cache.remove_session("t", f"s{session}")
cache.catch_up()
stats = cache.stats()
assert (stats.tokens, stats.bytes, stats.sessions, stats.pending, stats.leaving) == cache._core.recount()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process's address space")
@pytest.mark.parametrize("seed", range(6))
def test_the_cache_is_empty_and_works_after_memory_ran_out(seed: int) -> None:
    """Before, the process ended a few calls later, or a call never did."""
    command = [sys.executable, "-c", PROGRAM, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_bad_input_costs_nothing() -> None:
    cache = SuffixCache(vocab_size=100)
    cache.start("r", [1, 2, 3, 1, 2])
    with pytest.raises(IndexError):
        cache._core.extend(7, cache._core.candidates(0)[1])
    assert cache.propose(["r"], 4, cost=0.0)[0].token_ids.tolist()[:2] == [3, 1]


def assert_counted(cache: SuffixCache, requests: int) -> None:
    stats = cache.stats()
    assert stats.requests == requests
    assert (stats.tokens, stats.bytes, stats.sessions, stats.pending, stats.leaving) == cache._core.recount()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("booked", [False, True])
def test_a_start_that_is_interrupted_behind_the_core_leaves_no_request(
    error: type[BaseException], booked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that only the core knew was freed by the next start, but its group's other requests drafted from it."""
    cache = SuffixCache()
    cache.start("stays", [1, 2, 3, 4], session="s", tenant="t")
    add = RequestSlots.add

    def interrupted(*arguments: object) -> None:
        if booked:
            add(*arguments)  # type: ignore[arg-type]
        raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(RequestSlots, "add", interrupted)
        cache.start("r", [1, 2, 3, 4], session="s", tenant="t")
    assert_counted(cache, 1)
    with pytest.raises(UnknownRequestError):
        cache.abort("r")
    for name in ("r", "another"):
        cache.start(name, [9, 8, 7], session="x", tenant="t")
    assert_counted(cache, 3)
    assert len(set(cache.batch(["stays", "r", "another"]).slots.tolist())) == 3


def test_the_core_ends_a_request_whose_slot_it_is_given_again() -> None:
    cache, none = SuffixCache(), np.zeros(0, np.int32)
    cache.start("stays", [1, 2, 3, 4], session="s", tenant="t")
    for session in ("s", "s", "x"):
        names = Names(session, None, "t", "tenant").for_core()
        cache._core.start(1, np.arange(5, dtype=np.int32), names, None, None, ends=none, prediction=none, quotable=none)
        assert_counted(cache, 2)


def test_a_slot_that_an_interrupt_loses_is_given_to_nobody() -> None:
    cache = SuffixCache()
    for name in ("lost", "stays"):
        cache.start(name, [1, 2, 3])
    cache._running._by_id.pop("lost")  # as far as `release` comes
    for name in ("a", "b"):
        cache.start(name, [1, 2, 3])
    assert len(set(cache.batch(["stays", "a", "b"]).slots.tolist())) == 3
