"""Test that padding a batch to a recorded size changes nothing but the size.

Without a GPU, a stand-in takes the recorder's place: it pads the same way, and calls the loop.
"""

import pytest
import torch

from agentspec.errors import InvalidInputError
from agentspec.server_ext.speculator import DraftLoop
from agentspec.server_ext.speculator.gpu import Optimizations
from agentspec.server_ext.speculator.gpu.graphs import SIZES, CudaRecorder, PaddedLoop
from agentspec.server_ext.speculator.selection import DraftedTokens
from tests.speculator.shapes import inputs, small
from tests.speculator.stand_ins import DirectRecorder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GRAPHS = Optimizations(recorder=CudaRecorder if DEVICE.type == "cuda" else DirectRecorder)


def _on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


@pytest.mark.parametrize("kind", ["lstm", "mlp"])
def test_every_batch_drafts_as_without_padding(kind: str) -> None:
    plain = DraftLoop(small(kind).to(DEVICE))
    loop = DraftLoop(small(kind).to(DEVICE), optimizations=GRAPHS)
    loop.warm_up()
    assert loop.uses_graphs
    for rows in (64, 1, 2, 5, 7, 33, 64, 65, 3):  # larger ones first, so that there is something left behind
        given = _on_device(*inputs(rows, seed=rows))
        for proposal in (given[2], None):
            found, wanted = loop(given[0], given[1], proposal), plain(given[0], given[1], proposal)
            for mine, theirs in zip(found, wanted, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_batch_takes_the_next_size_and_only_recorded_ones_run() -> None:
    seen: list[int] = []

    def loop(hidden: torch.Tensor, tokens: torch.Tensor, proposal: torch.Tensor) -> DraftedTokens:
        seen.append(len(hidden))
        chances = hidden[:, :1].expand(-1, 2)
        return DraftedTokens(proposal, chances, tokens.unsqueeze(1).expand(-1, 2), chances)

    buffers = torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64), torch.zeros(8, 2, dtype=torch.int64)
    padded = PaddedLoop(loop, buffers, DirectRecorder(), sizes=(1, 2, 4, 8))
    assert padded.size_for(1) is None
    with pytest.raises(InvalidInputError, match="1 rows"):
        padded(*(buffer[:1] for buffer in buffers))
    padded.prepare()
    assert seen == [8, 4, 2, 1]  # the largest first
    padded.record()
    assert [padded.size_for(rows) for rows in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, None]
    seen.clear()
    found = padded(torch.full((3, 4), 0.5), torch.tensor([7, 8, 9]), torch.tensor([[1, 2], [3, 4], [5, 6]]))
    assert seen == [4]
    assert found.tokens.tolist() == [[1, 2], [3, 4], [5, 6]] and found.top.tolist() == [[7, 7], [8, 8], [9, 9]]
    assert found.probabilities.tolist() == [[0.5, 0.5]] * 3


def test_without_warm_up_nothing_is_recorded_while_serving() -> None:
    loop = DraftLoop(small().to(DEVICE), optimizations=GRAPHS)
    plain = DraftLoop(small().to(DEVICE))
    given = _on_device(*inputs(3))
    assert not loop.uses_graphs
    assert torch.equal(loop(*given).tokens, plain(*given).tokens)
    assert SIZES == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def test_no_rows_are_no_drafts() -> None:
    loop = DraftLoop(small().to(DEVICE), optimizations=GRAPHS)
    loop.warm_up()
    assert loop(*_on_device(*inputs(0))).tokens.shape == (0, 3)
