"""Draw the parts that the plots of plot.py share: colours, style, grouped bars, the line at 1."""

from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, RED, GRAY = "#0072B2", "#E69F00", "#D55E00", "#999999"
"""Colours of Okabe and Ito, which colour-blind readers tell apart."""
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "agentspec",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "legend.frameon": False,
}
Bars = Sequence[tuple[str, str, Sequence[float]]]
"""Bars of a plot: (label, colour, one height for each group)."""


def draw_bars(
    axis: Axes,
    groups: Sequence[str],
    bars: Bars,
    text: str,
    size: float = 8,
    errors: Sequence[float] | None = None,
) -> None:
    """Draw groups of bars from 0 on, each with its figure above. errors: half lengths of the last bars' error lines."""
    width = 0.84 / len(bars)
    for number, (label, colour, heights) in enumerate(bars):
        places = [group + (number - (len(bars) - 1) / 2) * width for group in range(len(groups))]
        last = errors is not None and number == len(bars) - 1
        patches = axis.bar(
            places,
            heights,
            width * 0.94,
            color=colour,
            label=label,
            yerr=errors if last else None,
            error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
        )
        labels = axis.bar_label(patches, [text.format(height) for height in heights], padding=1.5, fontsize=size)
        for text_above in labels:  # keep labels readable over the line at 1
            text_above.set(zorder=4, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4})
    axis.set_xticks(range(len(groups)), groups, fontsize=8)
    axis.tick_params(axis="x", length=0)
    tops = [max(heights) for _, _, heights in bars]
    tops += [height + error for height, error in zip(bars[-1][2], errors or (), strict=False)]
    axis.set_ylim(0, 1.12 * max(tops))


def line_at_one(axis: Axes) -> None:
    axis.axhline(1, color="black", lw=0.9, ls="--", zorder=3)


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, widths: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(
        rows, columns, figsize=(width, height), squeeze=False, layout="constrained", width_ratios=widths
    )
    return figure, list(axes.flat)


def new_panels(count: int, height: float, height_of_two: float) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` panels, up to three in a row. The heights are those of one row and of two."""
    figure, axes = new_figure(11, height if count <= 3 else height_of_two, (count + 2) // 3, min(3, count))
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, axes[:count]
