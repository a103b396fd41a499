"""Show the engines' figures on vLLM's ``/metrics``.

The figures live in the engines' workers. So whichever API server answers a scrape asks all engines for them, and adds
them to what vLLM shows there. A second API server gives the same figures, never a part of them. If an engine does not
answer in time, the scrape has vLLM's own figures alone. No label names a session, a tenant or a caller.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentspec.server_ext.api.response_figures import set_length
from agentspec.server_ext.vllm_adapter.frontend.engine_calls import ask_engines, engine_of, engine_ranks
from agentspec.server_ext.vllm_adapter.frontend.senders import path_of

logger = logging.getLogger("vllm.agentspec")

Stats = Mapping[str, Any]
"""One engine's answer to ``stats``."""

_PATHS = frozenset({"/metrics", "/metrics/"})
_NEGOTIATED = (b"accept", b"accept-encoding")
"""Headers by which a scraper asks for OpenMetrics, or for compression, which vLLM gives at ``/metrics/`` alone."""
_ASK_SECONDS = 2.0
_FRESH_SECONDS = 1.0
"""Age up to which figures are shown again, because anybody may read /metrics, and asking delays an engine's steps."""


class _Figure(NamedTuple):
    """Describe a metric: its name without prefix and suffix, where ``stats`` has its value, its help."""

    name: str
    path: str
    help: str


_COUNTERS = (
    _Figure("steps", "steps", "Decode steps in which agentspec was asked for drafts."),
    _Figure("drafts", "counters.drafts", "Drafts that were verified, one for each request and step."),
    _Figure("requests_started", "counters.started", "Requests that drafting began for."),
    _Figure("requests_finished", "counters.finished", "Requests that ended."),
    _Figure("requests_erased", "requests_erased", "Requests not kept because their session was erased meanwhile."),
    _Figure("sessions_ended", "counters.sessions_ended", "Sessions whose client said that a request was their last."),
    _Figure("cut_draft_tokens", "step_budget.cut_tokens", "Draft tokens cut because a step had too many."),
    _Figure("restored_turns", "store.restored", "Stored turns put back into the suffix indexes."),
    _Figure("refused_turns", "store.refused", "Stored turns that the suffix indexes could not take."),
    _Figure("evictions", "cache.evictions", "Sessions, groups and parts of tenants evicted from memory."),
    _Figure("store_written_records", "store.writer.persisted", "Records that the store has acknowledged."),
    _Figure("store_dropped_records", "store.writer.dropped", "Records lost because the queue was full, or at exit."),
    _Figure("store_refused_records", "store.writer.refused", "Records that the store will never accept."),
    _Figure("store_trimmed_records", "store.writer.trimmed", "Records that retention removed from the store."),
    _Figure("store_failed_writes", "store.writer.failed", "Writes that failed; they are repeated."),
    _Figure("store_failed_reads", "store.loader.failed", "Reads that failed; they are repeated."),
    _Figure("store_damaged_records", "store.loader.damaged", "Stored records skipped because they are damaged."),
    _Figure("followed_turns", "store.follower.applied", "Turns of other engines put into the suffix indexes."),
    _Figure("follower_skipped_records", "store.follower.skipped", "This engine's own records in the logs it follows."),
    _Figure("follower_erasures", "store.follower.erased", "Sessions that other engines erased, erased here too."),
    _Figure("follower_undone_erasures", "store.follower.undone", "Erasures that the store had lost, repeated."),
    _Figure("follower_failures", "store.follower.failed", "Reads of the logs that failed; they are repeated."),
    _Figure("steps_held_back", "steps_held_back", "Steps without drafts because erasures may not be known yet."),
    _Figure("store_lost_records", "store.lost", "Records that the store acknowledged to this engine and lost since."),
    _Figure("store_missing_records", "store.missing", "Records that reads found referred to, but gone."),
    _Figure("record_lost_lines", "record.lost", "Lines of the step record that were lost: the disk is full or slow."),
)
_GAUGES = (
    _Figure("requests_running", "running", "Requests that drafts are made for."),
    _Figure(
        "memory_bytes",
        "memory.bytes",
        "Memory of texts, indexes, what was learned, queues, figures and a store in memory.",
    ),
    _Figure("memory_limit_bytes", "memory.limit", "The budget of that memory."),
    _Figure("indexed_tokens", "cache.tokens", "Tokens kept of finished requests."),
    _Figure("pending_tokens", "cache.pending", "Tokens that are not indexed yet."),
    _Figure("sessions", "cache.sessions", "Sessions in memory."),
    _Figure("tenants", "cache.tenants", "Tenants in memory."),
    _Figure("store_queued_records", "store.writer.queued", "Records that wait to be written."),
    _Figure("store_queued_bytes", "store.writer.queued_bytes", "Bytes of the records that wait to be written."),
    _Figure("store_refused_logs", "store.writer.refused_logs", "Logs whose records the store refuses; they wait."),
    _Figure("store_loading_sessions", "store.loader.pending", "Sessions that wait to be read from the store."),
    _Figure("follower_logs", "store.follower.logs", "Tenants whose logs are followed."),
    _Figure("follower_behind_logs", "store.follower.behind", "Followed logs that hold more than was read."),
    _Figure("follower_refused_logs", "store.follower.refused", "Followed logs that the store refuses to read."),
    _Figure("follower_delay_ms", "store.follower.delay_ms", "Age of another engine's newest turn when it arrived."),
    _Figure("verify_cost_ratio", "verify_cost.cost", "Price of verifying one more token, as a share of a step."),
)
_BY_SOURCE = (
    _Figure("drafted_tokens", "drafted_by_source", "Draft tokens that were verified, by where they came from."),
    _Figure("accepted_tokens", "accepted_by_source", "Draft tokens that were accepted, by where they came from."),
)
_HISTOGRAMS = (
    _Figure("draft_seconds", "seconds.draft", "Time of a step's drafting."),
    _Figure(
        "index_seconds", "seconds.beside", "CPU time of a step's other work: starting, finishing, indexing, evicting."
    ),
)


def metric_families(engines: Mapping[int, Stats]) -> Iterator[Metric]:
    """Yield the metrics of all engines, by their numbers. A figure that no engine has is left out."""
    for family in _families([(str(number), stats) for number, stats in engines.items()]):
        if family.samples:
            yield family


def exposition(engines: Mapping[int, Stats]) -> bytes:
    """Return the metrics of all engines, by their numbers, in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Engines(engines))
    text: bytes = generate_latest(registry)
    return text


class MetricsMiddleware:
    """Add the engines' figures to the answers of ``GET /metrics``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._asked = -_FRESH_SECONDS
        self._text = b""
        self._lock = asyncio.Lock()  # so that several scrapes at once ask once
        self._failed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or path_of(scope) not in _PATHS:
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        body = b""

        async def collect(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                start = message
                return
            body += message.get("body", b"")
            if message.get("more_body", False) or start is None:
                return
            if scope["method"] == "GET" and _is_plain_text(start):
                body += await self._ours(scope["app"])
                set_length(start, body)
            await send(start)
            await send({"type": "http.response.body", "body": body})

        if engine_of(scope["app"]) is not None:  # ask for plain text, which ours can be added to
            scope = {**scope, "headers": [item for item in scope["headers"] if item[0] not in _NEGOTIATED]}
        await self._app(scope, receive, collect)

    async def _ours(self, app: Any) -> bytes:
        """Return the engines' figures in Prometheus' text format; nothing where they do not draft with agentspec."""
        engine = engine_of(app)
        if engine is None:
            return b""
        async with self._lock:
            if time.monotonic() - self._asked >= _FRESH_SECONDS:
                self._text = await self._ask(engine)
                self._asked = time.monotonic()
            return self._text

    async def _ask(self, engine: Any) -> bytes:
        """Ask all engines. Return their figures as text; nothing if one fails, which is logged once."""
        try:
            answers = await ask_engines(engine, "stats", seconds=_ASK_SECONDS)
            text = exposition(dict(zip(engine_ranks(engine), answers, strict=True)))
        except Exception as error:  # a scrape must have vLLM's own figures, whatever our engine does
            if not self._failed:
                self._failed = True
                logger.warning("agentspec: /metrics lacks the figures of agentspec: %r", error)
            return b""
        self._failed = False
        return text


class _Engines:
    """Pass the engines' answers to a registry of prometheus_client."""

    def __init__(self, engines: Mapping[int, Stats]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        return metric_families(self._engines)


def _families(engines: Sequence[tuple[str, Stats]]) -> Iterator[Metric]:
    """Yield all metrics of these engines, given by number and answer."""
    for kind, figures in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
        for figure in figures:
            family = kind(f"agentspec_{figure.name}", figure.help, labels=["engine"])
            for engine, value in _values(engines, figure):
                family.add_metric([engine], float(value))
            yield family
    for figure in _BY_SOURCE:
        tokens = CounterMetricFamily(f"agentspec_{figure.name}", figure.help, labels=["engine", "source"])
        for engine, by_source in _values(engines, figure):
            for source, count in by_source.items():
                tokens.add_metric([engine, source], count)
        yield tokens
    for figure in _HISTOGRAMS:
        histogram = HistogramMetricFamily(f"agentspec_{figure.name}", figure.help, labels=["engine"])
        for engine, found in _values(engines, figure):
            histogram.add_metric([engine], _buckets(found["bounds"], found["counts"]), found["sum"])
        yield histogram
    yield from _health(engines)


def _health(engines: Sequence[tuple[str, Stats]]) -> Iterator[Metric]:
    """Yield the errors by kind, and whether the store answers: all circuit breakers are closed."""
    errors = CounterMetricFamily(
        "agentspec_errors", "Errors; each costs drafts, no request.", labels=["engine", "kind"]
    )
    available = GaugeMetricFamily("agentspec_store_available", "Whether the store answers.", labels=["engine"])
    for engine, stats in engines:
        for name, count in stats["counters"].items():
            if name.startswith("errors_"):
                errors.add_metric([engine, name.removeprefix("errors_")], count)
        states = {side["state"] for name in ("writer", "loader", "follower") if (side := stats["store"].get(name))}
        available.add_metric([engine], float(states == {"closed"}))
    yield from (errors, available)


def _values(engines: Sequence[tuple[str, Stats]], figure: _Figure) -> Iterator[tuple[str, Any]]:
    """Yield each engine's number and value; nothing for an engine that has no such value."""
    for engine, stats in engines:
        value: Any = stats
        for name in figure.path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            yield engine, value


def _is_plain_text(start: Message) -> bool:
    headers = {name.lower(): value for name, value in start["headers"]}  # prometheus_client has capitals in them
    plain = headers.get(b"content-type", b"").startswith(b"text/plain")
    return bool(start["status"] == 200 and plain and b"content-encoding" not in headers)


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return cumulative buckets as prometheus_client wants them. counts: one more than bounds."""
    total, buckets = 0, []
    for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
