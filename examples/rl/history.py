"""Train with grpo.py under several histories, and plot what its rollouts took, epoch by epoch.

    python examples/rl/history.py --epochs 5 --out history.svg      # needs pip install trl matplotlib
    python examples/rl/history.py --runs FOLDER --out history.svg   # keeps the runs there, and trains what is missing

plain: vLLM without agentspec. off: a sample drafts from its own text alone. siblings: from the samples of the present
weights, which are those of the same step. epochs: from all that was sampled before. Seconds are those of the rollouts
alone, without training, and depend on what else the machine does; counts don't.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GRPO = Path(__file__).with_name("grpo.py")
PROMPTS = 4
HISTORIES: dict[str, dict[str, str]] = {
    "plain": {"AGENTSPEC": "0"},
    "off": {"AGENTSPEC": "1", "AGENTSPEC_SETTINGS": '{"scope": "none"}'},
    "siblings": {"AGENTSPEC": "1", "AGENTSPEC_SETTINGS": '{"history_window": "1 weights"}'},
    "epochs": {"AGENTSPEC": "1"},
}
COLOURS = {"plain": "#999999", "off": "#E69F00", "siblings": "#56B4E9", "epochs": "#0072B2"}


def main() -> None:
    """Run what is missing, and draw."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = arguments.runs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        train(folder, arguments.epochs)
        draw(folder, arguments.out)


def train(folder: Path, epochs: int) -> None:
    """Run the trainer for each history that is missing. It ends with ``HISTORY.jsonl``, a line for each step."""
    for name, environment in HISTORIES.items():
        if (folder / f"{name}.jsonl").exists():
            continue
        command = [sys.executable, str(GRPO), "--prompts", str(PROMPTS), "--steps", str(PROMPTS * epochs)]
        subprocess.run(
            [*command, "--figures", str(folder / f"{name}.jsonl")],
            env={**os.environ, "AGENTSPEC_STORE": "memory://", **environment},
            check=True,
        )


def by_epoch(lines: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Add up the steps of each epoch: rollout seconds, tokens a decode step, accepted tokens for each drafted one."""
    rows = []
    for begin in range(0, len(lines), PROMPTS):
        total = {
            name: sum(line[name] for line in lines[begin : begin + PROMPTS])
            for name in ("rollout_seconds", "tokens", "drafted", "accepted")
        }
        rows.append(
            {
                "seconds": total["rollout_seconds"],
                "tokens_per_step": total["tokens"] / (total["tokens"] - total["accepted"]),
                "acceptance": total["accepted"] / max(1, total["drafted"]),
            }
        )
    return rows


def draw(folder: Path, out: Path) -> None:
    """Draw three panels from the runs in a folder."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "agentspec", "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    for name, colour in COLOURS.items():
        lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = by_epoch([json.loads(line) for line in lines])
        print(name, *(", ".join(f"{key} {value:.2f}" for key, value in row.items()) for row in rows), sep="\n  ")
        for axis, key in zip(axes, ("seconds", "tokens_per_step", "acceptance"), strict=True):
            if name != "plain" or key != "acceptance":
                axis.plot(range(len(rows)), [row[key] for row in rows], marker="o", ms=3.5, color=colour, label=name)
    titles = ("rollout seconds", "tokens a decode step", "accepted tokens for each drafted one")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=10, weight="bold")
        axis.set_xlabel("epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_ylim(0, None)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(out, metadata={"Date": None})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help=f"of {PROMPTS} prompts (default 5)")
    parser.add_argument("--out", type=Path, default=Path("history.svg"))
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keep runs here; those that are there count")
    return parser.parse_args()


if __name__ == "__main__":
    main()
