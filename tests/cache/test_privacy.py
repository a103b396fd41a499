"""Test who may draft from what. Beside each denial stands a hit, which shows that the test can find one."""

import resource
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from agentspec.cache import SOURCES, DraftPolicy, FinishedTurn, Scope, StepDrafts, SuffixCache
from agentspec.errors import InvalidInputError

PROMPT = np.arange(4, dtype=np.int32)
SECRET = [71, 72, 73, 74, 75, 76, 77, 78, 79]


def say(cache: SuffixCache, session: str | None, tenant: str | None, scope: Scope = "tenant") -> None:
    cache.start("w", [1, 2], session=session, tenant=tenant, scope=scope)
    cache.extend("w", SECRET)
    cache.finish("w")


def leaks(cache: SuffixCache, session: str | None, tenant: str | None, scope: Scope = "tenant") -> bool:
    """Return whether a prompt that begins like the secret drafts the rest of it."""
    cache.start("q", [5, 71, 72, 73], session=session, tenant=tenant, scope=scope)
    draft = cache.propose(["q"], 8)[0].token_ids.tolist()
    cache.abort("q")
    return bool(set(draft) & set(SECRET[3:]))


@pytest.mark.parametrize(
    ("session", "tenant", "seen"),
    [
        ("s", "acme", True),
        ("other", "acme", True),
        (None, "acme", True),
        ("s", "rival", False),
        ("s", None, False),
        (None, None, False),
    ],
)
def test_a_tenants_text(session: str | None, tenant: str | None, seen: bool) -> None:
    cache = SuffixCache()
    say(cache, "s", "acme")
    assert leaks(cache, session, tenant) == seen


@pytest.mark.parametrize(
    ("session", "tenant", "seen"),
    [("s", None, True), ("other", None, True), (None, None, True), ("s", "acme", False), (None, "acme", False)],
)
def test_requests_without_a_tenant_are_one(session: str | None, tenant: str | None, seen: bool) -> None:
    cache = SuffixCache()
    say(cache, "s", None)
    assert leaks(cache, session, tenant) == seen


@pytest.mark.parametrize("tenant", [None, "acme"])
@pytest.mark.parametrize(
    ("writer", "reader", "session", "seen"),
    [
        ("tenant", "tenant", "other", True),
        ("tenant", "session", "s", True),  # a session's own text, under any scope
        ("tenant", "session", "other", False),
        ("tenant", "session", None, False),
        ("tenant", "none", "s", False),
        ("session", "tenant", "s", True),
        ("session", "tenant", "other", False),
        ("session", "tenant", None, False),
        ("session", "session", "s", True),
        ("session", "session", "other", False),
        ("none", "tenant", "s", False),
        ("none", "tenant", None, False),
        ("none", "session", "s", False),
        ("none", "none", "s", False),
    ],
)
def test_scopes(tenant: str | None, writer: Scope, reader: Scope, session: str | None, seen: bool) -> None:
    cache = SuffixCache()
    say(cache, "s", tenant, writer)
    assert leaks(cache, session, tenant, reader) == seen


def test_what_was_said_in_private_and_is_said_again_to_all_is_shared() -> None:
    """The session holds all of the text already when it is said to all."""
    cache = SuffixCache()
    say(cache, "s", "acme", "session")
    assert not leaks(cache, "other", "acme")
    say(cache, "s", "acme", "tenant")
    assert leaks(cache, "other", "acme")


def test_an_unknown_scope_changes_nothing() -> None:
    cache = SuffixCache()
    with pytest.raises(InvalidInputError, match="scope='everyone': give one of tenant, session, none"):
        say(cache, "s", None, "everyone")  # type: ignore[arg-type]
    assert cache.stats().requests == 0 and cache.stats().tenants == 0


def test_a_restored_turn_keeps_its_scope() -> None:
    cache = SuffixCache()
    cache.start("w", [1, 2], session="s", scope="session")
    cache.extend("w", SECRET)
    turn = cache.finish("w")
    assert turn is not None and turn.scope == "session"
    other = SuffixCache()
    other.restore(turn)
    assert leaks(other, "s", None) and not leaks(other, "other", None)


def test_names_cannot_be_composed_to_meet() -> None:
    """Session "b" of tenant "1:a", and the like, have keys of their own."""
    pairs = [("a", "bc"), ("ab", "c"), ("1:a", "b"), ("1", ":ab"), (None, "1:ab"), ("-", "s"), (None, "s")]
    for tenant, session in pairs:
        cache = SuffixCache()
        say(cache, session, tenant)
        holding = [pair for pair in pairs if cache.has_session(*pair)]
        assert holding == [(tenant, session)]


@pytest.mark.parametrize("tenant", [None, "acme"])
def test_an_erased_session_leaves_nothing(tenant: str | None) -> None:
    cache = SuffixCache()
    say(cache, "s", tenant)
    assert leaks(cache, "s", tenant)
    cache.remove_session(tenant, "s")
    assert not cache.has_session(tenant, "s") and cache.stats().tokens == 0
    assert not leaks(cache, "s", tenant) and not leaks(cache, "other", tenant)


def test_erasing_one_session_keeps_the_others() -> None:
    cache = SuffixCache()
    say(cache, "s", "acme")
    cache.start("w", [1, 2], session="kept", tenant="acme")
    cache.extend("w", [31, 32, 33, 34])
    cache.finish("w")
    cache.remove_session("acme", "s")
    cache.start("q", [31, 32], tenant="acme")
    assert cache.propose(["q"], 1)[0].token_ids.tolist() == [33]
    cache.abort("q")
    assert not leaks(cache, "kept", "acme")


@pytest.mark.parametrize(("given", "accepted"), [(5, 4), (3, 2), (1, 0)])
def test_erasing_any_session_leaves_the_figures_of_drafts_that_are_being_verified(given: int, accepted: int) -> None:
    """The engine already has the draft, and verifies it although a session is erased meanwhile."""
    cache = SuffixCache()
    cache.start("w", [1, 2], session="kept", tenant="acme")
    cache.extend("w", list(range(31, 45)))
    cache.finish("w")
    cache.start("q", [1, 2, 31, 32], tenant="acme")
    table = np.zeros((1, 40), np.int32)
    table[0, :4] = [1, 2, 31, 32]

    def step(length: int, verified: int) -> StepDrafts:
        return cache.step(["q"], table, [0], [length], [4], [verified], cost=0.001)

    assert step(4, 0).token_ids.tolist() == [33, 34, 35, 36]
    cache.remove_session("acme", "nobody's")
    table[0, 4 : 4 + given] = [33, 34, 35, 36, 37][:given]
    if given < 5:
        table[0, 3 + given] = 99
    after = step(4 + given, 4)
    assert (after.drafted.sum(), after.accepted.sum()) == (4, accepted)
    assert after.accepted[0, SOURCES.index("global")] == accepted


def test_a_session_erased_while_it_runs() -> None:
    cache = SuffixCache()
    say(cache, "s", "acme")
    cache.start("r", [4], session="s", tenant="acme")
    cache.remove_session("acme", "s")
    cache.extend("r", SECRET)
    assert cache.finish("r") is None
    assert not leaks(cache, "s", "acme") and cache.stats().tokens == 0


@pytest.mark.parametrize("session", ["s", "other"])
def test_a_draft_that_quotes_an_erased_session_is_dropped(session: str) -> None:
    """Otherwise merging a draft would return the quote once more, and go on behind it."""
    cache = SuffixCache()
    say(cache, "s", "acme")
    cache.start("r", [5, 71, 72, 73], session=session, tenant="acme")
    assert cache.propose(["r"], 8)[0].token_ids.tolist()[:2] == [74, 75]
    offered, probabilities = np.array([[74, 75]], np.int32), np.ones((1, 2))
    assert cache.merge_drafts(["r"], offered, probabilities, [2], [8]).lists()[0][:3] == [74, 75, 76]
    cache.remove_session("acme", "s")
    assert cache.candidates("r") == []
    assert cache.merge_drafts(["r"], offered, probabilities, [0], [8]).lists() == [[]]
    assert cache.propose(["r"], 8)[0].token_ids.tolist() == []


def test_an_erased_session_gives_its_memory_back_while_it_runs() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    cache = SuffixCache()
    cache.start("w", np.arange(4_000_000, dtype=np.int32), session="s", tenant="acme", scope="session")
    assert cache.finish("w") is not None
    cache.start("r", [4], session="s", tenant="acme", scope="session")
    before = resident()
    cache.remove_session("acme", "s")
    while cache.stats().leaving:
        cache.catch_up(1)
    assert resident() < before - 14_000_000
    cache.extend("r", [5, 6])
    assert cache.finish("r") is None


def test_an_erased_session_forgets_its_records() -> None:
    """The cache holds none of its records, so an import restores the whole session."""
    cache = SuffixCache()
    cache.start("w", [1, 2], session="s", group="g", tenant="acme")
    cache.extend("w", SECRET)
    turn = cache.finish("w", name=("writer", 1))
    assert turn is not None
    cache.mark_loaded("acme", "s")
    before = cache.stats()
    cache.remove_session("acme", "s")
    assert cache.stats().tokens == 0 and cache.needs_load("acme", "s")
    cache.restore(turn)
    assert cache.stats().tokens == before.tokens
    for session in ("s", "other"):
        assert leaks(cache, session, "acme")


REPEATING = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]


def teach(cache: SuffixCache, session: str | None, tenant: str | None, scope: Scope = "tenant") -> None:
    """Teach the cache that matches like REPEATING's are never right."""
    for _ in range(40):
        cache.start("teach", REPEATING, session=session, tenant=tenant, scope=scope)
        cache.propose(["teach"], 1)
        cache.extend("teach", [1000])
        cache.abort("teach")


def drafts_boldly(cache: SuffixCache, session: str | None, tenant: str | None, scope: Scope = "tenant") -> bool:
    cache.start("q", REPEATING, session=session, tenant=tenant, scope=scope)
    draft = cache.propose(["q"], 4)[0].token_ids.tolist()
    cache.abort("q")
    return bool(draft)


@pytest.mark.parametrize(
    ("session", "tenant", "influenced"),
    [("a", "acme", True), ("b", "acme", True), (None, "acme", True), ("a", "rival", False), ("a", None, False)],
)
def test_what_a_tenant_taught(session: str | None, tenant: str | None, influenced: bool) -> None:
    cache = SuffixCache(policy=DraftPolicy(cost=0.2))
    assert drafts_boldly(cache, session, tenant)
    teach(cache, "a", "acme")
    assert drafts_boldly(cache, session, tenant) == (not influenced)


@pytest.mark.parametrize(("session", "influenced"), [("a", True), ("b", False), (None, False)])
def test_what_a_session_taught_itself(session: str | None, influenced: bool) -> None:
    cache = SuffixCache(policy=DraftPolicy(cost=0.2))
    say(cache, "a", None, "session")
    teach(cache, "a", None, "session")
    assert drafts_boldly(cache, session, None, "session") == (not influenced)
    assert drafts_boldly(cache, session, None)


def test_a_draft_that_was_made_during_an_erasure_is_merged_by_no_later_call() -> None:
    """The text is erased in slices, and a step may draft between two of them."""
    random = np.random.default_rng(1)
    during, until = 0, time.monotonic() + 60
    while during < 5 and time.monotonic() < until:  # on a busy machine few drafts fall into an erasure
        cache = SuffixCache(vocab_size=50_000)
        said = [random.integers(40_000, 50_000, 200).astype(np.int32) for _ in range(400)]
        for number, response in enumerate(said, 1):
            cache.restore(FinishedTurn("t", "erased", 0, PROMPT, response, writer="w", number=number))
        cache.restore(FinishedTurn("t", "kept", 0, PROMPT, PROMPT, writer="w", number=1_000))
        cache.catch_up()
        cache.start("r", said[-1][:50], tenant="t", session="mine")
        erasing = threading.Thread(target=cache.remove_session, args=("t", "erased"))
        erasing.start()
        while erasing.is_alive():
            if len(cache.propose(["r"], 8)[0].token_ids):
                during += 1
                break  # this draft is the last one of the request
        erasing.join()
        nothing = (np.zeros((1, 1), np.int32), np.zeros((1, 1)), np.zeros(1, np.int32), np.array([8], np.int32))
        assert not len(cache.merge_drafts(["r"], *nothing).token_ids)
        assert not len(cache.propose(["r"], 8)[0].token_ids)
    assert during, "none was made during an erasure"
