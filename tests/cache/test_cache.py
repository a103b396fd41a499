"""Test what a user of SuffixCache relies on."""

import subprocess
import sys

import numpy as np
import pytest

from agentspec.cache import SOURCES, DraftPolicy, FinishedTurn, Scope, SuffixCache
from agentspec.errors import InvalidTokenError
from tests.oracle.cache import OWN_PER_STEP, WORK_PER_STEP

TURN = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


def drafts(cache: SuffixCache, request: str, max_draft: int = 32) -> list[int]:
    tokens: list[int] = cache.propose([request], max_draft)[0].token_ids.tolist()
    return tokens


def run(
    cache: SuffixCache,
    prompt: list[int],
    response: list[int],
    session: str | None,
    tenant: str | None,
    scope: Scope = "tenant",
) -> FinishedTurn | None:
    cache.start("run", prompt, session=session, tenant=tenant, scope=scope)
    cache.extend("run", response)
    return cache.finish("run")


def test_drafts_from_the_request_itself() -> None:
    cache = SuffixCache()
    cache.start("r", TURN + TURN[:4])
    draft = cache.propose(["r"], 3)[0]
    assert draft.token_ids.tolist() == [15, 16, 17] and draft.token_ids.dtype == np.int32
    assert (draft.source, draft.match_length) == ("request", 4)
    assert draft.probabilities.dtype == np.float32 and (draft.probabilities > 0).all()


def test_nothing_is_drafted_behind_a_token_that_ends_the_response() -> None:
    cache = SuffixCache(policy=DraftPolicy(cost=0.0))
    cache.start("r", TURN + TURN[:4], end_tokens=[17, 99])
    assert drafts(cache, "r") == [15, 16, 17]
    cache.start("open", TURN + TURN[:4])
    assert drafts(cache, "open")[:5] == [15, 16, 17, 18, 19]
    with pytest.raises(InvalidTokenError, match=r"end_tokens\[0\]"):
        cache.start("bad", [1], end_tokens=[-1])


def test_second_turn_drafts_from_the_first() -> None:
    cache = SuffixCache()
    run(cache, [1, 2, 3], TURN, "s", None)
    cache.start("r", [1, 2, 3, *TURN, 4, 5, 11, 12, 13], session="s")
    draft = cache.propose(["r"], 2)[0]
    assert draft.token_ids.tolist() == [14, 15] and draft.source == "session"


def test_a_response_is_found_from_its_first_token() -> None:
    """A stored response keeps the end of its prompt in front, so a like prompt drafts its first token."""
    cache = SuffixCache()
    run(cache, [1, 2, 3], TURN, None, "t")
    cache.start("r", [9, 2, 3], tenant="t")
    draft = cache.propose(["r"], 1)[0]
    assert draft.token_ids.tolist() == [11] and draft.source == "global"


def test_session_pays_for_new_tokens_only() -> None:
    cache = SuffixCache()
    text = [1, 2, 3]
    added = 0
    for turn in range(5):
        finished = run(cache, text, [100 + turn] * 3, "s", None, "session")
        assert finished is not None
        added += len(finished.prompt_tail) + len(finished.response)
        assert finished.kept == (len(text) - 2 if turn else 0)
        text = [*text, *[100 + turn] * 3, 50, 51]
    assert added == len(text) - 2  # no token is added twice


def test_a_changed_prompt_starts_where_it_differs() -> None:
    cache = SuffixCache()
    run(cache, [1, 2, 3], TURN, "s", None)
    finished = run(cache, [1, 2, 9], [7, 7], "s", None)
    assert finished is not None and finished.kept == 2 and finished.prompt_tail.tolist() == [9]
    cache.start("r", [5, 1, 2], session="s")
    assert drafts(cache, "r", 1) == [9]  # the newer of two matches, which begins before the stored response


def test_kept_counts_against_what_the_session_is_at_the_end() -> None:
    cache = SuffixCache()
    cache.start("a", [1, 2, 3], session="s")
    cache.start("b", [1, 2, 4], session="s")
    cache.extend("a", [5])
    cache.extend("b", [6])
    first, second = cache.finish("a"), cache.finish("b")
    assert first is not None and second is not None
    assert (first.kept, first.prompt_tail.tolist()) == (0, [1, 2, 3])
    assert (second.kept, second.prompt_tail.tolist()) == (2, [4])


def test_output_limit_drops_what_ran_past_the_stop() -> None:
    cache = SuffixCache()
    cache.start("r", [1], session="s", tenant="t")
    cache.extend("r", TURN)
    turn = cache.finish("r", output_limit=3)
    assert turn is not None and turn.response.tolist() == TURN[:3]
    cache.start("n", [1, *TURN[:3]], session="s", tenant="t")
    assert drafts(cache, "n") == []


def test_abort_keeps_nothing() -> None:
    cache = SuffixCache()
    cache.start("r", [1], session="s", tenant="t")
    cache.extend("r", TURN)
    cache.abort("r")
    assert not cache.has_session("t", "s") and cache.stats().tokens == 0 and cache.stats().requests == 0
    cache.start("r", [1, 11, 12], session="s", tenant="t")
    assert drafts(cache, "r") == []


def test_no_draft_where_none_pays() -> None:
    prompt = TURN + TURN[:4]
    cheap, dear = SuffixCache(policy=DraftPolicy(cost=0.01)), SuffixCache(policy=DraftPolicy(cost=5.0))
    for cache in (cheap, dear):
        cache.start("r", prompt)
    assert len(drafts(cheap, "r")) > 0 and drafts(dear, "r") == []
    assert drafts(cheap, "r", max_draft=0) == []


def test_odds_fall_with_failures_and_recover() -> None:
    """Verification also teaches about the best candidates when nothing is drafted."""
    cache = SuffixCache(policy=DraftPolicy(cost=0.3, memory=20))
    cache.start("r", [])
    cache.extend("r", [1, 2, 3, 4, 7] * 2)
    probability = [_probability(cache)]
    for i in range(80):
        cache.propose(["r"], 1)
        cache.extend("r", [20 + i, 1, 2, 3, 4])
    probability.append(_probability(cache))
    assert probability[1] < probability[0]
    for _ in range(80):
        cache.propose(["r"], 1)
        cache.extend("r", [7])
        cache.extend("r", [1, 2, 3, 4])
    probability.append(_probability(cache))
    assert probability[2] > probability[1]


def _probability(cache: SuffixCache) -> float:
    draft = cache.propose(["r"], 1)[0]
    return float(draft.probabilities[0]) if draft.probabilities.size else 0.0


def test_long_prompt_is_indexed_little_by_little() -> None:
    cache = SuffixCache()
    step = OWN_PER_STEP + WORK_PER_STEP
    prompt = np.arange(2 * step, dtype=np.int32)
    cache.start("r", np.concatenate([prompt, prompt[-20:-10]]))
    assert cache.stats().pending == 2 * step + 10
    assert drafts(cache, "r") == []  # the tokens to draft are still pending
    assert cache.stats().pending == step + 10
    assert cache.catch_up() == step + 10
    assert drafts(cache, "r", 4) == prompt[-10:-6].tolist()


def test_budget_evicts_the_least_recently_used_session() -> None:
    cache = SuffixCache(max_tokens=100)
    for name in "abc":
        run(cache, [], list(range(16)), name, None, "session")
    cache.start("r", list(range(16)), session="a")  # a is in use now
    run(cache, [], list(range(16)), "d", None, "session")
    held = {name for name in "abcd" if cache.has_session(None, name)}
    assert held == {"a", "c", "d"} and cache.stats().tokens <= 100
    for name in "efgh":
        run(cache, [], list(range(16)), name, None, "session")
    assert cache.has_session(None, "a")  # it is never evicted while one of its requests runs


def test_budget_drops_the_older_half_of_a_tenants_corpus() -> None:
    cache = SuffixCache(max_tokens=100)
    for i in range(10):
        run(cache, [], [100 * i + n for n in range(19)], None, "t")
    assert 0 < cache.stats().tokens <= 100
    cache.start("r", [900, 901], tenant="t")
    assert drafts(cache, "r", 1) == [902]
    cache.start("q", [0, 1], tenant="t")
    assert drafts(cache, "q", 1) == []


def test_restore_is_as_if_the_turns_had_run_here() -> None:
    rng = np.random.default_rng(7)
    original, copy = SuffixCache(), SuffixCache()
    text: list[int] = []
    for number in range(12):
        prompt = text[: int(rng.integers(len(text) + 1))] + rng.integers(0, 9, 12).tolist()
        session, tenant = [("s", None), ("s", "t"), (None, "t")][number % 3]
        turn = run(original, prompt, rng.integers(0, 9, 20).tolist(), session, tenant)
        text = prompt
        assert turn is not None
        copy.restore(turn)
    assert copy.stats().tokens == original.stats().tokens > 0
    for session, tenant in [("s", None), ("s", "t"), (None, "t")]:
        for start in range(30):
            for cache in (original, copy):
                cache.start("r", [start % 9, start // 9, 3], session=session, tenant=tenant)
            ours, theirs = copy.propose(["r"], 8)[0], original.propose(["r"], 8)[0]
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
            assert (ours.match_length, ours.source) == (theirs.match_length, theirs.source)
            copy.abort("r")
            original.abort("r")


def test_restore_without_the_turns_before_it() -> None:
    cache = SuffixCache()
    cache.restore(FinishedTurn("t", "s", 500, np.array([1, 2], np.int32), np.array(TURN, np.int32)))
    cache.start("r", [2, 11, 12], session="s", tenant="t")
    assert drafts(cache, "r", 1) == [13]


def test_sources_are_named() -> None:
    assert SOURCES == ("request", "session", "group", "global", "public", "sibling", "prediction", "model", "quote")


_WITHOUT_THE_CORE = """
import sys
sys.modules["agentspec.cache._native"] = None  # importing it fails, as where it was not built
import agentspec.cli
from agentspec import AgentClient
from agentspec.cache.store import open_store
try:
    from agentspec.cache import SuffixCache
except ValueError as error:
    print(type(error).__name__, error)
"""


def test_a_missing_core_is_one_clear_error_and_the_client_does_without() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT_THE_CORE], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ConfigurationError agentspec's compiled core cannot be loaded")
    assert "apt-get install g++" in done.stdout and len(done.stdout.splitlines()) == 1


def test_importing_the_client_imports_no_core() -> None:
    script = "import sys, agentspec.client; print('agentspec.cache._native' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
