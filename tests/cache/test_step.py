"""The decode step: one call for the batch, reading the engine's array, whatever the engine did meanwhile."""

import numpy as np
import pytest

from agentspec.cache import StepDrafts, SuffixCache
from agentspec.errors import InvalidInputError, UnknownRequestError

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8] * 3


def step(cache: SuffixCache, text: list[int], room: int = 4, scheduled: int = 0) -> StepDrafts:
    table = np.zeros((3, 256), np.int32)
    table[2, : len(text)] = text
    return cache.step(["r"], table, [2], [len(text)], [room], [scheduled])


def test_step_equals_extend_and_propose() -> None:
    one, other = SuffixCache(), SuffixCache()
    for cache in (one, other):
        cache.start("r", PROMPT)
    text = list(PROMPT)
    assert step(one, text).lists() == [other.propose(["r"], 4)[0].token_ids.tolist()]
    for new in ([1, 2, 3], [4], [9, 9], [1, 2, 3, 4, 5]):
        text += new
        other.extend("r", new)
        expected = other.propose(["r"], 4)[0]
        got = step(one, text, scheduled=4)
        assert got.lists() == [expected.token_ids.tolist()]
        assert got.probabilities.tolist() == expected.probabilities.tolist()
        assert got.match_lengths.tolist() == [expected.match_length]


def test_step_counts_what_was_accepted() -> None:
    cache = SuffixCache()
    cache.start("r", PROMPT)
    assert step(cache, PROMPT).lists() == [[1, 2, 3, 4]]
    result = step(cache, [*PROMPT, 1, 2, 99], scheduled=4)
    assert result.accepted.tolist() == [[2, 0, 0, 0, 0]] and result.drafted.tolist() == [[4, 0, 0, 0, 0]]
    assert result.accepted.dtype == np.int32 and result.sources.dtype == np.uint8


def test_step_counts_only_what_was_scheduled() -> None:
    cache = SuffixCache()
    cache.start("r", PROMPT)
    step(cache, PROMPT)
    result = step(cache, [*PROMPT, 1, 2], scheduled=1)
    assert result.accepted.tolist() == [[1, 0, 0, 0, 0]] and result.drafted.tolist() == [[1, 0, 0, 0, 0]]


def test_step_without_new_tokens_judges_nothing() -> None:
    cache = SuffixCache()
    cache.start("r", PROMPT)
    first = step(cache, PROMPT)
    second = step(cache, PROMPT, scheduled=4)
    assert second.lists() == first.lists() and second.drafted.sum() == 0


def test_skipped_steps_are_caught_up() -> None:
    cache, steady = SuffixCache(), SuffixCache()
    for other in (cache, steady):
        other.start("r", PROMPT, scope="session")
    text = [*PROMPT, 1, 2, 3, 50, 51, 52, 1, 2]
    for length in range(len(PROMPT), len(text)):
        step(steady, text[:length], room=0)
    assert step(cache, text).lists() == step(steady, text).lists() != [[]]
    assert cache.finish("r") is None  # no session to keep it for


def test_prompt_known_in_part_is_completed() -> None:
    cache = SuffixCache()
    cache.start("r", PROMPT[:5])
    assert step(cache, PROMPT).lists() == [[1, 2, 3, 4]]


def test_row_shorter_than_known_gets_no_draft() -> None:
    cache = SuffixCache()
    cache.start("r", PROMPT)
    assert step(cache, PROMPT[:-3]).lists() == [[]]
    assert step(cache, PROMPT).lists() == [[1, 2, 3, 4]]


def test_illegal_token_in_a_row_costs_only_that_draft() -> None:
    cache = SuffixCache(vocab_size=100)
    cache.start("r", PROMPT)
    assert step(cache, [*PROMPT, 1, -1, 3]).lists() == [[]]
    assert step(cache, [*PROMPT, 1, 100]).lists() == [[]]
    assert step(cache, [*PROMPT, 1]).lists() == [[2, 3, 4, 5]]


def test_array_is_read_in_place() -> None:
    cache = SuffixCache()
    cache.start("r", PROMPT)
    table = np.zeros((1, 64), np.int32)
    table[0, : len(PROMPT)] = PROMPT
    table.flags.writeable = False
    assert cache.step(["r"], table, [0], [len(PROMPT)], [2], [0]).lists() == [[1, 2]]
    with pytest.raises(InvalidInputError, match="C-contiguous"):
        cache.step(["r"], np.zeros((64, 2), np.int32).T, [0], [1], [2], [0])


def test_bad_arguments_change_nothing() -> None:
    cache = SuffixCache()
    cache.start("r", PROMPT)
    table = np.full((2, 64), 3, np.int32)
    bad = [
        (["r"], table.astype(np.int64), [0], [30], [4], [0]),
        (["r"], table, [2], [30], [4], [0]),
        (["r"], table, [0], [65], [4], [0]),
        (["r"], table, [0], [-1], [4], [0]),
        (["r"], table, [0, 1], [30], [4], [0]),
        (["r"], table, [0], [30.0], [4], [0]),
    ]
    for arguments in bad:
        with pytest.raises(InvalidInputError):
            cache.step(*arguments)  # type: ignore[arg-type]
    with pytest.raises(UnknownRequestError, match="'x'"):
        cache.step(["r", "x"], table, [0, 1], [30, 30], [4, 4], [0, 0])
    assert step(cache, PROMPT).lists() == [[1, 2, 3, 4]]


def test_empty_batch() -> None:
    result = SuffixCache().step([], np.zeros((0, 8), np.int32), [], [], [], [])
    assert result.lists() == [] and result.accepted.shape == (0, 5)
