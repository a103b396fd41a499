"""Test forced-token replay on real vLLM: the recorded tokens come out, and the counts are right."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from agentspec.errors import ConfigurationError
from agentspec.testing.replay import (
    Call,
    ModelShape,
    ReplayEngine,
    ReplayError,
    ReplayResult,
    compare,
    fitting_length,
)

VOCABULARY = 512
METHODS = ("none", "ngram", "agentspec", "vllm")

pytestmark = pytest.mark.engine


def _tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count, dtype=np.int32)


def _session(name: str, seed: int, turns: int = 3) -> list[Call]:
    """Return an append-only session. Each turn's answer is most of the previous one, with a new end."""
    prompt, calls = _tokens(seed, 40), []
    answer = _tokens(seed + 1, 50)
    for turn in range(turns):
        calls.append(Call(name, prompt, answer))
        prompt = np.concatenate([prompt, answer, _tokens(seed + 10 + turn, 12)])
        answer = np.concatenate([answer[:40], _tokens(seed + 20 + turn, 10)])
    return calls


CALLS = [*_session("a", 100), *_session("b", 200), *_session("c", 300)]
TOKENS = sum(len(call.response) for call in CALLS)


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, ReplayEngine]]:
    length = fitting_length(CALLS)
    shape = ModelShape(vocab_size=VOCABULARY, hidden=32, layers=1, heads=1)
    settings = {
        "store": "memory://",
        "verify_cost": 0.02,
    }  # a measured cost would make the counts depend on the machine
    started = {
        method: ReplayEngine(method=method, shape=shape, max_model_len=length, max_batch=3, settings=settings)
        for method in METHODS
    }
    try:
        for engine in started.values():
            engine.wait_ready()
        yield started
    finally:
        for engine in started.values():
            engine.close()


@pytest.fixture(scope="module")
def results(engines: dict[str, ReplayEngine]) -> dict[str, ReplayResult]:
    return compare(engines, CALLS, batch=3, chunk=2)  # a chunk ends in the middle of other requests


def test_every_recorded_token_is_returned(results: dict[str, ReplayResult]) -> None:
    # The worker raises if an output differs from its record. This checks that nothing was left out.
    assert {method: (r.calls, r.tokens) for method, r in results.items()} == dict.fromkeys(
        METHODS, (len(CALLS), TOKENS)
    )


def test_without_drafts_a_step_gives_one_token(results: dict[str, ReplayResult]) -> None:
    for plain in (results["none"], results["vllm"]):
        assert (plain.steps, plain.drafted, plain.accepted) == (TOKENS, 0, 0)
        assert plain.tokens_per_step == 1.0 and plain.acceptance_rate == 0.0


def test_accepted_tokens_are_steps_saved(results: dict[str, ReplayResult]) -> None:
    ours, ngram = results["agentspec"], results["ngram"]
    assert 0 < ours.accepted <= ours.drafted and 0 < ngram.accepted <= ngram.drafted
    assert ours.tokens == ours.steps + ours.accepted  # every step returns its bonus token
    # vLLM's ngram drafts past max_tokens, where a response can end on an accepted token.
    assert 0 <= ngram.steps + ngram.accepted - ngram.tokens <= ngram.calls


def test_agentspec_needs_fewer_steps_than_both(results: dict[str, ReplayResult]) -> None:
    assert results["agentspec"].steps < results["ngram"].steps < results["none"].steps


def test_the_extensions_own_figures_agree_with_the_runners(results: dict[str, ReplayResult]) -> None:
    ours = results["agentspec"]
    assert sum(ours.accepted_by_source.values()) == ours.accepted
    assert ours.accepted_by_source["session"] + ours.accepted_by_source["request"] > 0
    assert results["ngram"].accepted_by_source == {}


def test_a_call_that_was_seen_before_drafts_from_then(engines: dict[str, ReplayEngine]) -> None:
    prompt, response = _tokens(900, 30), _tokens(901, 60)
    first = engines["agentspec"].run([Call("again", prompt, response)])
    second = engines["agentspec"].run([Call("again", prompt, response)])
    assert first.steps > 50  # with random tokens there is hardly anything to draft from
    assert second.steps < 15 and second.accepted > 40


def test_the_first_token_of_a_response_is_a_step_too(engines: dict[str, ReplayEngine]) -> None:
    result = engines["none"].run([Call("one", _tokens(1, 5), _tokens(2, 1))])
    assert (result.calls, result.tokens, result.steps) == (1, 1, 1)


def test_all_engines_take_the_same_turns(results: dict[str, ReplayResult]) -> None:
    for result in results.values():
        assert len(result.turns) == 5  # nine calls, two a turn
        assert sum(tokens for tokens, _ in result.turns) == TOKENS
        assert sum(seconds for _, seconds in result.turns) == pytest.approx(result.seconds)


def test_the_calls_of_a_lane_run_one_after_the_other(engines: dict[str, ReplayEngine]) -> None:
    def run(lanes: tuple[str, str]) -> ReplayResult:
        calls = [Call(f"lane-{i}", _tokens(50 + i, 8), _tokens(60 + i, 12), lane=lane) for i, lane in enumerate(lanes)]
        return engines["none"].run(calls, batch=2)

    assert run(("a", "a")).decode_seconds == ()  # there is no step in which both slots decode
    assert len(run(("a", "b")).decode_seconds) > 5


def test_new_calls_end_those_that_are_in_flight(engines: dict[str, ReplayEngine]) -> None:
    unequal = [Call(None, _tokens(70 + i, 10), _tokens(80 + i, 2 + 20 * i)) for i in range(3)]
    for engine in engines.values():
        engine.begin(unequal, batch=3)
        assert engine.advance(1).calls == 1
        again = engine.run(unequal, batch=3)
        assert (again.calls, again.tokens) == (3, 66)


def test_an_engine_whose_process_was_killed_says_so() -> None:
    engine = ReplayEngine(method="none", shape=ModelShape(vocab_size=VOCABULARY, hidden=32, layers=1, heads=1))
    with engine:
        engine.wait_ready()
        engine._process.kill()
        engine._process.join()
        for _ in range(2):
            with pytest.raises(ReplayError, match=r"method none ended \(exit code -9\)"):
                engine.run(CALLS[:1])


def test_calls_that_cannot_be_played_are_named(engines: dict[str, ReplayEngine]) -> None:
    engine = engines["none"]
    with pytest.raises(ConfigurationError, match="do not fit into max_model_len"):
        engine.run([Call("long", _tokens(1, 4_000), _tokens(2, 4))])
    with pytest.raises(ConfigurationError, match="empty prompt or response"):
        engine.run([Call("empty", _tokens(1, 4), _tokens(2, 0))])
    with pytest.raises(ConfigurationError, match="batch must be between 1 and 3"):
        engine.run(CALLS, batch=4)
    with pytest.raises(ConfigurationError, match="method 'magic' is not known"):
        ReplayEngine(method="magic")


def test_vllms_own_suffix_method_needs_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigurationError, match=r"arctic_inference\.suffix_decoding"):
        ReplayEngine(method="suffix", module_paths=[tmp_path])
