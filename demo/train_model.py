"""Train the demo's small language model from generated agent sessions.

    python demo/train_model.py --out demo/model

Runs on the CPU, shows its progress, and goes on where it stopped when it is started again.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also works as a plain script

from demo.sessions import Message, copying, first_turns, session
from demo.starting_point import ROPE_BASE, prepare
from demo.tasks import FIRST_HELD_OUT_SEED
from demo.tokenizer import END, MAX_POSITIONS, PAD, encode, save_tokenizer, token_id, train_tokenizer

VOCABULARY = 1536
TOKENIZER_SEEDS = range(1500)
GROUP = 10  # steps whose sequences are drawn together, so that batches hold similar lengths


@dataclass(frozen=True)
class Options:
    """What a run can change."""

    out: Path
    steps: int
    early_steps: int
    batch: int
    rate: float
    threads: int
    seed: int
    save_every: int


def build_model(tokenizer: Tokenizer) -> Any:
    """A four-layer Llama; heads of 32 are the smallest that vLLM's CPU attention accepts."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, END),
        pad_token_id=token_id(tokenizer, PAD),
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    prepare(model)
    return model


def orthogonalize(update: Tensor) -> Tensor:
    """Bring all singular values of each matrix near one (Newton-Schulz iteration), as Muon does."""
    wide = update.size(-2) > update.size(-1)
    x = update.mT if wide else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if wide else x


class Muon(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not followed
    """Momentum with orthogonalized updates: far fewer steps than Adam for a transformer's matrices.

    torch has its own, but it works in bfloat16, which most CPUs are slow at.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    def step(self, closure: Any = None) -> None:
        """Update all matrices."""
        with torch.no_grad():
            for group in self.param_groups:
                shapes: dict[torch.Size, list[nn.Parameter]] = {}
                for parameter in group["params"]:
                    shapes.setdefault(parameter.shape, []).append(parameter)
                for parameters in shapes.values():
                    self._update(parameters, group["lr"], group["momentum"])

    def _update(self, parameters: list[nn.Parameter], rate: float, momentum: float) -> None:
        """Update matrices of one shape, together."""
        rows, columns = parameters[0].shape
        scale = rate * max(1.0, rows / columns) ** 0.5
        updates = torch.stack([self._momentum(parameter, momentum) for parameter in parameters])
        for parameter, update in zip(parameters, orthogonalize(updates), strict=True):
            parameter.mul_(1 - rate * 0.02).add_(update, alpha=-scale)

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        state = self.state[parameter]
        if "mean" not in state:
            state["mean"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        state["mean"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(state["mean"], momentum)


def build_optimizers(model: Any, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, Adam for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    embedding = [model.model.embed_tokens.weight]
    norms = [p for p in model.parameters() if p.ndim == 1]
    adam: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.0}
    return [Muon(matrices, lr=rate), torch.optim.AdamW([{"params": embedding}, {"params": norms}], **adam)]


def rate_factor(step: int, options: Options) -> float:
    """Warm up, hold, then fall to zero over the second half, which makes the model certain of its choices."""
    return min((step + 1) / 20, 1.0, (options.steps - step) / (options.steps * 0.5))


def conversation(rng: random.Random, early: bool) -> list[Message]:
    """A random training conversation; the early ones are short, so that copying is learned quickly."""
    seed = rng.randrange(FIRST_HELD_OUT_SEED)
    if early:
        return copying(seed) if rng.random() < 0.5 else first_turns(seed, rng.randint(1, 2))
    return copying(seed) if rng.random() < 0.03 else session(seed)


def batches(tokenizer: Tokenizer, options: Options, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of token ids and of what to learn, from the given step on.

    A step's batch depends only on its number, so a resumed run sees what an unbroken one would have seen.
    """
    for step in range(start - start % GROUP, options.steps, GROUP):
        rng = random.Random(f"batches {options.seed} {step}")
        early = step < options.early_steps
        size = options.batch * 5 // 2 if early else options.batch
        rows = [encode(tokenizer, conversation(rng, early)) for _ in range(size * GROUP)]
        rows.sort(key=lambda row: len(row[0]))
        groups = [rows[at : at + size] for at in range(0, len(rows), size)]
        rng.shuffle(groups)
        for group in groups[max(0, start - step) : options.steps - step]:
            yield pad_rows(group, token_id(tokenizer, PAD))


def pad_rows(rows: list[tuple[list[int], list[bool]]], pad: int) -> tuple[Tensor, Tensor]:
    """Rows of one width; what is added is never learned."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in rows])
    return ids, torch.tensor([row + [False] * (width - len(row)) for _, row in rows])


def loss_of(model: Any, ids: Tensor, learn: Tensor) -> tuple[Tensor, float]:
    """Mean loss over the tokens to learn, and the share of them that greedy decoding gets right."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    mask = learn[:, 1:]
    logits = model.lm_head(hidden[:, :-1][mask])
    goals = ids[:, 1:][mask]
    right = (logits.detach().argmax(-1) == goals).float().mean().item()
    return nn.functional.cross_entropy(logits, goals), right


def export(model: Any, tokenizer: Tokenizer, out: Path) -> None:
    """Write the model folder beside ``out`` and swap it in, so that readers never see half of it."""
    new, old = out.with_name(out.name + ".new"), out.with_name(out.name + ".old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    end, pad = token_id(tokenizer, END), token_id(tokenizer, PAD)
    half = LlamaForCausalLM(model.config)
    half.load_state_dict(model.state_dict())
    half.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad, do_sample=False)
    half.half().save_pretrained(new)
    (new / "model.safetensors").chmod(0o644)
    save_tokenizer(tokenizer, new)
    if (out / "README.md").exists():
        shutil.copy(out / "README.md", new)
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


class Trainer:
    """One training run, kept in a checkpoint so that it can go on later."""

    def __init__(self, options: Options) -> None:
        self.options = options
        torch.manual_seed(options.seed)
        torch.set_num_threads(options.threads)
        texts = (message.content for seed in TOKENIZER_SEEDS for message in session(seed))
        self.tokenizer = train_tokenizer(texts, VOCABULARY)
        self.model = build_model(self.tokenizer)
        self.optimizers = build_optimizers(self.model, options.rate)
        self.step = 0
        self.seconds = 0.0
        self.checkpoint = options.out.with_name(options.out.name + ".training.pt")

    def resume(self) -> None:
        """Load the checkpoint of an earlier run, if there is one."""
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]

    def save(self) -> None:
        """Write the checkpoint and a loadable model of this stage."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
        }
        partial = self.checkpoint.with_name(self.checkpoint.name + ".part")
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, partial)
        partial.replace(self.checkpoint)
        export(self.model, self.tokenizer, self.options.out)

    def train_step(self, ids: Tensor, learn: Tensor) -> tuple[float, float]:
        """One update; returns the loss and the share of right tokens."""
        factor = rate_factor(self.step, self.options)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group, scale in zip(groups, (1.0, 0.4, 0.05), strict=True):  # matrices, embedding, norms
            group["lr"] = self.options.rate * scale * factor
        loss, right = loss_of(self.model, ids, learn)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item(), right

    def run(self) -> None:
        """Train to the last step, saving now and then."""
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns) as progress:
            bar = progress.add_task("training", total=self.options.steps, completed=self.step)
            began, tokens = time.perf_counter(), 0
            for ids, learn in batches(self.tokenizer, self.options, self.step):
                loss, right = self.train_step(ids, learn)
                self.step += 1
                tokens += ids.numel()
                self.seconds += time.perf_counter() - began
                began = time.perf_counter()
                text = f"step {self.step} loss {loss:.4f} right {right:.2%} of tokens"
                progress.update(bar, completed=self.step, description=text)
                if self.step % 25 == 0:
                    rate = tokens / self.seconds
                    progress.console.print(f"{text}, {self.seconds:.0f} s, {rate:.0f} tokens/s {ids.shape}")
                if self.step % self.options.save_every == 0:
                    self.save()
        export(self.model, self.tokenizer, self.options.out)


def main() -> None:
    """Read the options and train."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("model"), help="folder to write")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--early-steps", type=int, default=300, help="steps on short sequences")
    parser.add_argument("--batch", type=int, default=6, help="sessions a step")
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=100)
    trainer = Trainer(Options(**vars(parser.parse_args())))
    trainer.resume()
    trainer.run()


if __name__ == "__main__":
    main()
