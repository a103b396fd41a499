"""Test the probe for the server's extension, and what it reports of a reply."""

from __future__ import annotations

import time
from typing import Any

import pytest

from agentspec import AgentClient, ConfigurationError, Speculation
from agentspec.client import request
from agentspec.client.answers.reply import read_speculation

from .fake_server import FakeServer

COUNTS = {
    "tokens": 12,
    "steps": 6,
    "drafts": 4,
    "drafted": 16,
    "accepted": 8,
    "accepted_by_source": {"request": 3, "session": 5},
    "drafted_by_source": {"request": 6, "session": 10},
}


def connect(server: FakeServer, **options: Any) -> AgentClient:
    return AgentClient(base_url=server.url, model="small", store=None, max_retries=0, **options)


def test_a_reply_tells_of_its_speculation(server: FakeServer) -> None:
    server.counts = COUNTS
    with connect(server) as client:
        reply = client.chat("hello")
        client.chat("again")
    assert reply.speculation == Speculation(
        drafted=16,
        accepted=8,
        steps=6,
        drafts=4,
        tokens=12,
        accepted_by_source={"request": 3, "session": 5},
        drafted_by_source={"request": 6, "session": 10},
    )
    assert reply.speculation.mean_acceptance_length == 3.0
    assert reply.speculation.acceptance_rate == 0.5
    assert len(server.probes) == 1
    assert not any("/requests/" in request.path for request in server.received)  # the figures come with the answer


def test_a_server_can_be_asked_afterwards(server: FakeServer) -> None:
    with connect(server, speculation=False) as client:
        reply = client.chat("hello")
        assert reply.speculation is None and client.speculation(reply) is None
        server.counts = COUNTS
        found = client.speculation(reply)
    assert found is not None and found.accepted == 8
    assert server.received[-1].path == "/v1/agentspec/requests/chatcmpl-1"


def test_a_server_is_told_how_much_to_send(server: FakeServer, plain_server: FakeServer) -> None:
    for fake in (server, plain_server):
        for wish in (True, "detailed", False):
            with connect(fake, speculation=wish) as client:
                client.chat("hello")
    assert [chat.headers.get("x-agentspec-figures") for chat in server.chats] == ["summary", "detailed", None]
    assert not any("x-agentspec-figures" in chat.headers for chat in plain_server.chats)
    with pytest.raises(ConfigurationError, match="speculation"):
        connect(server, speculation="loud")


def test_nothing_drafted_divides_nothing_by_zero() -> None:
    idle = Speculation(0, 0, 0, 0, 1, {}, {})
    assert (idle.mean_acceptance_length, idle.acceptance_rate) == (1.0, 0.0)


def test_it_can_be_switched_off(server: FakeServer) -> None:
    server.counts = COUNTS
    with connect(server, speculation=False) as client:
        assert client.chat("hello", session="s").speculation is None
    assert server.chats[0].body["session_id"] == "s"  # tags are another matter
    assert not any("/requests/" in request.path for request in server.received)


def test_a_request_that_the_server_forgot_has_none(server: FakeServer) -> None:
    with connect(server) as client:
        assert client.chat("hello").speculation is None


def test_a_server_without_the_extension_is_asked_once(plain_server: FakeServer) -> None:
    with connect(plain_server) as client:
        assert client.chat("hello").speculation is None
        assert client.chat("hello").speculation is None
    assert len(plain_server.probes) == 1
    assert not any("/requests/" in request.path for request in plain_server.received)


@pytest.mark.parametrize("answer", [{}, [], "<html>", {"agentspec": None}, 3, None])
def test_only_the_extensions_own_answer_counts(plain_server: FakeServer, answer: Any) -> None:
    plain_server.probe = lambda: (200, answer)
    with connect(plain_server) as client:
        assert client.chat("hello", session="s").text == "answer 1"
    assert "session_id" not in plain_server.chats[0].body


def test_a_probe_that_fails_for_now_is_repeated_later(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.probe = lambda: (503, {})
    with connect(server) as client:
        client.chat("hello", session="s")
        client.chat("hello", session="s")
        assert "session_id" not in server.chats[1].body
        assert len(server.probes) == 1
        server.probe = None
        later = time.monotonic() + request.RETRY_AFTER_S
        monkeypatch.setattr("agentspec.client.request.time.monotonic", lambda: later)
        client.chat("hello", session="s")
    assert len(server.probes) == 2
    assert server.chats[-1].body["session_id"] == "s"


def test_a_probe_that_hangs_costs_its_timeout_once(plain_server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.client.base.TIMEOUT_S", 0.1)

    def hang() -> tuple[int, object]:
        time.sleep(0.5)
        return 200, {"agentspec": "0.1.0"}

    plain_server.probe = hang
    with connect(plain_server) as client:
        assert client.chat("hello").text == "answer 1"
        client.chat("hello")
    assert len(plain_server.probes) == 1


@pytest.mark.parametrize(
    "answer", [None, "text", [], {}, {**COUNTS, "steps": "many"}, {**COUNTS, "accepted_by_source": 3}]
)
def test_counts_that_make_no_sense_are_none(answer: object) -> None:
    assert read_speculation(COUNTS) is not None
    assert read_speculation(answer) is None
