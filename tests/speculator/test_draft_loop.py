"""Test that the loop drafts greedily, and scores given tokens, as the reference does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentspec.errors import SpeculatorError
from agentspec.server_ext.speculator import DraftedTokens, DraftLoop, load_speculator
from tests.speculator import reference
from tests.speculator.files import Checkpoint, H, N, V, lstm, mlp


@pytest.fixture(params=["lstm", "mlp"])
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    return lstm() if request.param == "lstm" else mlp()


def _check(checkpoint: Checkpoint, drafted: DraftedTokens, hidden: Any, tokens: Any, proposal: list[list[int]]) -> None:
    for row, wanted in enumerate(proposal):
        expected = reference.draft(
            checkpoint.kind, checkpoint.reference_weights(), checkpoint.config, hidden[row], int(tokens[row]), wanted
        )
        for k, (token, chance, top, top_chance) in enumerate(expected):
            assert (int(drafted.tokens[row, k]), int(drafted.top[row, k])) == (token, top)
            assert float(drafted.probabilities[row, k]) == pytest.approx(chance, rel=1e-4)
            assert float(drafted.top_probabilities[row, k]) == pytest.approx(top_chance, rel=1e-4)


def test_drafts_and_scores_are_the_references(checkpoint: Checkpoint, tmp_path: Path) -> None:
    loop = DraftLoop(load_speculator(checkpoint.write(tmp_path)))
    random = np.random.default_rng(3)
    hidden, tokens = random.normal(size=(6, H)), random.integers(0, V, size=6)
    proposal = [[-1] * N, [4, -1, -1], [4, 5, -1], [1, 2, 3], [-1, 7, -1], [0, -1, 0]]
    inputs = torch.tensor(hidden, dtype=torch.float32), torch.tensor(tokens)
    _check(checkpoint, loop(*inputs), hidden, tokens, [[-1] * N] * 6)
    drafted = loop(*inputs, torch.tensor(proposal))
    _check(checkpoint, drafted, hidden, tokens, proposal)
    assert drafted.tokens.dtype == drafted.top.dtype == torch.int64
    assert drafted.probabilities.dtype == drafted.top_probabilities.dtype == torch.float32


def test_fewer_positions_are_the_first_ones(checkpoint: Checkpoint, tmp_path: Path) -> None:
    speculator = load_speculator(checkpoint.write(tmp_path))
    inputs = torch.randn(3, H, generator=torch.Generator().manual_seed(4)), torch.tensor([1, 2, 3])
    whole, part = DraftLoop(speculator)(*inputs), DraftLoop(speculator, positions=2)(*inputs)
    assert torch.equal(part.tokens, whole.tokens[:, :2])
    with pytest.raises(SpeculatorError, match="num_speculative_tokens"):
        DraftLoop(speculator, positions=N + 1)


def test_a_loop_for_no_row_is_empty(checkpoint: Checkpoint, tmp_path: Path) -> None:
    loop = DraftLoop(load_speculator(checkpoint.write(tmp_path)))
    assert loop(torch.zeros(0, H), torch.zeros(0, dtype=torch.int64)).tokens.shape == (0, N)
