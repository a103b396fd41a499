"""Test what Prometheus reads: names, units, sums over engines, and scrapes while an engine is away."""

import asyncio
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Response
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, make_asgi_app
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Mount

from agentspec.cache import SOURCES
from agentspec.server_ext.api import prometheus
from agentspec.server_ext.api.prometheus import MetricsMiddleware, exposition
from agentspec.server_ext.figures.metrics import Histogram, Metrics
from agentspec.server_ext.vllm_adapter.frontend import engine_calls
from tests.server_ext.plain_engine import Engine

VLLMS = b"# HELP vllm:steps_total Steps.\n# TYPE vllm:steps_total counter\nvllm:steps_total 3.0\n"
OUTPUT = list(range(100, 140)) * 3

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(text: bytes) -> Samples:
    """Return an exposition's samples by name and labels. Check that every family is well-formed and described."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.documentation and family.type != "unknown", family.name
        for sample in family.samples:
            samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def of(samples: Samples, name: str, **labels: str) -> float:
    """Return the sum of a metric over all labels but the given ones."""
    found = [value for (key, has), value in samples.items() if key == name and labels.items() <= dict(has).items()]
    assert found, name
    return sum(found)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Return an engine that has drafted in two requests, on a store that others may share."""
    running = Engine(f"sqlite:///{tmp_path}/log.db")
    for request in "ab":
        running.run(request, [1, 2, 3], OUTPUT, session="fix-42")
    yield running
    running.proposer.close()


def test_counters_equal_the_engines_figures(engine: Engine) -> None:
    stats = engine.proposer.stats()
    samples = read(exposition({0: stats}))
    assert of(samples, "agentspec_steps_total") == stats["steps"] > 0
    assert of(samples, "agentspec_drafted_tokens_total") == stats["counters"]["drafted"] > 0
    assert of(samples, "agentspec_accepted_tokens_total") == stats["counters"]["accepted"] > 0
    assert of(samples, "agentspec_accepted_tokens_total", source="request") == stats["accepted_by_source"]["request"]
    assert of(samples, "agentspec_requests_finished_total") == 2
    assert of(samples, "agentspec_requests_running") == 0
    assert of(samples, "agentspec_sessions") == 1
    assert of(samples, "agentspec_memory_bytes") == stats["memory"]["bytes"] > 0
    assert of(samples, "agentspec_verify_cost_ratio") == stats["verify_cost"]["cost"]
    assert of(samples, "agentspec_store_available") == 1
    written = of(samples, "agentspec_store_written_records_total")
    assert written + of(samples, "agentspec_store_queued_records") == 2
    assert (
        of(samples, "agentspec_draft_seconds_count") == of(samples, "agentspec_index_seconds_count") == stats["steps"]
    )
    assert {dict(has)["source"] for (name, has) in samples if name == "agentspec_drafted_tokens_total"} == set(SOURCES)


def test_every_figure_that_is_named_exists(engine: Engine) -> None:
    """The exposition would silently leave out a figure whose path `stats` lacks."""
    samples = read(exposition({0: engine.proposer.stats()}))
    named = {f"agentspec_{figure.name}_total" for figure in prometheus._COUNTERS}
    named |= {f"agentspec_{figure.name}" for figure in prometheus._GAUGES}
    assert named <= {name for name, _ in samples}


def test_the_documents_list_every_metric(engine: Engine) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    listed = set(re.findall(r"`(agentspec_\w+)`", page.partition("\n## Sessions\n")[0]))
    shown = {name for name, _ in read(exposition({0: engine.proposer.stats()}))}
    shown = {re.sub("_seconds_(bucket|count|sum)$", "_seconds", name) for name in shown} | {"agentspec_errors_total"}
    assert listed == shown


def test_no_label_names_a_session_or_a_tenant(engine: Engine) -> None:
    samples = read(exposition({0: engine.proposer.stats()}))
    assert {label for _, has in samples for label, _ in has} <= {"engine", "source", "kind", "le"}
    assert b"fix-42" not in exposition({0: engine.proposer.stats()})
    assert all(name.startswith("agentspec_") for name, _ in samples)


def test_several_engines_are_told_apart(engine: Engine) -> None:
    stats = engine.proposer.stats()
    broken = {**stats, "counters": {**stats["counters"], "errors_propose": 2}}
    broken["store"] = {**stats["store"], "writer": {**stats["store"]["writer"], "state": "open"}}
    samples = read(exposition({0: stats, 1: broken}))
    assert of(samples, "agentspec_steps_total", engine="0") == of(samples, "agentspec_steps_total", engine="1")
    assert of(samples, "agentspec_errors_total", kind="propose") == 2
    assert of(samples, "agentspec_store_available", engine="0") == 1
    assert of(samples, "agentspec_store_available", engine="1") == 0
    assert read(exposition({})) == {}


def test_histograms_are_cumulative() -> None:
    metrics = Metrics()
    for seconds in (1e-5, 2e-5, 3e-3, 1.0, 1.0):
        metrics.draft_seconds.observe(seconds)
    stats = {**Engine().proposer.stats(), **metrics.stats()}
    samples = read(exposition({0: stats}))
    buckets = {
        float(dict(has)["le"]): value
        for (name, has), value in samples.items()
        if name == "agentspec_draft_seconds_bucket"
    }
    assert buckets[1e-5] == 1
    assert buckets[2.5e-5] == buckets[2.5e-3] == 2
    assert buckets[5e-3] == buckets[0.1] == 3
    assert buckets[math.inf] == of(samples, "agentspec_draft_seconds_count") == 5
    assert of(samples, "agentspec_draft_seconds_sum") == pytest.approx(2.00303)
    assert list(Histogram().bounds) == sorted(Histogram().bounds)


# --- The middleware


class Scraped:
    """Run an app with a /metrics like vLLM's, and an engine that gives a test's answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: Any) -> None:
        self.asked = 0
        app = FastAPI()
        app.add_middleware(MetricsMiddleware)
        core = SimpleNamespace(core_engines=[(2).to_bytes(2, "little")])  # a node's only engine, of rank 2
        app.state.agentspec_engine = SimpleNamespace(vllm_config=None, engine_core=core)

        @app.get("/metrics")
        def metrics(compressed: bool = False) -> Response:
            headers = {"content-encoding": "x"} if compressed else {}
            return Response(VLLMS, media_type="text/plain; version=0.0.4", headers=headers)

        @app.get("/other")
        def other() -> Response:
            return Response(VLLMS, media_type="text/plain")

        async def ask(engine: Any, *question: str, seconds: float) -> Any:
            assert question == ("stats",)
            self.asked += 1
            await asyncio.wait_for(asyncio.sleep(0.01), seconds)
            return answers()

        monkeypatch.setattr(prometheus, "ask_engines", ask)
        monkeypatch.setattr(engine_calls, "uses_agentspec", lambda config: True)
        self.app, self.client = app, TestClient(app)


def test_a_scrape_of_the_other_path_has_them_too(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """At /metrics/, vLLM mounts an app of prometheus_client, which gives Prometheus compressed OpenMetrics."""
    scraped = Scraped(monkeypatch, lambda: [engine.proposer.stats()])
    mounted = Mount("/metrics", make_asgi_app(registry=CollectorRegistry()))
    mounted.path_regex = re.compile("^/metrics(?P<path>.*)$")
    scraped.app.routes.append(mounted)
    headers = {"Accept": "application/openmetrics-text; version=1.0.0, text/plain;q=0.5", "Accept-Encoding": "gzip"}
    answer = scraped.client.get("/metrics/", headers=headers)
    assert answer.headers["content-type"].startswith("text/plain")
    assert of(read(answer.content), "agentspec_steps_total") > 0


def test_a_scrape_has_vllms_figures_and_ours(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    scraped = Scraped(monkeypatch, lambda: [engine.proposer.stats()])
    monkeypatch.setattr(prometheus, "_FRESH_SECONDS", 1000.0)
    for path in ("/metrics", "/metrics", "/metrics?name=x"):
        answer = scraped.client.get(path)
        assert answer.content.startswith(VLLMS)
        assert int(answer.headers["content-length"]) == len(answer.content)
        samples = read(answer.content)
        assert of(samples, "vllm:steps_total") == 3
        assert of(samples, "agentspec_steps_total", engine="2") > 0
    assert scraped.asked == 1  # scrapes in a loop ask the engine once a second
    assert scraped.client.get("/other").content == VLLMS
    assert scraped.client.head("/metrics").content == b""
    monkeypatch.setattr(prometheus, "_FRESH_SECONDS", 0.0)
    scraped.client.get("/metrics")
    assert scraped.asked == 2


def test_what_is_not_plain_text_is_left_alone(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    scraped = Scraped(monkeypatch, lambda: [engine.proposer.stats()])
    with scraped.client.stream("GET", "/metrics?compressed=true") as answer:
        assert b"".join(answer.iter_raw()) == VLLMS
    assert scraped.asked == 0


@pytest.mark.parametrize("error", [TimeoutError(), RuntimeError("the engine is dead"), "nonsense"])
def test_an_engine_that_does_not_answer_fails_no_scrape(
    monkeypatch: pytest.MonkeyPatch, error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def answers() -> Any:
        if isinstance(error, Exception):
            raise error
        return [error]

    scraped = Scraped(monkeypatch, answers)
    monkeypatch.setattr(prometheus, "_FRESH_SECONDS", 0.0)
    for _ in range(2):
        assert scraped.client.get("/metrics").content == VLLMS
    assert sum("/metrics lacks" in record.getMessage() for record in caplog.records) == 1


def test_an_engine_that_answers_late_does_not_hold_up_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    scraped = Scraped(monkeypatch, list)
    monkeypatch.setattr(prometheus, "_ASK_SECONDS", 0.001)
    assert scraped.client.get("/metrics").content == VLLMS


def test_a_server_that_does_not_draft_shows_vllms_figures_only(monkeypatch: pytest.MonkeyPatch) -> None:
    scraped = Scraped(monkeypatch, list)
    monkeypatch.setattr(engine_calls, "uses_agentspec", lambda config: False)
    assert scraped.client.get("/metrics").content == VLLMS
    scraped.app.state.agentspec_engine = None  # vLLM's render server
    assert scraped.client.get("/metrics").content == VLLMS
    assert scraped.asked == 0


def test_evicting_the_figures_of_an_old_call_leaves_those_of_a_later_one_with_its_id() -> None:
    metrics = Metrics(max_bytes=1)
    first, second = metrics.begin("same", None, "one"), metrics.begin("same", None, "two")
    second.tokens = 3
    metrics.end(first)  # and forgets it, because there is no room
    found = metrics.request("same", None)
    assert found is not None and found["tokens"] == 3


def test_evicting_the_figures_of_a_later_call_leaves_those_of_an_older_one_that_runs() -> None:
    metrics = Metrics(max_bytes=1)
    first, second = metrics.begin("same", None, "one"), metrics.begin("same", None, "two")
    first.tokens = 3
    metrics.end(second)  # and forgets it, because there is no room
    for found in (metrics.request("same", None), metrics.request("same", any_caller=True)):
        assert found is not None and found["tokens"] == 3
    assert metrics.request("same", "another caller") is None


def test_an_older_call_that_ends_last_is_the_one_that_is_known() -> None:
    metrics = Metrics()
    first, second = metrics.begin("same", None, "one"), metrics.begin("same", None, "two")
    first.tokens = 3
    metrics.end(second)
    third = metrics.begin("same", None, "three")
    metrics.end(third)
    for number in range(5000):
        metrics.end(metrics.begin(f"other {number}", None))
    metrics.end(first)
    found = metrics.request("same", None)
    assert found is not None and found["tokens"] == 3
