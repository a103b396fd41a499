"""session.forecast(): what speculation would bring, on any server, beside what it brought."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentspec import AgentClient, AsyncAgentClient, ConfigurationError
from agentspec.client.forecast import Forecaster, approximate_tokens
from agentspec.client.reply import read_reply, read_speculation

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


def test_memory_stays_within_its_limits() -> None:
    forecaster = Forecaster(lambda text: [ord(c) for c in text])
    answer = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
    from openai.types.chat import ChatCompletion

    raw = ChatCompletion.model_validate(
        {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [answer]}
    )
    reply = read_reply(raw, "s", None)
    for i in range(5000):
        forecaster.note(f"s{i}", None, [{"role": "user", "content": "go"}], reply)
    assert len(forecaster._pending) <= 256 and len(forecaster._sessions) <= 4096
    assert forecaster.forecast("s4999", None, []).calls == 1
    assert forecaster.forecast("s1", None, []).calls == 0, "forgotten, but no error"


def test_tokens_are_approximated_like_a_tokenizer_would() -> None:
    tokens = approximate_tokens("def slugify(text):\n    return re.sub(r'[^a-z]+', '-', text.lower())\n")
    assert 18 <= len(tokens) <= 40 and all(0 <= token < 2**31 for token in tokens)
    assert approximate_tokens("") == [] and approximate_tokens("日本語 ñandú") != []


async def test_the_asynchronous_twin(plain_server: FakeServer) -> None:
    async with AsyncAgentClient(base_url=plain_server.url, model="small", store=None) as client:
        session = client.session("s")
        await session.chat("one")
        assert (await session.forecast()).calls == 1
        await session.clear()
        assert (await session.forecast()).calls == 0
