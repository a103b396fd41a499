"""Test that greedy output is the same with and without the extension, under all conditions at once.

Two answers may differ at a tie (see ``greedy``), of which there may be only a few.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from agentspec.testing.server import ModelServer
from demo.tasks import make_task
from tests.end_to_end.conftest import MODEL, run_script
from tests.end_to_end.greedy import Answers, differences, run_all
from tests.end_to_end.mixed_load import mixed_load
from tests.end_to_end.test_restart import wait_for

pytestmark = pytest.mark.engine

BLOCK = 32
"""Tokens in a block of the servers' KV cache."""


def test_greedy_text_is_identical_in_mixed_concurrent_batches(
    plain: ModelServer, fast: ModelServer, plain_answers: Answers
) -> None:
    before = fast.stats()["counters"]
    found = run_all(fast, mixed_load())
    assert sum(len(answers) for answers in plain_answers.values()) >= 50
    ties, errors = differences(plain, plain_answers, found)
    assert not errors
    assert len(ties) <= 3, ties
    # The comparison means nothing unless drafts were made, verified and accepted on the way.
    counters = fast.stats()["counters"]
    assert counters["accepted"] - before.get("accepted", 0) > 500
    assert not [name for name in counters if name.startswith("errors")]


def test_the_conditions_really_occurred(plain: ModelServer, fast: ModelServer) -> None:
    """vLLM's own counters show that requests were preempted, prefixes were found, and every request has ended."""
    metrics = fast.text("/metrics")
    assert metric(metrics, "vllm:num_preemptions_total") > 0
    assert metric(metrics, "vllm:prefix_cache_hits_total") > 0
    assert metric(metrics, "vllm:spec_decode_num_accepted_tokens_total") > 500
    assert metric(plain.text("/metrics"), "vllm:num_preemptions_total") > 0
    wait_for(lambda: fast.stats()["running"] == 0)  # the worker is told of the last ends with its next step
    counters = fast.stats()["counters"]
    assert counters["started"] == counters["finished"]


def test_the_end_of_an_answer_is_in_the_prefix_cache_as_without_drafts(plain: ModelServer, fast: ModelServer) -> None:
    """vLLM enters the tokens of a step with the next one. Of a last step that accepted a long draft it enters none."""

    def cached(server: ModelServer, seed: int) -> int:
        """Return how many tokens of the second turn's prompt are cached, of a chat that was answered before."""
        messages: list[Any] = [{"role": "user", "content": make_task(seed).request}]
        with openai.OpenAI(base_url=server.base_url, api_key="none", timeout=600) as client:
            ask = partial(client.chat.completions.create, model="demo", max_tokens=250, temperature=0.0)
            answers = [ask(messages=messages).choices[0].message.content for _ in range(3)]
            messages += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": "Test it."}]
            usage = ask(messages=messages).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    tasks = range(1_000_770, 1_000_776)
    found = [cached(fast, seed) for seed in tasks]
    assert found == [cached(plain, seed) for seed in tasks]
    assert min(found) >= 2 * BLOCK


def test_a_prompt_found_in_the_prefix_cache_is_not_filled_up_with_placeholders(fast: ModelServer) -> None:
    """vLLM does so if one token is left to compute, and waits for ever if a step has no room for the longest draft. A
    step here takes 128 tokens, and the row would have 129."""

    def drafted() -> tuple[float, int]:
        theirs = metric(fast.text("/metrics"), "vllm:spec_decode_num_draft_tokens_total")
        return theirs, fast.stats()["counters"]["drafted"]

    theirs, ours = drafted()
    prompt = [300 + k % 40 for k in range(BLOCK + 1)]
    with openai.OpenAI(base_url=fast.base_url, api_key="none", timeout=600, max_retries=0) as client:
        for turn in range(3):
            reply = client.completions.create(model="demo", prompt=prompt, max_tokens=4, temperature=0)
            assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
            assert reply.usage.prompt_tokens_details.cached_tokens == (BLOCK if turn else 0)
    theirs_now, ours_now = drafted()
    assert theirs_now - theirs == ours_now - ours  # what vLLM verified is what was drafted


def test_streamed_input_behind_the_end_of_a_response_is_answered_alike(tmp_path: Path) -> None:
    """vLLM takes back the last token of a response, but would keep one that was accepted, as it is computed.

    It would skip as many tokens of the next input as were accepted behind a repetition, and verify a draft from behind
    a stop token in the next response.
    """

    def run(method: str) -> Any:
        return run_script("streamed_input_run.py", str(MODEL), method, out=tmp_path / f"{method}.json")

    with ThreadPoolExecutor() as pool:  # each needs half a minute to start
        plain, drafted = pool.map(run, ("plain", "agentspec"))
    assert drafted["said"] == plain["said"]
    assert drafted["accepted"] > 100


def metric(text: str, name: str) -> float:
    """Return the sum of one Prometheus metric over its labels."""
    lines = [line for line in text.splitlines() if line.startswith(name)]
    assert lines, f"no metric {name}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
