"""Train Medusa heads for the demo's model, in the format that vLLM loads with its method `medusa`.

    python demo/train_medusa.py --out demo/medusa

Takes a few minutes on one CPU core. Head k sees the target's last hidden state, which has just produced the next token,
and guesses the token k + 1 places behind that one (Medusa-1: https://arxiv.org/abs/2401.10774).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also works as a plain script

from demo.sessions import session
from demo.tasks import FIRST_HELD_OUT_SEED
from demo.tokenizer import PAD, encode, token_id
from demo.train_model import pad_rows

MODEL = Path(__file__).with_name("model")
HEADS = 4
LAYERS = 2
SESSIONS_A_STEP = 4
HEAD_DISCOUNT = 0.8  # weight of a head's loss relative to the head before it, as in the paper
HELD_OUT_SESSIONS = 40

CARD = """# Medusa heads for the demo's model

{heads} heads of {layers} residual layers on `demo/model`'s last hidden state, with one shared output matrix; {size} MB
in float16, in the format that vLLM loads with the method `medusa`. Trained by `demo/train_medusa.py` on the sessions of
`demo/sessions.py`: {steps} steps of {batch} sessions, {minutes} minutes of one CPU core.

On {held_out} held-out sessions ({positions} positions), reading the recorded text: share of positions at which a head
and all heads before it guess right.

| head | {columns} |
|---|{line}|
| right so far | {right} |
"""


class Block(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Apply residual layers x + SiLU(Wx + b), as vLLM's `ResidualBlock` does.

    W and b start as zero, so that the head guesses the token that the target has just chosen.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(LAYERS)])
        for layer in self.layers:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + nn.functional.silu(layer(hidden))
        return hidden


class Heads(nn.Module):  # type: ignore[misc]
    """Hold all heads. They share `lm_head` [V, H], which starts as the target's."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(output.shape[1]) for _ in range(HEADS)])
        self.lm_head = nn.Linear(output.shape[1], output.shape[0], bias=False)
        self.lm_head.weight.data.copy_(output)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits [HEADS, N, V] of hidden states [N, H]."""
        return torch.stack([self.lm_head(block(hidden)) for block in self.blocks])


def examples(target: Any, tokenizer: Tokenizer, seeds: list[int]) -> tuple[Tensor, Tensor]:
    """Return the hidden states [N, H] that chose a reply's token, and the HEADS tokens behind it, [N, HEADS].

    A token behind the reply's end is -100, which cross-entropy leaves out.
    """
    ids, learn = pad_rows([encode(tokenizer, session(seed)) for seed in seeds], token_id(tokenizer, PAD))
    with torch.no_grad():
        hidden = target.model(input_ids=ids, use_cache=False).last_hidden_state
    goals = torch.full((*ids.shape, HEADS), -100)
    inside = torch.zeros_like(learn)
    inside[:, :-1] = learn[:, 1:]  # True where the next token belongs to a reply
    within = inside.clone()
    for k in range(HEADS):
        ahead = k + 2
        within[:, :-ahead] &= learn[:, ahead:]
        within[:, -ahead:] = False
        goals[:, :-ahead, k] = torch.where(within[:, :-ahead], ids[:, ahead:], -100)
    kept = inside & (goals[..., 0] >= 0)
    return hidden[kept], goals[kept]


def loss_of(logits: Tensor, goals: Tensor) -> Tensor:
    """Return the sum of the heads' cross-entropies, in which later heads weigh less."""
    losses = [nn.functional.cross_entropy(logits[k], goals[:, k]) * HEAD_DISCOUNT**k for k in range(HEADS)]
    return torch.stack(losses).sum()


def right_so_far(heads: Heads, hidden: Tensor, goals: Tensor) -> list[float]:
    """Return for each head the share of its positions at which it and all heads before it are right."""
    with torch.no_grad():
        guesses = heads(hidden).argmax(-1).T
        right = torch.eq(guesses, goals).long().cumprod(-1)
    return [float(right[goals[:, k] >= 0, k].float().mean()) for k in range(HEADS)]


def train(target: Any, tokenizer: Tokenizer, steps: int, rate: float, seed: int) -> Heads:
    """Train new heads with Adam, warm-up and a cosine decay."""
    torch.manual_seed(seed)
    rng = random.Random(f"medusa {seed}")
    heads = Heads(target.lm_head.weight.detach())
    optimizer = torch.optim.AdamW(heads.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.05)
    with Progress() as progress:
        bar = progress.add_task("training", total=steps)
        for _ in range(steps):
            seeds = [rng.randrange(FIRST_HELD_OUT_SEED) for _ in range(SESSIONS_A_STEP)]
            hidden, goals = examples(target, tokenizer, seeds)
            loss = loss_of(heads(hidden), goals)
            loss.backward()
            nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            progress.update(bar, advance=1, description=f"loss {loss.item():.3f}")
    return heads


def export(heads: Heads, out: Path, card: str) -> None:
    """Write config.json, model.safetensors and README.md."""
    out.mkdir(parents=True, exist_ok=True)
    vocabulary, width = heads.lm_head.weight.shape
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": width,
        "vocab_size": vocabulary,
        "num_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "torch_dtype": "float16",
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {name.replace("lm_head.", "lm_heads.0."): value.half() for name, value in heads.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "README.md").write_text(card)


def main() -> None:
    """Read the options, train and measure the heads, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("medusa"), help="folder to write")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    target = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    began = time.process_time()
    heads = train(target, tokenizer, options.steps, options.rate, options.seed)
    minutes = (time.process_time() - began) / 60
    held_out = [FIRST_HELD_OUT_SEED + i for i in range(HELD_OUT_SESSIONS)]
    groups = [held_out[at : at + SESSIONS_A_STEP] for at in range(0, HELD_OUT_SESSIONS, SESSIONS_A_STEP)]
    hidden, goals = map(torch.cat, zip(*(examples(target, tokenizer, group) for group in groups), strict=True))
    shares = right_so_far(heads, hidden, goals)
    card = CARD.format(
        heads=HEADS,
        layers=LAYERS,
        size=f"{sum(p.numel() for p in heads.parameters()) * 2 / 1e6:.2f}",
        steps=options.steps,
        batch=SESSIONS_A_STEP,
        minutes=f"{minutes:.0f}",
        held_out=HELD_OUT_SESSIONS,
        positions=len(hidden),
        columns=" | ".join(str(k + 1) for k in range(HEADS)),
        line="---|" * (HEADS - 1) + "---",
        right=" | ".join(f"{share:.1%}" for share in shares),
    )
    export(heads, options.out, card)
    print(card)


if __name__ == "__main__":
    main()
