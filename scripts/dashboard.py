"""Write docs/grafana-dashboard.json, the Grafana dashboard of the metrics, with Grafana's own SDK.

    python scripts/dashboard.py

Import the file in Grafana (Dashboards, New, Import) and choose the Prometheus that scrapes the servers' ``/metrics``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

TARGET = Path(__file__).parents[1] / "docs" / "grafana-dashboard.json"

# (title, unit, description, [(legend, query)]); SERVERS stands for the chosen servers, RATE for the window of a rate
_SPEED = (
    (
        "Generated tokens",
        "tok/s",
        "Tokens that vLLM generated, all requests together.",
        [("tokens", "sum(rate(vllm:generation_tokens_total{SERVERS}[RATE]))")],
    ),
    (
        "Accepted tokens by source",
        "tok/s",
        "Generated tokens that were drafted, by where the draft came from.",
        [("{{source}}", "sum by (source) (rate(agentspec_accepted_tokens_total{SERVERS}[RATE]))")],
    ),
    (
        "Acceptance rate by source",
        "percentunit",
        "Accepted share of the drafted tokens.",
        [
            (
                "{{source}}",
                "sum by (source) (rate(agentspec_accepted_tokens_total{SERVERS}[RATE]))"
                " / sum by (source) (rate(agentspec_drafted_tokens_total{SERVERS}[RATE]))",
            )
        ],
    ),
    (
        "Accepted tokens of a draft",
        "short",
        "Mean of all drafts that were verified; a step adds one token more.",
        [
            (
                "tokens",
                "sum(rate(agentspec_accepted_tokens_total{SERVERS}[RATE]))"
                " / sum(rate(agentspec_drafts_total{SERVERS}[RATE]))",
            )
        ],
    ),
    (
        "Time of a step's drafting",
        "s",
        "Drafting, and the work beside it (starting, finishing, indexing, evicting).",
        [
            (
                f"{name} p{quantile}",
                f"histogram_quantile(0.{quantile},"
                f" sum by (le) (rate(agentspec_{metric}_seconds_bucket{{SERVERS}}[RATE])))",
            )
            for name, metric in (("drafting", "draft"), ("beside", "index"))
            for quantile in (50, 99)
        ],
    ),
    (
        "Price of verifying a token",
        "percentunit",
        "As a share of a decode step, measured while serving; it decides how long drafts are.",
        [("{{instance}}", "agentspec_verify_cost_ratio{SERVERS}")],
    ),
    (
        "Requests",
        "short",
        "Requests that drafts are made for.",
        [("running", "sum(agentspec_requests_running{SERVERS})")],
    ),
    (
        "Errors",
        "short",
        "Each costs drafts, no request. Nothing is shown where there was none.",
        [("{{kind}}", "sum by (kind) (increase(agentspec_errors_total{SERVERS}[RATE]))")],
    ),
)
_MEMORY = (
    (
        "Memory",
        "bytes",
        "Texts, indexes, what was learned, queues and figures, beside the budget.",
        [
            ("used", "sum(agentspec_memory_bytes{SERVERS})"),
            ("budget", "sum(agentspec_memory_limit_bytes{SERVERS})"),
        ],
    ),
    (
        "Text",
        "short",
        "Tokens kept of finished requests, and those that are not indexed yet.",
        [
            ("kept", "sum(agentspec_indexed_tokens{SERVERS})"),
            ("not indexed yet", "sum(agentspec_pending_tokens{SERVERS})"),
        ],
    ),
    (
        "Sessions and tenants in memory",
        "short",
        "What is evicted comes back from the store when it is used.",
        [("sessions", "sum(agentspec_sessions{SERVERS})"), ("tenants", "sum(agentspec_tenants{SERVERS})")],
    ),
    (
        "Evictions",
        "ops",
        "Sessions, groups and parts of tenants that were evicted.",
        [("evictions", "sum(rate(agentspec_evictions_total{SERVERS}[RATE]))")],
    ),
)
_STORE = (
    (
        "Store available",
        "short",
        "1 where the store answers.",
        [("{{instance}}", "min by (instance) (agentspec_store_available{SERVERS})")],
    ),
    (
        "Records that wait",
        "short",
        "To be written; beyond the queue's limit the oldest are lost.",
        [("records", "sum(agentspec_store_queued_records{SERVERS})")],
    ),
    (
        "Records",
        "ops",
        "Written, and what went wrong: each of the others should be nothing.",
        [
            (name, f"sum(rate(agentspec_store_{name}_records_total{{SERVERS}}[RATE]))")
            for name in ("written", "dropped", "refused", "damaged", "lost", "missing")
        ],
    ),
    (
        "Failed calls",
        "ops",
        "They are repeated.",
        [
            ("writes", "sum(rate(agentspec_store_failed_writes_total{SERVERS}[RATE]))"),
            ("reads", "sum(rate(agentspec_store_failed_reads_total{SERVERS}[RATE]))"),
        ],
    ),
)
_PROMETHEUS = DataSourceRef(type_val="prometheus", uid="$datasource")
_SERVERS = 'instance=~"$instance"'


def build() -> str:
    """Return the dashboard as JSON."""
    dashboard = (
        Dashboard("agentspec")
        .uid("agentspec")
        .description("Where tokens are drafted from, how many are accepted, and what that takes.")
        .tags(["vllm", "agentspec"])
        .time("now-1h", "now")
        .refresh("30s")
        .readonly()
        .with_variable(DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            QueryVariable("instance")
            .label("Server")
            .datasource(_PROMETHEUS)
            .query("label_values(agentspec_steps_total, instance)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
        )
    )
    for title, panels in (("Speed", _SPEED), ("Memory", _MEMORY), ("Store", _STORE)):
        dashboard.with_row(Row(title))
        for panel in panels:
            dashboard.with_panel(_panel(*panel))
    text: str = JSONEncoder(sort_keys=True, indent=2).encode(dashboard.build())
    return text + "\n"


def _panel(title: str, unit: str, description: str, queries: Sequence[tuple[str, str]]) -> Any:
    panel = Panel().title(title).description(description).unit(unit).min(0).datasource(_PROMETHEUS).height(8).span(12)
    for number, (legend, query) in enumerate(queries):
        expression = query.replace("SERVERS", _SERVERS).replace("RATE", "$__rate_interval")
        panel.with_target(Dataquery().ref_id(chr(ord("A") + number)).expr(expression).legend_format(legend))
    return panel


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    TARGET.write_text(build(), encoding="utf-8")
    print(f"written: {TARGET}")
