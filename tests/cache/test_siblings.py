"""Test that running requests of a group draft from each other's verified tokens."""

import numpy as np
import pytest
from numpy.typing import NDArray

from agentspec.cache import Draft, Scope, SuffixCache
from tests.oracle.cache import Oracle

PROMPT = [1, 2, 3, 4]
ANSWER = list(range(100, 140))


def draft(cache: SuffixCache, request: str = "b", most: int = 4) -> tuple[str, list[int]]:
    found: Draft = cache.propose([request], most)[0]
    return found.source, found.token_ids.tolist()


def two_samples() -> tuple[SuffixCache, NDArray[np.int32]]:
    """Return a cache in which samples a and b have begun, and the engine's token array, in which a has its answer."""
    cache = SuffixCache()
    for name in ("a", "b"):
        cache.start(name, PROMPT, group="g")
    texts = np.zeros((2, 64), np.int32)
    texts[:, :4] = PROMPT
    texts[0, 4:44] = ANSWER
    return cache, texts


def test_a_step_drafts_what_a_sibling_says_in_it() -> None:
    for order in ([0, 1], [1, 0]):  # whichever row is first
        cache, texts = two_samples()
        texts[1, 4] = ANSWER[0]
        names, lengths, limits = ["a", "b"], [44, 5], [0, 3]
        step = cache.step(
            [names[i] for i in order], texts, order, [lengths[i] for i in order], [limits[i] for i in order], [0, 0]
        )
        assert step.lists()[order.index(1)] == ANSWER[1:4] and step.sources.tolist() == [5, 5, 5]
        texts[1, 5:9] = ANSWER[1:5]
        step = cache.step(["a", "b"], texts, [0, 1], [44, 9], limits, [0, 3])
        assert step.accepted[1].tolist() == step.drafted[1].tolist() == [0, 0, 0, 0, 0, 3, 0, 0, 0]


@pytest.mark.parametrize(
    ("group", "session", "tenant", "scope", "hit"),
    [
        ("g", None, "t", "tenant", True),
        ("g", "own", "t", "tenant", True),
        ("other", None, "t", "tenant", False),
        (None, None, "t", "tenant", False),
        ("g", None, "u", "tenant", False),
        ("g", None, None, "tenant", False),
        ("g", "own", "t", "session", False),
        ("g", None, "t", "none", False),
    ],
)
def test_only_requests_of_the_group_do(
    group: str | None, session: str | None, tenant: str | None, scope: Scope, hit: bool
) -> None:
    cache = SuffixCache()
    cache.start("a", PROMPT, group="g", tenant="t")
    cache.start("b", PROMPT, group=group, session=session, tenant=tenant, scope=scope)
    cache.extend("a", ANSWER)
    cache.extend("b", ANSWER[:2])
    cache.propose(["a"], 0)
    assert draft(cache) == (("sibling", ANSWER[2:6]) if hit else ("", []))


def test_parallel_calls_of_a_session_are_siblings() -> None:
    cache = SuffixCache()
    for name in ("a", "b"):
        cache.start(name, PROMPT, session="s")
    cache.extend("a", ANSWER)
    cache.propose(["a"], 0)
    cache.extend("b", ANSWER[:2])
    assert draft(cache) == ("sibling", ANSWER[2:6])


def test_a_sibling_that_has_finished_is_drafted_from_as_the_group() -> None:
    cache = SuffixCache()
    for name in ("a", "b"):
        cache.start(name, PROMPT, group="g")
    cache.extend("a", ANSWER)
    cache.propose(["a"], 0)
    cache.extend("b", ANSWER[:2])
    assert draft(cache)[0] == "sibling"
    cache.finish("a")
    assert draft(cache) == ("group", ANSWER[2:6])
    cache.start("a", PROMPT, group="g")
    cache.extend("a", [*ANSWER[:2], 7, 7, 7])
    cache.abort("a")
    assert draft(cache) == ("group", ANSWER[2:6])


def test_it_is_the_sibling_with_the_longest_match() -> None:
    cache = SuffixCache()
    for name in ("a", "c", "b"):
        cache.start(name, PROMPT, group="g")
    cache.extend("a", [50, 51, 60, 61, 62])
    cache.extend("c", [49, 50, 51, 70, 71, 72])
    cache.propose(["a", "c"], 0)
    cache.extend("b", [49, 50, 51])
    assert draft(cache) == ("sibling", [70, 71, 72])
    cache.extend("b", [60])
    assert draft(cache) == ("sibling", [61, 62])


def test_a_sibling_among_many_is_found_within_a_few_steps() -> None:
    cache = SuffixCache()
    names = [f"a{number}" for number in range(30)]
    for name in names:
        cache.start(name, PROMPT, group="g")
        cache.extend(name, [7, 8])
    cache.extend("a29", ANSWER)
    cache.start("b", PROMPT, group="g")
    cache.propose(names, 0)
    found = []
    for token in ANSWER[:6]:
        cache.extend("b", [token])
        found.append(draft(cache)[1][:1])
    assert found[0] == [] and found[4:] == [[105], [106]], "it looks into 8 of them in a step"


def test_many_siblings_are_asked_as_the_oracle_does() -> None:
    rng = np.random.default_rng(3)
    cache, oracle = SuffixCache(vocab_size=50), Oracle(vocab_size=50)
    names = [f"r{number}" for number in range(24)]
    for name in names:
        for each in (cache, oracle):
            each.start(name, PROMPT, group="g")
    for step in range(60):
        if step % 7 == 6:
            ended = names.pop(int(rng.integers(len(names))))
            for each in (cache, oracle):
                each.finish(ended)
        for name in names:
            tokens = rng.integers(0, 6, 3).tolist()
            for each in (cache, oracle):
                each.extend(name, tokens)
        found = [each.token_ids.tolist() for each in cache.propose(names, 6)]
        assert found == [each.tokens for each in oracle.propose(names, [6] * len(names))], step


def test_an_erased_session_is_nobodys_sibling() -> None:
    cache = SuffixCache()
    cache.start("a", PROMPT, group="g", session="s", tenant="t")
    cache.start("b", PROMPT, group="g", tenant="t")
    cache.extend("a", ANSWER)
    cache.propose(["a"], 0)
    cache.extend("b", ANSWER[:2])
    assert draft(cache)[0] == "sibling"
    cache.remove_session("t", "s")
    assert cache.candidates("b") == [] and draft(cache) == ("", [])
    cache.extend("b", ANSWER[2:4])  # learning does without the sibling's text, which is gone
    assert draft(cache) == ("", [])


def test_a_request_of_an_erased_session_has_no_sibling() -> None:
    """It had a sibling before the erasure, which runs on."""
    cache = SuffixCache()
    cache.start("a", PROMPT, group="g", tenant="t")
    cache.start("b", PROMPT, group="g", session="s", tenant="t")
    cache.extend("a", ANSWER)
    cache.propose(["a"], 0)
    cache.extend("b", ANSWER[:2])
    assert draft(cache)[0] == "sibling"
    cache.remove_session("t", "s")
    assert draft(cache) == ("", [])
    cache.extend("b", ANSWER[2:4])
    assert draft(cache) == ("", [])


def test_a_sibling_whose_tokens_the_engine_took_back() -> None:
    cache, texts = two_samples()
    texts[1, 4:6] = ANSWER[:2]
    cache.step(["a"], texts, [0], [44], [0], [0])
    assert cache.step(["b"], texts, [1], [6], [4], [0]).lists() == [ANSWER[2:6]]
    texts[0, 6:44] = 9
    cache.step(["a"], texts, [0], [20], [0], [0])
    texts[1, 6] = ANSWER[2]
    assert ANSWER[3] not in cache.step(["b"], texts, [1], [7], [4], [1]).lists()[0]


def test_what_a_group_remembers_of_its_requests_counts_and_goes() -> None:
    cache = SuffixCache()
    cache.start("first", PROMPT, group="g")
    before = cache.stats().bytes
    for number in range(1000):
        cache.start(f"r{number}", PROMPT, group="g")
        assert number % 100 or cache.stats().bytes == cache._core.recount()[1]
    for number in range(1000):
        cache.abort(f"r{number}")
    assert cache.stats().bytes == cache._core.recount()[1] <= before + 10_000
