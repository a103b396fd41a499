"""T > 0: the extension changes the speed and not the distribution of what is sampled."""

from collections import Counter

import openai
import pytest

from agentspec.testing.server import ModelServer
from tests.end_to_end.mixed_load import code

pytestmark = pytest.mark.engine

CALLS, SAMPLES = 12, 50


def sample(server: ModelServer) -> Counter[str]:
    """600 continuations of four tokens; the session makes later ones draft from earlier ones."""
    texts: Counter[str] = Counter()
    with openai.OpenAI(base_url=server.base_url, api_key="none", timeout=300) as client:
        for _ in range(CALLS):
            reply = client.completions.create(
                model="demo",
                prompt=code(77, 8),
                n=SAMPLES,
                temperature=1.3,
                top_p=0.9,
                max_tokens=4,
                extra_headers={"X-Session-ID": "sampling"},
            )
            texts.update(choice.text for choice in reply.choices)
    return texts


def test_sampled_texts_have_the_same_distribution(plain: ModelServer, fast: ModelServer) -> None:
    before = fast.stats()["counters"]
    found, expected = sample(fast), sample(plain)
    counters = fast.stats()["counters"]
    assert counters["accepted"] - before.get("accepted", 0) > 100, "nothing was drafted, so nothing was tested"
    assert counters["drafted"] - before.get("drafted", 0) > counters["accepted"] - before.get("accepted", 0)
    assert len(expected) > 5, "the distribution is too narrow to tell anything"
    statistic, freedom = two_sample_chi_square(found, expected)
    # Wilson-Hilferty: (X/k)^(1/3) is about normal with mean 1 - 2/(9k) and variance 2/(9k).
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert z < 4, f"chi-square {statistic:.1f} at {freedom} degrees of freedom"


def two_sample_chi_square(a: Counter[str], b: Counter[str]) -> tuple[float, int]:
    """Pearson's statistic of two samples of the same size; rare outcomes are pooled. Also degrees of freedom."""
    together = a + b
    frequent = [text for text, count in together.items() if count >= 10]
    cells = [(a[text], b[text]) for text in frequent]
    rest = (a.total() - sum(x for x, _ in cells), b.total() - sum(y for _, y in cells))
    if sum(rest) >= 10:
        cells.append(rest)
    return sum((x - y) ** 2 / (x + y) for x, y in cells), len(cells) - 1


def test_the_check_itself_sees_a_wrong_temperature(plain: ModelServer) -> None:
    """The statistic separates temperature 1.3 from temperature 1 with the same number of samples."""
    with openai.OpenAI(base_url=plain.base_url, api_key="none", timeout=300) as client:
        colder: Counter[str] = Counter()
        for _ in range(CALLS):
            reply = client.completions.create(
                model="demo",
                prompt=code(77, 8),
                n=SAMPLES,
                temperature=1.0,
                max_tokens=4,
            )
            colder.update(choice.text for choice in reply.choices)
    statistic, freedom = two_sample_chi_square(colder, sample(plain))
    assert statistic > 2 * freedom + 20
