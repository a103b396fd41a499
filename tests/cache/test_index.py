"""The reference index against its definition, spelled out by brute force."""

from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache.reference import BOUNDARY, CAP, LEVELS, WINDOW, ReferenceIndex
from tests.cache.streams import fibonacci, tokens


def brute_force(documents: list[list[int]], context: list[int]) -> tuple[int, list[int]]:
    text = [token for document in documents for token in (BOUNDARY, *document)]
    for k in LEVELS:
        if k > len(context):
            continue
        places = [p for p in range(k, len(text)) if text[p] != BOUNDARY and text[p - k : p] == context[-k:]]
        if places:
            newest = places[::-1][:WINDOW]
            agree = [_agreement(text[:p], context) for p in newest]
            return max(agree), [p for p, n in zip(newest, agree, strict=True) if n == max(agree)]
    return 0, []


def _agreement(before: list[int], context: list[int]) -> int:
    longest = min(len(before), len(context), CAP)
    return max(n for n in range(longest + 1) if n == 0 or before[-n:] == context[-n:])


@settings(max_examples=150, deadline=None)
@given(documents=st.lists(tokens, min_size=1, max_size=4), cut=st.integers(0, 10**6), extra=st.lists(st.integers(0, 2)))
def test_look_up_is_what_the_definition_says(documents: list[list[int]], cut: int, extra: list[int]) -> None:
    index = ReferenceIndex()
    for document in documents:
        index.append_boundary()
        index.append(document)
    index.advance(10**9)
    said = [token for document in documents for token in document]
    context = (said[: cut % (len(said) + 1)] + extra)[-200:]
    match = index.look_up(context)
    assert (match.length, match.positions) == brute_force(documents, context)


def test_matches_longer_than_any_level() -> None:
    index = ReferenceIndex()
    text = [*range(100), 7]
    index.append(text)
    index.advance(1000)
    match = index.look_up(list(range(100)))
    assert (match.length, match.positions) == (100, [100])


def test_pending_tokens_are_not_found() -> None:
    index = ReferenceIndex()
    index.append([1, 2, 3, 4])
    assert index.advance(2) == 2
    assert index.look_up([1]).positions == [1]
    assert index.look_up([2]).positions == []
    assert (index.pending, index.advance(100), index.pending) == (2, 2, 0)
    assert index.look_up([2]).positions == [2]


def test_no_match_crosses_a_boundary() -> None:
    index = ReferenceIndex()
    index.append([1, 2])
    index.append_boundary()
    index.append([3, 1, 2, 9])
    index.advance(100)
    match = index.look_up([2])
    assert match.positions == [6]  # the first 2 is followed by the boundary
    assert index.look_up([2, 3]).length == 1  # 2 and 3 stand side by side only across the boundary
    assert index.follow(9, match).positions == []


def test_fibonacci_word_keeps_the_longest_only() -> None:
    index = ReferenceIndex()
    word = fibonacci(200)
    index.append(word)
    index.advance(1000)
    match = index.look_up(word[:150])
    assert match.length == 150 and 150 in match.positions
