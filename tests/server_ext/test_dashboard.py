"""Test the Grafana dashboard: it is what the script builds, Grafana's types read it, and its metrics exist."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentspec.server_ext.api.prometheus import exposition
from tests.server_ext.plain_engine import Engine
from tests.server_ext.test_metrics import read

FILE = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"


def selectors() -> list[Any]:
    """Parse all queries of the dashboard. Return the metric and labels that each selects."""
    parser = pytest.importorskip("promql_parser", reason="promql-parser is not installed")
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, parser.VectorSelector):
            found.append(node)

    for query in queries():
        parser.walk(parser.parse(query.replace("$__rate_interval", "1m")), visit)
    return found


def queries() -> Iterator[str]:
    for panel in json.loads(FILE.read_text())["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]


def test_it_is_what_the_script_builds_and_grafana_reads() -> None:
    models = pytest.importorskip(
        "grafana_foundation_sdk.models.dashboard", reason="grafana-foundation-sdk is not installed"
    )
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    build = runpy.run_path(str(FILE.parents[1] / "scripts" / "dashboard.py"))["build"]
    text = FILE.read_text()
    assert text == build(), "run python scripts/dashboard.py"
    dashboard = models.Dashboard.from_json(json.loads(text))
    assert json.loads(JSONEncoder().encode(dashboard)) == json.loads(text)
    panels = [panel for panel in dashboard.panels if panel.type_val == "timeseries"]
    assert len({panel.title for panel in panels}) == len(panels) > 10 and all(panel.targets for panel in panels)


def test_its_queries_name_metrics_and_labels_that_exist(tmp_path: Path) -> None:
    running = Engine(f"sqlite:///{tmp_path}/log.db")
    running.run("a", [1, 2, 3], list(range(100, 140)) * 3, session="s")
    stats = running.proposer.stats()
    running.proposer.close()
    stats["counters"]["errors_propose"] = 1
    shown = {name for name, _ in read(exposition({0: stats}))}
    for selector in selectors():
        assert selector.name in shown or selector.name.startswith("vllm:"), selector
        assert [(str(label.name), label.value) for label in selector.matchers.matchers] == [("instance", "$instance")]
