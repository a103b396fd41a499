"""vLLM's own drafters beside the suffix index: the text stays vLLM's, and what both draft is accepted.

Each method takes a server of its own: `make test-drafters`.
"""

from collections.abc import Iterator

import openai
import pytest

from agentspec.testing.server import ModelServer
from tests.end_to_end.conftest import MODEL, speculating
from tests.end_to_end.greedy import Answers, differences, run_all
from tests.end_to_end.mixed_load import mixed_load

pytestmark = [pytest.mark.engine, pytest.mark.drafters]

HEADS = MODEL.with_name("medusa")
DRAFTERS = {
    "medusa": {"method": "medusa", "model": str(HEADS), "num_speculative_tokens": 4},
    "draft_model": {"method": "draft_model", "model": str(MODEL.with_name("draft_model")), "num_speculative_tokens": 4},
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
}


@pytest.fixture(scope="module", params=list(DRAFTERS))
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    """A server with the extension and one of vLLM's drafters, switched on as its users know it."""
    with speculating(DRAFTERS[request.param], tmp_path_factory.mktemp(request.param) / "server.log") as server:
        yield server


def test_greedy_text_is_identical_and_the_drafter_took_part(
    plain: ModelServer, drafting: ModelServer, plain_answers: Answers
) -> None:
    ties, errors = differences(plain, plain_answers, run_all(drafting, mixed_load()))
    assert not errors
    assert len(ties) <= 3, ties
    stats = drafting.stats()
    assert stats["model"]["runs"] > 10
    assert not stats["model"]["given_up"]
    assert stats["counters"]["accepted"] > 500
    assert not [name for name in stats["counters"] if name.startswith("errors")]


def test_samples_at_a_temperature_are_drafted_too(drafting: ModelServer) -> None:
    with openai.OpenAI(base_url=drafting.base_url, api_key="none", timeout=300) as client:
        reply = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Write a function add(a, b)."}],
            temperature=0.8,
            n=3,
            max_tokens=60,
        )
    assert len(reply.choices) == 3
    assert not [name for name in drafting.stats()["counters"] if name.startswith("errors")]
