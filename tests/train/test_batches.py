"""Test which rows a training step uses."""

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch

from agentspec.train.conversations import from_records
from agentspec.train.hidden_states import HiddenStates, Response, Target, extract
from agentspec.train.trainer import PIECE, Batch, collate, draws, pieces


def test_pieces_cover_every_position_that_something_follows() -> None:
    lengths = (2, 3, PIECE, PIECE + 1, PIECE + 2, 3 * PIECE)
    for length in lengths:
        cut = pieces([Response("s", 0, 0, length)])
        assert [i for piece in cut for i in range(piece.first, piece.last)] == list(range(length - 1))
        assert all(piece.last - piece.first <= PIECE for piece in cut)


@pytest.fixture
def data(target: Path, calls: Path, tmp_path: Path) -> HiddenStates:
    conversations = from_records(calls, None)
    extract(conversations, tmp_path, lambda: Target(str(target), "float32", torch.device("cpu")), lambda _: None)
    return HiddenStates(conversations, tmp_path)


def test_a_batch_holds_drafts_inputs_and_labels(data: HiddenStates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.train.trainer.PIECE", 10)
    n = 3
    chosen = pieces(data.responses)[3:9]
    batch = collate(data, chosen, n)
    inputs = batch.inputs(n)
    position = 0
    for piece in chosen:
        hidden, tokens = data.rows(piece.response, 0, piece.response.length)
        for i in range(piece.first, piece.last):
            assert torch.equal(batch.hidden[batch.starts[position]], hidden[i])
            for k in range(n):
                follows = i + k + 1 < piece.response.length
                assert bool(batch.left[position] > k) == follows
                if follows:
                    assert inputs[position, k] == tokens[i + k]
                    row = batch.row(k + 1)[position]
                    assert batch.tokens[row] == tokens[i + k + 1]
                    assert torch.equal(batch.hidden[row], hidden[i + k + 1])
            position += 1
    assert position == len(batch.starts)


def test_behind_the_end_of_a_response_rows_stay_inside_it() -> None:
    batch = Batch(torch.zeros(4, 2), torch.tensor([5, 6, 7, 8]), torch.tensor([0, 1, 2]), torch.tensor([3, 2, 1]))
    assert batch.row(3).tolist() == [3, 3, 3]
    assert batch.inputs(3).tolist() == [[5, 6, 7], [6, 7, 8], [7, 8, 8]]


def test_each_epoch_draws_everything_once_in_its_own_order() -> None:
    first, second = (list(islice(draws(50, 7, begin), 50)) for begin in (0, 50))
    assert Counter(first) == Counter(second) == Counter(range(50))
    assert first != second
    assert first != list(islice(draws(50, 8, 0), 50))


def test_draws_depend_on_their_number_alone() -> None:
    unbroken = list(islice(draws(20, 3, 0), 70))
    for begin in (1, 19, 20, 33):
        assert list(islice(draws(20, 3, begin), 70 - begin)) == unbroken[begin:]
