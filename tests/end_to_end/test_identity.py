"""Greedy output with the extension is the output without it, under every condition at once.

A batch of another shape rounds differently: where two tokens are equally likely to within floating-point error,
plain vLLM does not reproduce itself either. Such a tie is told from an error by asking the model: it must rate both
tokens the same to within TIE, and there may be only a few of them.
"""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from agentspec.testing.server import ModelServer
from tests.end_to_end.mixed_load import Answer, Case, mixed_load

pytestmark = pytest.mark.engine

TIE = 2e-3
"""Nats. Logits here are of the order of 10, float32 kernels of different shapes differ by about 1e-5 relative."""


def run_all(server: ModelServer, cases: list[Case]) -> dict[str, list[Answer]]:
    """All cases, eight at a time."""
    with openai.OpenAI(base_url=server.base_url, api_key="none", timeout=300) as client, ThreadPoolExecutor(8) as pool:
        return dict(zip((case.name for case in cases), pool.map(lambda case: case.run(client), cases), strict=True))


def is_tie(server: ModelServer, expected: Answer, found: Answer) -> bool:
    """Whether the two answers part at a token where the model without the extension cannot decide."""
    pairs = enumerate(zip(expected.token_ids, found.token_ids, strict=False))
    at = next((i for i, (one, other) in pairs if one != other), None)
    if at is None or expected.prompt_ids != found.prompt_ids:
        return False
    with openai.OpenAI(base_url=server.base_url, api_key="none") as client:
        reply = client.completions.create(
            model="demo",
            prompt=expected.prompt_ids + expected.token_ids[:at],
            max_tokens=1,
            temperature=0,
            logprobs=2,
            extra_body={"return_tokens_as_token_ids": True},
        )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.top_logprobs
    best = logprobs.top_logprobs[0]
    rivals = {f"token_id:{expected.token_ids[at]}", f"token_id:{found.token_ids[at]}"}
    return rivals <= set(best) and max(best[r] for r in rivals) - min(best[r] for r in rivals) < TIE


def test_greedy_text_is_identical_in_mixed_concurrent_batches(plain: ModelServer, fast: ModelServer) -> None:
    cases = mixed_load()
    expected = run_all(plain, cases)
    before = fast.stats()["counters"]
    found = run_all(fast, cases)
    assert sum(len(answers) for answers in expected.values()) >= 50
    ties: list[tuple[str, str, str]] = []
    errors: list[tuple[str, str, str]] = []
    for name, answers in expected.items():
        for one, other in zip(answers, found[name], strict=True):
            if one.text != other.text:  # a conversation's later turns then have other prompts: look no further
                (ties if is_tie(plain, one, other) else errors).append((name, one.text, other.text))
                break
    assert not errors
    assert len(ties) <= 3, ties
    # The comparison means nothing unless drafts were made, verified and accepted on the way.
    counters = fast.stats()["counters"]
    assert counters["accepted"] - before.get("accepted", 0) > 500
    assert not [name for name in counters if name.startswith("errors")]


def test_the_conditions_really_occurred(plain: ModelServer, fast: ModelServer) -> None:
    """The counters of vLLM itself: requests were preempted, prefixes were found, and every request has left."""
    metrics = fast.text("/metrics")
    assert metric(metrics, "vllm:num_preemptions_total") > 0
    assert metric(metrics, "vllm:prefix_cache_hits_total") > 0
    assert metric(metrics, "vllm:spec_decode_num_accepted_tokens_total") > 500
    assert metric(plain.text("/metrics"), "vllm:num_preemptions_total") > 0
    stats = fast.stats()
    assert stats["running"] == 0
    assert stats["counters"]["started"] == stats["counters"]["finished"]


def metric(text: str, name: str) -> float:
    """The sum of one Prometheus metric over its labels."""
    lines = [line for line in text.splitlines() if line.startswith(name)]
    assert lines, f"no metric {name}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
