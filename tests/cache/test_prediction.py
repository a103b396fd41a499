"""Test predictions and quotable texts: sources of one request alone, bounded and counted."""

from typing import Any

import numpy as np
import pytest

from agentspec.cache import SOURCES, SuffixCache
from agentspec.cache.types import MAX_QUOTABLE
from agentspec.errors import InvalidInputError, InvalidTokenError
from agentspec.protocol import MAX_PREDICTION

PROMPT = [1, 2, 3, 4, 5]
EXPECTED = list(range(100, 400))


def steps_for(cache: SuffixCache, response: list[int], prediction: list[int]) -> tuple[int, int, set[str]]:
    """Verify a response greedily. Return its steps, the rejected draft tokens, and the drafts' sources."""
    cache.start("r", PROMPT, prediction=prediction)
    cache.catch_up()
    left, steps, rejected, sources = list(response), 0, 0, set()
    while left:
        (draft,) = cache.propose(["r"], 32)
        tokens = draft.token_ids.tolist()
        right = next(
            (i for i, (a, b) in enumerate(zip(tokens, left, strict=False)) if a != b), min(len(tokens), len(left))
        )
        sources |= {draft.source} if tokens else set()
        rejected += len(tokens) - right
        cache.extend("r", left[: right + 1])
        left, steps = left[right + 1 :], steps + 1
    cache.abort("r")
    return steps, rejected, sources


def test_an_edited_prediction_takes_few_steps_and_serves_from_the_first_token() -> None:
    edited = [*EXPECTED[:120], 7, 8, *EXPECTED[125:]]
    without, _, _ = steps_for(SuffixCache(), edited, [])
    steps, rejected, sources = steps_for(SuffixCache(), edited, EXPECTED)
    assert without > 250 and steps < without / 6 and sources == {"prediction"}
    assert rejected < 60
    cache = SuffixCache()
    cache.start("r", PROMPT, prediction=EXPECTED)
    cache.catch_up()
    (draft,) = cache.propose(["r"], 8)
    assert draft.token_ids.tolist()[:3] == EXPECTED[:3], "behind the end of the prompt"


@pytest.mark.parametrize("scope", ["tenant", "session", "none"])
def test_it_serves_its_request_alone(scope: str) -> None:
    cache = SuffixCache()
    names = {"session": "s", "group": "g", "tenant": "t", "scope": scope}
    cache.start("r", PROMPT, prediction=EXPECTED, **names)  # type: ignore[arg-type]
    cache.catch_up()
    assert cache.propose(["r"], 8)[0].source == "prediction"
    cache.start("sibling", [*PROMPT, *EXPECTED[:9]], **names)  # type: ignore[arg-type]
    cache.catch_up()
    assert not len(cache.propose(["sibling"], 8)[0].token_ids)
    cache.abort("sibling")
    cache.extend("r", [7])
    cache.finish("r")
    cache.start("next", [*PROMPT, *EXPECTED[:9]], **names)  # type: ignore[arg-type]
    cache.catch_up()
    assert not len(cache.propose(["next"], 8)[0].token_ids), "nothing of it is kept"


@pytest.mark.parametrize(("name", "most"), [("prediction", MAX_PREDICTION), ("quotable", MAX_QUOTABLE)])
def test_its_memory_counts_and_is_given_back(name: str, most: int) -> None:
    cache = SuffixCache()
    before = cache.stats().bytes
    given: dict[str, Any] = {name: np.arange(most, dtype=np.int32)}
    for i in range(10):
        cache.start(f"r{i}", PROMPT, **given)
    cache.catch_up()
    per_token = (cache.stats().bytes - before) / 10 / most
    assert 4 < per_token < 40
    for i in range(10):
        cache.abort(f"r{i}")
    cache.catch_up()
    assert cache.stats().bytes < before + 100_000


def test_wrong_ones_are_refused_by_name_and_change_nothing() -> None:
    cache = SuffixCache(vocab_size=1000)
    with pytest.raises(InvalidInputError, match="prediction: 16385 tokens"):
        cache.start("r", PROMPT, prediction=[1] * (MAX_PREDICTION + 1))
    with pytest.raises(InvalidTokenError, match=r"prediction\[1\]"):
        cache.start("r", PROMPT, prediction=[1, 1000])
    cache.start("r", PROMPT)


def test_what_may_be_quoted_is_drafted_where_it_is_quoted_and_not_before() -> None:
    cache = SuffixCache()
    cache.start("r", PROMPT, quotable=EXPECTED)
    cache.catch_up()
    assert not len(cache.propose(["r"], 8)[0].token_ids), "it is not what the response begins with"
    cache.extend("r", [7, *EXPECTED[50:54]])
    (draft,) = cache.propose(["r"], 8)
    count = len(draft.token_ids)
    assert draft.source == "quote" and draft.token_ids.tolist() == EXPECTED[54 : 54 + count] and count > 2
    step = cache.step(["r"], np.array([[*PROMPT, 7, *EXPECTED[50:56], 9]], np.int32), [0], [13], [8], [count])
    quote, prediction = SOURCES.index("quote"), SOURCES.index("prediction")
    assert (step.accepted[0, quote], step.drafted[0, quote], step.drafted[0, prediction]) == (2, count, 0)


def test_it_is_kept_for_nobody_and_unused_beside_a_prediction() -> None:
    cache = SuffixCache()
    cache.start("r", PROMPT, tenant="t", quotable=EXPECTED)
    cache.extend("r", [7])
    cache.finish("r")
    cache.start("next", [*PROMPT, *EXPECTED[:9]], tenant="t", prediction=[5, 6], quotable=EXPECTED)
    cache.catch_up()
    assert EXPECTED[9] not in cache.propose(["next"], 8)[0].token_ids
    with pytest.raises(InvalidInputError, match="quotable: 65537 tokens"):
        cache.start("long", PROMPT, quotable=[1] * (MAX_QUOTABLE + 1))


def test_the_prompt_is_indexed_before_what_may_be_quoted() -> None:
    cache = SuffixCache()
    prompt = np.arange(2000, dtype=np.int32)
    cache.start("r", np.append(prompt, prompt[1000:1009]), quotable=np.arange(5000, 5000 + MAX_QUOTABLE))
    cache.catch_up(2100)
    (draft,) = cache.propose(["r"], 8)
    assert draft.source == "request" and draft.token_ids.tolist()[:3] == [1009, 1010, 1011]
