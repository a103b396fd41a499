"""Test vLLM's own drafters on real servers, alone and beside the suffix index: texts and samples stay vLLM's.

Each needs its own server, so they run in `make test-drafters`.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import vllm

from agentspec.testing.server import ModelServer
from tests.end_to_end.conftest import MODEL, speculating
from tests.end_to_end.drafter_folders import (
    write_dflash_head,
    write_eagle_head,
    write_mtp_model,
    write_split_draft_model,
)
from tests.end_to_end.greedy import Answers, differences, run_all
from tests.end_to_end.mixed_load import mixed_load
from tests.end_to_end.test_sampling import POSITIONS, deviation, sample

pytestmark = [pytest.mark.engine, pytest.mark.drafters]

T = TypeVar("T")

DRAFT_MODEL = MODEL.with_name("draft_model")
DRAFTERS = {
    "medusa": {"method": "medusa", "model": str(MODEL.with_name("medusa")), "num_speculative_tokens": 4},
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "draft_model": {"method": "draft_model", "model": str(DRAFT_MODEL), "num_speculative_tokens": 4},
    "eagle3": {"method": "eagle3", "model": str(MODEL.with_name("eagle3")), "num_speculative_tokens": 3},
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},
    "eagle": {"method": "eagle", "num_speculative_tokens": 3},
    "dflash": {"method": "dflash", "num_speculative_tokens": 3},
    "parallel": {"method": "draft_model", "parallel_drafting": True, "num_speculative_tokens": 3},
}
WRITTEN = {
    "eagle": (write_eagle_head, MODEL),
    "dflash": (write_dflash_head, MODEL),
    "parallel": (write_split_draft_model, DRAFT_MODEL),
    "draft_model on two ranks": (write_split_draft_model, DRAFT_MODEL),
}
"""Drafters and variants whose folder is written for the test: the function that writes it, and the model it needs."""
WITHOUT_INDEX = json.dumps({"agentspec": {"arctic_suffix_rule": {"max_spec_factor": 0.0}, "verify_cost": 0.01}})
"""Verification is declared cheap, so that the drafter drafts much, also wrongly."""
BY_VLLM = "eagle3 by vllm serve"
VARIANTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(DRAFTERS, ()),
    **{f"{name} alone": ("--additional-config", WITHOUT_INDEX) for name in ("draft_model", "eagle3", "mtp", "eagle")},
    **{f"{name} on two ranks": ("--tensor-parallel-size", "2") for name in ("eagle3", "mtp", "eagle", "draft_model")},
    BY_VLLM: ("--additional-config", json.dumps({"agentspec": {}})),
}
"""Options of each server besides its drafter. The name begins with the drafter's."""


@pytest.fixture(scope="module", params=list(VARIANTS))
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    """Start a server with the extension and one of vLLM's drafters, configured as its users do."""
    name, options = str(request.param), VARIANTS[request.param]
    if name == "medusa" and tuple(map(int, vllm.__version__.split(".")[:2])) >= (0, 33):
        pytest.skip("vLLM has no Medusa heads any more")
    folder, model = tmp_path_factory.mktemp(name.replace(" ", "-")), MODEL
    drafter = name.split()[0]
    config = DRAFTERS[drafter]
    if drafter == "mtp":
        model, options = folder / "model", (*options, "--trust-remote-code")
        write_mtp_model(MODEL, model)
    written = WRITTEN.get(name) or WRITTEN.get(drafter)
    if written is not None:
        write, source = written
        config = {**config, "model": str(folder / "drafter")}
        write(source, folder / "drafter")
    with speculating(config, folder / "server.log", *options, model=model, by_vllm=name == BY_VLLM) as server:
        yield server


@pytest.fixture(scope="module")
def plain_samples(plain: ModelServer) -> list[Counter[int]]:
    """Return how often vLLM without the extension samples each token."""
    return sample(plain)


def counted_without_errors(server: ModelServer) -> Counter[str]:
    """Return the server's counters, after checking that nothing failed."""
    stats = server.stats()
    assert not stats["model"]["given_up"]
    assert not [name for name in stats["counters"] if name.startswith("errors")]
    return Counter(stats["counters"])


def verifying(server: ModelServer, ask: Callable[[], T]) -> T:
    """Return a server's answers for which it verified both right and wrong drafts.

    A drafter rests, except for trials, while its passes take longer than they save, which a busy machine may cause.
    Then nothing was tested, so ask again.
    """
    for _ in range(12):
        before = counted_without_errors(server)
        answers = ask()
        counters = counted_without_errors(server) - before
        if 0 < counters["accepted"] < counters["drafted"]:
            return answers
    raise AssertionError(f"right and wrong drafts alike were to be verified: {server.stats()['model']}")


def test_greedy_text_is_identical_and_the_drafter_took_part(
    plain: ModelServer, drafting: ModelServer, plain_answers: Answers
) -> None:
    """The load includes chunked prefill, preemption, grammars, n > 1, aborts, prefix-cache hits and full contexts."""
    found = verifying(drafting, lambda: run_all(drafting, mixed_load()))
    ties, errors = differences(plain, plain_answers, found)
    assert not errors
    assert len(ties) <= 3, ties
    model = drafting.stats()["model"]
    assert model["runs"] > 0
    if any(method in str(drafting.options) for method in ("dflash", "parallel_drafting")):
        assert model["rests"] == 0, "their passes draft everything and always run"


def test_sampled_tokens_have_the_same_distribution(drafting: ModelServer, plain_samples: list[Counter[int]]) -> None:
    found = verifying(drafting, lambda: sample(drafting))
    same = [deviation(one, other) < 4.5 for one, other in zip(found, plain_samples, strict=True)]
    assert same == [True] * POSITIONS


def test_the_log_says_in_one_line_what_drafts(drafting: ModelServer) -> None:
    options = drafting.options
    method = json.loads(options[options.index("--speculative-config") + 1])["method"]
    drafters, price = f"suffix index (session, group, tenant) + {method}", "measured"
    if WITHOUT_INDEX in options:
        drafters, price = method, "0.01"
    line = f"agentspec: {drafters}, up to 128 tokens, price {price}; shared by all callers"
    assert drafting.log.read_text().count(line) == 1
