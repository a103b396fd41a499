"""Test session.forecast(): what speculation would gain on any server, beside what it gained."""

from __future__ import annotations

import dataclasses
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from agentspec import AgentClient, AsyncAgentClient, ConfigurationError
from agentspec.client.answers.reply import Reply, read_reply, read_speculation
from agentspec.client.forecast import Forecaster, _TokenisedTexts, approximate_tokens

from .fake_server import FakeServer
from .test_speculation import COUNTS

CODE = "\n".join(f"def function_{i}(argument, other):\n    return argument + other * {i}" for i in range(30))
SLOW = "\n".join(f"word{i * 7919} thing{i * 104729} unlike{i * 15485863}" for i in range(60))


def connect(server: FakeServer, **options: Any) -> AgentClient:
    return AgentClient(base_url=server.url, model="small", **{"store": None, **options})


def test_an_answer_that_is_repeated_is_forecast_to_be_drafted(plain_server: FakeServer) -> None:
    plain_server.answers = [{"content": SLOW}, {"content": SLOW}]
    with connect(plain_server) as client:
        session = client.session("s")
        assert session.forecast().calls == 0 and session.forecast().tokens_per_step == 0.0
        session.chat("Write it.")
        first = session.forecast()
        session.chat("Write it again.")
        both = session.forecast()
    assert (first.calls, both.calls, both.tokens_from) == (1, 2, "approximation")
    assert both.tokens == 2 * first.tokens and first.steps > first.tokens / 2
    assert both.steps - first.steps < first.steps / 5
    assert both.accepted_by_source["session"] + both.accepted_by_source["request"] > first.tokens / 2
    assert both.measured is None and both.measured_calls == 0


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_the_data_of_a_picture_is_no_text_to_draft_from(plain_server: FakeServer, kind: str) -> None:
    """A megabyte of base64 displaced the session's text, of which nothing was forecast to be drafted."""
    tokens = list[int]()

    def tokenize(text: str) -> list[int]:
        tokens.append(len(text))
        return approximate_tokens(text)

    part = {"type": kind, kind: {"url": "data:image/png;base64," + "QUJD" * 25_000}}
    with connect(plain_server, tokenizer=tokenize) as client:
        session = client.session("s")
        session.chat({"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]})
        session.chat("And now?")
        assert session.forecast().calls == 2
    assert 0 < sum(tokens) < 1_000


def test_what_the_server_measured_stands_beside_it(server: FakeServer) -> None:
    server.counts = COUNTS
    with connect(server) as client:
        session = client.session("s")
        session.chat("one")
        session.chat("two")
        client.session("other").chat("three")
        forecast = session.forecast()
    one = read_speculation(COUNTS)
    assert one is not None and forecast.measured is not None and forecast.measured_calls == 2
    assert (forecast.measured.steps, forecast.measured.accepted) == (2 * one.steps, 2 * one.accepted)
    assert forecast.measured.accepted_by_source == {
        source: 2 * count for source, count in one.accepted_by_source.items()
    }
    assert forecast.measured.tokens_per_step == one.tokens_per_step == one.tokens / one.steps


def test_a_resumed_session_is_forecast_before_its_first_call(plain_server: FakeServer, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sessions.db"
    plain_server.answers = [{"content": CODE}] * 4
    with connect(plain_server, store=url) as client:
        session = client.session("s")
        session.chat("one")
        session.chat("two")
        before = session.forecast()
    with connect(plain_server, store=url) as client:
        session = client.session("s")
        assert session.forecast() == before
        session.chat("three")
        assert session.forecast().calls == 3
        assert session.fork().forecast().calls == 0, "a fork has made no calls"
        session.clear()
        assert session.forecast().calls == 0
        session.chat("one")
        assert session.forecast().steps > 0.7 * before.steps, "nothing of it is left to draft from"


@pytest.mark.parametrize("loaded", [False, True])
def test_a_resumed_session_is_forecast_after_its_first_call(
    plain_server: FakeServer, tmp_path: Path, loaded: bool
) -> None:
    url = f"sqlite:///{tmp_path}/sessions.db"
    with connect(plain_server, store=url) as client:
        for content in ("one", "two", "three"):
            client.session("s").chat(content)
    with connect(plain_server, store=url) as client:
        session = client.session("s")
        if loaded:
            session.load()
        session.chat("four")
        assert session.forecast().calls == 4


@pytest.mark.parametrize("asked_between", [False, True])
def test_answers_of_another_client_are_forecast_once_they_are_read(
    plain_server: FakeServer, tmp_path: Path, asked_between: bool
) -> None:
    url = f"sqlite:///{tmp_path}/sessions.db"
    with connect(plain_server, store=url) as client, connect(plain_server, store=url) as other:
        session = client.session("s")
        session.chat("one")
        session.chat("two")
        session.reload()
        session.chat("three")
        assert not asked_between or session.forecast().calls == 3
        other.session("s").chat("four")
        session.reload()
        assert not asked_between or session.forecast().calls == 4
        session.chat("five")
        assert session.forecast().calls == 5
        fork = session.fork("f")
        fork.chat("six")
        fork.reload()
        assert fork.forecast().calls == 1, "what it was copied from is not its own"


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_the_server_are_taken(server: FakeServer, stream: bool) -> None:
    server.token_ids = ([1, 2, 3], [*range(100, 120)])
    with connect(server, tokenizer="server") as client:
        session = client.session("s")
        for _ in range(3):
            if stream:
                session.stream("go").until_done()
            else:
                session.chat("go")
        forecast = session.forecast()
    assert all(chat.body["return_token_ids"] is True for chat in server.chats)
    assert (forecast.calls, forecast.tokens, forecast.tokens_from) == (3, 60, "server")
    assert forecast.steps < 35


def test_other_tokenizers_may_be_given(plain_server: FakeServer, tmp_path: Path) -> None:
    plain_server.answers = [{"content": "abcdef"}]
    with connect(plain_server, tokenizer=lambda text: [ord(c) for c in text]) as client:
        session = client.session("s")
        session.chat("one")
        assert (session.forecast().tokens, session.forecast().tokens_from) == (6, "tokenizer")
    with pytest.raises(ConfigurationError, match="tokenizer"):
        connect(plain_server, tokenizer=str(tmp_path))


def short_reply(text: str = "yes") -> Reply[Any]:
    answer = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    raw = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [answer]}
    return read_reply(ChatCompletion.model_validate(raw), "s", None)


def test_memory_stays_within_its_limits() -> None:
    limit, text = 100_000, "go" * 500
    forecaster = Forecaster(lambda text: [ord(c) for c in text], max_bytes=limit)
    reply = short_reply()
    for i in range(10 * limit // len(text)):
        forecaster.note(f"s{i}", None, [{"role": "user", "content": text}], reply)
    assert limit / 4 < sum(len(said.sent[0]["content"]) for said in forecaster._pending) <= limit
    assert forecaster.forecast(f"s{i}", None, []).calls == 1
    assert forecaster.forecast("s1", None, []).calls == 0, "forgotten, but no error"
    assert not forecaster._pending and forecaster._pending.bytes == 0
    for i in range(5_000):
        forecaster.forecast(f"other {i}", None, [])
    assert len(forecaster._sessions) <= 4_096


@pytest.mark.parametrize("kind", ["detailed", "in other letters"])
def test_memory_that_calls_take_stays_within_its_limit(kind: str) -> None:
    """A detailed reply holds each token's text. One letter beyond U+FFFF makes each letter of its text take 4 bytes."""
    limit, count = 1_000_000, 2_000
    token = {"tokens": ["go"], "sources": ["session"], "rejected": [], "rejected_sources": []}
    forecaster = Forecaster(None, max_bytes=limit)
    tracemalloc.start()
    for i in range(200):
        if kind == "detailed":
            counted = read_speculation({**COUNTS, "detail": [token] * 500})
            reply = dataclasses.replace(short_reply(), speculation=counted)
        else:
            reply = short_reply(f"\U0001f600{i}" * count)
        forecaster.note(f"s{i}", None, [{"role": "user", "content": "go"}], reply)
    del reply
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert limit / 4 < held < 1.2 * limit


def test_a_text_that_the_tokenizer_refuses_costs_its_call_alone() -> None:
    def encode(text: str) -> list[int]:
        if "bad" in text:
            raise ValueError("refused on purpose")
        return [ord(character) for character in text]

    forecaster = Forecaster(encode)
    for session, answer in (("a", "yes"), ("b", "bad"), ("c", "yes")):
        forecaster.note(session, None, [{"role": "user", "content": "go"}], short_reply(answer))
    with pytest.raises(ValueError, match="on purpose"):
        forecaster.forecast("a", None, [])
    assert [forecaster.forecast(session, None, []).calls for session in "abc"] == [1, 0, 1]


def test_the_history_that_a_session_holds_is_counted_once() -> None:
    """Otherwise a few calls of a long session would fill the limit."""
    forecaster = Forecaster(None, max_bytes=200_000)
    sent: list[dict[str, Any]] = []
    for _ in range(50):
        sent.append({"role": "user", "content": "go " * 100})
        forecaster.note("s", None, list(sent), short_reply(CODE[:300]))
        sent.append({"role": "assistant", "content": CODE[:300]})
    assert forecaster.forecast("s", None, []).calls == 50


def test_long_histories_of_short_messages_are_counted() -> None:
    """Each call lists all messages before it, so their number grows with its square."""
    limit = 2_000_000
    forecaster = Forecaster(None, max_bytes=limit)
    sent: list[dict[str, Any]] = []
    for _ in range(1_500):
        sent += [{"role": "user", "content": "go"}, {"role": "assistant", "content": "yes"}]
        forecaster.note("s", None, list(sent), short_reply())
    assert limit / 2 < sum(sys.getsizeof(said.sent) for said in forecaster._pending) <= limit


def test_the_histories_of_sessions_that_are_no_longer_used_are_counted() -> None:
    """A service that resumes a long session for each request would hold its text once for each of them."""
    limit = 1_000_000
    resumed, tagged = Forecaster(None, max_bytes=limit), Forecaster(None, max_bytes=limit)
    for i in range(10 * limit // 30_000):
        history = [{"role": "assistant", "content": f"{i} " + "go " * 10_000}]
        resumed.note("s", None, [*history, {"role": "user", "content": "go"}], short_reply(), len(history))
        tagged.note(f"s{i}", None, [*history, {"role": "user", "content": "go"}], short_reply())
    for forecaster in (resumed, tagged):
        held = {id(said): len(said["content"]) for call in forecaster._pending for said in call.sent}
        assert limit / 2 < sum(held.values()) <= limit
        forecaster.forget({call.session for call in forecaster._pending})
        assert forecaster._pending.bytes == 0 and not forecaster._pending


def test_a_message_counts_once_for_the_calls_of_its_session(plain_server: FakeServer) -> None:
    text = "go " * 10_000
    with connect(plain_server) as client:
        session = client.session("s")
        for _ in range(20):
            session.chat(text)
        pending = client._forecaster._pending
        assert 20 * len(text) < pending.bytes < 21 * len(text) + 20 * 3_000
        session.clear()
        assert pending.bytes == 0


def test_remembered_texts_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.client.forecast._MAX_TEXT_BYTES", 10_000)
    texts = _TokenisedTexts(lambda text: [ord(c) for c in text])
    for i in range(1_000):
        text = f"text {i} " * 20
        assert len(texts.tokens_of(text)) == len(text)
        assert texts._bytes <= 11_000 and sum(map(len, texts._known)) <= 10_000


def test_a_call_waits_for_no_forecast_and_makes_none() -> None:
    """A call tokenises nothing, and does not wait while another thread forecasts."""
    begun, go_on = threading.Event(), threading.Event()

    def tokenize(text: str) -> list[int]:
        begun.set()
        assert go_on.wait(180)
        return [ord(c) for c in text]

    forecaster = Forecaster(tokenize)
    reply = short_reply()
    for _ in range(1_000):
        forecaster.note("s", None, [{"role": "user", "content": "go"}], reply)
    assert not begun.is_set()
    with ThreadPoolExecutor(1) as pool:
        forecast = pool.submit(forecaster.forecast, "other", None, [{"role": "assistant", "content": "yes"}])
        assert begun.wait(180)
        forecaster.note("s", None, [{"role": "user", "content": "go"}], reply)
        assert not forecast.done()
        go_on.set()
        assert forecast.result(60).calls == 1


def test_tokens_are_approximated_like_a_tokenizer_would() -> None:
    tokens = approximate_tokens("def slugify(text):\n    return re.sub(r'[^a-z]+', '-', text.lower())\n")
    assert 18 <= len(tokens) <= 40 and all(0 <= token < 2**31 for token in tokens)
    assert approximate_tokens("") == [] and approximate_tokens("日本語 ñandú") != []


def test_clear_erases_what_loops_said_in_other_sessions(plain_server: FakeServer) -> None:
    plain_server.answers = [{"content": SLOW} for _ in range(6)]
    with connect(plain_server) as client:
        client.session("other").chat("Write something else.")
        for forecast_before in (False, True):
            client.session("s").best_of("Write it.", 2, lambda reply: 1.0)
            if forecast_before:
                client.session("s").forecast()
            client.session("s").clear()
            assert {call.session for call in client._forecaster._pending} <= {"other"}
            assert client._forecaster._sessions.keys() <= {"other", "s"}


async def test_the_asynchronous_twin(plain_server: FakeServer) -> None:
    async with AsyncAgentClient(base_url=plain_server.url, model="small", store=None) as client:
        session = client.session("s")
        await session.chat("one")
        assert (await session.forecast()).calls == 1
        await session.clear()
        assert (await session.forecast()).calls == 0
