"""Compare the modules with the float64 reference, for every kind and every way of tying."""

from pathlib import Path

import numpy as np
import pytest
import torch

from agentspec.server_ext.speculator import SpeculatorConfig, build_speculator, load_speculator
from tests.speculator import reference
from tests.speculator.files import Checkpoint, H, N, V, lstm, mlp, rnn

CHECKPOINTS = {
    "lstm": lstm(),
    "lstm, unscaled": lstm(scaled=False),
    "lstm, four embeddings": lstm(tied=False),
    "mlp": mlp(),
    "mlp, tied, scaled": mlp(tied=True, scaled=True),
    "mlp, inner_dim 0": mlp(inner=0),
    "rnn": rnn(layers=1),
    "rnn, three layers": rnn(layers=3),
}


@pytest.fixture(params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    return CHECKPOINTS[request.param]


def test_logits_are_those_of_the_formulas(checkpoint: Checkpoint, tmp_path: Path) -> None:
    speculator = load_speculator(checkpoint.write(tmp_path))
    random = np.random.default_rng(1)
    hidden, tokens = random.normal(size=(40, H)) * 3, random.integers(0, V, size=(40, N))
    expected = reference.logits(checkpoint.kind, checkpoint.reference_weights(), checkpoint.config, hidden, tokens)
    got = speculator(torch.tensor(hidden, dtype=torch.float32), torch.tensor(tokens))
    assert len(got) == N
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == (40, V)
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())
        assert (ours.argmax(-1).numpy() == theirs.argmax(-1)).all()


def test_positions_see_their_own_tokens(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Position k depends on the inputs up to its own and on no later one."""
    speculator = load_speculator(checkpoint.write(tmp_path))
    hidden, tokens = torch.randn(1, H, generator=torch.Generator().manual_seed(2)), torch.tensor([[1, 2, 3]])
    before = speculator(hidden, tokens)
    for changed in range(N):
        other = tokens.clone()
        other[0, changed] = 40
        same = [torch.equal(a, b) for a, b in zip(before, speculator(hidden, other), strict=True)]
        assert same == [k < changed for k in range(N)]


@pytest.mark.parametrize(("n", "width", "expected"), [(3, 4096, 23.0720), (3, 6144, 28.2573), (4, 3072, 17.0476)])
def test_the_weight_of_the_embedding(n: int, width: int, expected: float) -> None:
    config = SpeculatorConfig(kind="lstm", hidden_size=64, inner_size=width, n_predict=n, vocab_size=8)
    assert config.alpha == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("kind", ["mlp", "lstm"])
def test_a_new_speculator_can_be_trained(kind: str) -> None:
    """Gradients reach every parameter, and a few steps lower the loss."""
    torch.manual_seed(0)
    values = {"kind": kind, "hidden_size": H, "inner_size": 16, "n_predict": N, "vocab_size": V}
    speculator = build_speculator(SpeculatorConfig(**values))  # type: ignore[arg-type]
    hidden, tokens = torch.randn(64, H), torch.randint(0, V, (64, N + 1))
    losses = []
    for _ in range(60):
        logits = speculator(hidden, tokens[:, :-1])
        loss = sum(torch.nn.functional.cross_entropy(logits[k], tokens[:, k + 1]) for k in range(N))
        gradients = torch.autograd.grad(loss, list(speculator.parameters()))
        with torch.no_grad():  # by hand: torch's optimizers take seconds to import
            for parameter, gradient in zip(speculator.parameters(), gradients, strict=True):
                parameter -= 0.3 * gradient
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
