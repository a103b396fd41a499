"""Write a run as one HTML file that needs no network and no script."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from statistics import fmean

from agentspec.cache.types import SOURCES
from agentspec.draft_figures import DraftedToken
from agentspec.report.records import Run, Session, Turn

_BAR_WIDTH, _CHART_HEIGHT = 28, 120
_MOST_BARS = 100
"""Most bars of a chart. Requests without a session are turns of one, and may be thousands."""


def render(run: Run, title: str = "What speculation did") -> str:
    """Return the page as HTML."""
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{_summary(run.total)}</p>",
        _legend(),
        _comparison(run.sessions),
        *(_session(session, number) for number, session in enumerate(run.sessions, 1)),
    ]
    style = files("agentspec.report").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f'<meta name="color-scheme" content="light dark">\n<title>{escape(title)}</title>\n<style>\n{style}</style>\n'
        '</head>\n<body>\n<a class="skip" href="#sessions">Skip to the sessions</a>\n<main>\n'
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def _summary(turn: Turn) -> str:
    parts = [_count(turn.tokens, "token")]
    if turn.tokens_per_step is not None:
        counted = f", {turn.tokens - turn.without_steps:,} of them" if turn.without_steps else ""
        parts[0] += f"{counted} in {_count(turn.steps, 'step')}"
        parts.append(f"{turn.tokens_per_step:.2f} tokens a step")
    if turn.acceptance is not None:
        parts.append(f"{turn.acceptance:.0%} of {_count(turn.drafted.total(), 'drafted token')} accepted")
    if turn.speed is not None:
        parts.append(f"{turn.speed:.0f} tokens a second")
    return ", ".join(parts)


def _legend() -> str:
    items = "".join(f'<li><span class="t {source}">{source}</span> {_MEANING[source]}</li>' for source in SOURCES)
    return (
        '<section aria-labelledby="legend"><h2 id="legend">Where a token was drafted</h2>'
        f'<ul class="legend">{items}<li>unmarked: the model itself</li></ul>'
        '<p class="switches"><label><input type="checkbox" id="show-rejected"> Show rejected drafts</label> '
        '<label><input type="checkbox" id="name-sources"> Name the sources in the text</label></p></section>'
    )


_MEANING = {
    "request": "in the request's own text",
    "session": "in what its session said before",
    "group": "in other answers to the same problem",
    "global": "in what other sessions said",
    "public": "in texts that the operator published",
    "sibling": "in an answer to the same problem that was still being written",
    "prediction": "in what the caller expected as the answer",
    "model": "by a draft model",
    "quote": "in the request's own text, as the answer spells it",
}


def _comparison(sessions: Sequence[Session]) -> str:
    families = any(session.parent for session in sessions)
    timed = any(session.total.speed is not None for session in sessions)
    rows = "".join(
        f'<tr><th scope="row"><a href="#session-{number}">{escape(session.name)}</a></th>'
        + (f"<td>{escape(session.parent or '')}</td>" if families else "")
        + f"<td>{len(session.turns)}</td>{_cells(session.total, timed)}</tr>"
        for number, session in enumerate(sessions, 1)
    )
    started = '<th scope="col">started by</th>' if families else ""
    return (
        '<section aria-labelledby="sessions"><h2 id="sessions">Sessions compared</h2><div class="wide" tabindex="0" '
        'role="region" aria-labelledby="sessions"><table><thead><tr><th scope="col">session</th>'
        f'{started}<th scope="col">turns</th>{_heads(timed)}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _heads(timed: bool) -> str:
    """Return the headings of `_cells`. timed: with the speed, which a server's record does not tell."""
    speed = ["tokens a second"] if timed else []
    names = ["tokens", "steps", "tokens a step", "accepted", *speed, "accepted by source"]
    return "".join(f'<th scope="col">{name}</th>' for name in names)


def _cells(turn: Turn, timed: bool) -> str:
    accepted = "" if turn.acceptance is None else f"{turn.acceptance:.0%}"
    speed = [_number(turn.speed, 0)] if timed else []
    values = [str(turn.tokens), str(turn.steps or ""), _number(turn.tokens_per_step, 2), accepted, *speed, _bar(turn)]
    return "".join(f"<td>{value}</td>" for value in values)


def _bar(turn: Turn) -> str:
    """Return a bar of a turn's tokens by source, and the same counts as text."""
    parts = [(source, turn.accepted[source]) for source in SOURCES if turn.accepted[source]]
    said = ", ".join(f"{source} {count}" for source, count in parts) or "none"
    spans = "".join(
        f'<span class="{source}" style="width:{100 * count / max(turn.tokens, 1):.2f}%"></span>'
        for source, count in parts
    )
    return f'<span class="bar" aria-hidden="true">{spans}</span><span class="said">{said}</span>'


def _session(session: Session, number: int) -> str:
    turns = session.turns
    timed = session.total.speed is not None
    rows = "".join(f'<tr><th scope="row">{at}</th>{_cells(turn, timed)}</tr>' for at, turn in enumerate(turns, 1))
    charts = _chart("Tokens a step by turn", [turn.tokens_per_step for turn in turns], 2)
    charts += _chart("Tokens a second by turn", [turn.speed for turn in turns], 0)
    charts += _chart(
        "Accepted share of drafts by turn, percent",
        [None if turn.acceptance is None else 100 * turn.acceptance for turn in turns],
        0,
    )
    texts = "".join(_turn(turn, at) for at, turn in enumerate(turns, 1))
    return (
        f'<section aria-labelledby="session-{number}"><h2 id="session-{number}">{escape(session.name)}</h2>'
        f'<p>{_summary(session.total)}</p><div class="charts">{charts}</div>'
        f'<div class="wide" tabindex="0" role="region" aria-label="Turns of {escape(session.name)}"><table><thead><tr>'
        f'<th scope="col">turn</th>{_heads(timed)}</tr></thead><tbody>{rows}</tbody></table></div>{texts}</section>'
    )


def _chart(title: str, turns: Sequence[float | None], digits: int) -> str:
    """Return a bar chart, or nothing without values. The table beside it has the same figures.

    Of many turns, a bar stands for the mean of several that follow each other.
    """
    together = -(-len(turns) // _MOST_BARS)
    values = [_mean(turns[at : at + together]) for at in range(0, len(turns), together)]
    known = [value for value in values if value is not None]
    if not known:
        return ""
    if together > 1:
        title += f", mean of {together}"
    most = max(known) or 1.0
    bars = []
    for at, value in enumerate(values):
        height = 0.0 if value is None else _CHART_HEIGHT * value / most
        x, y = at * _BAR_WIDTH, _CHART_HEIGHT - height
        first, last = at * together + 1, min((at + 1) * together, len(turns))
        named = f"turn {first}" if first == last else f"turns {first} to {last}"
        bars.append(
            f"<g><title>{named}: {_number(value, digits)}</title>"
            f'<rect x="{x + 3}" y="{y + 16:.1f}" width="{_BAR_WIDTH - 6}" height="{height:.1f}"></rect>'
            f'<text x="{x + _BAR_WIDTH / 2}" y="{y + 12:.1f}">{_number(value, digits)}</text></g>'
        )
    width, height = max(len(values) * _BAR_WIDTH, 60), _CHART_HEIGHT + 18
    return (
        f'<figure><figcaption>{title}</figcaption><svg role="img" aria-label="{title}: '
        f'{", ".join(_number(value, digits) or "unknown" for value in values)}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">{"".join(bars)}</svg></figure>'
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _turn(turn: Turn, number: int) -> str:
    if turn.text is None:
        return ""
    body = _detail(turn) if turn.detail else escape(turn.text)
    return (
        f"<details{' open' if number == 1 else ''}><summary>Turn {number}: {_summary(turn)}</summary>"
        f'<pre tabindex="0" role="region" aria-label="Text of turn {number}">{body}</pre></details>'
    )


def _detail(turn: Turn) -> str:
    """Return the text with its sources marked, and rejected drafts where they were rejected."""
    out = []
    pending: list[DraftedToken] = []  # tokens of one source, possibly from several steps
    for step in turn.detail:
        for token in step.tokens:
            if pending and (pending[-1].source != token.source):
                out.append(_marked(pending))
                pending = []
            pending.append(token)
            if token is step.tokens[-1] and step.rejected:
                # The rejected draft began where the step's last token is now, which is the model's own.
                own = pending.pop()
                out += [_marked(pending), _rejected(step.rejected)]
                pending = [own]
    return "".join([*out, _marked(pending)])


def _marked(tokens: Sequence[DraftedToken]) -> str:
    text = escape("".join(token.text or "" for token in tokens))
    source = tokens[0].source if tokens else None
    if source is None or not text:
        return text
    name = escape(source)
    return f'<span class="t {name}" title="{name}"><i class="n">[{name}: </i>{text}<i class="n">]</i></span>'


def _rejected(tokens: Iterable[DraftedToken]) -> str:
    parts = []
    for source, group in itertools.groupby(tokens, key=lambda token: token.source or "model"):
        text = "".join("…" if token.text is None else token.text for token in group)
        parts.append(f'<del class="{escape(source)}" title="rejected, from {escape(source)}">{escape(text)}</del>')
    return "".join(parts)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
