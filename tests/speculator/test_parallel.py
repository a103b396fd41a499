"""Test that a head shared by two ranks drafts what the whole head drafts, on both ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agentspec.errors import SpeculatorError
from agentspec.server_ext.speculator import DraftedTokens, DraftLoop, Ranks
from tests.speculator.parallel_rank import CASES, ROWS
from tests.speculator.shapes import REDUCED, VOCABULARY, inputs, small


def test_two_ranks_draft_what_one_does(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.speculator.parallel_rank"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for place, case in enumerate(CASES):
        whole = REDUCED if case["reduced"] else VOCABULARY
        shares = [results[rank][place][1] for rank in range(2)]
        assert all(first + second == whole and min(first, second) > 0 for first, second in zip(*shares, strict=True))
        loop = DraftLoop(small(str(case["kind"]), reduced=bool(case["reduced"])), fp8_head=bool(case["fp8"]))
        alone = loop(*inputs(ROWS))
        right = case["kernels"] == "right"  # kernels that are broken on one rank are off on both
        for rank in range(2):
            assert results[rank][place][2] == (right, right)
            _agree(DraftedTokens(*results[rank][place][0]), alone, 0.1 if case["fp8"] else 1e-5)


def _agree(found: DraftedTokens, wanted: DraftedTokens, tolerance: float) -> None:
    """Check that drafts agree. With FP8 weights each half has its own scale, so probabilities differ a little."""
    sure = wanted.top_probabilities > (0.4 if tolerance > 1e-3 else 0.0)
    assert sure.any() and torch.equal(found.top[sure], wanted.top[sure])
    assert (found.probabilities - wanted.probabilities)[sure].abs().max() <= tolerance
    assert (found.top_probabilities - wanted.top_probabilities)[sure].abs().max() <= tolerance


def test_rows_are_shared_in_multiples_of_sixteen_and_all_are_held_once() -> None:
    for total, size in ((128256, 8), (272, 2), (208, 4), (100, 3), (152064, 5)):
        held = [Ranks(rank, size, lambda part: part).rows(total) for rank in range(size)]
        assert [row for rows in held for row in rows] == list(range(total))
        assert all(rows.start % 16 == 0 for rows in held)


@pytest.mark.parametrize("rank", range(9))
def test_too_many_ranks_are_refused_on_each_of_them(rank: int) -> None:
    with pytest.raises(SpeculatorError, match="208 rows cannot be shared by 9"):
        DraftLoop(small(reduced=True), parallel=Ranks(rank, 9, lambda part: part))
