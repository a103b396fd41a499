"""Compare greedy answers with and without the extension, and tell ties from errors.

A batch of another shape rounds differently. Where two tokens are equally likely to within floating-point error, plain
vLLM does not reproduce itself either. At a tie, the model rates both tokens the same to within TIE; otherwise the
difference is an error.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import openai

from agentspec.testing.server import ModelServer
from tests.end_to_end.mixed_load import Answer, Case

Answers = Mapping[str, Sequence[Answer]]

TIE = 2e-3
"""Nats. Logits here are of the order of 10, float32 kernels of different shapes differ by about 1e-5 relative."""


def run_all(server: ModelServer, cases: list[Case]) -> dict[str, list[Answer]]:
    """Run all cases, eight at a time. Return the answers by case name."""
    with openai.OpenAI(base_url=server.base_url, api_key="none", timeout=600) as client, ThreadPoolExecutor(8) as pool:
        return dict(zip((case.name for case in cases), pool.map(lambda case: case.run(client), cases), strict=True))


def is_tie(server: ModelServer, expected: Answer, found: Answer) -> bool:
    """Return whether the answers differ first at a token where the model without the extension cannot decide."""
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


def differences(
    plain: ModelServer, expected: Answers, found: Answers
) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Return (ties, errors): the cases whose texts differ, with both texts."""
    ties: list[tuple[str, str, str]] = []
    errors: list[tuple[str, str, str]] = []
    for name, answers in expected.items():
        for one, other in zip(answers, found[name], strict=True):
            if one.text != other.text:  # later turns of this conversation have other prompts, so look no further
                (ties if is_tie(plain, one, other) else errors).append((name, one.text, other.text))
                break
    return ties, errors
