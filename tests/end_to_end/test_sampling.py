"""Test T > 0: the extension changes the speed, and not the distribution of sampled tokens."""

from collections import Counter
from typing import Any

import openai
import pytest

from agentspec.testing.server import ModelServer
from tests.end_to_end.mixed_load import code

pytestmark = pytest.mark.engine

CALLS, SAMPLES, POSITIONS = 60, 10, 4


def sample(server: ModelServer, temperature: float = 1.3, top_p: float = 0.9) -> list[Counter[int]]:
    """Sample 600 continuations. Return the token counts at each position. Later samples draft from earlier ones."""
    counts: list[Counter[int]] = [Counter() for _ in range(POSITIONS)]
    with openai.OpenAI(base_url=server.base_url, api_key="none", timeout=600) as client:
        for _ in range(CALLS):
            reply = client.completions.create(
                model="demo",
                prompt=code(77, 8),
                n=SAMPLES,
                temperature=temperature,
                top_p=top_p,
                max_tokens=POSITIONS,
                extra_headers={"X-Session-ID": "sampling"},
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )
            choices: list[Any] = list(reply.choices)
            for choice in choices:
                for position, token in enumerate(choice.token_ids[:POSITIONS]):
                    counts[position][token] += 1
    return counts


def deviation(a: Counter[int], b: Counter[int]) -> float:
    """Return how far two samples are from one distribution: Pearson's chi-square as a standard normal deviate.

    Rare outcomes are pooled. Wilson-Hilferty: (X/k)^(1/3) is about normal with mean 1 - 2/(9k), variance 2/(9k).
    """
    cells = [(a[token], b[token]) for token, count in (a + b).items() if count >= 10]
    rest = (a.total() - sum(x for x, _ in cells), b.total() - sum(y for _, y in cells))
    if sum(rest) >= 10:
        cells.append(rest)
    freedom = len(cells) - 1
    assert freedom >= 2, "the distribution is too narrow to tell anything"
    statistic = sum((x - y) ** 2 / (x + y) for x, y in cells)
    variance = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - variance)) / variance**0.5)


def test_sampled_tokens_have_the_same_distribution(plain: ModelServer, priced: ModelServer) -> None:
    before = priced.stats()["counters"]
    found, expected = sample(priced), sample(plain)
    counters = priced.stats()["counters"]
    accepted, drafted = (counters[name] - before.get(name, 0) for name in ("accepted", "drafted"))
    assert accepted > 200, "too little was accepted to test anything"
    assert drafted - accepted > 200, "too little was rejected to test anything"
    assert [deviation(one, other) < 4.5 for one, other in zip(found, expected, strict=True)] == [True] * POSITIONS
    # The same statistic detects another temperature, so it would have detected a lost one.
    colder = sample(plain, temperature=0.9)
    assert max(deviation(one, other) for one, other in zip(colder, expected, strict=True)) > 4.5
