"""Test that the sessions of a family draft from each other, also under scope "session", and that sessions end."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentspec.cache import Budget, FinishedTurn, Scope, SuffixCache
from agentspec.cache.types import Int32Array

REPORT = np.arange(1000, 1100, dtype=np.int32)
PROMPT = np.arange(200, 240, dtype=np.int32)
SCOPES: tuple[Scope, ...] = ("session", "tenant")


@pytest.fixture(params=SCOPES)
def scope(request: pytest.FixtureRequest) -> Iterator[Scope]:
    yield request.param


def say(
    cache: SuffixCache,
    session: str,
    parent: str | None = None,
    text: Int32Array = REPORT,
    number: int = 0,
    scope: Scope = "session",
    tenant: str | None = "t",
) -> FinishedTurn:
    cache.start("w", PROMPT, session=session, tenant=tenant, scope=scope, parent=parent)
    cache.extend("w", text)
    turn = cache.finish("w", name=("w", number) if number else None)
    assert turn is not None
    return turn


def finds(
    cache: SuffixCache,
    session: str | None,
    parent: str | None = None,
    text: Int32Array = REPORT,
    scope: Scope = "session",
    tenant: str | None = "t",
) -> str:
    """Return the source of the draft behind a piece of the text, "" if nothing is drafted."""
    cache.start("q", [7, *text[50:54].tolist()], session=session, tenant=tenant, scope=scope, parent=parent)
    cache.catch_up()
    draft = cache.propose(["q"], 4)[0]
    cache.abort("q")
    return draft.source if draft.token_ids.tolist()[:2] == text[54:56].tolist() else ""


@pytest.mark.parametrize(
    ("session", "parent", "source"),
    [
        ("root", None, "session"),
        ("child", "root", "group"),
        ("another child", "root", "group"),
        ("grandchild", "child", "group"),
        ("stranger", None, ""),
        ("child of a stranger", "stranger", ""),
        (None, "root", ""),
    ],
)
@pytest.mark.parametrize("writer", ["root", "child"])
def test_who_drafts_from_a_family(writer: str, session: str | None, parent: str | None, source: str) -> None:
    cache = SuffixCache()
    cache.start("child runs", PROMPT, session="child", tenant="t", scope="session", parent="root")
    say(cache, writer)
    if session == writer:
        source = "session"
    assert finds(cache, session, parent) == source


def test_no_other_tenant_drafts_from_a_family(scope: Scope) -> None:
    cache = SuffixCache()
    say(cache, "root", scope=scope)
    assert finds(cache, "child", "root", scope=scope) == "group"
    assert finds(cache, "child", "root", scope=scope, tenant="u") == ""
    assert finds(cache, "child", "root", scope=scope, tenant=None) == ""
    assert finds(cache, "child", "root", scope="none") == ""


def test_a_named_group_goes_before_the_family() -> None:
    cache = SuffixCache()
    cache.start("r", PROMPT, session="child", parent="root", group="g")
    cache.extend("r", REPORT)
    cache.finish("r")
    assert cache.needs_load(None, family="root") and not finds(cache, "root", tenant=None)
    cache.mark_loaded(None, family="root")
    assert cache.needs_load(None, family="root")


def test_a_parent_that_is_known_later_joins_the_families() -> None:
    """A child came first, then the root that started its parent. New responses of all three meet at the root."""
    cache = SuffixCache()
    say(cache, "child", "parent")
    say(cache, "parent", "root", REPORT + 1000)
    assert finds(cache, "root", text=REPORT + 1000) == "session"
    cache.start("r", PROMPT, session="child", tenant="t", scope="session")
    assert cache.family_of("r") == "root"


def test_parents_in_a_circle_have_a_root() -> None:
    cache = SuffixCache()
    for session, parent in (("a", "b"), ("b", "c"), ("c", "a"), ("a", "a")):
        say(cache, session, parent)
    cache.start("r", PROMPT, session="b", tenant="t", parent="a")
    assert cache.family_of("r") == "c"


def test_a_chain_of_a_thousand_sessions_is_one_family() -> None:
    cache = SuffixCache()
    for number in range(1000):
        say(cache, f"s{number}", f"s{number - 1}" if number else None, REPORT[:4])
    cache.start("r", PROMPT, session="s1000", tenant="t", parent="s999")
    assert cache.family_of("r") == "s0"


def test_a_turn_carries_its_family(scope: Scope) -> None:
    source, cache = SuffixCache(), SuffixCache()
    turns = [say(source, "root", number=1, scope=scope), say(source, "child", "root", REPORT + 1000, 2, scope)]
    assert [turn.family for turn in turns] == [None, "root"]
    for turn in reversed(turns):
        cache.restore(turn)
    assert finds(cache, "sibling", "root", REPORT, scope) == "group"
    assert finds(cache, "sibling", "root", REPORT + 1000, scope) == "group"
    held = cache.stats()
    for turn in turns:
        cache.restore(turn)
    assert cache.stats().tokens == held.tokens


def test_a_followed_turn_reaches_a_family_that_is_held() -> None:
    source, cache = SuffixCache(), SuffixCache()
    turn = say(source, "child", "root", REPORT + 1000, 2)
    cache.restore(turn, held_only=True)
    assert cache.stats().tokens == 0
    say(cache, "root")
    cache.restore(turn, held_only=True)
    assert finds(cache, "root", text=REPORT + 1000) == "session" and not cache.has_session("t", "child")


def test_a_large_session_is_adopted_beside_its_family() -> None:
    source, cache = SuffixCache(), SuffixCache()
    root = say(source, "root", number=1)
    child = say(source, "child", "root", REPORT + 1000, 2)
    say(cache, "other child", "root", REPORT + 2000, number=3)
    assert cache.adopt(cache.prepare([child]), child)
    assert not cache.adopt(cache.prepare([root]), root)  # its family holds more than its own responses
    for turn in (root, child):
        cache.restore(turn)
    for text in (REPORT, REPORT + 1000, REPORT + 2000):
        assert finds(cache, "root", text=text) == "session"


def test_a_family_is_loaded_and_evicted_as_one() -> None:
    cache = SuffixCache(max_tokens=400)
    say(cache, "child", "root")
    assert cache.needs_load("t", family="root")
    cache.mark_loaded("t", family="root")
    assert not cache.needs_load("t", family="root")
    for number in range(5):
        say(cache, f"s{number}", text=REPORT + 2000 + 100 * number)
    cache.catch_up()
    assert cache.needs_load("t", family="root")


def test_a_root_is_loaded_again_for_a_family_that_its_tenants_eviction_dropped() -> None:
    """Tenants that learned much beside little text are evicted first. Their families go before the newer sessions."""
    cache = SuffixCache(max_bytes=None)
    for tenant in ("old", "new"):
        cache.start("r", [1], session="root", tenant=tenant)
        for number in range(600):
            cache.propose(["r"], 8, cost=0.0)
            cache.extend("r", [number % 7])
        cache.finish("r", output_limit=2)
        cache.mark_loaded(tenant, "root")
    cache.catch_up()
    cache.resize(max_bytes=cache.stats().bytes - 1)
    assert cache.stats().evictions == 1 and cache.needs_load("old", family="root")  # the family was evicted
    assert cache.has_session("old", "root") and cache.needs_load("old", "root")
    assert not cache.needs_load("new", "root")


def test_a_root_is_loaded_again_for_a_family_that_was_emptied_while_a_request_ran(scope: Scope) -> None:
    cache = SuffixCache()
    cache.start("r", [1], session="root", tenant="t", scope=scope)
    say(cache, "root", scope="session")
    cache.mark_loaded("t", "root")
    cache.mark_loaded("t", family="root")
    cache.resize(max_tokens=cache.stats().tokens - 1)
    assert cache.has_session("t", "root") and cache.needs_load("t", "root")
    assert cache.needs_load("t", family="root")
    cache.abort("r")
    assert cache.needs_load("t", "root")


def test_a_family_keeps_to_the_budget_of_a_session() -> None:
    """Many sessions of one root say ten times the budget of a session."""
    cache = SuffixCache(per_session=Budget(tokens=500))
    for number in range(50):
        say(cache, f"s{number}", "root", REPORT + 100 * number)
        cache.free_session("t", f"s{number}")
    assert cache.stats().tokens <= 500
    assert finds(cache, "root", text=REPORT + 4900) == "session"
    assert finds(cache, "root") == ""


@pytest.mark.parametrize("saved", [False, True])
def test_an_erased_child_leaves_its_family(saved: bool, tmp_path: Path) -> None:
    cache = SuffixCache()
    say(cache, "root", text=REPORT + 1000)
    say(cache, "child", "root")
    if saved:
        cache.save(tmp_path / "snapshot")
        cache = SuffixCache.load(tmp_path / "snapshot")
    assert finds(cache, "sibling", "root") == "group"
    cache.remove_session("t", "child")
    assert finds(cache, "sibling", "root") == finds(cache, "root") == finds(cache, "child", "root") == ""
    assert finds(cache, "sibling", "root", REPORT + 1000) == "group"


def test_an_erased_child_leaves_its_family_though_its_own_text_was_evicted() -> None:
    cache = SuffixCache()
    say(cache, "child", "root")
    cache.free_session("t", "child")
    assert finds(cache, "root") == "session"
    cache.remove_session("t", "child")
    assert finds(cache, "root") == ""


def test_an_erased_child_leaves_its_family_though_its_turns_were_followed() -> None:
    """This process served the root only; it followed the child's turn."""
    cache, there = SuffixCache(), SuffixCache()
    say(cache, "root", text=REPORT + 500)
    cache.restore(say(there, "child", "root"), held_only=True)
    assert finds(cache, "root") and not cache.has_session("t", "child")
    cache.remove_session("t", "child")
    assert not finds(cache, "root") and finds(cache, "root", text=REPORT + 500)


def test_an_erased_child_leaves_its_family_though_it_was_evicted_before_a_snapshot(tmp_path: Path) -> None:
    """Evicted text stays in memory, and in snapshots, until later calls remove it."""
    cache, path, other = SuffixCache(), tmp_path / "snapshot", REPORT + 2000
    say(cache, "child", "root")
    say(cache, "root", text=other)
    cache.catch_up()
    cache.resize(per_session=Budget(tokens=300))
    say(cache, "root", text=other + 100)
    cache.save(path)
    assert cache.stats().leaving > 0 and REPORT[50:].tobytes() in path.read_bytes()
    loaded = SuffixCache.load(path)
    loaded.remove_session("t", "child")
    loaded.save(path)
    assert REPORT[50:].tobytes() not in path.read_bytes() and other[50:].tobytes() in path.read_bytes()
    assert finds(loaded, "root", text=other) == "session"


def test_a_snapshot_knows_families(tmp_path: Path) -> None:
    cache = SuffixCache()
    say(cache, "child", "root")
    cache.save(tmp_path / "snapshot")
    loaded = SuffixCache.load(tmp_path / "snapshot")
    loaded.start("r", PROMPT, session="grandchild", tenant="t", scope="session", parent="child")
    assert loaded.family_of("r") == "root"


def test_an_ended_session_is_freed(scope: Scope) -> None:
    cache = SuffixCache()
    say(cache, "other", text=REPORT[:5], scope=scope)
    cache.catch_up()
    before = cache.stats()
    for number in range(100):
        say(cache, "s", text=REPORT + 100 * number, scope=scope)
    turn = say(cache, "s", text=REPORT, scope=scope)
    cache.catch_up()
    assert cache.stats().sessions == 2
    cache.free_session("t", "s")
    cache.catch_up()
    after = cache.stats()
    assert after.sessions == 1 and not cache.has_session("t", "s")
    if scope == "session":  # under scope "tenant" the tenant's corpus keeps the response
        assert (after.tokens, after.leaving) == (before.tokens, 0) and after.bytes < before.bytes + 1024
    else:
        assert finds(cache, "another", scope=scope) == "global"
    assert cache.needs_load("t", "s")
    cache.restore(replace(turn, parent=0, kept=0))  # it can come back
    assert cache.has_session("t", "s") and finds(cache, "s", scope=scope)


def test_an_ended_session_goes_when_its_last_request_ends() -> None:
    cache = SuffixCache()
    for name in ("a", "b"):
        cache.start(name, PROMPT, session="s", tenant="t")
        cache.extend(name, REPORT)
    cache.finish("a")
    cache.free_session("t", "s")
    assert cache.has_session("t", "s")
    cache.start("c", PROMPT, session="s", tenant="t")  # so the session has not ended
    cache.abort("b")
    cache.abort("c")
    assert cache.has_session("t", "s")
    cache.start("d", PROMPT, session="s", tenant="t")
    cache.free_session("t", "s")
    assert cache.finish("d") is not None
    assert not cache.has_session("t", "s")


def test_a_root_that_has_ended_takes_its_family_along() -> None:
    cache = SuffixCache()
    say(cache, "root")
    cache.start("r", PROMPT, session="child", tenant="t", scope="session", parent="root")
    cache.free_session("t", "root")
    assert finds(cache, "child", "root") == "group"  # a request still drafts from it
    cache.abort("r")
    say(cache, "root")
    cache.free_session("t", "root")
    assert finds(cache, "child", "root") == ""


def test_nothing_is_freed_where_nothing_is_held() -> None:
    cache = SuffixCache()
    cache.free_session(None, "s")
    cache.free_session("t", "s")
    assert cache.stats().tokens == 0
