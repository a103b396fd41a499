"""Test the history window: groups and tenants drop what older weights, epochs or tokens wrote."""

from pathlib import Path

import pytest

from agentspec.cache import HistoryWindow, SuffixCache
from agentspec.errors import ConfigurationError


def answer(policy: int) -> list[int]:
    return [7, 8, *range(100 * policy, 100 * policy + 8)]


def say(cache: SuffixCache, policy: int, group: str | None = "g", tenant: str | None = None) -> None:
    cache.start("w", [1, 2], group=group, tenant=tenant)
    cache.extend("w", answer(policy))
    cache.finish("w")


def drafted(cache: SuffixCache, policy: int, group: str | None = "g") -> bool:
    cache.start("q", [5, *answer(policy)[:4]], group=group)
    draft: list[int] = cache.propose(["q"], 4)[0].token_ids.tolist()
    cache.abort("q")
    return draft == answer(policy)[4:8]


def window(text: str) -> SuffixCache:
    return SuffixCache(history=HistoryWindow.parse(text))


def begin(cache: SuffixCache, unit: str) -> None:
    {"weights": cache.begin_weights, "epochs": cache.begin_epoch}[unit]()


@pytest.mark.parametrize("unit", ["weights", "epochs"])
def test_responses_of_the_newest_weights_or_epochs_are_drafted_from(unit: str) -> None:
    cache = window(f"3 {unit}")
    for policy in range(1, 6):
        say(cache, policy)
        assert drafted(cache, policy) and drafted(cache, 1) == (policy < 4)
        begin(cache, unit)  # the window holds the next period and two before it
        begin(cache, "epochs" if unit == "weights" else "weights")  # the window does not count these
    assert [drafted(cache, policy) for policy in range(1, 6)] == [False, False, False, True, True]
    for _ in range(2):
        begin(cache, unit)
    assert not drafted(cache, 5)
    cache.catch_up()
    assert cache.stats().tokens == 0


def test_responses_stay_until_so_many_tokens_are_written_after_them() -> None:
    cache = window("20 tokens")  # two answers
    for policy in range(1, 5):
        say(cache, policy, group=f"g{policy}")
    assert [drafted(cache, policy, f"g{policy}") for policy in range(1, 5)] == [False, False, True, True]
    say(cache, 5)
    assert [drafted(cache, policy, f"g{policy}") for policy in range(3, 5)] == [False, True]


def test_another_tenants_tokens_make_nothing_older() -> None:
    cache = window("20 tokens")
    say(cache, 1)
    for policy in range(2, 9):
        say(cache, policy, tenant="other")
    assert drafted(cache, 1)


def test_restored_turns_count_as_written_now_and_make_nothing_older() -> None:
    old, cache = SuffixCache(), window("20 tokens")
    turns = []
    for policy in range(1, 9):
        old.start("w", [1, 2], group="g")
        old.extend("w", answer(policy))
        turns.append(old.finish("w", name=("writer", policy)))
    say(cache, 9)
    for turn in turns:
        assert turn is not None
        cache.restore(turn)
    assert all(drafted(cache, policy) for policy in range(1, 10))
    say(cache, 10)
    say(cache, 11)
    assert [drafted(cache, policy) for policy in range(8, 12)] == [False, False, True, True]


def test_without_a_window_everything_stays() -> None:
    cache = SuffixCache()
    for policy in range(1, 5):
        say(cache, policy)
        cache.begin_weights()
        cache.begin_epoch()
    assert all(drafted(cache, policy) for policy in range(1, 5))


def test_a_session_keeps_its_own_text() -> None:
    cache = window("1 weights")
    cache.start("w", [1, 2], session="s")
    cache.extend("w", answer(1))
    cache.finish("w")
    cache.begin_weights()
    cache.start("q", [1, 2, *answer(1), 5, *answer(1)[:4]], session="s")
    draft = cache.propose(["q"], 4)[0]
    assert draft.token_ids.tolist() == answer(1)[4:8] and draft.source == "session"


@pytest.mark.parametrize("unit", ["weights", "epochs", "tokens"])
def test_a_snapshot_knows_when_what_was_written(unit: str, tmp_path: Path) -> None:
    kept = HistoryWindow(20, "tokens") if unit == "tokens" else HistoryWindow.parse(f"2 {unit}")
    cache = SuffixCache(history=kept)
    for policy in (1, 2):
        if unit != "tokens":
            begin(cache, unit)
        say(cache, policy)
    cache.save(tmp_path / "snapshot")
    loaded = SuffixCache.load(tmp_path / "snapshot", history=kept)
    if unit == "tokens":
        say(loaded, 3)
    else:
        begin(loaded, unit)
    assert not drafted(loaded, 1) and drafted(loaded, 2)


def test_weights_that_began_before_a_snapshot_is_loaded_count(tmp_path: Path) -> None:
    cache = window("1 weights")
    say(cache, 1)
    cache.save(tmp_path / "snapshot")
    for begin_first in (True, False):
        loaded = window("1 weights")
        if begin_first:
            loaded.begin_weights()
        loaded.load_snapshot(tmp_path / "snapshot")
        if not begin_first:
            assert drafted(loaded, 1)
            loaded.begin_weights()
        assert not drafted(loaded, 1)


@pytest.mark.parametrize(("saved", "window"), [("500 tokens", "1 weights"), ("3 weights", "20 tokens")])
def test_what_was_saved_under_another_unit_counts_as_written_now(saved: str, window: str, tmp_path: Path) -> None:
    cache = SuffixCache(history=HistoryWindow.parse(saved))
    for policy in (1, 2, 3):
        say(cache, policy)
        cache.begin_weights()
    cache.save(tmp_path / "snapshot")
    loaded = SuffixCache.load(tmp_path / "snapshot", history=HistoryWindow.parse(window))
    assert all(drafted(loaded, policy) for policy in (1, 2, 3))
    if window == "20 tokens":
        say(loaded, 8)
        say(loaded, 9)
    else:
        loaded.begin_weights()
    assert not any(drafted(loaded, policy) for policy in (1, 2, 3))


@pytest.mark.parametrize("text", ["1 weights", "10 tokens"])
def test_a_corpus_fades_a_part_at_a_time(text: str) -> None:
    other, cache, left = SuffixCache(), window(text), []
    for number in range(600):
        other.start("w", [1, 2])
        other.extend("w", answer(1 + number))
        turn = other.finish("w", name=("w", number))
        assert turn is not None
        cache.restore(turn)
    if text == "10 tokens":
        cache.start("w", [1, 2], scope="session", session="s")  # ten tokens that the tenant doesn't share
        cache.extend("w", answer(601))
        cache.finish("w")
    else:
        cache.begin_weights()
    for _ in range(3):
        before = cache.stats().tokens
        cache.start("q", [5])
        cache.abort("q")
        left.append(before - cache.stats().tokens)
    assert left[0] == left[1] > left[2] > 0
    assert cache.stats().bytes == cache._core.recount()[1]


@pytest.mark.parametrize("text", ["", "3", "epochs", "0 epochs", "-1 epochs", "1.5 epochs", "3 moons", "3 epochs ago"])
def test_a_wrong_window_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="give a"):
        HistoryWindow.parse(text)


def test_a_window_reads_as_it_was_written() -> None:
    assert str(HistoryWindow.parse("1 epoch")) == "1 epochs" and str(HistoryWindow.parse(" 3  tokens ")) == "3 tokens"
