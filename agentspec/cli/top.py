"""Define ``agentspec top``: a live table of a server's speeds, sources of drafts and sessions."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, NamedTuple, TypeAlias

import httpx
import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agentspec.addresses import without_secrets
from agentspec.cli.server import DEFAULT_URL, HeaderOption, UrlOption, ask, reading, root_of, server_at, shown_time
from agentspec.errors import AgentSpecError, InvalidInputError, StoreUnavailableError

_GENERATED = "vllm:generation_tokens_total"
_MB = 2**20
_LINES_BESIDE_ROWS = 9
"""Lines of a screen that are no row of a table: the heading, two blank ones, and the heads of three tables."""


class SessionRow(NamedTuple):
    """Hold what is shown of a session. used: when it was used last, in seconds of the epoch."""

    name: str
    tokens: int
    turns: int
    used: float


@dataclass(frozen=True, slots=True)
class Sample:
    """Hold a server's figures at one moment, summed over its engines.

    at: seconds of the monotonic clock. totals: counters since the server's start. gauges: present values.
    sessions: the caller's, used last first; without_sessions says why there are none.
    """

    at: float
    engines: int
    totals: Counter[str]
    drafted: Counter[str]
    accepted: Counter[str]
    gauges: Counter[str]
    stores: Sequence[str]
    sessions: Sequence[SessionRow] = field(default=())
    without_sessions: str = ""


def take_sample(server: httpx.Client, url: str, sessions: int) -> Sample:
    """Ask a server for its figures and for this many sessions of the caller. Raises as `ask` does."""
    engines = ask(server, "GET", "stats", "engines").json()["engines"]
    totals: Counter[str] = Counter()
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    gauges: Counter[str] = Counter()
    with reading("stats"):
        for engine in engines:
            counters = engine["counters"]
            totals["steps"] += engine["steps"]
            totals["errors"] += sum(count for name, count in counters.items() if name.startswith("errors_"))
            totals.update({name: counters[name] for name in ("drafts", "drafted", "accepted", "finished")})
            drafted.update(engine["drafted_by_source"])
            accepted.update(engine["accepted_by_source"])
            gauges["running"] += engine["running"]
            gauges["bytes"] += engine["memory"]["bytes"]
            gauges["limit"] += engine["memory"]["limit"]
            gauges.update({name: engine["cache"][name] for name in ("tokens", "pending", "sessions")})
        stores = _stores(engines)
    with reading("metrics"):
        generated = _generated_tokens(server.get(f"{root_of(url)}/metrics"))
    if generated is not None:
        totals["generated"] = generated
    found, why = _sessions(server, sessions)
    return Sample(time.monotonic(), len(engines), totals, drafted, accepted, gauges, stores, found, why)


def top(
    url: UrlOption = DEFAULT_URL,
    header: HeaderOption = None,
    interval: Annotated[float, typer.Option(min=0.1, max=60, help="Seconds between updates.")] = 2.0,
    sessions: Annotated[
        int, typer.Option(min=0, max=100, help="How many sessions to show, the most recently used first.")
    ] = 10,
    once: Annotated[bool, typer.Option("--once", help="Print the figures of one interval and end.")] = False,
) -> None:
    """Show a server's speeds, where its drafts come from, and your sessions, live. Ctrl-C ends it."""
    console = Console()
    with server_at(url, header) as server:
        last = take_sample(server, url, sessions)
        if once:
            time.sleep(interval)
            console.print(draw(take_sample(server, url, sessions), last, url))
            return
        with _shown(console, url) as show:
            show(last, None, "")
            try:
                while True:
                    time.sleep(interval)
                    last = _look_again(server, url, sessions, last, show)
            except KeyboardInterrupt:
                return


Show: TypeAlias = Callable[[Sample, Sample | None, str], None]
"""Function that shows a sample, the rates since the one before, and a text above them if it is not empty."""


@contextmanager
def _shown(console: Console, url: str) -> Iterator[Show]:
    """Yield a function that shows samples: on the whole terminal, and in a log or a pipe one after the other."""
    if not console.is_terminal:
        yield lambda now, before, why: console.print(*([Text(why)] if why else []), draw(now, before, url))
        return
    with Live(console=console, auto_refresh=False, screen=True) as live:

        def show(now: Sample, before: Sample | None, why: str) -> None:
            above = [Text(why, style="bold red", overflow="ellipsis", no_wrap=True)] if why else []
            live.update(Group(*above, draw(now, before, url, console.height - len(above))), refresh=True)

        yield show


def draw(now: Sample, before: Sample | None, url: str, height: int | None = None) -> RenderableType:
    """Return the tables. Rates count from `before`; without it, or if the server restarted since, they are blank.

    height: lines of the terminal, for which sources without drafts and the sessions used longest ago are left out;
    None: show all.
    """
    rates = _Rates(now, before)
    speeds, sources = _speeds(now, rates), _sources(now, rates, drafting_only=height is not None)
    taken = _LINES_BESIDE_ROWS + speeds.row_count + sources.row_count
    sessions = _session_table(now, None if height is None else max(height - taken, 1))
    return Group(_heading(now, url), speeds, "", sources, "", sessions)


class _Rates:
    """Tell by how much counters rose in a second."""

    def __init__(self, now: Sample, before: Sample | None) -> None:
        shared = () if before is None else before.totals.keys() & now.totals.keys()
        restarted = before is not None and any(now.totals[name] < before.totals[name] for name in shared)
        self._before = None if restarted else before
        self._now = now

    def of(self, counters: str, name: str) -> str:
        """Return the rate of a counter, and nothing where one of the samples lacks it."""
        if self._before is None:
            return ""
        now, before = getattr(self._now, counters), getattr(self._before, counters)
        if name not in now or name not in before:  # as vLLM's /metrics, which may not have answered
            return ""
        rise = now[name] - before[name]
        return f"{rise / max(self._now.at - self._before.at, 1e-3):,.1f}"

    @property
    def rises(self) -> Counter[str]:
        """Return by how much the totals rose; nothing where that is unknown."""
        return Counter() if self._before is None else self._now.totals - self._before.totals


def _look_again(server: httpx.Client, url: str, sessions: int, last: Sample, show: Show) -> Sample:
    """Show a new sample and return it. While the server is away, say so, and return the last one."""
    try:
        now = take_sample(server, url, sessions)
    except (AgentSpecError, httpx.HTTPError) as error:
        show(last, None, str(error) if isinstance(error, AgentSpecError) else f"{without_secrets(url)} does not answer")
        return last
    show(now, last, "")
    return now


def _generated_tokens(answer: httpx.Response) -> int | None:
    """Return how many tokens vLLM has generated by its /metrics; None where these are not shown."""
    if answer.status_code != 200:
        return None
    lines = [line for line in answer.text.splitlines() if line.startswith(_GENERATED)]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines)) if lines else None


def _sessions(server: httpx.Client, count: int) -> tuple[Sequence[SessionRow], str]:
    if not count:
        return (), ""
    try:
        found = ask(server, "GET", "sessions", "sessions", params={"limit": count}).json()["sessions"]
        with reading("sessions"):
            # A server adds sessions that were stored at the same moment as the last one asked for.
            return [_row(session) for session in found[:count]], ""
    except (InvalidInputError, StoreUnavailableError) as error:  # the store is away, or the list is nobody's
        return (), str(error)


def _row(session: Mapping[str, Any]) -> SessionRow:
    return SessionRow(
        str(session["id"] or session.get("key", "")),
        int(session["tokens"]),
        int(session["turns"]),
        float(session["used"]),
    )


def _stores(engines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is wrong with the stores of the engines."""
    sides = [(name, side) for engine in engines for name, side in engine["store"].items() if isinstance(side, Mapping)]
    return sorted({f"{name} {side['state']}" for name, side in sides if side.get("state", "closed") != "closed"})


def _heading(now: Sample, url: str) -> Text:
    engines = f"{now.engines} engine{'' if now.engines == 1 else 's'}"
    return Text.assemble(("agentspec ", "bold"), f"{without_secrets(url)}  {engines}  {datetime.now():%H:%M:%S}")


def _speeds(now: Sample, rates: _Rates) -> Table:
    table = _table("", "now", "since start")
    table.columns[1].justify = table.columns[2].justify = "right"
    totals, gauges = now.totals, now.gauges
    if "generated" in totals:
        table.add_row("tokens a second", rates.of("totals", "generated"), f"{totals['generated']:,} tokens")
    table.add_row("decode steps a second", rates.of("totals", "steps"), f"{totals['steps']:,} steps")
    table.add_row("requests", f"{gauges['running']:,} running", f"{totals['finished']:,} finished")
    table.add_row("acceptance rate", *(_share(of["accepted"], of["drafted"]) for of in (rates.rises, totals)))
    table.add_row("accepted tokens per draft", *(_mean(of["accepted"], of["drafts"]) for of in (rates.rises, totals)))
    table.add_row("memory", f"{gauges['bytes'] / _MB:,.1f} MB", f"of {gauges['limit'] / _MB:,.0f} MB")
    table.add_row("kept tokens", f"{gauges['tokens']:,}", f"{gauges['pending']:,} not indexed yet")
    table.add_row("store", Text("; ".join(now.stores) or "available", "bold red" if now.stores else ""), "")
    if totals["errors"]:
        table.add_row(Text("errors", "bold red"), rates.of("totals", "errors"), f"{totals['errors']:,}")
    return table


def _sources(now: Sample, rates: _Rates, *, drafting_only: bool) -> Table:
    table = _table("source", "drafted a second", "accepted a second", "drafted", "accepted", "acceptance rate")
    for column in table.columns[1:]:
        column.justify = "right"
    for source, count in now.drafted.items():
        if drafting_only and not count:
            continue
        taken = now.accepted[source]
        per_second = (rates.of("drafted", source), rates.of("accepted", source))
        table.add_row(source, *per_second, f"{count:,}", f"{taken:,}", _share(taken, count))
    return table


def _session_table(now: Sample, most: int | None) -> RenderableType:
    """Return the table of sessions. most: rows that there is room for; None: any number."""
    if now.without_sessions:
        return Text(f"no sessions: {now.without_sessions}")
    table = _table("your sessions", "tokens", "turns", "last used")
    for column in table.columns[1:3]:
        column.justify = "right"
    shown = now.sessions if most is None or len(now.sessions) <= most else now.sessions[: most - 1]
    for session in shown:
        used = shown_time(session.used, today="%H:%M:%S")
        table.add_row(Text(session.name), f"{session.tokens:,}", f"{session.turns:,}", used)
    if hidden := len(now.sessions) - len(shown):
        table.add_row(f"and {hidden} more: enlarge the terminal, or use --once")
    return table


def _table(*names: str) -> Table:
    return Table(*names, box=box.SIMPLE_HEAD, show_edge=False)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else ""


def _mean(total: int, count: int) -> str:
    return f"{total / count:.2f}" if count else ""
