"""Compare the oracle's index with its definition, spelled out by brute force."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cache.streams import fibonacci
from tests.oracle.index import BOUNDARY, WINDOW, Match, SuffixIndex

small_tokens = st.lists(st.integers(0, 2), max_size=25)
edge_tokens = st.lists(st.sampled_from([0, 1, 2**31 - 1]), max_size=25)
runs = st.integers(0, 60).map(lambda n: [5] * n)
words = st.integers(0, 90).map(fibonacci)
pieces = small_tokens | edge_tokens | runs | words


def agreement(before: list[int], context: list[int]) -> int:
    n = 0
    while n < min(len(before), len(context)) and before[-1 - n] == context[-1 - n] != BOUNDARY:
        n += 1
    return n


def sort_key(text: list[int], position: int) -> tuple[list[int], int]:
    """Return a position's sort key: its tokens backwards to the boundary, each plus 1, then 0; and the position."""
    start = next((p + 1 for p in range(position - 1, -1, -1) if text[p] == BOUNDARY), 0)
    ranks = [token + 1 for token in text[start:position]]
    return [*ranks[::-1], 0], position


def occurrences(text: list[int], indexed: set[int], context: list[int], length: int) -> Match:
    places = [p for p in sorted(indexed) if agreement(text[:p], context) >= length > 0]
    if len(places) > WINDOW:
        ordered = sorted(places, key=lambda p: sort_key(text, p))
        return Match(length, len(places), [ordered[k * len(places) // WINDOW] for k in range(WINDOW)])
    return Match(length, len(places), places[::-1]) if places else Match()


def longest(text: list[int], indexed: set[int], context: list[int]) -> Match:
    length = max((agreement(text[:p], context) for p in indexed), default=0)
    return occurrences(text, indexed, context, length)


def build(documents: list[tuple[list[int], list[int]]]) -> tuple[SuffixIndex, list[int], set[int]]:
    """Return an index of documents (context only, then findable), its text, and the indexed positions."""
    index, text, indexed = SuffixIndex(), list[int](), set[int]()
    for hidden, findable in documents:
        index.append_boundary()
        index.append(hidden, findable=False)
        index.append(findable)
        text += [BOUNDARY, *hidden]
        indexed |= set(range(len(text), len(text) + len(findable)))
        text += findable
    assert index.advance(10**9) == len(indexed)
    return index, text, indexed


documents_of = st.lists(st.tuples(small_tokens, pieces), min_size=1, max_size=5)


@settings(max_examples=80, deadline=None)
@given(
    documents=documents_of, repeat=st.booleans(), cut=st.integers(0, 10**6), extra=small_tokens, short=st.integers(0, 9)
)
def test_look_up_is_what_the_definition_says(
    documents: list[tuple[list[int], list[int]]], repeat: bool, cut: int, extra: list[int], short: int
) -> None:
    index, text, indexed = build(documents * 2 if repeat else documents)
    context = text[: cut % (len(text) + 1)] + extra[:3]
    assert index.look_up(context) == longest(text, indexed, context)
    expected = occurrences(text, indexed, context, short) if short <= len(context) else Match()
    assert index.look_up(context, short) == expected


@settings(max_examples=40, deadline=None)
@given(documents=documents_of, cut=st.integers(0, 10**6), token=st.integers(0, 2))
def test_follow_keeps_what_was_followed_by_the_token(
    documents: list[tuple[list[int], list[int]]], cut: int, token: int
) -> None:
    index, text, indexed = build(documents)
    match = index.look_up(text[: cut % (len(text) + 1)])
    followed = index.follow(token, match)
    if not match.complete:
        assert followed is None
        return
    moved = [p + 1 for p in match.positions if text[p] == token and p + 1 in indexed]
    assert followed == (Match(match.length + 1, len(moved), moved) if moved else Match())


@settings(max_examples=40, deadline=None)
@given(documents=documents_of, seed=st.integers(0, 2**32), budget=st.integers(1, 9))
def test_removal_leaves_what_the_others_said(
    documents: list[tuple[list[int], list[int]]], seed: int, budget: int
) -> None:
    index, text, indexed = build(documents)
    starts = [p for p, token in enumerate(text) if token == BOUNDARY]
    ranges = list(zip(starts, [*starts[1:], len(text)], strict=True))
    random = Random(seed)
    random.shuffle(ranges)
    for begin, end in ranges:
        gone = {p for p in indexed if begin <= p < end}
        done: list[int] = []
        while not done or done[-1] == budget:
            before = index.version
            done.append(index.remove(begin, end, budget))
            assert (index.version != before) == (done[-1] > 0)
        assert sum(done) == len(gone)
        indexed -= gone
        text[begin:end] = [BOUNDARY] * (end - begin)
        assert index.text == text and index.indexed == len(indexed)
        context = [random.randrange(3) for _ in range(5)]
        assert index.look_up(context) == longest(text, indexed, context)


def test_a_match_is_as_long_as_it_is() -> None:
    document = [*range(1000), 7]
    index, _, _ = build([([], document)])
    assert index.look_up(list(range(1000))) == Match(1000, 1, [1001])


def test_counts_are_exact_and_the_listing_is_even() -> None:
    index, _, _ = build([([], [5] * 101)])
    assert index.look_up([5, 5]).positions == index.look_up([9, 5, 5]).positions
    match = index.look_up([5])
    assert (match.length, match.count, match.complete) == (1, 100, False)
    assert match.positions == [2 + k * 100 // WINDOW for k in range(WINDOW)]  # contexts sort by their length here
    few = index.look_up([5] * 90)
    assert (few.count, few.complete) == (11, True)
    assert few.positions == list(range(101, 90, -1))


def test_pending_tokens_are_not_found() -> None:
    index = SuffixIndex()
    index.append([1, 2, 3, 4])
    assert index.advance(2) == 2
    assert index.look_up([1]).positions == [1]
    assert index.look_up([2]).positions == []
    assert (index.pending, index.advance(100), index.pending) == (2, 2, 0)
    assert index.look_up([2]).positions == [2]


def test_pending_tokens_that_are_removed_are_never_indexed() -> None:
    index = SuffixIndex()
    index.append([1, 2, 3, 1, 2])
    index.advance(2)
    index.append_boundary()
    index.append([1, 2, 4])
    assert index.remove(0, 5, 100) == 2
    assert (index.pending, index.advance(100)) == (3, 3)
    assert index.look_up([1, 2]).positions == [8]
    assert index.text == [BOUNDARY] * 6 + [1, 2, 4]


def test_context_only_is_matched_but_never_found() -> None:
    index, _, _ = build([([1, 2, 8], [3, 4])])
    assert index.look_up([1]) == Match()
    assert index.look_up([1, 2, 8]) == Match(3, 1, [4])
    assert index.look_up([9, 8]) == Match(1, 1, [4])


def test_no_match_crosses_a_boundary() -> None:
    index, text, _ = build([([], [1, 2]), ([], [3, 1, 2, 9])])
    match = index.look_up([2])
    assert match.positions == [7]  # nothing findable follows the first 2
    assert index.look_up([2, 3]).length == 1
    assert index.look_up([1, 2, BOUNDARY]) == Match()
    assert index.look_up([BOUNDARY, 1, 2]).length == 2
    assert index.follow(9, match) == Match()
    assert text[7] == 9


@pytest.mark.parametrize("length", [0, 4])
def test_a_length_that_the_context_does_not_have(length: int) -> None:
    index, _, _ = build([([], [1, 2, 3, 1, 2, 3])])
    assert index.look_up([1, 2, 3], length) == Match()


def test_the_version_changes_with_what_is_indexed_only() -> None:
    index = SuffixIndex()
    index.append([1, 2, 3])
    assert index.version == 0
    index.advance(1)
    version = index.version
    assert version != 0
    index.append([4])
    index.look_up([1])
    assert index.advance(0) == 0
    assert index.remove(4, 4, 5) == 0
    assert index.version == version
