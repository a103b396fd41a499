"""Test that a reduced head drafts, scores and loads like the whole one, among the tokens that it keeps."""

from pathlib import Path

import pytest
import torch

from agentspec.errors import SpeculatorError
from agentspec.server_ext.speculator import DraftLoop, Speculator, load_speculator, save_speculator
from agentspec.server_ext.speculator.vocabulary import choose_vocabulary, prune_head
from tests.speculator.files import H, V, lstm, mlp

KEEP = torch.arange(3, V, 2)


@pytest.fixture(params=["lstm", "mlp"])
def whole(request: pytest.FixtureRequest, tmp_path: Path) -> Speculator:
    return load_speculator((lstm() if request.param == "lstm" else mlp()).write(tmp_path / "whole"))


def inputs(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(rows, H, generator=generator), torch.randint(V, (rows,), generator=generator)


def test_only_the_heads_rows_change(whole: Speculator) -> None:
    pruned = prune_head(whole, KEEP)
    assert pruned.draft_vocabulary.tolist() == KEEP.tolist()
    for name, value in whole.state_dict().items():
        ours = pruned.state_dict()[name]
        assert torch.equal(ours, value[KEEP]) if name.startswith("heads.") else ours.data_ptr() == value.data_ptr()


def test_it_drafts_the_best_token_that_it_has(whole: Speculator) -> None:
    """Each position has the whole model's logits without the removed tokens."""
    hidden, tokens = inputs()
    drafted = DraftLoop(prune_head(whole, KEEP))(hidden, tokens)
    fed = torch.cat([tokens[:, None], drafted.tokens[:, :-1]], dim=1)
    for k, logits in enumerate(whole(hidden, fed)):
        chances, best = logits[:, KEEP].softmax(-1).max(-1)
        assert torch.equal(drafted.tokens[:, k], KEEP[best])
        torch.testing.assert_close(drafted.probabilities[:, k], chances)


def test_it_scores_what_is_proposed(whole: Speculator) -> None:
    """Proposals have the target's ids. A token that the head lacks is taken, with probability 0."""
    hidden, tokens = inputs(2)
    drafted = DraftLoop(prune_head(whole, KEEP))(hidden, tokens, torch.tensor([[5, 7, -1], [4, 9, 4]]))
    assert drafted.tokens[0, :2].tolist() == [5, 7]
    assert drafted.tokens[1].tolist() == [4, 9, 4]
    assert (drafted.probabilities[1] == 0).tolist() == [True, False, True]
    logits = whole(hidden, torch.stack([tokens, torch.tensor([5, 4]), torch.tensor([7, 9])], dim=1))
    expected = torch.stack([logits[k][0, KEEP].softmax(-1)[(token - 3) // 2] for k, token in enumerate((5, 7))])
    torch.testing.assert_close(drafted.probabilities[0, :2], expected)


def test_it_loads_as_it_was_saved(whole: Speculator, tmp_path: Path) -> None:
    pruned = prune_head(whole, KEEP)
    save_speculator(pruned, tmp_path / "pruned")
    loaded = load_speculator(tmp_path / "pruned", dtype=torch.float64)
    assert loaded.config == pruned.config
    assert torch.equal(loaded.draft_vocabulary, KEEP)
    assert loaded.heads[0].weight.shape[0] == len(KEEP)
    hidden, tokens = inputs()
    again, first = DraftLoop(loaded)(hidden.double(), tokens), DraftLoop(pruned)(hidden, tokens)
    assert torch.equal(again.tokens, first.tokens)


@pytest.mark.parametrize(
    ("keep", "message"),
    [(torch.tensor([1, 1]), "keep: distinct"), (torch.tensor([V]), "keep: distinct"), (torch.tensor([]), "keep")],
)
def test_a_vocabulary_that_cannot_be_is_refused(whole: Speculator, keep: torch.Tensor, message: str) -> None:
    with pytest.raises(SpeculatorError, match=message):
        prune_head(whole, keep)


def test_a_reduced_head_is_not_reduced_again(whole: Speculator) -> None:
    with pytest.raises(SpeculatorError, match="already reduced"):
        prune_head(prune_head(whole, KEEP), torch.arange(3))


def test_a_damaged_vocabulary_is_named(whole: Speculator, tmp_path: Path) -> None:
    save_speculator(prune_head(whole, KEEP), tmp_path / "pruned")
    file = tmp_path / "pruned" / "pytorch_model.bin"
    tensors = torch.load(file, weights_only=True)
    torch.save(tensors | {"draft_vocabulary": KEEP + V}, file)
    with pytest.raises(SpeculatorError, match="tensor draft_vocabulary: distinct tokens from 0 to 49"):
        load_speculator(tmp_path / "pruned")


def test_the_choice() -> None:
    """Special tokens come first, then the order is by count in responses, by count in prompts, and by lower id."""
    responses, prompts = torch.tensor([0, 5, 0, 9, 0, 0, 0]), torch.tensor([0, 0, 0, 0, 2, 0, 0])
    for size, expected in ((2, [3, 6]), (3, [1, 3, 6]), (4, [1, 3, 4, 6]), (5, [0, 1, 3, 4, 6])):
        assert choose_vocabulary(responses, prompts, size, always=[6, 99]).tolist() == expected
    for size in (0, 7):
        with pytest.raises(SpeculatorError, match=r"size: 1 .*to 6"):
            choose_vocabulary(responses, prompts, size, always=[6])
