"""Test ``agentspec top`` on a server's real routes: figures, rates, sessions, and its errors."""

from __future__ import annotations

import io
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import Response
from fastapi.testclient import TestClient
from rich.console import Console

from agentspec.cli.top import Sample, SessionRow, draw
from tests.cli.test_cli import Program, agentspec
from tests.server_ext.session_server import ADA, BOB, Server, Start, start

__all__ = ["agentspec", "start"]

Top = Callable[..., tuple[int, str]]
URL = "http://127.0.0.1:8000"
NO_ROUTES = "HTTP 404; is this a server with agentspec? Plain `vllm serve` needs VLLM_PLUGINS=agentspec"


@pytest.fixture
def server(start: Start) -> Server:
    server = start(ADA, BOB, engines=2)
    server.say(server.identity(ADA, "fix-42"))
    server.say(server.identity(BOB, "bobs"))
    return server


@pytest.fixture
def top(agentspec: Program, server: Server, monkeypatch: pytest.MonkeyPatch) -> Top:
    """Return a function that calls ``agentspec top --once`` with a key. Between its two samples a request runs."""
    answer_calls(monkeypatch, server)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: server.say(server.identity(ADA, "another")))
    monkeypatch.setattr("agentspec.cli.top.time", clock)

    def call(*arguments: str, key: str | None = ADA) -> tuple[int, str]:
        monkeypatch.setenv("AGENTSPEC_API_KEY", key or "")
        return agentspec("top", "--once", *arguments)

    return call


def answer_calls(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    """Let this server answer the program's HTTP calls."""

    def client(base_url: str, headers: dict[str, str], timeout: float, **_: Any) -> Any:
        return TestClient(server.http.app, base_url=base_url, headers=headers)

    monkeypatch.setattr(httpx, "Client", client)
    monkeypatch.setenv("COLUMNS", "120")


def row(printed: str, name: str) -> list[str]:
    """Return the cells of a row behind its name."""
    (line,) = (line for line in printed.splitlines() if line.strip().startswith(f"{name} "))
    return line.strip().removeprefix(name).split()


def test_it_shows_rates_sources_and_the_callers_sessions(top: Top, server: Server) -> None:
    status, printed = top()
    assert status == 0, printed
    stats = [engine.stats() for engine in server.engines]
    steps = sum(engine["steps"] for engine in stats)
    rate, *total = row(printed, "decode steps a second")
    assert total == [f"{steps:,}", "steps"] and float(rate.replace(",", "")) > 0
    assert all(row(printed, source) for source in stats[0]["drafted_by_source"])
    assert row(printed, "store") == ["available"] and "2 engines" in printed
    assert "fix-42" in printed and "another" in printed and "bobs" not in printed
    assert "tokens a second" not in printed  # this server has no /metrics
    assert "fix-42" not in top("--sessions", "0")[1]


def test_tokens_a_second_are_vllms(top: Top, server: Server) -> None:
    text = 'vllm:generation_tokens_total{engine="0"} 40.0\nvllm:generation_tokens_total{engine="1"} 2.0\n'
    server.http.app.add_api_route("/metrics", lambda: Response(text, media_type="text/plain"))  # type: ignore[attr-defined]
    assert row(top()[1], "tokens a second") == ["0.0", "42", "tokens"]


def test_it_goes_on_while_the_server_is_away(
    agentspec: Program, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_calls(monkeypatch, server)
    monkeypatch.setenv("AGENTSPEC_API_KEY", ADA)
    looks: list[str] = []

    def sleep(seconds: float) -> None:
        looks.append("look")
        if len(looks) == 2:
            server.http.app.state.agentspec_engine = None  # type: ignore[attr-defined]
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("agentspec.cli.top.time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    status, printed = agentspec("top")
    assert status == 0 and len(looks) == 3
    assert "this engine does not draft with agentspec" in printed and "fix-42" in printed
    assert printed.count("2 engines") == 3, "what is no terminal gets each look"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (None, "the server wants an API key: put it into the environment variable AGENTSPEC_API_KEY"),
        ("wrong", "the server refuses the API key in the environment variable AGENTSPEC_API_KEY"),
    ],
)
def test_a_key_that_is_missing_or_wrong_is_named(top: Top, key: str | None, message: str) -> None:
    status, printed = top(key=key)
    assert status == 2 and message in printed and "Traceback" not in printed


def test_where_all_callers_are_one_the_rest_is_shown(
    agentspec: Program, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(engines=1)
    server.http.app.state.agentspec_loopback = False  # type: ignore[attr-defined]
    answer_calls(monkeypatch, server)
    status, printed = agentspec("top", "--once", "--interval", "0.1")
    assert status == 0 and "no sessions: all callers of this server are one" in printed and row(printed, "global")


def test_the_heading_has_no_password_of_a_gateway(
    agentspec: Program, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_calls(monkeypatch, start(engines=1))
    status, printed = agentspec("top", "--once", "--interval", "0.1", "--url", "http://ada:hunter2@gateway")
    assert status == 0 and "***@gateway" in printed and "hunter2" not in printed


@pytest.mark.parametrize(
    ("url", "message"), [("http://127.0.0.1:1", "does not answer"), ("ftp://x", "--url ftp://x"), ("x", "--url x")]
)
def test_no_server_is_named(agentspec: Program, url: str, message: str) -> None:
    status, printed = agentspec("top", "--url", url)
    assert status == 2 and message in printed and "Traceback" not in printed


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, {"detail": "Not Found"}, NO_ROUTES),
        (404, {"error": {"message": "Not Found", "code": 404}}, NO_ROUTES),
        (502, "bad gateway", "HTTP 502; is this a server with agentspec?\n"),
        (403, {"detail": "say please"}, "say please"),
        (403, {"error": {"message": "say please", "code": 403}}, "say please"),  # as vLLM words all errors
    ],
)
def test_an_error_is_told_in_the_servers_words(
    agentspec: Program, monkeypatch: pytest.MonkeyPatch, status: int, body: Any, message: str
) -> None:
    answers = httpx.MockTransport(lambda request: httpx.Response(status, json=body))
    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: client(**options, transport=answers))
    ended, printed = agentspec("top", "--url", URL)
    assert ended == 2 and message in printed


ENGINE: dict[str, Any] = {
    "counters": {"drafts": 1, "drafted": 2, "accepted": 1, "finished": 1},
    "steps": 3,
    "drafted_by_source": {"session": 2},
    "accepted_by_source": {"session": 1},
    "running": 0,
    "memory": {"bytes": 1, "limit": 2},
    "cache": {"tokens": 1, "pending": 0, "sessions": 1},
    "store": {},
}
SESSION = {"id": "s", "tokens": 1, "turns": 1, "bytes": 3, "used": 1.7e9, "group": None}


@pytest.mark.parametrize(
    ("stats", "session", "command", "status", "message"),
    [
        ({"engines": [ENGINE]}, SESSION, "top --once", 0, "2023-11-1"),
        ({"engines": [ENGINE]}, {**SESSION, "used": 1e18}, "top --once", 0, "1000000000000000000 s"),
        (
            {"engines": [ENGINE]},
            {"id": "s"},
            "top --once",
            0,
            "no sessions: sessions: the server's answer lacks 'tokens'",
        ),
        ({"engines": None}, SESSION, "top --once", 2, "stats: the server's answer is not understood"),
        ({"engines": [{**ENGINE, "memory": None}]}, SESSION, "top --once", 2, "stats: the server's answer is not"),
        ({"engines": [{"counters": {}}]}, SESSION, "top --once", 2, "stats: the server's answer lacks 'steps'; is it"),
        ({}, {"id": "s"}, "sessions list", 2, "sessions: the server's answer lacks 'tokens'; is it of another"),
        ({}, {"turns": [{}]}, "sessions show s", 2, "turns: the server's answer lacks 'kept'"),
    ],
)
def test_an_answer_of_another_form_is_told_in_a_line(
    agentspec: Program,
    monkeypatch: pytest.MonkeyPatch,
    stats: Any,
    session: Any,
    command: str,
    status: int,
    message: str,
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/metrics"):
            return httpx.Response(404)
        if request.url.path.endswith("/stats"):
            return httpx.Response(200, json=stats)
        return httpx.Response(
            200, json=session if "turns" in session and len(session) == 1 else {"sessions": [session]}
        )

    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: client(**options, transport=httpx.MockTransport(answer)))
    monkeypatch.setattr("agentspec.cli.top.time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None))
    monkeypatch.setenv("COLUMNS", "200")
    ended, printed = agentspec(*command.split())
    assert (ended, message in printed, "Traceback" in printed) == (status, True, False), printed


@pytest.mark.parametrize("count", [1, 2, 10])
def test_it_shows_as_many_sessions_as_it_is_asked_for(
    agentspec: Program, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A server's answer has more sessions if several were stored at the same moment, as in one batch."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/stats"):
            return httpx.Response(200, json={"engines": [ENGINE]})
        listed = [{**SESSION, "id": f"session-{number}"} for number in range(24)]
        return httpx.Response(200, json={"sessions": listed}) if "sessions" in request.url.path else httpx.Response(404)

    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: client(**options, transport=httpx.MockTransport(answer)))
    status, printed = agentspec("top", "--once", "--interval", "0.1", "--sessions", str(count))
    assert (status, printed.count("session-")) == (0, count), printed


_DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("status", "stats", "session", "generated", "message"),
    [
        (200, json.dumps({"engines": [ENGINE]}), json.dumps(SESSION), "+Inf", "metrics: the server's answer is not"),
        (200, json.dumps({"engines": [ENGINE]}), '{"id": "s", "tokens": 1e999}', "1", "no sessions: sessions: the"),
        (200, f'{{"engines": {_DEEP}}}', json.dumps(SESSION), "1", "HTTP 200 sends on to http://***@elsewhere"),
        (500, _DEEP, json.dumps(SESSION), "1", "HTTP 500; is this a server with agentspec?"),
        (302, "", "", "", "HTTP 302 sends on to http://***@elsewhere/login?…; is this a server"),
    ],
)
def test_an_answer_that_no_server_of_agentspec_gives_is_told_in_a_line(
    agentspec: Program,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    stats: str,
    session: str,
    generated: str,
    message: str,
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/metrics"):
            return httpx.Response(200, text=f'vllm:generation_tokens_total{{engine="0"}} {generated}')
        if request.url.path.endswith("/stats"):
            return httpx.Response(
                status, text=stats, headers={"Location": "http://ada:hunter2@elsewhere/login?token=1"}
            )
        return httpx.Response(200, text=f'{{"sessions": [{session}]}}')

    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: client(**options, transport=httpx.MockTransport(answer)))
    ended, printed = agentspec("top", "--once", "--interval", "0.1")
    assert ended == (0 if "sessions:" in message else 2) and message in printed, printed


def test_a_time_of_today_has_no_date(top: Top, server: Server) -> None:
    for _ in range(2):  # midnight may come once between the call and the table
        today = datetime.now().date()
        server.say(server.identity(ADA, "fix-42"))
        (line,) = (line for line in top()[1].splitlines() if "fix-42" in line)
        if datetime.now().date() == today:
            break
    assert len(line.split()[-1]) == len("12:34:56") and "-" not in line.split()[-1]


def sample(at: float, steps: int, drafted: int) -> Sample:
    totals = Counter(steps=steps, drafts=drafted, drafted=drafted, accepted=drafted // 2, finished=0, errors=0)
    by_source = (Counter(group=drafted), Counter(group=drafted // 2))
    return Sample(at, 1, totals, *by_source, Counter(), ["writer open"])


@pytest.mark.parametrize(("height", "sessions"), [(24, 3), (24, 30), (60, 30), (5, 30), (24, 0)])
def test_a_small_terminal_shows_what_there_is_room_for(height: int, sessions: int) -> None:
    """The rest of a screen cannot be reached, so what is left out is said."""
    drafted = Counter(dict.fromkeys(("request", "session", "group", "global", "public", "model"), 0))
    drafted["session"] = 4
    rows = [SessionRow(f"session-{number}", 1, 1, 0.0) for number in range(sessions)]
    now = replace(sample(1.0, 5, 4), drafted=drafted, sessions=rows)
    out = io.StringIO()
    Console(file=out, width=120).print(draw(now, None, URL, height))
    lines = out.getvalue().splitlines()
    shown = sum("session-" in line for line in lines)
    assert len(lines) <= max(height, 20) and "group" not in out.getvalue()
    hidden = sessions - shown
    assert (f"and {hidden} more" in out.getvalue()) == (hidden > 0)
    assert shown == (sessions if height == 60 or sessions <= 3 else max(shown, 0))
    assert height != 24 or sessions == 0 or shown >= 3


def test_rates_are_blank_after_a_restart() -> None:
    def printed(now: Sample, before: Sample | None) -> str:
        out = io.StringIO()
        Console(file=out, width=120).print(draw(now, before, URL))
        return out.getvalue()

    text = printed(sample(12.0, 300, 80), sample(10.0, 100, 40))
    assert row(text, "decode steps a second") == ["100.0", "300", "steps"]
    assert row(text, "group")[:2] == ["20.0", "10.0"] and row(text, "acceptance rate") == ["50%", "50%"]
    assert row(text, "store") == ["writer", "open"]
    for before in (None, sample(10.0, 400, 40)):
        assert row(printed(sample(12.0, 300, 80), before), "decode steps a second") == ["300", "steps"]


def test_a_rate_is_blank_where_the_sample_before_lacks_the_counter() -> None:
    """Otherwise all tokens since the server's start would be shown as those of one interval."""
    now = sample(12.0, 300, 80)
    now.totals["generated"] = 1_000_000
    out = io.StringIO()
    Console(file=out, width=120).print(draw(now, sample(10.0, 100, 40), URL))
    assert row(out.getvalue(), "tokens a second") == ["1,000,000", "tokens"]
    assert row(out.getvalue(), "decode steps a second") == ["100.0", "300", "steps"]


def test_the_other_rates_stay_where_vllms_metrics_do_not_answer_once() -> None:
    before = sample(10.0, 100, 40)
    before.totals["generated"] = 1_000_000
    out = io.StringIO()
    Console(file=out, width=120).print(draw(sample(12.0, 300, 80), before, URL))
    assert row(out.getvalue(), "decode steps a second") == ["100.0", "300", "steps"]
