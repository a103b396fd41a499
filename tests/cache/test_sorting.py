"""Test that a text sorted in one go answers as one that is indexed piece by piece."""

from collections.abc import Callable
from random import Random

import pytest

from agentspec.cache import SuffixCache
from tests.cache.streams import fibonacci

LENGTH = 3_000


def _words(rng: Random) -> list[int]:
    """Return sentences of few words, most of them repeated."""
    said = [[rng.randrange(50) for _ in range(rng.randrange(2, 30))] for _ in range(20)]
    return [token for _ in range(LENGTH // 15) for token in rng.choice(said)]


TEXTS: dict[str, Callable[[Random], list[int]]] = {
    "random": lambda rng: [rng.randrange(130_000) for _ in range(LENGTH)],
    "two tokens": lambda rng: [rng.randrange(2) for _ in range(LENGTH)],
    "one token": lambda _: [7] * LENGTH,
    "one period": lambda rng: [rng.randrange(9) for _ in range(70)] * (LENGTH // 70),
    "fibonacci": lambda _: fibonacci(LENGTH),
    "largest ids": lambda rng: [rng.choice([0, 1, 2**31 - 1]) for _ in range(LENGTH)],
    "said before": _words,
}


def drafted(cache: SuffixCache, context: list[int], session: str | None = None) -> list[list[float]]:
    cache.start("r", context, session=session, tenant="t")
    [draft] = cache.propose(["r"], 32, cost=0.001)
    cache.abort("r")
    return [column.tolist() for column in (draft.token_ids, draft.probabilities, draft.sources)]


@pytest.mark.parametrize("kind", TEXTS)
def test_sorting_gives_the_same_drafts(kind: str) -> None:
    rng = Random(kind)
    text = TEXTS[kind](rng)
    parts = [text[: len(text) // 3], text[len(text) // 3 :], text[: len(text) // 2]]
    sorted_whole, by_pieces = SuffixCache(), SuffixCache()
    for number, part in enumerate(parts):
        split = rng.randrange(len(part))
        for cache in (sorted_whole, by_pieces):
            cache.start("r", part[:split], session=f"s{number % 2}", tenant="t")
            cache.extend("r", part[split:])
            cache.finish("r")
    assert sorted_whole.catch_up() > LENGTH
    while by_pieces.catch_up(8):
        pass
    for _ in range(150):
        end = rng.randrange(1, len(text))
        context = text[max(0, end - rng.choice([3, 40, LENGTH])) : end] + [1] * rng.randrange(2)
        assert drafted(sorted_whole, context, "s0") == drafted(by_pieces, context, "s0")


def test_texts_that_begin_alike_are_in_the_order_of_their_positions() -> None:
    """There are more texts than a match lists, so their order decides which ones it lists."""
    rng = Random(5)
    sorted_whole, by_pieces = SuffixCache(), SuffixCache()
    for number in range(100):
        last = 100 + rng.randrange(number + 1)
        for cache in (sorted_whole, by_pieces):
            cache.start("r", [], session=f"s{number}", tenant="t")
            cache.extend("r", [*range(1, 12), last])
            cache.finish("r")
    sorted_whole.catch_up()
    while by_pieces.catch_up(8):
        pass
    for end in range(2, 12):
        context = list(range(1, end))
        assert drafted(sorted_whole, context) == drafted(by_pieces, context)
        for cache in (sorted_whole, by_pieces):
            cache.start("r", context, tenant="t")
            cache.propose(["r"], 32, cost=0.001)
        assert sorted_whole.candidates("r") == by_pieces.candidates("r")
        for cache in (sorted_whole, by_pieces):
            cache.abort("r")


def test_what_is_sorted_can_be_added_to_and_removed() -> None:
    rng = Random(3)
    texts = [[rng.randrange(6) for _ in range(400)] for _ in range(12)]
    one, other = SuffixCache(), SuffixCache()
    for number, text in enumerate(texts):
        for cache, budget in ((one, None), (other, 8)):
            cache.start("r", text[:10], session=f"s{number}", tenant="t")
            cache.extend("r", text[10:])
            cache.finish("r")
            if number >= 6:
                cache.remove_session("t", f"s{number - 6}")
            while cache.catch_up(budget):
                pass
    for text in texts:
        for end in range(5, 400, 7):
            assert drafted(one, text[:end]) == drafted(other, text[:end])
