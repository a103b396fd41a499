"""New weights: what older policies wrote fades from groups and tenants."""

from pathlib import Path

import pytest

from agentspec.cache import SuffixCache
from agentspec.errors import InvalidInputError


def answer(policy: int) -> list[int]:
    return [7, 8, *range(100 * policy, 100 * policy + 8)]


def say(cache: SuffixCache, policy: int, group: str | None = "g") -> None:
    cache.start("w", [1, 2], group=group)
    cache.extend("w", answer(policy))
    cache.finish("w")


def drafted(cache: SuffixCache, policy: int, group: str | None = "g") -> bool:
    cache.start("q", [5, *answer(policy)[:4]], group=group)
    draft: list[int] = cache.propose(["q"], 4)[0].token_ids.tolist()
    cache.abort("q")
    return draft == answer(policy)[4:8]


def test_responses_of_the_newest_weights_are_drafted_from() -> None:
    cache = SuffixCache()
    for policy in range(1, 5):
        say(cache, policy)
        assert drafted(cache, policy) and drafted(cache, 1) == (policy < 4)
        cache.begin_weights(keep=3)  # the next one and two before it
    assert [drafted(cache, policy) for policy in range(1, 5)] == [False, False, True, True]
    before = cache.stats().tokens
    cache.begin_weights(keep=1)
    assert not drafted(cache, 4)
    cache.catch_up()
    assert cache.stats().tokens == 0 < before


def test_without_a_limit_everything_stays() -> None:
    cache = SuffixCache()
    for policy in range(1, 5):
        say(cache, policy)
        cache.begin_weights()
    assert all(drafted(cache, policy) for policy in range(1, 5))


def test_a_session_keeps_its_own_text() -> None:
    cache = SuffixCache()
    cache.start("w", [1, 2], session="s")
    cache.extend("w", answer(1))
    cache.finish("w")
    cache.begin_weights(keep=1)
    cache.start("q", [1, 2, *answer(1), 5, *answer(1)[:4]], session="s")
    draft = cache.propose(["q"], 4)[0]
    assert draft.token_ids.tolist() == answer(1)[4:8] and draft.source == "session"


def test_a_snapshot_knows_which_weights_wrote_what(tmp_path: Path) -> None:
    cache = SuffixCache()
    for policy in (1, 2):
        cache.begin_weights()
        say(cache, policy)
    cache.save(tmp_path / "snapshot")
    loaded = SuffixCache.load(tmp_path / "snapshot")
    loaded.begin_weights(keep=2)
    assert not drafted(loaded, 1) and drafted(loaded, 2)


def test_a_corpus_fades_a_part_at_a_time() -> None:
    cache = SuffixCache()
    for number in range(600):
        say(cache, 1 + number, group=None)
    tokens = cache.stats().tokens
    cache.begin_weights(keep=1)
    left = []
    for _ in range(3):
        cache.start("q", [5])
        cache.abort("q")
        left.append(cache.stats().tokens)
    assert tokens > left[0] > left[1] > left[2] == 0
    assert cache.stats().bytes == cache._core.recount()[1]


def test_a_wrong_number_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="keep=0: give a number of weights"):
        SuffixCache().begin_weights(keep=0)
