"""Test suffix indexes and a speculator together on real vLLM: texts and distributions stay the model's own."""

from collections.abc import Iterator

import openai
import pytest

from agentspec.testing.server import ModelServer
from demo.tasks import FIRST_HELD_OUT_SEED, make_task
from tests.end_to_end.conftest import DRAFTER, speculating
from tests.end_to_end.greedy import Answers, differences, run_all
from tests.end_to_end.mixed_load import chat, mixed_load
from tests.end_to_end.test_restart import wait_for
from tests.end_to_end.test_sampling import POSITIONS, deviation, sample

pytestmark = pytest.mark.engine

ARCTIC = {"method": "arctic", "model": str(DRAFTER), "num_speculative_tokens": 3, "enable_suffix_decoding": True}
CHATS = 8
"""Conversations of three turns each, which a server runs at once."""


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    """Start ``agentspec serve`` with a speculative config as ArcticInference's users write it. Verification is declared
    cheap, so that much is drafted, also wrongly."""
    with speculating(ARCTIC, tmp_path_factory.mktemp("logs") / "hybrid.log", "--verify-cost", "0.005") as server:
        yield server


def test_greedy_text_is_identical_and_both_draft(
    plain: ModelServer, hybrid: ModelServer, plain_answers: Answers
) -> None:
    """The load includes chunked prefill, preemption, grammars, n > 1, aborts and the end of the context.

    The draft model runs only where that saves time, which depends on the machine's load. Chats go on until it has run
    often enough.
    """
    ties, errors = differences(plain, plain_answers, run_all(hybrid, mixed_load()))
    for first in range(100, 100 + 5 * CHATS, CHATS):
        model = hybrid.stats()["model"]
        right = sum(kind["right"] for name, kind in model["tokens"].items() if name != "judged")
        if model["runs"] > 50 and right > 20:
            break
        chats = [chat(seed) for seed in range(first, first + CHATS)]
        more = differences(plain, run_all(plain, chats), run_all(hybrid, chats))
        ties, errors = ties + more[0], errors + more[1]
    assert model["runs"] > 50, model
    assert right > 20, model
    assert not model["given_up"]
    assert not errors
    assert len(ties) <= 3, ties
    wait_for(lambda: hybrid.stats()["running"] == 0)
    assert not [name for name in hybrid.stats()["counters"] if name.startswith("errors")]


def test_new_text_is_drafted_by_the_model(hybrid: ModelServer) -> None:
    """Each request drafts from its own text and the draft model only."""
    with openai.OpenAI(base_url=hybrid.base_url, api_key="none", timeout=600) as client:
        accepted = 0
        for seed in range(24):  # a busy machine decides how often the model runs
            if accepted > 10:
                break
            reply = client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": make_task(FIRST_HELD_OUT_SEED + 500 + seed).request}],
                temperature=0,
                max_tokens=100,
                extra_body={"vllm_xargs": {"agentspec_scope": "none"}},
            )
            figures = hybrid.get(f"/v1/agentspec/requests/{reply.id}")
            assert figures["accepted"] == sum(figures["accepted_by_source"].values())
            accepted += figures["accepted_by_source"]["model"]
    assert accepted > 10


def test_sampled_tokens_have_the_same_distribution(plain: ModelServer, hybrid: ModelServer) -> None:
    before = hybrid.stats()["counters"]
    found, expected = sample(hybrid), sample(plain)
    counters = hybrid.stats()["counters"]
    assert counters["accepted"] - before["accepted"] > 100
    assert [deviation(one, other) < 4.5 for one, other in zip(found, expected, strict=True)] == [True] * POSITIONS
