"""Draw the plots of docs/ from the results that are committed in benchmarks/results.

    python benchmarks/plot.py [--out docs]    # needs matplotlib

The same results give the same files: no dates, no random ids, text as outlines. Nothing is measured here.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plot_parts import BLUE, GRAY, ORANGE, RED, STYLE, draw_bars, line_at_one, new_figure, new_panels
from report import RESULTS, ROOT, say

WORKLOADS = {
    "swe_gemini3": "SWE\nagent",
    "react_hotpot": "ReAct\nagent",
    "rollouts_codegen": "RL\nrollouts",
    "chat_mtbench": "plain\nchat",
    "refine_code_uniq": "refining\ncode",
    "refine_code_ldb": "refining code,\nanswers repeat",
}
MICRO = "µ"
SPREADS = (
    ("turn by turn", True, "turns go around, shared", BLUE, "-"),
    ("by session", True, "sessions stay, shared", "#56B4E9", "-"),
    ("by session", False, "sessions stay, not shared", ORANGE, "--"),
    ("turn by turn", False, "turns go around, not shared", RED, "--"),
)
METHODS = {
    "agentspec": ("agentspec", BLUE),
    "suffix, best of 12": ("ArcticInference's rule, best of 12 settings", ORANGE),
    "suffix, default": ("ArcticInference's rule, default", RED),
    "ngram": ("n-gram", GRAY),
}
ROLLOUTS = {
    "priced": ("agentspec, told the price", BLUE, "-"),
    "agentspec": ("agentspec, price measured", "#56B4E9", "-"),
    "off": ("agentspec, history off", "#56B4E9", ":"),
    "suffix": ("vLLM suffix (ArcticInference)", ORANGE, "-"),
    "ngram": ("vLLM ngram", GRAY, "-"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw all plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", metavar="DIR", help="where they go (docs)")
    options = parser.parse_args(arguments)
    for path in draw(options.out):
        say(f"wrote {path}")
    return 0


def draw(folder: Path) -> list[Path]:
    """Write every plot into the folder and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context(STYLE):
        for name, plot in PLOTS.items():
            figure = plot()
            path = folder / f"{name}.svg"
            creator = f"benchmarks/plot.py, matplotlib {matplotlib.__version__}"
            figure.savefig(path, metadata={"Date": None, "Creator": creator})
            plt.close(figure)
            paths.append(path)
    return paths


def load(name: str) -> dict[str, Any]:
    """Return one of the committed results."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def plot_results() -> Figure:
    """Draw the picture of the README: real vLLM, many sessions (simulated), and the index."""
    figure, axes = new_figure(12.5, 4.4, 1, 3, (6, 6, 2.6))
    _draw_serving(axes[0], 1, legend=True)
    axes[0].set_title("Real vLLM on a CPU, one request at a time:\ntokens/s over no speculation")
    _draw_sessions(axes[1], 128, "Llama-3.1-8B")
    axes[1].set_title("Simulated GPU, 128 sessions at once, 8B:\nthroughput over no speculation")
    rows = _by_figure()
    speed = [rows[f"propose, learned rule, learning and extend included, batch of 16, 5 M tokens, {MICRO}s a request"]]
    memory = [rows["resident memory at 5 M tokens, bytes a token"]]
    values = [(row["agentspec"], row["arctic"]) for row in (*memory, *speed)]
    bars = [("agentspec", BLUE, [a for a, _ in values]), ("ArcticInference", ORANGE, [b for _, b in values])]
    draw_bars(axes[-1], ("bytes\na token", f"{MICRO}s\na draft"), bars, "{:.0f}", size=8)
    axes[-1].set_title("The index at 5 M tokens:\nless is better")
    axes[-1].legend(loc="upper left", fontsize=8)
    axes[-1].set_ylim(0, 360)
    return figure


def plot_drafting() -> Figure:
    """Draw agentspec's defaults over ArcticInference's best setting, by recording."""
    figure, axes = new_figure(9, 3.6)
    rows = load("drafting")["rows"]
    ratios = {(row["workload"], row["cost"]): row["ratio"] for row in rows}
    bars = [
        (f"a token to verify costs {cost:g} of a step", colour, [ratios[name, cost] for name in WORKLOADS])
        for cost, colour in ((0.01, BLUE), (0.03, "#56B4E9"))
    ]
    draw_bars(axes[0], list(WORKLOADS.values()), bars, "{:.2f}")
    axes[0].set_title(
        "Drafting: tokens per unit of work, agentspec's defaults over the best of 12 ArcticInference settings"
    )
    line_at_one(axes[0])
    axes[0].set_ylim(0, 1.95)
    axes[0].legend(loc="upper left", ncols=2)
    return figure


def plot_serving() -> Figure:
    """Draw each drafting method's tokens/s as a multiple of plain vLLM's."""
    figure, axes = new_figure(9, 6.4, 2, 1)
    for axis, batch in zip(axes, (1, 8), strict=True):
        _draw_serving(axis, batch, legend=batch == 1, errors=True)
        what = "one request at a time" if batch == 1 else f"{batch} requests at a time"
        axis.set_title(f"Real vLLM on a CPU, tiny model, {what}: tokens/s over no speculation")
    return figure


def plot_gpu() -> Figure:
    """Draw tokens/s on a GPU as a multiple of vLLM's own choice of runner and scheduling, without speculation."""
    rows = load("gpu")["rows"]
    names = [name for name in WORKLOADS if any(row["workload"] == name for row in rows)]
    speeds = {(row["workload"], row["batch"], row["method"]): row for row in rows}
    figure, axes = new_panels(len(names), 3.4, 6.2)
    sizes = sorted({row["batch"] for row in rows})
    for axis, name in zip(axes, names, strict=True):
        bars, noise = [], [speeds[name, size, "vllm"]["noise"] for size in sizes]
        for method, label, colour in (
            ("suffix", "vLLM suffix (ArcticInference)", ORANGE),
            ("agentspec", "agentspec", BLUE),
        ):
            pairs = [(speeds[name, size, method], speeds[name, size, "vllm"]) for size in sizes]
            bars.append((label, colour, [a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs]))
        draw_bars(axis, [f"{size} at a time" for size in sizes], bars, "{:.2f}", errors=noise)
        axis.set_title(WORKLOADS[name].replace("\n", " "))
        highest = max(height + error for height, error in zip(bars[-1][2], noise, strict=True))
        axis.set_ylim(0, max(2.6, 1.15 * highest))
        line_at_one(axis)
    axes[0].legend(loc="upper left", fontsize=8)
    figure.suptitle("An H200, an 8B model's shape: tokens/s over vLLM without speculation", weight="bold", fontsize=11)
    return figure


def plot_batch() -> Figure:
    """Draw the simulated throughput by concurrent sessions, one panel for each recording."""
    rows = [row for row in load("batch")["rows"] if row["model"] == "Llama-3.1-8B"]
    simulated = _simulated()
    figure, axes = new_panels(len(simulated), 3.4, 6.2)
    for axis, (workload, title) in zip(axes, simulated.items(), strict=True):
        heights: list[float] = []
        for method, (label, colour) in METHODS.items():
            found = {
                row["sessions"]: row["ratio"] for row in rows if (row["workload"], row["method"]) == (workload, method)
            }
            places = range(len(found))
            heights += found.values()
            ours = method == "agentspec"
            axis.plot(places, list(found.values()), marker="o", ms=4, lw=2 if ours else 1.4, color=colour, label=label)
            axis.set_xticks(places, [str(sessions) for sessions in found])
            if ours:
                for place, ratio in zip(places, found.values(), strict=True):
                    axis.annotate(
                        f"{ratio:.2f}", (place, ratio), (4, 5), textcoords="offset points", ha="left", color=colour
                    )
        ticks = [tick for tick in (0.8, 1, 1.2, 1.5, 2, 3, 5, 10, 20) if 0.9 * min(heights) < tick < 1.2 * max(heights)]
        axis.set_yscale("log", base=2)
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_ylim(0.9 * min(1, *heights), 1.2 * max(heights))
        axis.set_xlim(-0.25, 3.5)
        axis.set_title(title.replace("\n", " "))
        axis.set_xlabel("sessions at once")
        line_at_one(axis)
    figure.suptitle(
        "Simulated: throughput over no speculation, on published step times of Llama-3.1-8B", weight="bold", fontsize=11
    )
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def plot_index() -> Figure:
    """Draw memory and times of the index beside ArcticInference's tree."""
    figure, axes = new_figure(10, 2.9, 1, 5)
    rows = _by_figure()
    panels = {
        "resident memory at 5 M tokens, bytes a token": "memory,\nbytes a token",
        f"propose, learned rule, learning and extend included, batch of 16, 5 M tokens, {MICRO}s a request": (
            f"a draft,\n{MICRO}s a request"
        ),
        f"extend by 4 tokens, 5 M tokens, {MICRO}s a token": f"taking in text,\n{MICRO}s a token",
        f"a session's next turn, 16 k-token prompt, 500 new tokens, CPU time, {MICRO}s": (
            f"a session's next\nturn, {MICRO}s"
        ),
        "load a 5 M-token snapshot (the peer: build its tree), s": "restart: load, or\nbuild the tree, s",
    }
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        row = rows[name]
        values = (row["agentspec"], row["arctic"])
        patches = axis.bar(("agentspec", "Arctic-\nInference"), values, 0.6, color=(BLUE, ORANGE))
        axis.bar_label(patches, [f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in values], padding=2)
        axis.set_ylim(0, 1.15 * max(values))
        axis.set_title(title, fontsize=9)
        axis.set_yticks([])
        axis.spines["left"].set_visible(False)
    figure.suptitle("The index at 5 M tokens, beside ArcticInference's suffix tree: less is better", weight="bold")
    return figure


def plot_soak() -> Figure:
    """Draw memory, store and drafts of a server under mixed traffic, over time."""
    result = load("soak")
    stores = {"redis": "Redis, killed and restarted", "sqlite": "SQLite, locked by another process"}
    figure, axes = new_figure(11, 5.2, 2, 4)
    for row, (store, title) in enumerate(stores.items()):
        samples = [sample for sample in result["rows"] if sample["store"] == store]
        minutes = [sample["seconds"] / 60 for sample in samples]
        panels = (
            ("resident memory, MB", "resident_bytes", None),
            ("suffix cache, MB", "cache_bytes", result["max_bytes"]),
            ("store, MB", "store_bytes", result["store_bytes"]),
            ("tokens a step", "tokens_per_step", None),
        )
        for axis, (name, key, limit) in zip(axes[4 * row : 4 * row + 4], panels, strict=True):
            scale = 1e6 if key.endswith("bytes") else 1
            drawn = [
                (minute, sample[key] / scale) for minute, sample in zip(minutes, samples, strict=True) if sample[key]
            ]
            axis.plot(*zip(*drawn, strict=True), color=BLUE, lw=1.2)
            if limit:
                axis.axhline(limit / scale, color=RED, lw=0.9, ls="--")
            for minute, sample in zip(minutes, samples, strict=True):
                if sample["outage"]:
                    axis.axvspan(minute, minute + 2.2 / 60, color="#eeeeee", lw=0, zorder=0)
            axis.set_ylim(0, None)
            axis.set_title(name, fontsize=9)
            axis.set_xlabel("minutes" if row else "")
        axes[4 * row].set_ylabel(title, fontsize=9)
    figure.suptitle(
        f"Mixed traffic for {result['minutes']:g} minutes; dashed: the limit; grey: the store is away", weight="bold"
    )
    return figure


def plot_replicas() -> Figure:
    """Draw tokens a step of replicas that share and that don't over one replica's, one panel for each recording."""
    rows = load("replicas")["rows"]
    names = [name for name in WORKLOADS if any(row["workload"] == name for row in rows)]
    figure, axes = new_panels(len(names), 3.2, 5.6)
    for axis, name in zip(axes, names, strict=True):
        for spread, shared, label, colour, line in SPREADS:
            found = {1: 1.0} | {
                row["replicas"]: row["ratio"]
                for row in rows
                if (row["workload"], row["spread"], row["shared"]) == (name, spread, shared) and row["replicas"] > 1
            }
            axis.plot(range(len(found)), list(found.values()), line, marker="o", ms=3.5, color=colour, label=label)
            if shared and spread == "turn by turn":
                for place, ratio in list(enumerate(found.values()))[1:]:
                    axis.annotate(f"{ratio:.2f}", (place, ratio), (0, 5), textcoords="offset points", ha="center")
            axis.set_xticks(range(len(found)), [str(count) for count in found])
        axis.axhspan(0.97, 1.0, color="#eeeeee", lw=0, zorder=0)
        axis.set_xlim(-0.2, len(found) - 0.6)
        axis.set_ylim(None, 1.05)
        axis.set_title(WORKLOADS[name].replace("\n", " "))
        axis.set_xlabel("replicas")
    figure.suptitle("Tokens a step over one replica's; grey: within 3 %", weight="bold", fontsize=11)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def plot_rollouts() -> Figure:
    """Draw steps of plain vLLM over each method's, by epoch, one panel for each batch size."""
    rows = load("rollouts")["rows"]
    steps = {(row["batch"], row["method"], row["epoch"]): row["steps"] for row in rows}
    sizes = sorted({row["batch"] for row in rows})
    epochs = sorted({row["epoch"] for row in rows})
    figure, axes = new_figure(11, 3.2, 1, len(sizes))
    for axis, size in zip(axes, sizes, strict=True):
        for method, (label, colour, line) in ROLLOUTS.items():
            found = [steps[size, "none", epoch] / steps[size, method, epoch] for epoch in epochs]
            axis.plot(epochs, found, line, marker="o", ms=3.5, color=colour, label=label)
            if method == "priced":
                for epoch, ratio in zip(epochs, found, strict=True):
                    axis.annotate(f"{ratio:.2f}", (epoch, ratio), (0, 5), textcoords="offset points", ha="center")
        axis.set_xticks(epochs)
        axis.set_xlim(-0.3, epochs[-1] + 0.3)
        axis.set_ylim(0.9, 3.2)
        axis.set_title(f"{size} at a time" if size > 1 else "one at a time")
        axis.set_xlabel("epoch")
        line_at_one(axis)
    figure.suptitle("Rollouts: steps of plain vLLM over each method's, by epoch", weight="bold", fontsize=11)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


PLOTS: Mapping[str, Callable[[], Figure]] = {
    "results": plot_results,
    "drafting": plot_drafting,
    "serving": plot_serving,
    "gpu": plot_gpu,
    "index": plot_index,
    "batch": plot_batch,
    "soak": plot_soak,
    "replicas": plot_replicas,
    "rollouts": plot_rollouts,
}


def _by_figure() -> dict[str, dict[str, Any]]:
    return {row["figure"]: row for row in load("index")["rows"]}


def _simulated() -> dict[str, str]:
    """Return the recordings that batch.py was run on, with their titles."""
    found = {row["workload"] for row in load("batch")["rows"]}
    return {name: title for name, title in WORKLOADS.items() if name in found}


def _draw_serving(axis: Axes, batch: int, legend: bool, errors: bool = False) -> None:
    rows = {row["workload"]: row for row in load("serve")["rows"] if row["batch"] == batch}
    speeds = {name: rows[name]["tokens_per_second"] for name in WORKLOADS}
    bars = [
        (label, colour, [speed[method] / speed["none"] for speed in speeds.values()])
        for method, label, colour in (
            ("ngram", "vLLM ngram", GRAY),
            ("suffix", "vLLM suffix (ArcticInference)", ORANGE),
            ("agentspec", "agentspec", BLUE),
        )
    ]
    noise = [rows[name]["agentspec_over"]["none"]["standard_error"] for name in WORKLOADS] if errors else None
    draw_bars(axis, list(WORKLOADS.values()), bars, "{:.1f}", size=7, errors=noise)
    line_at_one(axis)
    if legend:
        axis.legend(loc="upper left", fontsize=8)


def _draw_sessions(axis: Axes, sessions: int, model: str) -> None:
    rows = {
        (row["workload"], row["method"]): row["ratio"]
        for row in load("batch")["rows"]
        if (row["sessions"], row["model"]) == (sessions, model)
    }
    bars = [
        (label, colour, [rows[name, method] for name in _simulated()])
        for method, (label, colour) in reversed(METHODS.items())
        if method != "ngram"
    ]
    draw_bars(axis, list(_simulated().values()), bars, "{:.2f}", size=6.5)
    axis.set_ylim(0, 1.25 * axis.get_ylim()[1])  # leave room for the legend
    line_at_one(axis)
    axis.legend(loc="upper left", fontsize=8)


if __name__ == "__main__":
    sys.exit(main())
