"""Test the report: what it says of a record, and how it looks in a browser."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentspec import InvalidInputError
from agentspec.cache import SOURCES
from agentspec.cli.app import app
from agentspec.report import read_run, render

EVIL = '</pre><script>alert("x")</script><img src="http://example.org/x.png">'


def reply(session: str | None, text: str | None = "def f(): return 1", **fields: Any) -> dict[str, Any]:
    return {"session": session, "parent": None, "seconds": 0.5, "tokens": 6, "text": text, **fields}


def detailed(session: str) -> dict[str, Any]:
    """Return a reply of 6 tokens in 3 steps."""
    steps = [
        [[["def", None]], []],
        [[[" f", "session"], ["():", "session"], [" return", None]], [[" pass", "session"], [None, "global"]]],
        [[[" ", "request"], ["1", None]], []],
    ]
    counts: dict[str, Any] = {
        "drafted_by_source": {"session": 3, "global": 1, "request": 1},
        "steps": 3,
        "detail": steps,
    }
    return reply(session, accepted_by_source={"session": 2, "request": 1, "model": 0}, **counts)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def record(tmp_path: Path) -> Path:
    lines = [detailed("fix-42"), detailed("fix-42"), reply("other <b>", EVIL, parent="fix-42"), reply(None)]
    return write(tmp_path / "replies.jsonl", *lines)


def step(request: str, session: str | None, key: str | None) -> dict[str, Any]:
    """Return a line of the server's record."""
    step = {"step": 1, "request": request, "session": session, "session_key": key}
    return {**step, "source": None, "drafted": 0, "accepted": 0, "tokens": 1, "ns": 0}


def test_sessions_of_different_callers_are_told_apart_although_they_have_one_name(tmp_path: Path) -> None:
    """Keys and salts tell callers apart. Otherwise their turns would alternate in one session."""
    adas, bobs = "a1" * 16, "b2" * 16
    lines = [step("1", "fix-42", adas), step("2", "fix-42", bobs), step("3", "fix-42", adas), step("4", "one", adas)]
    run = read_run(write(tmp_path / "steps.jsonl", *lines, step("5", None, None), step("6", None, None)))
    assert [(session.name, len(session.turns)) for session in run.sessions] == [
        ("fix-42 (a1a1a1a1)", 2),
        ("fix-42 (b2b2b2b2)", 1),
        ("one", 1),
        ("without a session", 2),
    ]
    assert "fix-42 (b2b2b2b2)" in render(run, "title")


def test_charts_of_thousands_of_turns_fit_a_page(tmp_path: Path) -> None:
    """Requests without a session are turns of one."""
    lines = [step(str(number), None, None) for number in range(2_345)]
    page = render(read_run(write(tmp_path / "steps.jsonl", *lines)), "title")
    assert "Tokens a step by turn, mean of 24" in page
    assert "<title>turns 1 to 24: 1.00</title>" in page and "<title>turns 2329 to 2345: 1.00</title>" in page
    assert max(int(width) for width in re.findall(r'<svg [^>]* width="(\d+)"', page)) <= 100 * 28


def test_a_run_adds_up(record: Path) -> None:
    run = read_run(record)
    assert [session.name for session in run.sessions] == ["fix-42", "other <b>", "without a session"]
    assert [len(session.turns) for session in run.sessions] == [2, 1, 1]
    total = run.sessions[0].total
    assert (total.tokens, total.steps, total.tokens_per_step, total.speed) == (12, 6, 2.0, 12.0)
    assert total.acceptance == 0.6 and total.accepted == {"session": 4, "request": 2}
    # The other 12 tokens came from a server that tells no steps.
    assert (run.total.tokens, run.total.steps, run.total.tokens_per_step) == (24, 6, 2.0)
    assert "24 tokens, 12 of them in 6 steps, 2.00 tokens a step" in render(run)
    plain = run.sessions[1].total
    assert (plain.tokens_per_step, plain.acceptance, plain.speed) == (None, None, 12.0)


def test_a_reply_whose_tokens_are_not_told_has_no_speed(tmp_path: Path) -> None:
    lines = [reply("s"), {**reply("s"), "tokens": None}, {**reply("without a session"), "tokens": None}, reply(None)]
    run = read_run(write(tmp_path / "replies.jsonl", *lines))
    told, untold = run.sessions[0].turns
    assert told.speed == run.sessions[0].total.speed == run.total.speed and untold.speed is None
    assert [len(session.turns) for session in run.sessions] == [2, 1, 1]  # one session is named like those without
    assert "0 tokens a second" not in render(run)


def test_a_reply_without_a_text_is_shown_without_one(tmp_path: Path) -> None:
    run = read_run(write(tmp_path / "replies.jsonl", reply("s", text=None)))
    assert run.sessions[0].turns[0].text is None and ">None<" not in render(run)


def test_every_source_has_a_meaning_and_a_colour(record: Path) -> None:
    page = render(read_run(record))
    for source in SOURCES:
        assert f'<span class="t {source}">{source}</span> ' in page
        assert f".t.{source} {{" in page and f".bar .{source} {{" in page


def test_the_servers_step_record_is_read_too(tmp_path: Path) -> None:
    line = {"session": "s", "request": "r1", "source": "session", "drafted": 4, "accepted": 3, "tokens": 4, "ns": 1}
    path = write(
        tmp_path / "steps.jsonl",
        {**line, "source": None, "drafted": 0, "accepted": 0, "tokens": 1},
        line,
        {**line, "request": "r2"},
    )
    (session,) = read_run(path).sessions
    assert [(turn.tokens, turn.steps, turn.text) for turn in session.turns] == [(5, 2, None), (4, 1, None)]
    assert session.total.acceptance == 0.75
    page = render(read_run(path))
    assert "<details" not in page and "tokens a second" not in page, "it tells neither texts nor durations"


def test_a_request_that_two_sessions_name_is_the_firsts(tmp_path: Path) -> None:
    """An erasure blanks a session's name in its lines, of which later ones may come."""
    line = {"session": "s", "request": "r1", "source": "session", "drafted": 4, "accepted": 3, "tokens": 4, "ns": 1}
    run = read_run(write(tmp_path / "steps.jsonl", line, {**line, "session": None}, {**line, "session": "t"}))
    (session,) = run.sessions
    assert [(turn.tokens, turn.steps) for turn in session.turns] == [(12, 3)]
    assert render(run)


def test_a_table_shows_speeds_where_a_record_tells_them(record: Path) -> None:
    page = render(read_run(record))
    assert page.count('<th scope="col">tokens a second</th>') == 4  # the sessions compared, and a table for each
    rows = [row.partition("</tr>")[0] for row in page.split("<tr>")[1:]]
    assert {row.count("<th") + row.count("<td") for row in rows if 'scope="row"' in row} == {7, 9}


@pytest.mark.parametrize(
    "text", [b"", b"\n", b"no json", b'{"a": 1}\n', b"[1]\n", b'{"session": "s", "request": "r"}\n', b"\x7fELF\xd0\n"]
)
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(text)
    with pytest.raises(InvalidInputError, match=r"bad\.jsonl"):
        read_run(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"session": 5},
        {"parent": []},
        {"tokens": float("inf")},
        {"tokens": 10**400},
        {"tokens": -1},
        {"tokens": 6.5},
        {"seconds": float("nan")},
        {"seconds": 10**400},
        {"steps": 1, "detail": [[[[5, "request"]], []]]},
        {"steps": 1, "detail": [[[["a", ["request"]]], []]]},
        {"drafted_by_source": {"request": 1.5}},
    ],
)
def test_a_value_of_a_wrong_type_names_its_line(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = write(tmp_path / "bad.jsonl", reply("s"), {**reply("s"), **wrong})
    with pytest.raises(InvalidInputError, match="line 2"):
        read_run(path)
    path.write_text("[" * 100_000)
    with pytest.raises(InvalidInputError, match="line 1"):
        read_run(path)


def test_the_page_never_takes_the_place_of_the_record(record: Path) -> None:
    before = record.read_bytes()
    assert CliRunner().invoke(app, ["report", str(record), "-o", str(record)]).exit_code == 2
    assert record.read_bytes() == before


@pytest.mark.parametrize("before", [None, "an earlier page"])
def test_a_page_that_cannot_be_written_whole_is_not_there(record: Path, tmp_path: Path, before: str | None) -> None:
    """Half of a page looks whole, and would replace the earlier one."""
    page = tmp_path / "pages" / "report.html"
    page.parent.mkdir()
    if before is not None:
        page.write_text(before)
    program = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))\n"
    program += "from agentspec.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, "report", str(record), "-o", str(page)], capture_output=True, text=True
    )
    assert ended.returncode == 2 and "File too large" in ended.stderr
    assert [file.read_text() for file in page.parent.iterdir()] == ([] if before is None else [before])


def test_a_line_that_was_not_written_to_its_end_is_left_out(record: Path) -> None:
    whole = len(read_run(record).sessions)
    record.write_bytes(record.read_bytes() + b'{"session": "new", "seco')
    assert len(read_run(record).sessions) == whole
    after = (json.dumps(reply(name)) + "\n" for name in ("behind the broken one", "later"))  # appended by the next run
    record.write_bytes(record.read_bytes() + "".join(after).encode())
    assert [session.name for session in read_run(record).sessions[whole:]] == ["later"]
    record.write_bytes(record.read_bytes() + b'{"other": 1}\n')
    with pytest.raises(InvalidInputError, match="line 7"):
        read_run(record)


def test_half_a_character_is_drawn_as_a_question_mark(tmp_path: Path) -> None:
    out, record = tmp_path / "page.html", write(tmp_path / "half.jsonl", reply("s", "before \ud800 after"))
    assert CliRunner().invoke(app, ["report", str(record), "-o", str(out)]).exit_code == 0
    assert "before ? after" in out.read_text()


def test_nothing_that_was_said_becomes_markup(record: Path) -> None:
    page = render(read_run(record), title="<i>")
    assert "<script" not in page and "<img" not in page and "<b>" not in page and "<i>&" not in page
    assert "&lt;script&gt;" in page


def test_the_command_writes_the_page_and_names_it(record: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(record), "-o", str(out)])
    assert result.exit_code == 0 and str(out) in result.output.replace("\n", "")
    assert "fix-42" in out.read_text()
    assert out.stat().st_mode & 0o777 == 0o600  # it quotes what was said
    result = CliRunner().invoke(app, ["report", str(record), "-o", str(tmp_path / "no" / "page.html")])
    assert result.exit_code == 2


def test_the_command_reads_a_compressed_record_whose_counts_another_program_made_floats(tmp_path: Path) -> None:
    line = {**detailed("fix-42"), "tokens": 6.0, "steps": 3.0, "accepted_by_source": {"session": 2.0, "request": 1.0}}
    record, out = tmp_path / "replies.jsonl.gz", tmp_path / "page.html"
    record.write_bytes(gzip.compress(json.dumps(line).encode()))
    result = CliRunner().invoke(app, ["report", str(record), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "6 tokens in 3 steps, 2.00 tokens a step, 60% of 5 drafted tokens accepted" in out.read_text()


def test_the_page_goes_through_a_pipe(record: Path) -> None:
    command = [sys.executable, "-m", "agentspec", "report", str(record), "-o", "/dev/stdout"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("</html>")
    assert done.stderr == "written: /dev/stdout\n"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it(record: Path, tmp_path: Path, scheme: Any) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    page_path = tmp_path / "report.html"
    page_path.write_text(render(read_run(record)), encoding="utf-8")
    said: list[str] = []
    asked: list[str] = []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(color_scheme=scheme)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(page_path.as_uri())
        text = page.locator("pre").first
        assert text.inner_text() == "def f(): return 1"
        assert "12 tokens in 6 steps, 2.00 tokens a step, 60% of 10 drafted tokens accepted" in page.inner_text("main")

        def color(selector: str, of: str = "backgroundColor") -> str:
            return str(page.locator(selector).first.evaluate(f"node => getComputedStyle(node).{of}"))

        colors = {color(f"pre .{source}") for source in ("session", "request")} | {color("body")}
        assert len(colors) == 3
        background = [int(part) for part in color("body").removeprefix("rgb(").rstrip(")").split(",")]
        assert (sum(background) > 600) is (scheme == "light")

        page.keyboard.press("Tab")  # by keyboard alone: the skip link, then the switches
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
        assert "passreturn" not in text.inner_text() and " pass…" in text.inner_text()
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
        assert "[session:  f():]" in text.inner_text()
        summary = page.locator("summary").nth(1)
        summary.focus()
        page.keyboard.press("Enter")
        assert page.locator("pre").nth(1).is_visible()
        charts = page.get_by_role("img")
        assert charts.first.get_attribute("aria-label") == "Tokens a step by turn: 2.00, 2.00"
        assert page.get_by_role("table").count() == 4 and page.get_by_role("heading").count() >= 5
        browser.close()
    assert said == [] and asked == [page_path.as_uri()]
