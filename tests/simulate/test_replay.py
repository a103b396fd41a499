"""Test that the simulation counts what greedy verification would have done, with the real cache."""

from collections.abc import Iterator

import numpy as np
import pytest

from agentspec.cache import DraftPolicy, Scope, SuffixCache
from agentspec.cache.core import without_clock
from agentspec.simulate import Call, Durations, Figures, simulate


def _tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, count, dtype=np.int32)


def _call(line: int, prompt: np.ndarray, response: np.ndarray, session: str = "s", tenant: str | None = None) -> Call:
    return Call(line, session, 0, None, tenant, prompt, response)


def test_nothing_that_repeats_takes_one_step_a_token() -> None:
    figures = simulate([_call(1, _tokens(1, 300), _tokens(2, 80))], SuffixCache())
    assert (figures.tokens, figures.steps, figures.accepted) == (80, 80, 0)
    assert (figures.tokens_per_step, figures.acceptance_rate) == (1.0, 0.0)
    assert figures.bytes_per_token > 0


def test_a_repeated_answer_comes_from_its_session_and_counts_add_up() -> None:
    prompt, answer = _tokens(1, 60), _tokens(2, 90)
    again = np.concatenate([prompt, answer, _tokens(3, 10), prompt[:20]])
    figures = simulate([_call(1, prompt, answer), _call(2, again, answer)], SuffixCache())
    assert figures.tokens == 180
    assert figures.steps < 130
    # A step gives its accepted tokens and one more, unless a response ends within its draft.
    assert figures.tokens <= figures.steps + figures.accepted <= figures.tokens + 2
    assert figures.accepted <= figures.drafted
    assert sum(figures.accepted_by_source.values()) == figures.accepted
    assert figures.accepted_by_source["global"] == 0


def test_the_step_that_reads_the_prompt_gives_the_first_token() -> None:
    prompt, answer = _tokens(1, 60), _tokens(2, 90)
    calls = [_call(1, prompt, answer), _call(2, prompt, answer), _call(3, prompt, answer[:0])]
    without, figures = (simulate(calls, SuffixCache(), prefill_steps=engine) for engine in (False, True))
    assert figures.tokens == without.tokens == 180
    assert figures.steps == 90 + 1 + (without.steps - 90), "one step more where the first token was drafted"


def test_another_session_helps_within_a_tenant_and_only_there() -> None:
    prompt, answer = _tokens(1, 60), _tokens(2, 90)

    def steps(first: str | None, second: str | None, scope: Scope = "tenant") -> int:
        calls = [_call(1, _tokens(5, 30), answer, "a", first), _call(2, prompt, answer, "b", second)]
        return simulate(calls, SuffixCache(), scope=scope).steps

    assert steps("t", "t") == steps(None, None) < 130
    assert steps("t", "u") == steps(None, "t") == steps(None, None, "session") == 180


def test_max_draft_bounds_each_draft() -> None:
    answer = np.tile(_tokens(2, 8), 30)
    counts = {
        max_draft: simulate(
            [_call(1, _tokens(1, 9), answer)], SuffixCache(policy=DraftPolicy(cost=0.0)), max_draft=max_draft
        )
        for max_draft in (0, 1, 16)
    }
    assert (counts[0].drafted, counts[0].steps) == (0, 240)
    assert counts[1].steps >= 120 and counts[1].drafted <= counts[1].steps
    assert counts[16].steps < 60


def test_calls_are_taken_one_by_one() -> None:
    cache = SuffixCache()

    def calls() -> Iterator[Call]:
        for line in range(1, 4):
            assert cache.stats().requests == 0  # the earlier call has finished
            yield _call(line, _tokens(line, 10), _tokens(line + 10, 5))

    assert simulate(calls(), cache).tokens == 15


@pytest.mark.usefixtures("clock_on")
def test_a_machine_that_is_slow_drafts_the_same() -> None:
    """If the clock counted, the middle of a long prompt would be indexed some steps later."""
    prompt = _tokens(1, 200_000)
    call = _call(1, prompt, prompt[100_000:100_300])
    figures = simulate([call], SuffixCache())
    with without_clock():
        assert figures.steps == simulate([call], SuffixCache()).steps


def test_an_empty_response_is_no_step() -> None:
    figures = simulate([_call(1, _tokens(1, 10), _tokens(2, 0))], SuffixCache())
    assert (figures.tokens, figures.steps) == (0, 0)


def test_quantiles_are_within_a_hundredth() -> None:
    durations = Durations()
    for nanoseconds in range(1, 100_001):
        durations.add(nanoseconds)
    assert durations.quantile(0.5) == pytest.approx(50.0, rel=0.01)
    assert durations.quantile(0.99) == pytest.approx(99.0, rel=0.01)
    assert Durations().quantile(0.5) == 0.0
    assert set(Figures().as_dict()) == {
        "tokens",
        "steps",
        "drafted",
        "accepted",
        "tokens_per_step",
        "acceptance_rate",
        "accepted_by_source",
        "propose_us",
        "extend_us",
        "bytes_per_token",
    }
