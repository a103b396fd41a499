"""Train two drafters with layers of attention for the demo's model, in the formats that vLLM loads.

    python demo/train_drafters.py draft_model   # demo/draft_model, a small Llama
    python demo/train_drafters.py eagle3        # demo/eagle3, an EAGLE-3 head

Each takes some minutes on one CPU core. Both learn the target's probabilities on the first replies of generated
sessions. The EAGLE-3 head reads the target's hidden states behind three layers and the newest token, and then its own
states in their place; training unrolls that (EAGLE-3, https://arxiv.org/abs/2503.01840).
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
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also works as a plain script

from demo.sessions import first_turns
from demo.tasks import FIRST_HELD_OUT_SEED
from demo.tokenizer import PAD, encode, token_id
from demo.train_model import pad_rows

MODEL = Path(__file__).with_name("model")
SESSIONS_A_STEP = 4
HELD_OUT_SESSIONS = 40
TURNS = 3
"""Most turns of a session that is learned from: attention over whole sessions takes most of the time."""
AUX_LAYERS = (2, 3, 4)
"""Numbers of the target's layers behind which the EAGLE-3 head reads hidden states."""
UNROLLED = 3
"""Tokens that the EAGLE-3 head drafts in training."""
DISCOUNT = 0.8
"""Weight of a drafted token's loss, relative to the token before it."""

CARD = """# {title}

{what}; {size} MB in float16, in the format that vLLM loads with the method `{kind}`. Trained by
`python demo/train_drafters.py {kind} --steps {steps}` on the first replies of the sessions of `demo/sessions.py`:
{batch} sessions a step, {minutes} minutes of one CPU core with other work on the machine.

On {held_out} held-out sessions, reading the recorded text: share of the replies' positions at which it and the target
choose the same token: {right}.
"""


class Batch:
    """Hold the target's answers on some sessions.

    ids [B, T]; hidden: its states behind AUX_LAYERS, [B, T, 3 H]; probabilities [B, T, V] of the next token; learn
    [B, T]: whether the token at this position belongs to a reply.
    """

    def __init__(self, target: Any, tokenizer: Tokenizer, seeds: list[int]) -> None:
        rows = [encode(tokenizer, first_turns(seed, 1 + seed % TURNS)) for seed in seeds]
        self.ids, self.learn = pad_rows(rows, token_id(tokenizer, PAD))
        before_norm: list[Tensor] = []
        hook = target.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
        with torch.no_grad():
            answer = target(input_ids=self.ids, use_cache=False, output_hidden_states=True)
        hook.remove()
        states = [*answer.hidden_states[:-1], before_norm[0]]
        self.hidden = torch.cat([states[layer] for layer in AUX_LAYERS], dim=-1)
        self.probabilities = answer.logits.softmax(-1)


def compared(logits: Tensor, batch: Batch, ahead: int) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy with the target, and the share of equal choices.

    logits [B, T - ahead, V]: the drafter's; entry t predicts the token behind token t + ahead.
    """
    wanted = batch.probabilities[:, ahead:][:, : logits.shape[1]]
    learn = torch.zeros_like(batch.learn)
    learn[:, :-1] = batch.learn[:, 1:]
    mask = learn[:, ahead:][:, : logits.shape[1]]
    scores, goals = logits[mask], wanted[mask]
    loss = -(goals * functional.log_softmax(scores, -1)).sum(-1).mean()
    return loss, torch.eq(scores.argmax(-1), goals.argmax(-1)).float().mean()


class DraftModel(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Define a Llama of two narrow layers that shares the target's vocabulary."""

    title, what = "A draft model for the demo's model", "A Llama with 2 layers of width 96"

    def __init__(self, target: Any) -> None:
        super().__init__()
        config = LlamaConfig(**target.config.to_dict())
        config.update(
            {
                "hidden_size": 96,
                "intermediate_size": 256,
                "num_hidden_layers": 2,
                "num_attention_heads": 3,
                "num_key_value_heads": 3,
            }
        )
        self.llama = LlamaForCausalLM(config)

    def forward(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Return loss and share of equal choices."""
        logits = self.llama(input_ids=batch.ids, use_cache=False).logits
        return [compared(logits, batch, 0)]

    def export(self, out: Path) -> None:
        """Write config.json and model.safetensors."""
        self.llama.half().save_pretrained(out)
        (out / "model.safetensors").chmod(0o644)


class Eagle3(nn.Module):  # type: ignore[misc]
    """Define an EAGLE-3 head as vLLM's Eagle3LlamaForCausalLM. Embedding and output layer are the target's."""

    title = "An EAGLE-3 head for the demo's model"
    what = f"One layer on the target's hidden states behind layers {', '.join(map(str, AUX_LAYERS))}"

    def __init__(self, target: Any) -> None:
        super().__init__()
        config = self.config = LlamaConfig(**target.config.to_dict())
        config._attn_implementation = "eager"
        width = config.hidden_size
        self.fc = nn.Linear(len(AUX_LAYERS) * width, width, bias=False)
        projections = {f"{name}_proj": nn.Linear(2 * width, width, bias=False) for name in "qkv"}
        self.midlayer = nn.ModuleDict(
            {
                "self_attn": nn.ModuleDict({**projections, "o_proj": nn.Linear(width, width, bias=False)}),
                "mlp": LlamaMLP(config),
                **{
                    f"{name}": LlamaRMSNorm(width, config.rms_norm_eps)
                    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
                },
            }
        )
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        with torch.no_grad():  # begin with what the target makes of its last layer
            self.norm.weight.copy_(target.model.norm.weight)
            self.fc.weight.zero_()
            self.fc.weight[:, -width:] = torch.eye(width)
        self._rotary = LlamaRotaryEmbedding(config)
        self._embedding, self._output = [target.model.embed_tokens], [target.lm_head]  # lists: no weights of its own

    def forward(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Return loss and share of equal choices of each unrolled token."""
        keys: list[Tensor] = []
        values: list[Tensor] = []
        hidden, result = self.fc(batch.hidden[:, :-1]), []
        for step in range(UNROLLED):
            length = batch.ids.shape[1] - 1 - step
            hidden = self._layer(hidden[:, :length], batch.ids[:, 1 + step :], step, keys, values)
            result.append(compared(self._output[0](self.norm(hidden)), batch, 1 + step))
        return result

    def _layer(self, hidden: Tensor, ids: Tensor, step: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Return the next states [B, T, H] of T drafts that have ``step`` tokens. Entry t has read ids[t]."""
        part, attention = self.midlayer, self.midlayer["self_attn"]
        read = torch.cat((part["input_layernorm"](self._embedding[0](ids)), part["hidden_norm"](hidden)), -1)
        rows, length, _ = read.shape
        heads, size = self.config.num_attention_heads, self.config.head_dim
        query, key, value = (
            attention[f"{name}_proj"](read).view(rows, length, heads, size).transpose(1, 2) for name in "qkv"
        )
        cos, sin = self._rotary(read, torch.arange(step, step + length)[None])
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        keys.append(key)
        values.append(value)
        # A draft that began at t sees the target's states up to t, and its own states behind that.
        scores = query @ keys[0][:, :, :length].mT
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        own = [(query * later[:, :, :length]).sum(-1, keepdim=True) for later in keys[1:]]
        weights = (torch.cat([scores, *own], -1) / size**0.5).softmax(-1)
        mixed = weights[..., :length] @ values[0][:, :, :length]
        for number, later in enumerate(values[1:]):
            mixed = mixed + weights[..., length + number, None] * later[:, :, :length]
        hidden = hidden + attention["o_proj"](mixed.transpose(1, 2).reshape(rows, length, heads * size))
        return hidden + part["mlp"](part["post_attention_layernorm"](hidden))

    def export(self, out: Path) -> None:
        """Write config.json and model.safetensors."""
        kept = [
            *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
            *("max_position_embeddings", "rms_norm_eps", "rope_parameters", "vocab_size", "hidden_act"),
        ]
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": self.config.vocab_size,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS), "use_aux_hidden_state": True},
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            **{name: getattr(self.config, name) for name in kept},
        }
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        weights = {name: value.half().contiguous() for name, value in self.state_dict().items()}
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        (out / "model.safetensors").chmod(0o644)


KINDS: dict[str, Any] = {"draft_model": DraftModel, "eagle3": Eagle3}


def train(drafter: Any, target: Any, tokenizer: Tokenizer, steps: int, rate: float, seed: int) -> None:
    """Train with Adam, warm-up and a cosine decay."""
    rng = random.Random(f"drafters {seed}")
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.05)
    with Progress() as progress:
        bar = progress.add_task("training", total=steps)
        for step in range(steps):
            seeds = [rng.randrange(FIRST_HELD_OUT_SEED) for _ in range(SESSIONS_A_STEP)]
            parts = drafter(Batch(target, tokenizer, seeds))
            loss = sum(part * DISCOUNT**k for k, (part, _) in enumerate(parts))
            loss.backward()
            nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            text = f"loss {loss.item():.3f}, right {', '.join(f'{right:.1%}' for _, right in parts)}"
            progress.update(bar, advance=1, description=text)
            if step % 50 == 49:
                progress.console.print(f"step {step + 1}: {text}", highlight=False)


def main() -> None:
    """Read the options, train and measure the drafter, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--out", type=Path, help="folder to write (default: the kind's, beside this file)")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    target = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval().requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    drafter = KINDS[options.kind](target)
    began = time.process_time()
    train(drafter, target, tokenizer, options.steps, options.rate, options.seed)
    minutes = (time.process_time() - began) / 60
    shares = []
    with torch.no_grad():
        for at in range(0, HELD_OUT_SESSIONS, SESSIONS_A_STEP):
            seeds = [FIRST_HELD_OUT_SEED + at + i for i in range(SESSIONS_A_STEP)]
            shares.append([float(right) for _, right in drafter(Batch(target, tokenizer, seeds))])
    means = [sum(column) / len(column) for column in zip(*shares, strict=True)]
    card = CARD.format(
        title=drafter.title,
        what=drafter.what,
        kind=options.kind,
        size=f"{sum(p.numel() for p in drafter.parameters()) * 2 / 1e6:.2f}",
        steps=options.steps,
        batch=SESSIONS_A_STEP,
        minutes=f"{minutes:.0f}",
        held_out=HELD_OUT_SESSIONS,
        right=", then ".join(f"{mean:.1%}" for mean in means),
    )
    out = options.out or Path(__file__).with_name(options.kind)
    out.mkdir(parents=True, exist_ok=True)
    drafter.export(out)
    (out / "README.md").write_text(card)
    print(card)


if __name__ == "__main__":
    main()
