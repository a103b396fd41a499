"""Test that bad input gives a clear error that names what is wrong, and changes nothing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentspec.cache import DraftPolicy, FinishedTurn, SuffixCache, context_hashes
from agentspec.errors import (
    ConfigurationError,
    DuplicateRequestError,
    InvalidInputError,
    InvalidSessionError,
    InvalidTokenError,
    UnknownRequestError,
)

LARGEST = 2**31 - 1

BAD_TOKENS: list[tuple[Any, str]] = [
    ([1, -1], r"\[1\] is -1"),
    ([0, 1, 2**31], r"\[2\] is 2147483648"),
    ([2**70], r"\[0\] is 1180591620717411303424"),
    ([1, True], r"\[1\] is True"),
    ([1, 2.0], r"\[1\] is 2.0"),
    (["1"], r"\[0\] is '1'"),
    ([[1, 2]], r"\[0\]"),
    ("abc", "str"),
    (None, "NoneType"),
    (np.array([1.0]), "float64"),
    (np.array([True]), "bool"),
    (np.array([[1]]), r"shape \(1, 1\)"),
    (np.array([1, -5], np.int32), r"\[1\] is -5"),
    (np.array([2**40]), r"\[0\] is 1099511627776"),
]


@pytest.mark.parametrize(("tokens", "message"), BAD_TOKENS)
def test_bad_tokens_are_refused_before_anything_changes(tokens: Any, message: str) -> None:
    cache = SuffixCache()
    cache.start("r", [1, 2, 3], session="s")
    before = (cache.propose(["r"], 4)[0].token_ids.tolist(), cache.stats())
    with pytest.raises(InvalidTokenError, match=message):
        cache.start("new", tokens)
    with pytest.raises(InvalidTokenError, match=message):
        cache.extend("r", tokens)
    with pytest.raises(InvalidTokenError, match=message):
        cache.restore(FinishedTurn(None, "s", 0, np.array([1], np.int32), tokens))
    assert (cache.propose(["r"], 4)[0].token_ids.tolist(), cache.stats()) == before


@pytest.mark.parametrize(
    "tokens",
    [
        [0, LARGEST, 0, LARGEST, 0],
        (0, LARGEST, 0, LARGEST, 0),
        np.array([0, LARGEST, 0, LARGEST, 0], np.int32),
        np.array([0, LARGEST, 0, LARGEST, 0], np.int64),
        np.array([0, 9, LARGEST, 9, 0, 9, LARGEST, 9, 0], np.uint32)[::2],
        [np.int64(0), LARGEST, np.int32(0), LARGEST, 0],
    ],
)
def test_every_integer_form_is_taken(tokens: Any) -> None:
    cache = SuffixCache()
    cache.start("r", tokens)
    assert cache.propose(["r"], 1)[0].token_ids.tolist() == [LARGEST]


def test_vocabulary_bounds_the_tokens() -> None:
    cache = SuffixCache(vocab_size=100)
    cache.start("r", [0, 99])
    with pytest.raises(InvalidTokenError, match=r"tokens\[0\] is 100: token ids must be from 0 to 99"):
        cache.extend("r", [100])


def test_placeholders_of_images_are_context_and_never_drafted() -> None:
    """Some models mark images in a prompt by ids beyond their vocabulary."""
    cache, other = SuffixCache(vocab_size=100), SuffixCache(vocab_size=100)
    image = [100] * 300 + [2**31 - 2] * 2
    prompt = [1, 2, *image, 3, 4]
    cache.start("r", prompt, session="s")
    table = np.array([[*prompt, 5, 6, 7, 1, 2]], np.int32)
    assert cache.step(["r"], table, [0], [len(prompt) + 5], [8], [0], cost=0.0).lists() == [[]]
    turn = cache.finish("r")
    assert turn is not None and turn.prompt_tail.tolist() == prompt
    other.restore(turn)
    for kept in (cache, other):
        kept.catch_up()
        kept.start("q", [*prompt, 5], session="s")
        assert kept.propose(["q"], 2, cost=0.0)[0].token_ids.tolist() == [6, 7]
        again = kept.finish("q")
        assert again is not None and again.kept == len(prompt) + 1
        assert again.parent == context_hashes([*prompt, 5]).tolist()[-1]
        kept.start("q", [9, 2**31 - 2, 3], session="s")  # the image's last placeholder is matched
        assert kept.propose(["q"], 1, cost=0.0)[0].token_ids.tolist() == [4]
        kept.abort("q")


def test_a_row_may_have_any_number_where_a_placeholder_was() -> None:
    """The largest token has no form as a placeholder. The sanitizer of undefined behaviour watches this."""
    for token in (2**31 - 1, -(2**31), -1, 99):
        cache = SuffixCache(vocab_size=100)
        cache.start("r", [1, 2, 3, 2**31 - 2, 5, 6])
        row = np.array([[1, 2, 3, token, 5, 6, 7, 8]], np.int32)
        cache.step(["r"], row, [0], [8], [0], [0])
        cache.step(["r"], np.array([[1, 2, 3, 1, 2, 3]], np.int32), [0], [6], [0], [0])
        assert cache.propose(["r"], 1, cost=0.0)[0].token_ids.tolist() == [1]
        turn = cache.finish("r")
        assert turn is not None and [*turn.prompt_tail, *turn.response] == [1, 2, 3, 1, 2, 3]


def test_request_ids() -> None:
    cache = SuffixCache()
    cache.start("r", [1])
    with pytest.raises(DuplicateRequestError, match="'r'"):
        cache.start("r", [2])
    for call in (
        cache.finish,
        cache.abort,
        lambda name: cache.propose([name], 1),
        lambda name: cache.extend(name, [1]),
    ):
        with pytest.raises(UnknownRequestError, match="'gone' is not running"):
            call("gone")
    cache.abort("r")
    cache.start("r", [1])


@pytest.mark.parametrize("wrong", [["r"], {}, np.zeros((2, 2)), None, 7])
def test_what_is_no_request_id(wrong: Any) -> None:
    cache = SuffixCache()
    cache.start("r", [1])
    for call in (cache.finish, cache.abort, cache.candidates, cache.family_of, lambda name: cache.extend(name, [1])):
        with pytest.raises(UnknownRequestError, match="is not running"):
            call(wrong)
    with pytest.raises(InvalidInputError, match=r"^request_id="):
        cache.start(wrong, [1])
    for of_several in (cache.batch, lambda ids: cache.propose(ids, 1)):
        with pytest.raises((InvalidInputError, UnknownRequestError), match=r"^request_ids: give|is not running"):
            of_several([wrong])
    assert cache.stats().requests == 1


@pytest.mark.parametrize("wrong", [None, 7, object()])
def test_what_is_no_sequence_of_ids(wrong: Any) -> None:
    cache = SuffixCache()
    for call in (cache.batch, lambda ids: cache.propose(ids, 1)):
        with pytest.raises(InvalidInputError, match=r"^request_ids: give a sequence of ids"):
            call(wrong)


@pytest.mark.parametrize("wrong", [None, 7, "turn", {"session": "s"}])
def test_what_is_no_turn(wrong: Any) -> None:
    cache = SuffixCache()
    for call in (cache.restore, cache.learn_from, lambda turn: cache.prepare([turn])):
        with pytest.raises(InvalidInputError, match=r"^turns?: give"):
            call(wrong)


def test_a_session_that_is_not_named() -> None:
    cache = SuffixCache()
    for call in (cache.has_session, cache.free_session, cache.remove_session):
        with pytest.raises(InvalidSessionError, match=r"^session: must be a string, got NoneType"):
            call(None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "a\x00b", 7])
def test_session_names(name: Any) -> None:
    cache = SuffixCache()
    for field in ("session", "tenant", "group"):
        with pytest.raises(InvalidSessionError, match=field):
            cache.start("r", [1], **{field: name})
    assert cache.stats().requests == 0 and cache.stats().tenants == 0


def test_numbers_out_of_range() -> None:
    cache = SuffixCache()
    cache.start("r", [1])
    with pytest.raises(InvalidInputError, match="output_limit"):
        cache.finish("r", output_limit=-1)
    with pytest.raises(InvalidInputError, match="max_draft"):
        cache.propose(["r"], [1, 2])
    with pytest.raises(InvalidInputError, match="kept"):
        cache.restore(FinishedTurn(None, "s", -1, np.array([], np.int32), np.array([], np.int32)))
    assert cache.propose(["r"], -3)[0].token_ids.size == 0
    for options in ({"max_tokens": 0}, {"vocab_size": 0}, {"vocab_size": 2**31 + 1}):
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            SuffixCache(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["kept", "parent", "block"])
@pytest.mark.parametrize("wrong", ["1", 1.5, None, True, -1, 2**64])
def test_a_turns_numbers(field: str, wrong: Any) -> None:
    cache = SuffixCache()
    turn = FinishedTurn(None, "s", 0, np.array([1], np.int32), np.array([2], np.int32))
    for take in (cache.restore, cache.learn_from, lambda turn: cache.prepare([turn])):
        with pytest.raises(InvalidInputError, match=f"^{field}="):
            take(replace(turn, **{field: wrong}))
    right: Any = {field: np.uint64(0)}  # as in what `context_hashes` returns
    cache.restore(replace(turn, **right))
    assert cache.stats().sessions == 1


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("writer", "\ud800"), ("writer", 5), ("writer", None), ("number", None), ("number", "1"), ("number", True)],
)
def test_the_name_of_a_stored_turn(field: str, wrong: Any) -> None:
    cache = SuffixCache()
    turn = FinishedTurn(None, "s", 0, np.array([1], np.int32), np.array([2], np.int32), writer="w", number=1)
    for take in (cache.restore, cache.learn_from, lambda turn: cache.prepare([turn])):
        with pytest.raises(InvalidInputError, match=f"^{field}=.*: give a "):
            take(replace(turn, **{field: wrong}))
    assert cache.stats().sessions == 0


@pytest.mark.parametrize("requests", [0, 2])
@pytest.mark.parametrize("wrong", [[[1], [1, 2]], [1, [2]], ["a", "b"], "ab", "", None, {}, [1.5, 2], [[1]], [1]])
def test_numbers_of_each_request(requests: int, wrong: Any) -> None:
    cache = SuffixCache()
    ids = [f"r{number}" for number in range(requests)]
    for request_id in ids:
        cache.start(request_id, [1])
    with pytest.raises(InvalidInputError, match=rf"^max_draft: give one integer a request \({requests}\)"):
        cache.propose(ids, wrong)
    for right in ([4] * requests, (4,) * requests, np.full(requests, 4)):
        assert len(cache.propose(ids, right)) == requests  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["ab", "w", ("w",), ("w", 1, 2), ("w", "1"), ("w", 1.5), ("w", True), (1, 2), 7])
def test_a_turns_name(wrong: Any) -> None:
    cache = SuffixCache()
    cache.start("r", [1, 2], session="s")
    cache.extend("r", [3])
    with pytest.raises(InvalidInputError, match=r"^name=.*: give a writer and a number, or None$"):
        cache.finish("r", name=wrong)
    turn = cache.finish("r", name=("w", 1))
    assert turn is not None and (turn.writer, turn.number) == ("w", 1)


def test_numbers_larger_than_any_text() -> None:
    cache = SuffixCache()
    for budget, seconds in ((2**70, None), (None, 1e300), (-(2**70), -1e300), (2**70, float("inf"))):
        cache.start("r", [1, 2])
        cache.extend("r", [3])
        cache.catch_up(budget, seconds=seconds)
        turn = cache.finish("r", output_limit=2**70)
        assert turn is not None and turn.response.tolist() == [3]


def test_numbers_that_are_none() -> None:
    cache = SuffixCache()
    cache.start("r", [1, 2, 1])
    for wrong in ("x", [1], True):
        with pytest.raises(InvalidInputError, match="output_limit="):
            cache.finish("r", output_limit=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="cost='x'"):
        cache.propose(["r"], 4, cost="x")  # type: ignore[arg-type]
    for scalar in (1j, np.complex64(0.1), np.complex128(0.1)):
        with pytest.raises(InvalidInputError, match="cost="):
            cache.propose(["r"], 4, cost=scalar)  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match="seconds="):
            cache.catch_up(seconds=scalar)  # type: ignore[arg-type]
    for many in (2**31, -(2**31) - 1, 2**40):
        with pytest.raises(InvalidInputError, match="integers of 32 bits"):
            cache.propose(["r"], [many])
    for options in ({"vocab_size": "a"}, {"max_bytes": 2**70}, {"max_tokens": 1.5}, {"max_bytes": True}):
        with pytest.raises(ConfigurationError, match=f"{next(iter(options))}="):
            SuffixCache(**options)
    for options in ({"budget": 1.5}, {"budget": "x"}, {"seconds": "x"}, {"seconds": float("nan")}, {"budget": True}):
        with pytest.raises(InvalidInputError, match=f"{next(iter(options))}="):
            cache.catch_up(**options)
    SuffixCache(vocab_size=np.int64(9), max_bytes=np.int64(10_000_000))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("most", "x", "most='x': give an integer of 32 bits"),
        ("most", 1.0, "most=1.0: give an integer of 32 bits"),
        ("most", None, "most=None: give an integer of 32 bits"),
        ("most", True, "most=True: give an integer of 32 bits"),
        ("most", 2**31, "most=2147483648: give an integer of 32 bits"),
        ("work_seconds", "x", "work_seconds='x': give a number of seconds"),
        ("work_seconds", None, "work_seconds=None: give a number of seconds"),
        ("work_seconds", 1j, "work_seconds=1j: give a number of seconds"),
        ("work_seconds", float("nan"), "work_seconds=nan: give a number of seconds"),
    ],
)
def test_a_step_refuses_wrong_limits_by_name(name: str, wrong: Any, message: str) -> None:
    cache = SuffixCache()
    cache.start("r", [1, 2, 1, 2])
    table = np.array([[1, 2, 1, 2, 1]], np.int32)
    with pytest.raises(InvalidInputError, match=f"^{message}$"):
        cache.step(["r"], table, [0], [5], [4], [0], **{name: wrong})
    taken = cache.step(["r"], table, [0], [5], [4], [0], cost=0.0, most=np.int64(2), work_seconds=np.float32(0.001))  # type: ignore[arg-type]
    assert taken.lists() == [[2, 1]]


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("policy", "arctic", "DraftPolicy"),
        ("history", "2 epochs", "HistoryWindow"),
        ("per_tenant", 100, "Budget"),
        ("per_session", {"tokens": 100}, "Budget"),
    ],
)
def test_arguments_of_another_kind(name: str, value: Any, kind: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name}=.*: give a {kind}, or None$"):
        SuffixCache(**{name: value})


@pytest.mark.parametrize(
    "options",
    [{"cost": -0.1}, {"cost": float("nan")}, {"max_draft": 129}, {"max_draft": 2.0}, {"min_match": 0}, {"memory": 1}],
)
def test_policy_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        DraftPolicy(**options)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda cache: cache.save(5), "path=5: give a string"),
        (lambda cache: cache.save("x", identity=5), "identity=5: give a string"),
        (lambda cache: cache.save("x", note="text"), "note='text': give bytes"),
        (lambda cache: cache.load_snapshot(None), "path=None: give a string"),
        (lambda cache: cache.finish("r", name=("\ud800", 1)), "give a writer and a number"),
        (lambda cache: cache.catch_up(seconds=float("nan")), "seconds=nan: give a number"),
        (lambda cache: context_hashes([1], -1), "parent=-1: give a number from 0"),
        (lambda cache: context_hashes([1], 0, 2**32), "kept=4294967296: give a number from 0"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(call: Callable[[SuffixCache], object], said: str) -> None:
    cache = SuffixCache()
    cache.start("r", [1, 2], tenant="t")
    with pytest.raises(InvalidInputError, match=said):
        call(cache)
    assert cache.catch_up(seconds=10**400) >= 0  # however long it is
    assert not Path("5").exists() and not Path("x").exists()
