"""Train the demo's draft model for ``demo/model`` with the settings in ``demo/drafter.yaml``.

    python -m demo.train_drafter --compare

Writes its data, trains, measures on held-out tasks, and replaces ``demo/drafter``. A second call resumes the first.
``--compare`` also trains with plain cross-entropy, the published recipe, for as many steps.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from agentspec.train.config import RecordsSource, Source, TrainingConfig, load_config
from agentspec.train.run import REPORT, train
from demo.drafter_data import write_held_out, write_training

HERE = Path(__file__).resolve().parent
DRAFTER = HERE / "drafter"

CARD = """# The demo's drafter

A draft model for `demo/model` and for nothing else: an LSTM speculator of {parameters} M parameters ({size} MB in
float16) that reads the target's hidden state and drafts 3 tokens. It has no attention: it knows the hidden state and
the newest token, so it is good at what follows from them (syntax, phrases, the rest of a word) and cannot copy a name
that it has not seen; that is what the suffix index is for.

- Trained by `python -m demo.train_drafter --compare` as `demo/drafter.yaml` says: {steps} steps on
  {responses:,} replies ({tokens:,} tokens) of {sessions} generated sessions (`demo/sessions.py`, seeds from 0 on), in
  {minutes:.0f} minutes on one CPU thread with other work on the same machine.
- Measured on {held_out} tasks that neither the target nor the drafter was trained on, whose identifiers are in no
  training task: whole agent loops with the target's own greedy replies, {held_out_tokens:,} tokens.

| | mean acceptance length | accepted at position 1 | 2 | 3 |
| --- | --- | --- | --- | --- |
{rows}

Acceptance as in decoding with drafts of 3 at every step: a position counts for each step, also where an earlier one
was refused. The most that 3 drafted tokens can bring is 4.00. A difference of 0.01 means nothing: another choice of
as many tasks changes more than that.
"""


def main() -> None:
    """Write missing data, train, and put the result into ``demo/drafter``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=600, help="generated sessions to train on (default 600)")
    parser.add_argument("--tasks", type=int, default=60, help="held-out tasks to measure on (default 60)")
    parser.add_argument("--compare", action="store_true", help="also train with plain cross-entropy")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    config = load_config(HERE / "drafter.yaml")
    _data(config, options.sessions, options.tasks, console)
    reports = {"lk": _trained(config, console)}
    if options.compare:
        reports["cross-entropy"] = _trained(_cross_entropy(config), console)
    _publish(config.checkpoint.output_dir, reports)
    console.print(f"written: {DRAFTER}")


def _data(config: TrainingConfig, sessions: int, tasks: int, console: Console) -> None:
    training, held_out = (_file(sources[0]) for sources in (config.data.sources, config.data.eval_sources))
    training.parent.mkdir(parents=True, exist_ok=True)
    for there in (file for file in (training, held_out) if file.exists()):
        console.print(f"using {there}; remove it to write it anew, as with another --sessions or --tasks")
    if not training.exists():
        console.print(f"writing {sessions} sessions to {training}")
        write_training(training, sessions)
    if not held_out.exists():
        console.print(f"letting the target work on {tasks} held-out tasks, for {held_out}")
        write_held_out(held_out, tasks)


def _file(source: Source) -> Path:
    assert isinstance(source, RecordsSource)
    return source.path


def _trained(config: TrainingConfig, console: Console) -> dict[str, Any]:
    report = config.checkpoint.output_dir / REPORT
    if report.exists():
        finished: dict[str, Any] = json.loads(report.read_text())
        return finished
    return train(config, console)


def _cross_entropy(config: TrainingConfig) -> TrainingConfig:
    folder = config.checkpoint.output_dir.with_name("cross-entropy")
    checkpoint = config.checkpoint.model_copy(update={"output_dir": folder})
    return config.model_copy(update={"loss": "cross_entropy", "checkpoint": checkpoint})


def _publish(trained: Path, reports: dict[str, dict[str, Any]]) -> None:
    """Replace ``demo/drafter`` with the trained draft model, and write a card with the figures."""
    DRAFTER.mkdir(exist_ok=True)
    for name in ("config.json", "pytorch_model.bin", REPORT):
        shutil.copyfile(trained / name, DRAFTER / name)
    weights = DRAFTER / "pytorch_model.bin"
    report = reports["lk"]
    figures = {
        f"trained, LK loss (arXiv 2602.23881{', this one' if len(reports) > 1 else ''})": report["held_out"]["trained"],
        **{f"trained, {name}": other["held_out"]["trained"] for name, other in reports.items() if name != "lk"},
        "untrained": report["held_out"]["untrained"],
    }
    rows = "\n".join(_row(name, each) for name, each in figures.items())
    card = CARD.format(
        parameters=f"{_parameters(weights) / 1e6:.2f}",
        size=f"{weights.stat().st_size / 1e6:.1f}",
        steps=report["training"]["steps"],
        minutes=report["training"]["seconds"] / 60,
        responses=report["training"]["responses"],
        tokens=report["training"]["response_tokens"],
        sessions=report["training"]["sessions"],
        held_out=report["held_out"]["sessions"],
        held_out_tokens=report["held_out"]["response_tokens"],
        rows=rows,
    )
    (DRAFTER / "README.md").write_text(card)


def _row(name: str, figures: dict[str, Any]) -> str:
    shares = " | ".join(f"{share:.1%}" for share in figures["per_position"])
    return f"| {name} | {figures['mean_acceptance_length']:.3f} | {shares} |"


def _parameters(weights: Path) -> int:
    tensors = torch.load(weights, weights_only=True).values()
    return sum({tensor.data_ptr(): tensor.numel() for tensor in tensors}.values())


if __name__ == "__main__":
    main()
