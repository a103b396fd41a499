"""Make small speculators with random weights, in the shapes that the optimisations must handle."""

import torch

from agentspec.server_ext.speculator import Speculator, SpeculatorConfig, build_speculator

HIDDEN, VOCABULARY, REDUCED, POSITIONS = 96, 272, 208, 3


def small(kind: str = "lstm", *, reduced: bool = False, inner: int = 80) -> Speculator:
    """Return a tied LSTM, or an MLP with its own weights at each position. reduced: draft from a random vocabulary."""
    torch.manual_seed(0)
    config = SpeculatorConfig(
        kind="lstm" if kind == "lstm" else "mlp",
        hidden_size=HIDDEN,
        inner_size=inner,
        n_predict=POSITIONS,
        vocab_size=VOCABULARY,
        tie_weights=kind == "lstm",
        scale_input=True,
        draft_vocab_size=REDUCED if reduced else 0,
    )
    speculator = build_speculator(config)
    speculator.eval().requires_grad_(False)
    for name, parameter in speculator.named_parameters():
        if "norm" in name:
            parameter.normal_(1.0 if name.endswith("weight") else 0.0, 0.2)
        else:
            parameter.mul_(4.0)  # so that probabilities differ
    if reduced:
        speculator.draft_vocabulary.copy_(torch.randperm(VOCABULARY)[:REDUCED])
    return speculator


def inputs(rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, newest tokens, and proposals of which about a third are unforced (-1)."""
    random = torch.Generator().manual_seed(seed)
    proposal = torch.randint(0, VOCABULARY, (rows, POSITIONS), generator=random)
    proposal[torch.rand(rows, POSITIONS, generator=random) < 0.3] = -1
    hidden = torch.randn(rows, HIDDEN, generator=random)
    return hidden, torch.randint(0, VOCABULARY, (rows,), generator=random), proposal
