"""Test that kernels and graphs are compared with plain torch before use: a broken one costs itself and a warning.

No GPU is needed: stand-ins are given through `Optimizations`, which selects kernels and recorders on a GPU.
"""

import logging
import math

import pytest
import torch
from torch import Tensor, nn

from agentspec.server_ext.speculator import DraftedTokens, DraftLoop, Ranks
from agentspec.server_ext.speculator.gpu import Optimizations
from agentspec.server_ext.speculator.gpu.graphs import SIZES, Recorder
from agentspec.server_ext.speculator.gpu.self_check import margins
from agentspec.server_ext.speculator.selection import PLAIN, Operations, part_of
from tests.speculator.shapes import HIDDEN, inputs, small
from tests.speculator.stand_ins import BROKEN, DirectRecorder, FailingRecorder, StaleRecorder


def warmed(
    kernels: Operations | None = None,
    recorder: Recorder | None = None,
    *,
    kind: str = "lstm",
    ranks: Ranks | None = None,
) -> DraftLoop:
    """Return a loop that has tried these kernels and this recorder."""
    optimizations = Optimizations(
        None if kernels is None else lambda: kernels, None if recorder is None else lambda: recorder
    )
    loop = DraftLoop(small(kind, reduced=True), optimizations=optimizations, parallel=ranks)
    loop.warm_up()
    return loop


def drafts_as_plain_torch(loop: DraftLoop) -> None:
    plain = DraftLoop(small("lstm", reduced=True))
    for rows in (1, 5, 65):
        given = inputs(rows, seed=rows)
        for ours, theirs in zip(loop(*given), plain(*given), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("kind", ["lstm", "mlp"])
def test_what_is_right_is_switched_on_without_a_word(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    loop = warmed(PLAIN, DirectRecorder(), kind=kind)
    assert (loop.uses_kernels, loop.uses_graphs) == (True, True)
    assert not warnings(caplog)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_costs_the_kernels_and_one_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    loop = warmed(BROKEN[name], DirectRecorder())
    assert (loop.uses_kernels, loop.uses_graphs) == (False, True)
    drafts_as_plain_torch(loop)
    (warning,) = warnings(caplog)
    assert warning.startswith("agentspec: fused kernels are off, drafting with plain torch: ")
    assert "\n" not in warning


def test_the_warning_says_how_far_off_it_is(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("another token", "twice the probability", "raises"):
        warmed(BROKEN[name])
    token, probability, raised = warnings(caplog)
    assert "1 rows: token " in token and " times its probability, at least " in token
    assert ": probability " in probability and " instead of " in probability and " of it expected" in probability
    assert raised.endswith(": the kernel is broken on purpose")


def test_a_graph_that_replays_stale_inputs_costs_the_graphs(caplog: pytest.LogCaptureFixture) -> None:
    loop = warmed(PLAIN, StaleRecorder())
    assert (loop.uses_kernels, loop.uses_graphs) == (True, False)
    drafts_as_plain_torch(loop)
    (warning,) = warnings(caplog)
    assert warning.startswith("agentspec: CUDA graphs are off, drafting with single launches: ")


@pytest.mark.parametrize("place", ["prepare", "record", "replay"])
def test_a_graph_that_cannot_be_recorded_costs_the_graphs(place: str, caplog: pytest.LogCaptureFixture) -> None:
    loop = warmed(None, FailingRecorder(place))
    assert not loop.uses_graphs
    drafts_as_plain_torch(loop)
    assert [warning.rpartition(": ")[2] for warning in warnings(caplog)] == [f"{place} is broken on purpose"]


def test_a_recorder_that_cannot_be_made_costs_the_graphs(caplog: pytest.LogCaptureFixture) -> None:
    def recorder() -> Recorder:
        raise RuntimeError("no stream")

    loop = DraftLoop(small("lstm", reduced=True), optimizations=Optimizations(recorder=recorder))
    loop.warm_up()
    drafts_as_plain_torch(loop)
    assert [warning.rpartition(": ")[2] for warning in warnings(caplog)] == ["no stream"]


def test_before_it_is_checked_nothing_is_used() -> None:
    loop = DraftLoop(
        small("lstm", reduced=True), optimizations=Optimizations(lambda: BROKEN["another token"], StaleRecorder)
    )
    assert (loop.uses_kernels, loop.uses_graphs) == (False, False)
    drafts_as_plain_torch(loop)


def _last_of_equal(head: nn.Module, x: Tensor, wanted: Tensor) -> Tensor:
    """Return scores whose best index is the last of equal logits; plain torch takes the first."""
    logits = head(x)
    part = part_of(logits, wanted)
    part[..., 1] = logits.shape[-1] - 1 - logits.flip(-1).argmax(-1)
    return part


def test_a_tie_may_go_either_way(caplog: pytest.LogCaptureFixture) -> None:
    speculator = small("lstm")
    head = speculator.heads[0].weight
    head[1::2] = head[::2]  # each token has a twin with the same logit
    loop = DraftLoop(speculator, optimizations=Optimizations(lambda: PLAIN._replace(score=_last_of_equal)))
    loop.warm_up()
    given = inputs(5)
    assert loop.uses_kernels and not warnings(caplog)
    assert not torch.equal(loop(given[0], given[1]).top, DraftLoop(speculator)(given[0], given[1]).top)


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_errors_of_the_size_of_roundings_pass_and_larger_ones_do_not(dtype: torch.dtype, share: float) -> None:
    def noisy(size: float) -> Operations:
        def score(head: nn.Module, x: Tensor, wanted: Tensor) -> Tensor:
            logits = head(x).float()
            noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(len(x)))
            return part_of(logits + size * logits.std() * noise, wanted)

        return PLAIN._replace(score=score)

    passed = []
    for size in (share / 2, 100 * share):
        loop = DraftLoop(small().to(dtype), optimizations=Optimizations(lambda size=size: noisy(size)))  # type: ignore[misc]
        loop.warm_up()
        passed.append(loop.uses_kernels)
    assert passed == [True, False]


@pytest.mark.parametrize("fp8", [False, True])
def test_the_margin_is_that_of_the_formula(fp8: bool) -> None:
    speculator = small().bfloat16()
    DraftLoop(speculator, fp8_head=fp8)
    hidden, tokens = torch.randn(2, HIDDEN).bfloat16(), torch.tensor([[1, 2, 3], [4, 5, 6]])
    found = margins(speculator, hidden, tokens)
    epsilon = 2.0**-5 if fp8 else 2.0**-7
    for k, logits in enumerate(speculator(hidden, tokens)):
        largest = logits.float().abs().amax(-1)
        expected = 2 * (k + 1) * (2 * epsilon + math.sqrt(80) * 2.0**-23) * largest
        torch.testing.assert_close(found[:, k], expected)


@pytest.mark.parametrize("agrees", [True, False])
def test_what_fails_on_another_rank_is_switched_off_on_all(agrees: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The other rank is a stand-in: it answers as this one does, except for its verdicts."""

    def gather(part: Tensor) -> Tensor:
        verdict = part.shape == (1, 4) and bool((part == 1.0).all())
        return torch.stack((part, torch.zeros_like(part) if verdict and not agrees else part))

    loop = warmed(PLAIN, DirectRecorder(), ranks=Ranks(0, 2, gather))
    assert (loop.uses_kernels, loop.uses_graphs) == (agrees, agrees)
    said = [warning.rpartition(": ")[2] for warning in warnings(caplog)]
    assert said == ([] if agrees else ["the check failed on another rank"] * 2)


def test_every_kernel_is_compared_and_every_size_is_warmed_up() -> None:
    seen: set[int] = set()

    def choose(parts: Tensor, given: Tensor, vocabulary: Tensor | None) -> DraftedTokens:
        seen.add(len(given))
        return PLAIN.choose(parts, given, vocabulary)

    warmed(PLAIN._replace(choose=choose))
    assert {1, 17, 33, 65} <= seen and {*SIZES, SIZES[-1] + 1} <= seen  # compared, and warmed up
