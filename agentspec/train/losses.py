"""What a speculator is trained to do, at every position of its drafts."""

import torch
from torch import Tensor
from torch.nn import functional

ETA = 3.0
"""How fast the LK loss turns from divergence to acceptance; the paper's best setting."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The published recipe: minus the log probability of the response's own token.

    logits: [N, V]. labels: int64 [N]. Returns float32 [N].
    """
    return functional.cross_entropy(logits.float(), labels, reduction="none")


def lk(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The adaptive LK loss (Samarin et al., "LK Losses", arXiv 2602.23881), which raises the acceptance itself.

    With p the target's distribution and q the draft's, a draft sampled from q is accepted with probability
    a = sum(min(p, q)), one minus their total variation. The gradient of that alone vanishes where they hardly overlap;
    so it is mixed with the Kullback-Leibler divergence, which leads there::

        l * KL(p || q) + (1 - l) * (1 - a)   with   l = exp(-ETA * a), taken as a constant

    (For the divergence stands the cross-entropy of p and q: the same gradient, without the entropy of p.)
    logits: [N, V] of the draft. target: float32 [N, V], p. Returns the loss, float32 [N], and a, without a gradient.
    """
    log_q = functional.log_softmax(logits.float(), -1)
    overlap = torch.minimum(log_q.exp(), target).sum(-1)
    divergence = -(target * log_q).sum(-1)
    accepted = overlap.detach()
    weight = torch.exp(-ETA * accepted)
    return weight * divergence + (1.0 - weight) * (1.0 - overlap), accepted


def worth(accepted: Tensor) -> Tensor:
    """How many more tokens of a draft are accepted, for each unit that a position's own acceptance rises.

    A position counts only where those before it are accepted, and carries those behind it: the derivative of the
    expected number of accepted tokens, a1 + a1 a2 + a1 a2 a3 + ..., by each a. accepted: [N, n]. Returns [N, n].
    """
    reached = torch.ones_like(accepted)
    reached[:, 1:] = accepted[:, :-1].cumprod(1)
    behind = torch.ones_like(accepted)
    for k in range(accepted.shape[1] - 2, -1, -1):
        behind[:, k] += accepted[:, k + 1] * behind[:, k + 1]
    return reached * behind
