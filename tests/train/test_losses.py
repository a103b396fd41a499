"""Compare the losses with their formulas in float64 numpy, and test their gradients."""

import numpy as np
import torch

from agentspec.train.trainer import cross_entropy, lk, worth


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def test_cross_entropy_is_minus_the_log_probability() -> None:
    scores = np.random.default_rng(0).normal(size=(5, 11))
    labels = np.array([0, 3, 10, 4, 4])
    expected = -np.log(softmax(scores)[np.arange(5), labels])
    np.testing.assert_allclose(cross_entropy(torch.tensor(scores), torch.tensor(labels)), expected, rtol=1e-5)


def test_lk_is_the_paper_s_mix_up_to_the_target_s_entropy() -> None:
    random = np.random.default_rng(1)
    scores, p = random.normal(size=(6, 9)) * 2, softmax(random.normal(size=(6, 9)) * 2)
    q = softmax(scores)
    a = np.minimum(p, q).sum(-1)
    weight = np.exp(-3.0 * a)
    divergence = (p * np.log(p / q)).sum(-1)
    entropy = -(p * np.log(p)).sum(-1)
    expected = weight * (divergence + entropy) + (1 - weight) * (1 - a)
    loss, accepted = lk(torch.tensor(scores), torch.tensor(p).float())
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    np.testing.assert_allclose(accepted, a, rtol=1e-4)


def test_lk_pulls_even_where_there_is_no_overlap() -> None:
    """The gradient of the acceptance alone is nearly zero there."""
    scores = torch.zeros(1, 4)
    scores[0, 0] = 20.0
    scores.requires_grad_()
    target = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    lk(scores, target)[0].sum().backward()
    assert scores.grad is not None
    assert scores.grad[0, 3] < -0.5
    assert scores.grad[0, 0] > 0.5


def test_lk_rests_where_the_draft_is_the_target() -> None:
    scores = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    target = scores.detach().softmax(-1)
    loss, _ = lk(scores, target)
    loss.sum().backward()
    assert scores.grad is not None
    # The overlap has a kink here, so each token's gradient is at most that of one side of it.
    assert float(scores.grad.abs().max()) < 0.3
    worse, _ = lk(scores.detach() + torch.tensor([2.0, *[0.0] * 7]), target)
    assert bool((worse > loss).all())


def test_worth_is_the_derivative_of_the_expected_length() -> None:
    accepted = torch.rand(7, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    accepted.cumprod(1).sum().backward()
    torch.testing.assert_close(worth(accepted.detach()), accepted.grad)
    assert worth(torch.zeros(1, 3)).tolist() == [[1.0, 0.0, 0.0]]
