"""Compare fused kernels and recorded graphs with plain torch on random states, before they are used.

Two correct computations differ by roundings, and the bound follows from these. A logit is the sum of I products of a
state and a weight (I: the reduction length).

- Between two products plain torch rounds to the weights' dtype several times, kernels once. ROUNDINGS times the
  dtype's epsilon e bounds the sum of these errors, relative to a typical element; the errors of Triton's interpreter
  reach a sixth of it. A state carries them on, so position k has k + 1 times as many.
- With weights in FP8, a state near the middle between two numbers of E4M3 may round to either. A share e / e8 of the
  elements is so near, and each is off by E4M3's epsilon e8; as errors of random sign add up, that is sqrt(e * e8).
- The products are summed in float32 in another order: sqrt(I) times its epsilon, of random sign too.

So a logit is off by at most::

    (k + 1) * (ROUNDINGS * e + sqrt(I) * epsilon of float32) * (largest absolute logit of the row)

and a log probability, the difference of a logit and the log-sum-exp of all, by twice that: the *margin*. Near ties make
tokens differ legitimately. So a token passes if plain torch gives it at least exp(-margin) times the probability of the
best; its own probability must lie within the margin of plain torch's.
"""

import math

import torch
from torch import Tensor

from agentspec.errors import SpeculatorError
from agentspec.server_ext import UNFORCED
from agentspec.server_ext.speculator.gpu.fp8 import E4M3, Fp8Linear
from agentspec.server_ext.speculator.gpu.graphs import Loop, PaddedLoop
from agentspec.server_ext.speculator.models import Speculator
from agentspec.server_ext.speculator.selection import DraftedTokens

BATCHES = (1, 17, 33, 65)
"""Batch sizes to compare kernels at: kernels are compiled for up to 16, 32 and 64 rows; torch computes larger ones."""
ROUNDINGS = 2
_TINY = 1e-30
"""Smallest probability that does not count as zero; float32 cannot hold those of very improbable tokens."""
_PRODUCT_EPSILON = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}
"""Rounding error of the factors of torch's float32 products on tensor cores (TF32, bfloat16), by precision."""


def check_kernels(fused: Loop, plain: Loop, speculator: Speculator, positions: int) -> None:
    """Compile a loop's kernels and compare it with plain torch. Raises SpeculatorError that names the difference."""
    for batch in BATCHES:
        inputs = random_inputs(speculator, positions, batch, seed=batch)
        problem = difference(fused(*inputs), plain, speculator, inputs)
        if problem:
            raise SpeculatorError(f"{batch} rows: {problem}")


def check_graphs(recorded: PaddedLoop, eager: Loop, speculator: Speculator, positions: int) -> None:
    """Replay every size twice, with other inputs, and compare it with unrecorded launches.

    Raises SpeculatorError that names the difference, after all sizes, because ranks that share a head must all replay
    equally often.
    """
    problems = []
    for size in recorded.sizes:
        for seed in (size, size + 1000):
            inputs = random_inputs(speculator, positions, size, seed)
            found = DraftedTokens(*(field.clone() for field in recorded(*inputs)))
            if problem := difference(found, eager, speculator, inputs):
                problems.append(f"{size} rows: {problem}")
    if problems:
        raise SpeculatorError(problems[0])


def random_inputs(speculator: Speculator, positions: int, batch: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random states and tokens for a loop; half of the rows are unforced, half score given tokens."""
    some = next(speculator.parameters())
    config, random = speculator.config, torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch, config.hidden_size, generator=random)
    tokens = torch.randint(config.vocab_size, (batch,), generator=random)
    proposal = torch.randint(config.vocab_size, (batch, positions), generator=random)
    proposal[torch.rand(batch, positions, generator=random) < 0.5] = UNFORCED
    proposal[::2] = UNFORCED
    return hidden.to(some), tokens.to(some.device), proposal.to(some.device)


def difference(
    found: DraftedTokens, reference: Loop, speculator: Speculator, inputs: tuple[Tensor, Tensor, Tensor]
) -> str | None:
    """Return a message about what is wrong with ``found``, which was drafted from these inputs, or None.

    reference: the loop to compare with. It scores the tokens in ``found``, so both read the same tokens before each
    position. speculator: a plain torch one, for the size of the logits.
    """
    hidden, tokens, proposal = inputs
    unforced = proposal == UNFORCED
    inside = (found.tokens >= 0) & (found.tokens < speculator.config.vocab_size)
    if not bool(inside.all()):
        return f"token {int(found.tokens[~inside][0])} is outside the vocabulary"
    if not torch.equal(found.tokens, torch.where(unforced, found.top, proposal)):
        return "a token is neither the likeliest nor the one given"
    wanted = reference(hidden, tokens, found.tokens)
    margin = margins(speculator, hidden, torch.cat((tokens[:, None], found.tokens[:, :-1]), dim=1))
    least = wanted.top_probabilities * (-margin).exp()
    worse = unforced & ~(wanted.probabilities >= least - _TINY)
    if bool(worse.any()):
        share = wanted.probabilities[worse][0] / wanted.top_probabilities[worse][0]
        bound = (-margin).exp()[worse][0]
        return (
            f"token {int(found.tokens[worse][0])} instead of {int(wanted.top[worse][0])} has {float(share):.3g} times "
            f"its probability, at least {float(bound):.3g} expected"
        )
    for name in ("probabilities", "top_probabilities"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        off = ~((ours - theirs).abs() <= theirs * margin.expm1() + _TINY)  # NaN is off too
        if bool(off.any()):
            return (
                f"probability {float(ours[off][0]):.6g} instead of {float(theirs[off][0]):.6g}, "
                f"within {float(margin.expm1()[off][0]):.2g} of it expected"
            )
    return None


def margins(speculator: Speculator, hidden: Tensor, inputs: Tensor) -> Tensor:
    """Return float32 [B, n]: how far two log probabilities may differ by rounding alone.

    hidden [B, H]; inputs int64 [B, n]: the input token of each position.
    """
    scale = torch.stack([logits.float().abs().amax(dim=-1) for logits in speculator(hidden, inputs)], dim=1)
    length, depth = speculator.config.inner_size, torch.arange(1, inputs.shape[1] + 1, device=hidden.device)
    share = ROUNDINGS * _epsilon(speculator) + math.sqrt(length) * torch.finfo(torch.float32).eps
    return 2.0 * share * depth * scale


def _epsilon(speculator: Speculator) -> float:
    """Return the relative error of a state's elements by one rounding."""
    dtype = next(speculator.parameters()).dtype
    epsilon = float(torch.finfo(dtype).eps)
    if dtype == torch.float32:
        epsilon = max(epsilon, _PRODUCT_EPSILON[torch.get_float32_matmul_precision()])
    if any(isinstance(module, Fp8Linear) for module in speculator.modules()):
        epsilon = max(epsilon, float(torch.finfo(torch.bfloat16).eps))  # torch's FP8 products come out in bfloat16
        epsilon = math.sqrt(epsilon * float(torch.finfo(E4M3).eps))
    return epsilon
