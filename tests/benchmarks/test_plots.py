"""Test that the plots in docs/ are what plot.py draws from the committed results."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

import plot  # isort: skip
import report  # isort: skip

DOCS = report.ROOT / "docs"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw all plots into a folder."""
    folder = tmp_path_factory.mktemp("plots")
    assert {path.stem for path in plot.draw(folder)} == set(plot.PLOTS)
    return folder


def creator(svg: str) -> str:
    """Return the program and version that drew the plot."""
    found = re.search(r"<dc:title>(.*?)</dc:title>", svg)
    assert found is not None
    return found[1]


def labels(svg: str) -> list[str]:
    """Return every label of the plot, figures included: each is named in a comment before its outlines."""
    ElementTree.fromstring(svg)
    return re.findall(r"<!-- (.*?) -->", svg, flags=re.DOTALL)


@pytest.mark.parametrize("name", sorted(plot.PLOTS))
def test_a_committed_plot_shows_the_committed_results(name: str, drawn: Path) -> None:
    committed = (DOCS / f"{name}.svg").read_text(encoding="utf-8")
    now = (drawn / f"{name}.svg").read_text(encoding="utf-8")
    assert labels(committed) == labels(now)
    if creator(committed) == creator(now):
        assert committed == now


def test_figures_and_what_is_simulated_are_labelled(drawn: Path) -> None:
    simulated = labels((drawn / "batch.svg").read_text(encoding="utf-8"))
    ratios = [row["ratio"] for row in plot.load("batch")["rows"] if row["method"] == "agentspec"]
    assert f"{ratios[0]:.2f}" in simulated
    assert any("Simulated" in label for label in simulated)
    assert any("Simulated" in label for label in labels((drawn / "results.svg").read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("method", "row"), [("priced", ".02, given"), ("agentspec", "measured, of a tiny model on a CPU")]
)
def test_the_page_on_rollouts_has_the_committed_figures(method: str, row: str) -> None:
    steps = {(each["batch"], each["method"], each["epoch"]): each["steps"] for each in plot.load("rollouts")["rows"]}
    ratios = [
        [f"{steps[batch, 'none', epoch] / steps[batch, method, epoch]:.2f}" for batch in (1, 8, 32, 64)]
        for epoch in (0, 2)
    ]
    cells = [", ".join(each[:3]) + f" and {each[3]}" for each in ratios]
    assert f"| {row} | {' | '.join(cells)} |" in (DOCS / "rl.md").read_text(encoding="utf-8")


def test_a_result_of_few_recordings_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    load = plot.load

    def some(name: str) -> dict[str, Any]:
        result = load(name)
        return {**result, "rows": [row for row in result["rows"] if row["workload"] in list(plot.WORKLOADS)[:4]]}

    monkeypatch.setattr(plot, "load", some)
    for draw in (plot.plot_gpu, plot.plot_batch, plot.plot_replicas):
        titles = [axis.get_title() for axis in draw().axes if axis.axison]
        assert titles == [title.replace("\n", " ") for title in list(plot.WORKLOADS.values())[:4]]


def test_every_result_says_where_it_comes_from() -> None:
    for path in sorted(report.RESULTS.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        assert {"kind", "commit", "date", "machine"} <= set(result), path.name
        runs = [result, *(value for value in result.values() if isinstance(value, dict))]
        assert any(run.get("rows") for run in runs), path.name
