"""Test the decode step: one call for the batch, which reads the engine's array, whatever the engine did meanwhile."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agentspec.cache import SOURCES, StepDrafts, SuffixCache
from agentspec.errors import InvalidInputError, UnknownRequestError
from tests.oracle.index import SuffixIndex

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8] * 3


def step(cache: SuffixCache, text: list[int], max_draft: int = 4, num_verified: int = 0) -> StepDrafts:
    table = np.zeros((3, 256), np.int32)
    table[2, : len(text)] = text
    return cache.step(["r"], table, [2], [len(text)], [max_draft], [num_verified])


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
        got = step(one, text, num_verified=4)
        assert got.lists() == [expected.token_ids.tolist()]
        assert got.probabilities.tolist() == expected.probabilities.tolist()
        assert got.match_lengths.tolist() == [expected.match_length]


@pytest.mark.parametrize(("most", "drafted"), [(0, 0), (2, 2), (128, 4)])
def test_no_draft_is_longer_than_any_may_be(most: int, drafted: int) -> None:
    """The limit, `max_draft`, is 4."""
    cache = SuffixCache()
    cache.start("r", PROMPT)
    table = np.array([PROMPT], np.int32)
    drafts = cache.step(["r"], table, [0], [len(PROMPT)], [4], [0], most=most)
    assert drafts.lists() == [[1, 2, 3, 4][:drafted]]


def test_step_counts_what_was_accepted() -> None:
    cache = SuffixCache()
    cache.start("r", PROMPT)
    assert step(cache, PROMPT).lists() == [[1, 2, 3, 4]]
    result = step(cache, [*PROMPT, 1, 2, 99], num_verified=4)
    assert result.accepted.tolist() == [[2, 0, 0, 0, 0, 0, 0, 0, 0]] and result.drafted.tolist() == [
        [4, 0, 0, 0, 0, 0, 0, 0, 0]
    ]
    assert result.accepted.dtype == np.int32 and result.sources.dtype == np.uint8


def test_step_counts_only_what_was_scheduled() -> None:
    cache = SuffixCache()
    cache.start("r", PROMPT)
    step(cache, PROMPT)
    result = step(cache, [*PROMPT, 1, 2], num_verified=1)
    assert result.accepted.tolist() == [[1, 0, 0, 0, 0, 0, 0, 0, 0]] and result.drafted.tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0, 0]
    ]


def test_step_without_new_tokens_judges_nothing() -> None:
    cache = SuffixCache()
    cache.start("r", PROMPT)
    first = step(cache, PROMPT)
    second = step(cache, PROMPT, num_verified=4)
    assert second.lists() == first.lists() and second.drafted.sum() == 0


def test_skipped_steps_are_caught_up() -> None:
    cache, steady = SuffixCache(), SuffixCache()
    for other in (cache, steady):
        other.start("r", PROMPT, scope="session")
    text = [*PROMPT, 1, 2, 3, 50, 51, 52, 1, 2]
    for length in range(len(PROMPT), len(text)):
        step(steady, text[:length], max_draft=0)
    assert step(cache, text).lists() == step(steady, text).lists() != [[]]
    assert cache.finish("r") is None  # there is no session to keep the turn for


def test_prompt_known_in_part_is_completed() -> None:
    cache = SuffixCache()
    cache.start("r", PROMPT[:5])
    assert step(cache, PROMPT).lists() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("back", [1, 2, 30])
@pytest.mark.parametrize("more", [1, 2, 29, 31, 40])
def test_tokens_that_the_engine_took_back_are_forgotten(back: int, more: int) -> None:
    """A failed load of the KV cache discards tokens; others take their place in one step or in several."""
    cache = SuffixCache()
    cache.start("r", PROMPT, session="s")
    said = list(range(100, 130))
    step(cache, PROMPT + said)
    text = PROMPT + said[: len(said) - back]
    for token in range(200, 200 + more):
        text.append(token)
        if more < 30:
            assert step(cache, text).lists() == [[]]
    assert step(cache, [*text, *said[:2]]).lists()[0][:2] == (said[2:4] if back < 25 else [])
    turn = cache.finish("r")
    assert turn is not None and turn.prompt_tail.tolist() == PROMPT and turn.response.tolist() == text[24:] + said[:2]
    cache.start("q", [], session="s")
    cache.extend("q", [129] if back > 2 else said[-back - 1 :])
    assert cache.propose(["q"], 1)[0].token_ids.tolist() == []


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


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        lambda row: np.array(row, np.int64),
        lambda row: np.array(row, np.uint8),
        lambda row: np.repeat(np.array(row, np.int32), 2)[::2],
        lambda row: [np.int64(number) for number in row],
    ],
)
def test_rows_come_in_every_integer_form(form: Callable[[list[int]], Any]) -> None:
    cache = SuffixCache()
    for request in ("r", "q"):
        cache.start(request, PROMPT)
    table = np.array([PROMPT[:-1], PROMPT[1:]], np.int32)
    cache.step(["r", "q"], table, form([0, 0]), form([3, 3]), form([0, 0]), form([0, 0]))
    wide = np.array([[*PROMPT, 0, 0], [*PROMPT, 1, 2]], np.int32)
    drafts = cache.step(["r", "q"], wide, form([1, 0]), form([26, 24]), form([2, 3]), form([0, 0]))
    assert drafts.lists() == [[3, 4], [1, 2, 3]]


TABLE = np.full((2, 64), 3, np.int32)
BAD_STEPS: list[tuple[dict[str, Any], str]] = [
    ({"tokens": TABLE.astype(np.int64)}, "tokens: .*int32"),
    ({"tokens": TABLE.astype(np.float32)}, "tokens: .*int32"),
    ({"tokens": TABLE.astype(np.dtype(">i4"))}, "tokens: .*int32"),
    ({"tokens": TABLE[0]}, r"tokens: .*\[rows, columns\]"),
    ({"tokens": TABLE.tolist()}, "tokens: "),
    ({"tokens": TABLE[:, ::2]}, "C-contiguous"),
    ({"tokens": TABLE[:0]}, "tokens: "),
    ({"rows": [2]}, "rows: must be from 0 to 1, got 2"),
    ({"rows": np.array([-1], np.int32)}, "rows: must be from 0 to 1, got -1"),
    ({"lengths": [65]}, "lengths: must be from 0 to 64, got 65"),
    ({"lengths": [-1]}, "lengths: .*-1"),
    ({"lengths": [2**32 + 30]}, r"lengths\[0\] is 4294967326"),
    ({"lengths": [2**70]}, r"lengths\[0\] is 1180591620717411303424"),
    ({"rows": [0, 1]}, r"rows: give one integer a request \(1\), got 2"),
    ({"rows": np.zeros((1, 1), np.int32)}, r"rows\[0\]"),
    ({"lengths": [30.0]}, r"lengths\[0\] is 30.0"),
    ({"lengths": np.array([30.0])}, r"lengths\[0\]"),
    ({"max_draft": []}, "max_draft: give one integer a request"),
    ({"max_draft": [True]}, r"max_draft\[0\] is True"),
    ({"max_draft": np.array([True])}, r"max_draft\[0\]"),
    ({"max_draft": 4}, "max_draft: .*int"),
    ({"max_draft": np.int32(4)}, "max_draft: "),
    ({"num_verified": None}, "num_verified: .*NoneType"),
    ({"num_verified": "0"}, r"num_verified\[0\] is '0'"),
    ({"num_verified": {0: 0}}, "num_verified: .*dict"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_STEPS)
def test_bad_arguments_change_nothing(bad: dict[str, Any], message: str) -> None:
    cache = SuffixCache()
    cache.start("r", PROMPT)
    good: dict[str, Any] = {"tokens": TABLE, "rows": [0], "lengths": [30], "max_draft": [4], "num_verified": [0]}
    with pytest.raises(InvalidInputError, match=message):
        cache.step(["r"], **{**good, **bad})
    assert step(cache, PROMPT).lists() == [[1, 2, 3, 4]]


def test_an_unknown_request_changes_nothing() -> None:
    cache = SuffixCache()
    cache.start("r", PROMPT)
    with pytest.raises(UnknownRequestError, match="'x'"):
        cache.step(["r", "x"], TABLE, [0, 1], [30, 30], [4, 4], [0, 0])
    assert step(cache, PROMPT).lists() == [[1, 2, 3, 4]]


def test_empty_batch() -> None:
    result = SuffixCache().step([], np.zeros((0, 8), np.int32), [], [], [], [])
    assert result.lists() == [] and result.accepted.shape == (0, len(SOURCES))


class TestBatchHandle:
    """Test batches whose requests are looked up once, for many steps."""

    def test_it_serves_like_the_ids(self) -> None:
        one, other = SuffixCache(), SuffixCache()
        for cache in (one, other):
            for name in "rq":
                cache.start(name, PROMPT)
        batch = one.batch(["r", "q"])
        assert len(batch) == 2
        rows = ([0, 0], [len(PROMPT)] * 2, [4, 2], [0, 0])
        expected = other.step(["r", "q"], TABLE, *rows).lists()
        assert one.step(batch, TABLE, *rows).lists() == expected
        given, sure = np.array([[5], [6]], np.int32), np.array([[1.0], [1.0]])
        offered = one.merge_drafts(batch, given, sure, [1, 1], [4, 4]).lists()
        assert offered == other.merge_drafts(["r", "q"], given, sure, [1, 1], [4, 4]).lists()
        for requests, ids in ((batch, ["r", "q"]), (one.batch(["q"]), ["q"])):
            drafts = [draft.token_ids.tolist() for draft in one.propose(requests, 3)]
            assert drafts == [draft.token_ids.tolist() for draft in other.propose(ids, 3)]

    def test_another_request_never_takes_the_place_of_one_that_ended(self) -> None:
        cache = SuffixCache()
        cache.start("r", PROMPT)
        batch = cache.batch(["r"])
        cache.abort("r")
        cache.start("q", [91, 92, 93])  # gets the slot that r had
        for use in (lambda: cache.propose(batch, 4), lambda: cache.step(batch, TABLE, [0], [30], [4], [0])):
            with pytest.raises(UnknownRequestError, match="'r'"):
                use()
        assert cache.propose(["q"], 4)[0].token_ids.tolist() == []
        cache.start("r", PROMPT)
        assert len(cache.propose(batch, 4)[0].token_ids) == 4, "the id is looked up again"

    def test_the_end_of_others_does_no_harm(self) -> None:
        cache = SuffixCache()
        for name in "ars":
            cache.start(name, PROMPT)
        batch = cache.batch(["s", "r"])
        before = [draft.token_ids.tolist() for draft in cache.propose(batch, 4)]
        cache.finish("a")
        assert [draft.token_ids.tolist() for draft in cache.propose(batch, 4)] == before

    def test_of_another_cache(self) -> None:
        cache, other = SuffixCache(), SuffixCache()
        cache.start("r", PROMPT)
        other.start("filler", [1])
        other.start("r", [91, 92, 93])
        batch = cache.batch(["r"])
        for _ in range(2):
            assert other.propose(batch, 4)[0].token_ids.tolist() == []
            assert len(cache.propose(batch, 4)[0].token_ids) == 4

    def test_only_of_running_requests(self) -> None:
        with pytest.raises(UnknownRequestError, match="'x'"):
            SuffixCache().batch(["x"])


@pytest.mark.parametrize("prompt", [*range(1, 100, 7), 16, 48, 80, 112, 512])
def test_text_that_is_indexed_over_several_steps_is_found(prompt: int) -> None:
    """A step looks up the end of a text while earlier tokens wait; a later step indexes them all."""
    text = np.random.default_rng(prompt).integers(0, 3, prompt + 300, np.int32)
    cache, expected = SuffixCache(vocab_size=10), SuffixIndex()
    cache.start("r", text[:prompt])
    expected.append(text[:prompt].tolist())
    waited = compared = 0
    for length in range(prompt + 1, len(text) + 1):
        cache.step(["r"], text[None, :], [0], [length], [8], [0], work_seconds=0.0)
        expected.append([int(text[length - 1])])
        waited += cache.stats().pending > 0
        found = [(one.match_length, one.count) for here in cache.candidates("r")[:1] for one in here if one.rank < 2]
        if cache.stats().pending == 0 and found:  # without candidates there is nothing to compare
            expected.advance(length)
            match = expected.look_up(text[:length].tolist())
            assert max(found) == (match.length, match.count)
            compared += 1
    assert (waited > 0) == (prompt > 32)
    assert compared > 200
