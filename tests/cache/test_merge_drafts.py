"""Test another drafter's tokens: when they replace a draft, what follows them, and what is learned."""

from typing import Any

import numpy as np
import pytest

from agentspec.cache import SOURCES, Draft, DraftPolicy, Drafts, SuffixCache
from agentspec.cache._native import draft_value
from agentspec.errors import AgentSpecError, InvalidInputError, InvalidTokenError, UnknownRequestError
from tests.cache.streams import Pair
from tests.oracle.drafting import CAUTION, DraftValue

TURN = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
REQUEST, MODEL = SOURCES.index("request"), SOURCES.index("model")


def begun(prompt: list[int], max_draft: int = 16, **policy: Any) -> tuple[SuffixCache, Draft]:
    """Return a cache with request "r", and the request's draft."""
    cache = SuffixCache(policy=DraftPolicy(**policy), vocab_size=1000)
    cache.start("r", prompt)
    return cache, cache.propose(["r"], max_draft)[0]


def merge(
    cache: SuffixCache, tokens: list[int], probabilities: list[float], max_draft: int = 16, **options: Any
) -> Drafts:
    given = np.array([tokens], np.int32), np.array([probabilities], np.float64)
    return cache.merge_drafts(["r"], *given, [len(tokens)], [max_draft], **options)


@pytest.mark.parametrize("merged", [False, True])
def test_a_draft_that_was_kept_resumes_nowhere_in_an_index_that_has_moved_meanwhile(merged: bool) -> None:
    """The indexing thread may move it while the draft model runs. Then the draft's places in it are those of others."""
    pair, said = Pair(DraftPolicy(cost=0.0)), list(range(10, 20))
    for name, response in (("first", [*said, *range(1000, 4000)]), ("second", list(range(5000, 7500)))):
        pair.start(name, [1], None, "t")
        pair.extend(name, response)
        pair.finish(name)
    pair.catch_up(2**62)
    text = [7, *said[:5]]
    pair.start("r", text, None, "t")
    assert pair.step(["r"], [text], [8], [0]).lists()[0][:5] == said[5:10]
    pair.resize(max_tokens=2600)  # evicts the first response, and then moves the second one to the front
    for _ in range(2):
        pair.catch_up(2**62)
    if merged:
        pair.merge_drafts(["r"], [[(5, 0.0)]], [8])
    assert pair.step(["r"], [[*text, 99]], [8], [8]).lists() == [[]]
    assert pair.core.candidates("r") == []


def test_given_tokens_where_the_suffix_indexes_have_none() -> None:
    cache, draft = begun([1, 2, 3])
    assert draft.token_ids.size == 0
    drafts = merge(cache, [7, 8, 9], [0.9, 0.75, 0.5])
    assert drafts.lists() == [[7, 8, 9]]
    assert drafts.sources.tolist() == [MODEL] * 3 and drafts.match_lengths.tolist() == [0]
    assert drafts.probabilities.tolist() == pytest.approx([0.9, 0.75, 0.5])
    assert drafts.expected() == pytest.approx([0.9 + 0.9 * 0.75 + 0.9 * 0.75 * 0.5])


def test_a_tail_that_does_not_pay_is_cut() -> None:
    cache, _ = begun([1, 2, 3], cost=0.1)
    assert merge(cache, [7, 8, 9], [0.9, 0.9, 0.05]).lists() == [[7, 8]]
    cache, _ = begun([1, 2, 3], cost=0.1)
    assert merge(cache, [7, 8, 9], [0.9, 0.9, 0.05], cost=0.0).lists() == [[7, 8, 9]]
    cache, _ = begun([1, 2, 3], cost=0.1)
    assert merge(cache, [7, 8, 9], [0.9, 0.9, 0.9], max_draft=1).lists() == [[7]]
    cache, _ = begun([1, 2, 3])
    assert merge(cache, [7, 8, 9], [0.9, 0.9, 0.9], max_draft=0).lists() == [[]]


def test_the_suffix_indexes_go_on_behind() -> None:
    cache, draft = begun([*TURN, 99], cost=0.001)
    assert draft.token_ids.size == 0
    drafts = merge(cache, [50, 11, 12], [0.9, 0.9, 0.9], max_draft=6)
    assert drafts.lists() == [[50, 11, 12, 13, 14, 15]]
    # A token that the suffix indexes drafted too counts as theirs, with the given probability.
    assert drafts.sources.tolist() == [MODEL, MODEL, REQUEST, REQUEST, REQUEST, REQUEST]
    assert drafts.probabilities[2] == np.float32(0.9)


def test_a_worse_draft_changes_nothing() -> None:
    cache, draft = begun(TURN + TURN[:4])
    scored = cache.candidates("r")
    assert draft.token_ids.tolist()[:3] == TURN[4:7]
    drafts = merge(cache, [50, 51], [0.2, 0.2])
    assert drafts.lists() == [draft.token_ids.tolist()] and drafts.sources.tolist() == draft.sources.tolist()
    assert drafts.probabilities.tolist() == draft.probabilities.tolist()
    assert cache.candidates("r") == scored


def test_a_better_offer_takes_the_place() -> None:
    cache, draft = begun(TURN + TURN[:4], max_draft=1)
    assert draft.token_ids.tolist() == [15]
    drafts = merge(cache, [15, 50, 51], [0.99, 0.99, 0.99])
    assert drafts.lists()[0][:3] == [15, 50, 51]
    assert drafts.sources.tolist()[:3] == [REQUEST, MODEL, MODEL] and drafts.match_lengths.tolist() == [4]
    assert [candidate.token for candidate in cache.candidates("r")[0]] == [15]


def test_the_best_of_several_offers_stays() -> None:
    cache, _ = begun([1, 2, 3])
    for tokens, probabilities, best in [
        ([7, 8], [0.5, 0.5], [7, 8]),
        ([5], [0.4], [7, 8]),
        ([6, 8], [0.9, 0.9], [6, 8]),
        ([7, 8], [0.5, 0.5], [6, 8]),
    ]:
        assert merge(cache, tokens, probabilities).lists() == [best]


def test_offers_in_one_call_are_taken_in_turn() -> None:
    cache, _ = begun([1, 2, 3])
    cache.start("q", [4, 5])
    cache.propose(["q"], 4)
    tokens = np.array([[7, -1], [8, 9], [6, 5]])
    drafts = cache.merge_drafts(
        ["r", "q", "r"], tokens, np.array([[0.5, 7], [0.9, 0.9], [0.9, 0.9]]), [1, 2, 2], [4, 4, 4]
    )
    assert drafts.lists() == [[7], [8, 9], [6, 5]]


def test_chances_for_its_own_tokens_shorten_or_drop_a_draft() -> None:
    prompt = TURN + TURN[:4]
    cache, draft = begun(prompt)
    own = draft.token_ids.tolist()
    assert len(own) >= 4
    assert merge(cache, own[:3], [0.9, 0.9, 0.001]).lists() == [own[:2]]
    assert merge(cache, own[:1], [0.001]).lists() == [[]]
    assert merge(cache, [50], [0.3]).lists() == [[50]]  # the tokens that won before


def test_chances_for_its_own_tokens_lengthen_a_draft() -> None:
    cache, draft = begun(TURN + TURN[:2], cost=0.3)
    own = draft.token_ids.tolist()
    assert len(own) < 4
    assert merge(cache, TURN[2:6], [0.99] * 4).lists()[0][:4] == TURN[2:6]


def test_text_goes_on_behind_a_replaced_token() -> None:
    """If the given token differs from the one to copy, the copy goes on behind it."""
    cache, _ = begun(TURN + TURN[:5], max_draft=0, cost=0.0)
    drafts = merge(cache, [99], [0.999999], max_draft=4)
    assert drafts.lists() == [[99, 17, 18, 19]] and drafts.sources.tolist() == [MODEL, REQUEST, REQUEST, REQUEST]


def table_of(tokens: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array([tokens], np.int32)


def test_what_was_accepted_is_counted_for_the_model() -> None:
    cache, _ = begun([*TURN, 99], cost=0.001)
    assert merge(cache, [50, 11, 12], [0.9] * 3, max_draft=5).lists() == [[50, 11, 12, 13, 14]]
    text = [*TURN, 99, 50, 11, 12, 7]
    result = cache.step(["r"], table_of(text), [0], [len(text)], [4], [4])
    assert result.drafted.tolist() == [[2, 0, 0, 0, 0, 0, 0, 2, 0]] and result.accepted.tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 2, 0]
    ]


@pytest.mark.parametrize("said", [[99, 17], [16, 17], [50, 51]])
def test_the_suffix_indexes_learn_as_without_an_offer(said: list[int]) -> None:
    """Verification reveals the first position in any case. The index learns from it and sets a resume point."""
    answers = []
    for offered in (False, True):
        cache, _ = begun(TURN + TURN[:5], max_draft=1, rerank=False, memory=3.0, cost=0.0)
        if offered:
            assert merge(cache, [99], [1.0], max_draft=1).lists() == [[99]]
        cache.extend("r", said)
        draft = cache.propose(["r"], 4)[0]
        answers.append((draft.token_ids.tolist(), draft.probabilities.tolist()))
    assert answers[0] == answers[1] and answers[0][0]


def test_a_given_token_that_is_right_reveals_what_follows() -> None:
    """The suffix indexes' draft behind it is learned from. It is always wrong, so its probability falls."""
    probabilities = []
    cache = SuffixCache(policy=DraftPolicy(cost=0.0))
    for _ in range(40):
        cache.start("r", [*TURN, 99], tenant="t")
        cache.propose(["r"], 2)
        drafts = merge(cache, [13], [0.999], max_draft=2)
        assert drafts.lists() == [[13, 14]]
        probabilities.append(float(drafts.probabilities[1]))
        cache.extend("r", [13, 98])
        cache.abort("r")
    assert probabilities[-1] < 0.5 * probabilities[0]


def test_under_the_fixed_rule() -> None:
    cache = SuffixCache(policy=DraftPolicy.fixed())
    cache.start("r", TURN + TURN[:4])
    own = cache.propose(["r"], 4)[0].token_ids.tolist()
    assert own == TURN[4:8]
    assert merge(cache, own[:1], [0.01]).lists() == [own]  # the rule's draft is never cut
    assert merge(cache, [50], [0.9]).lists() == [own]
    drafts = merge(cache, [*own, 50, 51], [0.99] * 6)
    assert drafts.lists() == [[*own, 50, 51]]  # the suffix indexes add nothing behind them
    assert drafts.sources.tolist() == [REQUEST] * 4 + [MODEL] * 2 and drafts.match_lengths.tolist() == [4]


def test_no_draft_for_this_text_and_so_no_offer() -> None:
    cache = SuffixCache()
    cache.start("r", [1, 2, 3])
    assert merge(cache, [7], [0.9]).lists() == [[]]  # no draft yet
    cache.propose(["r"], 4)
    cache.extend("r", [7])
    assert merge(cache, [8], [0.9]).lists() == [[]]  # the draft was for the earlier text
    cache.step(["r"], table_of([1, 2, 3, 7, -1]), [0], [5], [4], [0])
    assert merge(cache, [8], [0.9]).lists() == [[]]  # the engine's row holds no valid token
    cache.step(["r"], table_of([1, 2, 3, 7]), [0], [4], [4], [0])
    assert merge(cache, [8], [0.9]).lists() == [[8]]


BAD_OFFERS: list[tuple[dict[str, Any], type[AgentSpecError], str]] = [
    ({"tokens": np.array([[5, 1000]])}, InvalidTokenError, r"tokens\[0, 1\] is 1000: token ids must be from 0 to 999"),
    ({"tokens": np.array([[-1, 5]])}, InvalidTokenError, r"tokens\[0, 0\] is -1"),
    ({"tokens": np.array([[5.0, 6.0]])}, InvalidInputError, "tokens: .*float64"),
    ({"tokens": [[5, 6]]}, InvalidInputError, "tokens: .*list"),
    ({"tokens": np.array([5, 6])}, InvalidInputError, r"tokens: .*\(2,\)"),
    ({"tokens": np.array([[5], [6]])}, InvalidInputError, r"\(2, 1\)"),
    ({"tokens": np.array([[5, 6, 7]])}, InvalidInputError, r"\(1, 3\) and \(1, 2\)"),
    ({"probabilities": np.array([[0.5, 1.5]])}, InvalidInputError, r"probabilities\[0, 1\] is 1.5"),
    ({"probabilities": np.array([[-0.1, 1.0]])}, InvalidInputError, r"probabilities\[0, 0\] is -0.1"),
    ({"probabilities": np.array([[0.5, np.nan]])}, InvalidInputError, r"probabilities\[0, 1\] is nan"),
    ({"probabilities": np.array([[1, 1]])}, InvalidInputError, "probabilities: .*int64"),
    ({"probabilities": np.array([[0.5]])}, InvalidInputError, "one probability a token"),
    ({"lengths": [3]}, InvalidInputError, "lengths: must be from 0 to 2"),
    ({"lengths": [-1]}, InvalidInputError, "lengths"),
    ({"lengths": [1, 1]}, InvalidInputError, "lengths"),
    ({"max_draft": [1.0]}, InvalidInputError, "max_draft"),
    ({"cost": float("nan")}, InvalidInputError, "cost"),
    ({"request_ids": ["gone"]}, UnknownRequestError, "'gone' is not running"),
    ({"request_ids": ["r", "gone"]}, UnknownRequestError, "'gone' is not running"),
]


@pytest.mark.parametrize(("bad", "error", "message"), BAD_OFFERS)
def test_bad_offers_change_nothing(bad: dict[str, Any], error: type[AgentSpecError], message: str) -> None:
    cache, _ = begun([1, 2, 3])
    good: dict[str, Any] = {
        "request_ids": ["r"],
        "tokens": np.array([[5, 6]]),
        "probabilities": np.array([[0.9, 0.8]], np.float32),
        "lengths": [2],
        "max_draft": [4],
    }
    with pytest.raises(error, match=message):
        cache.merge_drafts(**{**good, **bad})
    assert merge(cache, [], []).lists() == [[]]
    assert cache.merge_drafts(**good).lists() == [[5, 6]]
    cache.extend("r", [5])
    assert cache.candidates("r") == []


@pytest.mark.parametrize("cost", [0.0, 0.02, 0.3])
def test_draft_value_is_what_drafts_are_cut_by(cost: float) -> None:
    value = DraftValue(CAUTION * cost)
    for probability in (0.9, 0.5, 0.8, 0.1):
        value.add(probability)
        assert draft_value(value.expected - 1.0, value.length, cost) == pytest.approx(value.value, rel=1e-15)
    assert draft_value(0.0, 0, cost) == 1.0


def test_a_draft_is_worth_more_the_more_it_promises_and_less_the_dearer_it_is() -> None:
    assert draft_value(2.0, 4, 0.02) > draft_value(1.5, 4, 0.02) > draft_value(1.5, 8, 0.02) > draft_value(1.5, 8, 0.1)
