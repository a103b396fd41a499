"""Test traces: what each step drafted and where its tokens came from, for requests that ask for it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from agentspec.cache import SOURCES
from agentspec.server_ext.api.response_figures import _as_text
from agentspec.server_ext.figures.metrics import RequestFigures
from agentspec.server_ext.figures.traces import Trace, Traces, steps_of
from agentspec.server_ext.identity import DETAIL_KEY, Identity, RequestTagger
from agentspec.server_ext.session_questions import EraseSession
from agentspec.server_ext.step import NewRequest

from .plain_engine import TEXT, Engine

REQUEST, GLOBAL = SOURCES.index("request"), SOURCES.index("global")


def detail(engine: Engine, request_id: str) -> list[dict[str, Any]]:
    figures = engine.proposer.request(request_id)
    assert figures is not None
    return steps_of(figures["detail"])


def test_a_trace_has_each_token_of_the_response_and_where_it_came_from() -> None:
    engine = Engine()
    engine.run("a", [1, 2, 3], TEXT, session="s", detailed=True)
    assert [step["tokens"] for step in detail(engine, "a")] == [[token] for token in TEXT]
    steps = engine.run("b", [1, 2, 3, *TEXT, 4, 5, 100, 101], [*TEXT[2:40], 7, 8, 9], session="s", detailed=True)
    found = detail(engine, "b")
    assert len(found) == steps
    assert [token for step in found for token in step["tokens"]] == [*TEXT[2:40], 7, 8, 9]
    assert all(len(step["sources"]) < len(step["tokens"]) for step in found)  # the last is the model's own
    figures = engine.proposer.request("b")
    assert figures is not None
    told = [source for step in found for source in step["sources"]]
    assert {source: told.count(source) for source in SOURCES} == figures["accepted_by_source"]
    rejected = [source for step in found for source in step["rejected_sources"]]
    assert len(told) + len(rejected) == figures["drafted"] > figures["accepted"]
    assert all(len(step["rejected"]) == len(step["rejected_sources"]) for step in found)
    assert 140 in [token for step in found for token in step["rejected"]]  # the draft after 139 was 140, but 7 came


def test_samples_of_one_api_request_share_its_figures_and_the_first_is_traced() -> None:
    engine = Engine()
    requests = engine.proposer._requests
    for name in ("0_cmpl", "1_cmpl"):
        requests.begin(NewRequest(name, [1, 2, 3], Identity(), api_id="cmpl", detailed=True), 0)
    assert [state.trace is not None for state in requests.of(["0_cmpl", "1_cmpl"])] == [True, False]
    assert engine.proposer.request("cmpl") is not None and engine.proposer.request("0_cmpl") is None


def test_a_request_that_did_not_ask_has_none() -> None:
    engine = Engine()
    engine.run("a", [1, 2, 3], TEXT, session="s", detailed=True)
    engine.run("b", [1, 2, 3], TEXT, session="s")
    figures = engine.proposer.request("b")
    assert figures is not None and "detail" not in figures and engine.proposer._traces.running == 0


@pytest.mark.parametrize("named", [True, False])
def test_rejected_tokens_of_a_shared_corpus_are_not_told(named: bool) -> None:
    """Such tokens may quote another principal of the tenant. A tenant without a name is one caller's."""
    engine = Engine(tenant="shared")
    engine.named_tenant = "shared" if named else None
    engine.run("a", [1, 2, 3], TEXT, session="one")
    engine.run("b", [1, 2, 3], [*TEXT[:20], 7, 8, 9], session="two", detailed=True)
    pairs = [
        pair
        for step in detail(engine, "b")
        for pair in zip(step["rejected"], step["rejected_sources"], strict=True)
        if pair[1] == "global"
    ]
    assert pairs and ({token for token, _ in pairs} == {-1}) == named


@pytest.mark.parametrize("length", [0, 1, 7, 20, 21, 23])
def test_a_trace_ends_where_its_callers_response_does(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server finds a stop text after the engine verified tokens behind it, which may quote another caller."""
    engine = Engine(tenant="shared")
    output = [*TEXT[:20], 7, 8, 9]
    engine.run("a", [1, 2, 3], TEXT, session="one")
    monkeypatch.setattr(engine.proposer, "finish", lambda *_: None)  # the request goes on until the engine is told
    engine.run("b", [1, 2, 3], output, session="two", detailed=True)
    before = detail(engine, "b")
    size = engine.proposer._traces.bytes
    engine.proposer.note_lengths({"b": length})
    found = detail(engine, "b")
    assert [token for step in found for token in step["tokens"]] == output[:length]
    assert all(len(step["sources"]) <= len(step["tokens"]) for step in found)
    figures = engine.proposer.request("b")
    assert figures is not None and figures["tokens"] == length
    for was, step in zip(before, found, strict=True):
        assert was["sources"] + was["rejected_sources"] == step["sources"] + step["rejected_sources"]
        assert len(step["rejected"]) == len(step["rejected_sources"])
        told = zip(step["rejected"], step["rejected_sources"], strict=True)
        assert all(token == -1 for token, source in told if source == "global")
    assert engine.proposer._traces.bytes <= size
    assert any(len(step["tokens"]) > 5 for step in before), "it must have drafted"


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("count", range(11))
def test_what_is_taken_back_of_drafts_was_rejected(count: int, shared: bool) -> None:
    """Each step's drafted tokens keep their places and sources. Only tokens of a shared corpus are left out."""
    traces, figures = Traces(max_bytes=10_000), RequestFigures()
    trace = traces.begin(figures, None, shared)
    empty = trace.bytes
    steps = [  # tokens, draft, its sources, how many were accepted by the engine
        ([10, 11, 12], [10, 11, 90, 91], [GLOBAL, REQUEST, GLOBAL, REQUEST], 2),
        ([13], [92], [REQUEST], 0),
        ([14, 15, 16, 17], [14, 15, 16, 93], [GLOBAL, GLOBAL, REQUEST, REQUEST], 3),
        ([18, 19], [18, 19, 20, 21], [GLOBAL] * 3 + [REQUEST], 4),  # the response ended inside of the draft
    ]
    for tokens, draft, sources, accepted in steps:
        trace.note_draft(draft, sources)
        traces.add(trace, tokens, len(draft), accepted)
    traces.cut(trace, count)
    kept, rejections = 10 - count, 0
    for (tokens, draft, sources, accepted), step in zip(steps, steps_of(trace.packed()), strict=True):
        left = min(len(tokens), kept)
        right = min(accepted, left)
        kept -= left
        rejections += len(draft) - right
        told = [-1 if shared and source == GLOBAL else token for token, source in zip(draft, sources, strict=True)]
        names = [SOURCES[source] for source in sources]
        assert (step["tokens"], step["sources"]) == (tokens[:left], names[:right])
        assert (step["rejected"], step["rejected_sources"]) == (told[right:], names[right:])
    assert trace.bytes - empty == 16 * 4 + 5 * (10 - count + rejections)


def test_an_erased_session_leaves_no_trace() -> None:
    engine = Engine()
    engine.run("a", [1, 2, 3], TEXT, session="s", detailed=True)
    engine.run("b", [1, 2, 3], TEXT, session="t", detailed=True)
    engine.proposer.sessions.begin("job", None, EraseSession("s", [None]))
    figures = engine.proposer.request("a")
    assert figures is not None and "detail" not in figures
    assert len(detail(engine, "b")) > 0


def test_an_erased_session_is_not_told_as_what_others_rejected() -> None:
    """The rejected tokens of another session of the same caller quote it."""
    engine = Engine()
    said = [*range(700, 760)]
    engine.run("a", [1, 2, 3], said, session="erased")
    engine.run("b", [4, 5, *said[:9]], [said[9], 8, 9, 10], session="other", detailed=True)
    rejected = [token for step in detail(engine, "b") for token in step["rejected"]]
    assert set(rejected) & set(said)
    engine.proposer.sessions.begin("job", None, EraseSession("erased", [None]))
    while not engine.proposer.sessions.poll("job"):
        time.sleep(0.01)
    found = detail(engine, "b")
    assert [token for step in found for token in step["rejected"]] == [-1] * len(rejected)
    assert [token for step in found for token in step["tokens"]] == [said[9], 8, 9, 10]


@pytest.mark.parametrize(("tenant", "hidden"), [("own", True), ("other", False)])
def test_a_draft_on_its_way_is_hidden_where_it_may_quote_an_erased_session(tenant: str, hidden: bool) -> None:
    traces, figures = Traces(max_bytes=10_000), RequestFigures()
    trace = traces.begin(figures, "t", shares_corpus=False, tenant="own")
    trace.note_draft([4, 5], [GLOBAL, REQUEST])
    traces.erase("s", {tenant})
    traces.add(trace, [7], 2, 0)
    trace.note_draft([6], [GLOBAL])  # the step was drafting while the session was erased
    traces.add(trace, [7], 1, 0)
    trace.note_draft([8], [GLOBAL])
    traces.add(trace, [7], 1, 0)
    told = [step["rejected"] for step in steps_of(trace.packed())]
    assert told == ([[-1, -1], [-1], [8]] if hidden else [[4, 5], [6], [8]])


def test_a_long_trace_is_read_in_no_time() -> None:
    """The engine's thread reads it between two steps, whenever a caller asks."""
    traces, figures = Traces(max_bytes=100_000_000), RequestFigures()
    trace = traces.begin(figures, None, shares_corpus=False)
    for token in range(32_000):
        traces.add(trace, [token], 0, 0)
    begin = time.thread_time()
    packed = figures.as_dict("r")["detail"]
    assert time.thread_time() - begin < 0.005
    assert [step["tokens"] for step in steps_of(packed)] == [[token] for token in range(32_000)]


def test_traces_stay_within_their_limit() -> None:
    traces = Traces(max_bytes=20_000)
    held = []
    for _ in range(100):
        figures = RequestFigures()
        trace = traces.begin(figures, None, shares_corpus=False)
        held.append(figures)
        for _ in range(100):
            traces.add(trace, [1, 2, 3], 0, 0)
            assert traces.bytes <= 20_000
    kept = [figures.trace for figures in held if figures.trace is not None]
    assert 0 < len(kept) < 10 and kept[-1] is held[-1].trace
    assert traces.bytes == sum(trace.bytes for trace in kept)


def test_one_trace_beyond_the_limit_is_dropped() -> None:
    traces, figures = Traces(max_bytes=2_000), RequestFigures()
    trace = traces.begin(figures, None, shares_corpus=False)
    for _ in range(1_000):
        traces.add(trace, [1, 2, 3], 0, 0)
    assert figures.trace is None and traces.bytes == 0


@pytest.mark.parametrize("why", ["limit", "erasure"])
def test_a_dropped_trace_takes_no_memory_although_its_request_goes_on(why: str) -> None:
    """The request holds the trace until it ends. Otherwise its text would outlive the session's erasure, uncounted."""
    traces, figures = Traces(max_bytes=2_000), RequestFigures()
    trace = traces.begin(figures, "s", shares_corpus=False)
    empty = trace.bytes
    trace.note_draft([4, 5], [0, 0])
    traces.add(trace, [4, 5, 6], 2, 2)
    if why == "erasure":
        traces.erase("s", ())
    else:
        traces.add(trace, [1] * 1_000, 0, 0)
    trace.note_draft([7], [0])
    traces.add(trace, [7, 8], 1, 1)
    assert (trace.bytes, steps_of(trace.packed()), traces.bytes) == (empty, [], 0)


def test_a_trace_may_be_dropped_while_its_figures_are_read() -> None:
    """Another process may erase its session at any time; here a thread does."""

    class Figures(RequestFigures):
        @property
        def trace(self) -> Trace | None:
            found = self._trace
            traces.erase("s", ())
            return found

        @trace.setter
        def trace(self, trace: Trace | None) -> None:
            self._trace = trace

    traces, figures = Traces(max_bytes=2_000), Figures()
    traces.begin(figures, "s", shares_corpus=False)
    assert steps_of(figures.as_dict("r")["detail"]) == []


@pytest.mark.parametrize(("header", "asked"), [(b"detailed", True), (b"summary", False), (None, False)])
def test_only_the_header_asks_for_a_trace(header: bytes | None, asked: bool) -> None:
    from agentspec.server_ext.identity.callers import Callers, Presented
    from agentspec.server_ext.settings import Settings

    tagger = RequestTagger(Callers(Settings(store="memory://"), b"secret of the tests"), "tenant")
    presented = Presented([] if header is None else [(b"x-agentspec-figures", header)])
    assert tagger.tag({DETAIL_KEY: True}, presented).get(DETAIL_KEY, False) is asked


def test_texts_of_tokens_add_up_to_the_text() -> None:
    text = "naïve 👍 text"
    raw = text.encode()

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    steps = [
        {
            "tokens": list(raw[at : at + 3]),
            "sources": ["session"],
            "rejected": [-1, 65],
            "rejected_sources": ["global", "global"],
        }
        for at in range(0, len(raw), 3)
    ]
    shown = _as_text(steps, decode)
    assert "".join(piece for step in shown for piece in step["tokens"]) == text
    assert shown[-1]["rejected"] == [None, "A"]
