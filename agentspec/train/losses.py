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


def lk(logits: Tensor, target: Tensor) -> Tensor:
    """The adaptive LK loss (Samarin et al., "LK Losses", arXiv 2602.23881), which raises the acceptance itself.

    With p the target's distribution and q the draft's, a draft sampled from q is accepted with probability
    a = sum(min(p, q)), one minus their total variation. The gradient of that alone vanishes where they hardly overlap;
    so it is mixed with the Kullback-Leibler divergence, which leads there::

        l * KL(p || q) + (1 - l) * (1 - a)   with   l = exp(-ETA * a), taken as a constant

    (For the divergence stands the cross-entropy of p and q: the same gradient, without the entropy of p.)
    logits: [N, V] of the draft. target: float32 [N, V], p. Returns float32 [N].
    """
    log_q = functional.log_softmax(logits.float(), -1)
    overlap = torch.minimum(log_q.exp(), target).sum(-1)
    divergence = -(target * log_q).sum(-1)
    weight = torch.exp(-ETA * overlap.detach())
    return weight * divergence + (1.0 - weight) * (1.0 - overlap)
